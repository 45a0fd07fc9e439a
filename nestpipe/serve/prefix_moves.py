"""Copies of KV prefixes between the device tier and the host tier.

    device    keys and values in the device's memory      ▲ promotion       │ demotion
    host      pinned memory, where there is a device      │                 ▼

On an accelerator copies run on a stream of their own: the stream that computes waits, on the device, for a promotion that it
reads, and never for a demotion. Times are small and stay on the host. Without an accelerator both tiers are host memory, and a
move is a copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nestpipe.models.kv_prefix import KVPrefix
from nestpipe.ops.device_memory import used_here
from nestpipe.serve.prefill import copy_prefix


class HostMoves:
    """Both tiers are host memory."""

    def demoted(self, prefix: KVPrefix) -> KVPrefix:
        return copy_prefix(prefix)

    def promoted(self, prefix: KVPrefix) -> KVPrefix:
        return copy_prefix(prefix)

    def on_host(self, prefix: KVPrefix) -> KVPrefix:
        """A prefix that was just computed, for the host tier."""
        return prefix


class DeviceMoves:
    """The device tier is a device's memory. Used by the engine's thread, whose current stream computes."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.Stream(device)

    def promoted(self, prefix: KVPrefix) -> KVPrefix:
        """The prefix on the device; what the current stream launches next sees it. The host does not wait."""
        with self._stream:
            keys, values = ([self._upload(one) for one in part] for part in (prefix.keys, prefix.values))
            copied = self._stream.record_event()
        torch.accelerator.current_stream(self._device).wait_event(copied)
        used_here(*keys, *values)  # freed in the order of the stream that reads them
        return replace(prefix, keys=tuple(keys), values=tuple(values))

    def demoted(self, prefix: KVPrefix) -> KVPrefix:
        """The prefix in pinned memory, complete: a tier below may read it. Waits for this copy alone."""
        computed = torch.accelerator.current_stream(self._device).record_event()
        with self._stream:
            self._stream.wait_event(computed)
            keys, values = ([_download(one) for one in part] for part in (prefix.keys, prefix.values))
            used_here(*prefix.keys, *prefix.values)
            copied = self._stream.record_event()
        copied.synchronize()
        return replace(prefix, keys=tuple(keys), values=tuple(values))

    def on_host(self, prefix: KVPrefix) -> KVPrefix:
        return self.demoted(prefix)

    def _upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)


PrefixMoves = HostMoves | DeviceMoves


def prefix_moves(device: torch.device) -> PrefixMoves:
    """The moves of a device: an accelerator, or the CPU."""
    return HostMoves() if device.type == "cpu" else DeviceMoves(device)


def _download(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
