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


class Site(NamedTuple):
    """A call of `used_here`: the function that it is in, and which of its calls, from the top."""

    function: str
    line: int

    @staticmethod
    def caller() -> Site:
        code = sys._getframe(2)
        return Site(code.f_code.co_qualname, code.f_lineno - code.f_code.co_firstlineno)


class EdgeKind(NamedTuple):
    """A dependency of a schedule, by kinds and distance in batches."""

    event: str
    need: str
    back: int


@contextmanager
def watched_sites(seen: set[Site], left_out: Site | None = None) -> Iterator[None]:
    """Notes every call of `used_here`; leaves out those of one site."""
    original = device_memory.used_here

    def noted(*tensors: torch.Tensor) -> None:
        site = Site.caller()
        if any(one.device.type != "cpu" and one.numel() for one in tensors):
            seen.add(site)
        if site != left_out:
            original(*tensors)

    with ExitStack() as patches:
        for name in _USERS:
            patches.enter_context(patch(f"nestpipe.{name}.used_here", noted))
        yield


@contextmanager
def watched_edges(seen: set[EdgeKind], left_out: EdgeKind | None = None) -> Iterator[None]:
    """Notes every edge between two streams for which a device stream waits; leaves out those of one kind."""
    begin, execute, own = DeviceStreams.begin, Runner._waits_for, threading.local()

    def noted_event(runner: Runner, event: Event) -> list[Event]:
        own.event = event
        return execute(runner, event)

    def filtered(streams: DeviceStreams, name: str, needs: Sequence[Event]) -> None:
        kept = []
        for need in needs:
            edge = EdgeKind(own.event.kind, need.kind, own.event.batch - need.batch)
            seen.add(edge)
            if edge != left_out:
                kept.append(need)
        begin(streams, name, kept)

    with patch.object(Runner, "_waits_for", noted_event), patch.object(DeviceStreams, "begin", filtered):
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


def sites(world: World, case: DeviceCase) -> list[Site]:
    """All sites that a training reaches."""
    seen: set[Site] = set()
    with watched_sites(seen):
        train_toy(world, case)
    return sorted(seen)


def edges(world: World, case: DeviceCase) -> list[EdgeKind]:
    """All edges for which a training waits on the device."""
    seen: set[EdgeKind] = set()
    with watched_edges(seen):
        train_toy(world, case)
    return sorted(seen)


def train_without_site(world: World, case: DeviceCase, site: Site) -> None:
    with watched_sites(set(), site):
        train_toy(world, case)


def train_without_edge(world: World, case: DeviceCase, edge: EdgeKind) -> None:
    with watched_edges(set(), edge):
        train_toy(world, case)


def train_without_wait(world: World, case: DeviceCase, name: str) -> None:
    with WAITS[name]():
        train_toy(world, case)
