"""`fakeccl`: collectives of the fake accelerator, over gloo. As nccl and hccl do, it refuses host tensors, runs on a stream
of its own, and `Work.wait` orders the caller's stream without blocking the host."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_accelerator.accelerator import NAME, _native

BACKEND = "fakeccl"


class _StreamWork(dist.Work):
    """A queued collective."""

    def __init__(self, event: torch.Event, keep: list[Any]):
        super().__init__()
        self._event, self._keep = event, keep

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        return True


class FakeProcessGroup(dist.ProcessGroup):
    """Ranks whose tensors are on the fake accelerator."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout)
        self._stream = torch.Stream(NAME)
        self._running: list[Any] = []  # callbacks must outlive their calls

    def getBackendName(self) -> str:
        return BACKEND

    def alltoall_base(
        self, output: Tensor, sent: Tensor, output_sizes: list[int], input_sizes: list[int], options: Any
    ) -> dist.Work:
        """An all-to-all of contiguous rows; sizes are per rank."""
        for one in (output, sent):
            if one.device.type != NAME:
                raise RuntimeError(f"{BACKEND}: tensors must be on the device, got one on {one.device}")
            if not one.is_contiguous():
                raise RuntimeError(f"{BACKEND}: tensors must be contiguous")
        native = _native()
        source, target = _on_host(sent), _on_host(output)

        def run() -> None:
            self._gloo.alltoall_base(
                target, source, list(output_sizes), list(input_sizes), dist.AllToAllOptions()
            ).wait()

        callback = ctypes.CFUNCTYPE(None)(run)
        self._running.append(callback)
        self._stream.wait_event(torch.accelerator.current_stream().record_event())
        for one in (output, sent):
            native.fake_use_on_stream(one.untyped_storage().data_ptr(), self._stream.stream_id)
        native.fake_host_function(
            self._stream.stream_id,
            b"all-to-all",
            callback,
            *(sent.data_ptr(), sent.nbytes),
            *(output.data_ptr(), output.nbytes),
        )
        return _StreamWork(self._stream.record_event(), [callback])


def _on_host(tensor: Tensor) -> Tensor:
    """The bytes behind a device tensor, for the host function."""
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    address = _native().fake_host_view(tensor.data_ptr())
    memory = (ctypes.c_char * tensor.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def register() -> None:
    """Registers the backend as that of the device."""
    dist.Backend.register_backend(BACKEND, FakeProcessGroup, devices=[NAME])
