"""Mutants of the device path: each removes one wait, join, record_stream or edge, on the device only.

Host threads still wait for each other, so results may stay the same. The fake accelerator must see the missing order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from nestpipe.distributed.process_group import World
from nestpipe.ops import device_memory
from nestpipe.pipeline.runner import Runner
from nestpipe.pipeline.schedule import Event
from nestpipe.pipeline.streams import DeviceStreams
from tests.fake_accelerator.device_training import DeviceCase, train_toy

# The modules that declare tensors of other streams as used.
_USERS = (
    *("distributed.exchange", "embedding.row_adam", "embedding.row_ops", "embedding.window"),
    *("pipeline.dense_params", "pipeline.stages"),
)


class EdgeKind(NamedTuple):
    """A dependency of a schedule, by kinds and distance in batches."""

    event: str
    need: str
    back: int


@contextmanager
def watched_sites(seen: set[str], left_out: Callable[[str], bool] = lambda site: False) -> Iterator[None]:
    """Notes the functions that call `used_here`, its sites; leaves out the calls of some."""
    original = device_memory.used_here

    def noted(*tensors: torch.Tensor) -> None:
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
def watched_edges(seen: set[EdgeKind], left_out: EdgeKind | None = None) -> Iterator[None]:
    """Notes every edge between two streams for which a device stream waits; leaves out those of one kind."""
    begin, needs_of, own = DeviceStreams.begin, Runner._needs, threading.local()

    def noted_event(runner: Runner, event: Event) -> list[Event]:
        own.event = event
        return needs_of(runner, event)

    def filtered(streams: DeviceStreams, name: str, needs: Sequence[Event]) -> None:
        kept = []
        for need in needs:
            edge = EdgeKind(own.event.kind, need.kind, own.event.batch - need.batch)
            seen.add(edge)
            if edge != left_out:
                kept.append(need)
        begin(streams, name, kept)

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


@contextmanager
def no_join() -> Iterator[None]:
    """The caller does not wait for the streams."""
    with patch.object(DeviceStreams, "join", lambda streams: None):
        yield


WAITS: dict[str, Callable[[], Any]] = {"start": no_start_wait, "join": no_join}


def sites(world: World, case: DeviceCase) -> list[str]:
    """All sites that a training reaches."""
    seen: set[str] = set()
    with watched_sites(seen):
        train_toy(world, case)
    return sorted(seen)


def edges(world: World, case: DeviceCase) -> list[EdgeKind]:
    """All edges for which a training waits on the device."""
    seen: set[EdgeKind] = set()
    with watched_edges(seen):
        train_toy(world, case)
    return sorted(seen)


def train_without_sites(world: World, case: DeviceCase, *functions: str) -> None:
    """Without the calls in these functions; without any if none is named."""
    with watched_sites(set(), lambda site: not functions or site in functions):
        train_toy(world, case)


def train_without_edge(world: World, case: DeviceCase, edge: EdgeKind) -> None:
    with watched_edges(set(), edge):
        train_toy(world, case)


def train_without_wait(world: World, case: DeviceCase, name: str) -> None:
    with WAITS[name]():
        train_toy(world, case)
