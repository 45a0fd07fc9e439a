"""Copies between host and device, and the lifetime of tensors that several streams of a device use.

A thread that launches device work must not wait for the device. So uploads go through pinned memory, and `download`,
which waits, is called only where the host needs the values. `Download` copies on a stream of its own meanwhile. On the CPU
uploads and downloads return at once.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

_LOCK, _counts = Lock(), {"downloads": 0}


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, complete in the order of the current stream; the host does not wait."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.detach().contiguous().pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A copy on the host; waits for it. The same tensor if it is there already."""
    return tensor if tensor.device.type == "cpu" else download_all([tensor])[0]


class Download:
    """Copies of device tensors on the way to the host, on a stream of their own."""

    def __init__(self, tensors: list[Tensor], stream: torch.Stream):
        """Starts after what the current stream has launched; that stream continues meanwhile."""
        self._sources = tensors  # until the copies are done, so that their memory is not reused
        stream.wait_event(torch.accelerator.current_stream().record_event())
        with stream:
            self._copies = _started_copies(tensors)
            self._done = stream.record_event()

    def wait(self) -> list[Tensor]:
        """The copies; blocks until they are complete."""
        self._done.synchronize()
        self._sources = []
        return self._copies


def download_all(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of device tensors on the host, with one wait for all of them."""
    copies = _started_copies(tensors)
    with _LOCK:
        _counts["downloads"] += 1
    torch.accelerator.current_stream().record_event().synchronize()
    return copies


def _started_copies(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
    for copy, one in zip(copies, tensors, strict=True):
        copy.copy_(one.detach(), non_blocking=True)
    return copies


def num_downloads() -> int:
    """How often a thread of this process has waited for a download so far."""
    return _counts["downloads"]


def used_here(*tensors: Tensor) -> None:
    """Declares that the current stream uses tensors of other streams: freed memory is not reused before it is done.

    Only where a tensor may be freed before its own stream waits for this one; a test leaves out each call and sees it.
    """
    for one in tensors:
        if one.device.type != "cpu" and one.numel():
            one.record_stream(torch.accelerator.current_stream())


def wait_here(*tensors: Tensor) -> None:
    """Waits until the current stream has done what was launched on it, if any of these tensors is on a device."""
    if any(one.device.type != "cpu" for one in tensors):
        torch.accelerator.current_stream().record_event().synchronize()


def address(tensor: Tensor) -> int:
    """The address of a tensor for native code, which runs on the host. Raises TypeError for a tensor on a device."""
    if not tensor.is_cpu:
        raise TypeError(
            f"a tensor {list(tensor.shape)} on {tensor.device} was given to native code, which can only read host memory; "
            "this operation has no version for devices. Train with --train.device cpu."
        )
    return tensor.data_ptr()
