"""Mutants of the device path: each removes one wait, join, record_stream or edge, on the device only.

Host threads still wait for each other, so results may stay the same. The fake accelerator must see the missing order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nestpipe.distributed.exchange import Handle
from nestpipe.distributed.process_group import World
from nestpipe.embedding.device_rows import HostBelow
from nestpipe.ops import device_memory
from nestpipe.ops.device_memory import Download
from nestpipe.pipeline.runner import Runner
from nestpipe.pipeline.schedule import Event
from nestpipe.pipeline.streams import DeviceStreams
from tests.fake_accelerator.device_edges import EdgeKind
from tests.fake_accelerator.device_training import Content, DeviceCase, train_toy

# The modules that declare tensors of other streams as used.
_USERS = ("distributed.exchange", "embedding.row_ops", "embedding.window", "pipeline.dense_params")


@contextmanager
def watched_sites(seen: set[str], left_out: Callable[[str], bool] = lambda site: False) -> Iterator[None]:
    """Notes the functions that call `used_here`, its sites; leaves out the calls of some."""
    original = device_memory.used_here

    def noted(*tensors: Tensor) -> None:
        site = sys._getframe(1).f_code.co_qualname
        if any(one.device.type != "cpu" and one.numel() for one in tensors):
            seen.add(site)
        if not left_out(site):
            original(*tensors)

    with ExitStack() as patches:
        for name in _USERS:
            patches.enter_context(patch(f"nestpipe.{name}.used_here", noted))
        yield


@contextmanager
def without_edge(left_out: EdgeKind) -> Iterator[None]:
    """No device stream waits for dependencies of one kind."""
    begin, needs_of, own = DeviceStreams.begin, Runner._needs, threading.local()

    def noted_event(runner: Runner, event: Event) -> list[Event]:
        own.event = event
        return needs_of(runner, event)

    def filtered(streams: DeviceStreams, name: str, needs: Sequence[Event]) -> None:
        kinds = [EdgeKind(own.event.kind, need.kind, own.event.batch - need.batch) for need in needs]
        begin(streams, name, [need for need, kind in zip(needs, kinds, strict=True) if kind != left_out])

    with patch.object(Runner, "_needs", noted_event), patch.object(DeviceStreams, "begin", filtered):
        yield


@contextmanager
def no_start_wait() -> Iterator[None]:
    """Streams do not wait for what the caller has launched."""

    def started(streams: DeviceStreams, device: torch.device, names: Sequence[str], *, memory: int = 16) -> None:
        streams._device, streams._memory, streams._device_events = device, memory, {}
        streams._streams = {name: torch.Stream(device) for name in names}

    with patch.object(DeviceStreams, "__init__", started):
        yield


def no_join() -> AbstractContextManager[Any]:
    """The caller does not wait for the streams."""
    return patch.object(DeviceStreams, "join", lambda streams: None)


def no_collective_wait() -> AbstractContextManager[Any]:
    """Who needs what a collective receives does not wait for it."""
    wait = Handle._wait_for_works

    def on_host_only(handle: Handle, end: int) -> None:
        if handle._is_host:
            wait(handle, end)

    return patch.object(Handle, "_wait_for_works", on_host_only)


def no_wait_of_downloads() -> AbstractContextManager[Any]:
    """The stream of downloads does not wait for the rows to be gathered."""

    def started(download: Download, tensors: list[Tensor], stream: torch.Stream) -> None:
        download._sources = tensors
        with stream:
            download._copies = device_memory._started_copies(tensors)
            download._done = stream.record_event()

    return patch.object(Download, "__init__", started)


def upload_before_download() -> AbstractContextManager[Any]:
    """Rows are uploaded on another stream, into positions whose rows may not have been gathered yet."""
    read = HostBelow.read

    def early(below: HostBelow, slots: Tensor, columns: Any, places: Tensor) -> None:
        caller, stream = torch.accelerator.current_stream(), torch.Stream(below._downloads.device)
        with stream:
            read(below, slots, columns, places)
        caller.wait_event(stream.record_event())  # later stages are not mutants

    return patch.object(HostBelow, "read", early)


WAITS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "start": no_start_wait,
    "join": no_join,
    "collective": no_collective_wait,
    "download": no_wait_of_downloads,
    "upload": upload_before_download,
}


def sites(world: World, case: DeviceCase) -> list[str]:
    """All sites that a training reaches."""
    seen: set[str] = set()
    with watched_sites(seen):
        train_toy(world, case)
    return sorted(seen)


def train_without_sites(world: World, case: DeviceCase, *functions: str) -> Content:
    """Without the calls in these functions; without any if none is named."""
    with watched_sites(set(), lambda site: not functions or site in functions):
        return train_toy(world, case)


def train_without_edge(world: World, case: DeviceCase, edge: EdgeKind) -> Content:
    with without_edge(edge):
        return train_toy(world, case)


def train_without_wait(world: World, case: DeviceCase, name: str) -> Content:
    with WAITS[name]():
        return train_toy(world, case)
