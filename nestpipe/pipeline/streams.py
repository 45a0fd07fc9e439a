"""Where the work of a lane is queued: on the host at once, or on a stream of an accelerator.

On a CPU a stage that has returned is done, so the order of events on the host is all there is. On an accelerator it has
only been queued: each lane then has a stream of its own, and before an event its stream waits, on the device, for what the
streams of other lanes had queued when the events it needs were done. The host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from nestpipe.pipeline.schedule import Event


class StreamBackend(Protocol):
    """What a runner asks of the device that its lanes work on."""

    def stream(self, name: str) -> AbstractContextManager[Any]:
        """Surrounds all that a lane's thread does."""
        ...

    def begin(self, name: str, needs: Sequence[Event]) -> None:
        """The lane is about to run an event that needs others."""
        ...

    def end(self, name: str, event: Event) -> None:
        """The lane has run an event."""
        ...


class HostStreams:
    """Stages are done when they return."""

    def stream(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(self, name: str, needs: Sequence[Event]) -> None:
        pass

    def end(self, name: str, event: Event) -> None:
        pass


class DeviceStreams:
    """One stream per lane on an accelerator. Written for CUDA and NPU devices; not run there yet."""

    def __init__(self, device: torch.device, streams: Sequence[str], *, memory: int = 16):
        self._streams = {stream: torch.Stream(device) for stream in streams}
        self._marks: dict[Event, torch.Event] = {}
        self._memory = memory  # batches after which a mark is not needed any more

    def stream(self, name: str) -> AbstractContextManager[Any]:
        return self._streams[name]

    def begin(self, name: str, needs: Sequence[Event]) -> None:
        for need in needs:
            if mark := self._marks.get(need):
                self._streams[name].wait_event(mark)

    def end(self, name: str, event: Event) -> None:
        self._marks[event] = self._streams[name].record_event()
        if event.kind == "write":
            for old in [one for one in tuple(self._marks) if one.batch < event.batch - self._memory]:
                self._marks.pop(old, None)


def place_of(device: torch.device, streams: Sequence[str]) -> StreamBackend:
    """Streams on an accelerator, the host otherwise."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(device, streams)
