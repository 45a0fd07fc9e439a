"""Streams: where the work of a schedule's stream is queued, on the host or on an accelerator.

On a CPU a stage that has returned is done, so the order of events on the host is enough. On an
accelerator it has only been queued: each schedule stream has a device stream, which waits, on the
device, for the device events recorded after the events it depends on. The host never waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from nestpipe.pipeline.schedule import Event


class StreamBackend(Protocol):
    """The device side of a schedule's streams."""

    def stream(self, name: str) -> AbstractContextManager[Any]:
        """A context around all work of a stream's thread."""
        ...

    def begin(self, name: str, needs: Sequence[Event]) -> None:
        """Called before a stream runs an event, with its dependencies."""
        ...

    def end(self, name: str, event: Event) -> None:
        """Called after a stream has run an event."""
        ...

    def join(self) -> None:
        """Called when all streams have ended: what the caller launches next comes after them."""
        ...


class HostStreams:
    """Stages are done when they return."""

    def stream(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(self, name: str, needs: Sequence[Event]) -> None:
        pass

    def end(self, name: str, event: Event) -> None:
        pass

    def join(self) -> None:
        pass


class DeviceStreams:
    """One device stream per schedule stream. All start after what the caller has launched, and end before what it launches next."""

    def __init__(self, device: torch.device, streams: Sequence[str], *, memory: int = 16):
        self._device = device
        self._streams = {stream: torch.Stream(device) for stream in streams}
        started = torch.accelerator.current_stream(device).record_event()
        for stream in self._streams.values():
            stream.wait_event(started)
        self._device_events: dict[Event, torch.Event] = {}
        self._memory = memory  # batches after which a device event is dropped

    def stream(self, name: str) -> AbstractContextManager[Any]:
        return self._streams[name]

    def begin(self, name: str, needs: Sequence[Event]) -> None:
        for need in needs:
            if device_event := self._device_events.get(need):
                self._streams[name].wait_event(device_event)

    def end(self, name: str, event: Event) -> None:
        self._device_events[event] = self._streams[name].record_event()
        if event.kind == "write":
            for old in [one for one in tuple(self._device_events) if one.batch < event.batch - self._memory]:
                self._device_events.pop(old, None)

    def join(self) -> None:
        caller = torch.accelerator.current_stream(self._device)
        for stream in self._streams.values():
            caller.wait_event(stream.record_event())


def stream_backend(device: torch.device, streams: Sequence[str]) -> StreamBackend:
    """Device streams on an accelerator, the host otherwise."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(device, streams)
