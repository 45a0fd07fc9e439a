"""Which dependencies of a schedule a device must wait for: those that no other dependency and no order of a stream implies.

Pure data: the events of some batches, ordered by streams and dependencies, without one kind of edge.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nestpipe.pipeline.schedule import MAIN, Event, Schedule
from tests.fake_accelerator.device_training import DeviceCase

_NUM_BATCHES = 10
_HOST_ONLY = frozenset(("read", "keys", "flag"))  # stages that launch nothing on the device
# Who collects waits for the collective itself, which starts after the gradients; sums that stay here are read by the update,
# which waits for the flag, which comes after all gradients.
_BY_COLLECTIVE = ("collect", "grads", 0)


class EdgeKind(NamedTuple):
    """A dependency of a schedule, by kinds and distance in batches."""

    event: str
    need: str
    back: int

    def __str__(self) -> str:
        back = f" of {self.back} before" if self.back else ""
        return f"{self.event} after {self.need}{back}"


def schedule_of(case: DeviceCase) -> Schedule:
    assert case.mode is not None
    return Schedule.of(
        case.mode,
        2,
        depth=case.depth + case.stale,
        clip_rows=case.clip.rows and case.clip.norm > 0,
        stale=case.stale,
        groups=case.groups > 1,
        chunks=case.chunks,
    )


@cache
def necessary_edges(schedule: Schedule) -> tuple[EdgeKind, ...]:
    """The edges between two streams without which an event could come too early on the device."""
    every = [(event, need) for event, needs in _needs(schedule).items() for need in needs if event.kind != "backward"]
    edges = {_kind(event, need) for event, need in every}
    crossing = [edge for edge in edges if _stream(schedule, edge.event) != _stream(schedule, edge.need)]
    on_device = [edge for edge in crossing if not {edge.event, edge.need} & _HOST_ONLY and edge != _BY_COLLECTIVE]
    return tuple(sorted(edge for edge in on_device if not _is_implied(schedule, edge)))


def _is_implied(schedule: Schedule, edge: EdgeKind) -> bool:
    """Whether, in the middle of a run, all its events come after what they need without it."""
    needs, before = _needs(schedule), _in_stream(schedule)
    own = [event for event in needs if event.kind == edge.event and event.batch == _NUM_BATCHES // 2]
    return all(
        need in _before(event, needs, before, edge)
        for event in own
        for need in needs[event]
        if _kind(event, need) == edge and need in needs
    )


def _before(
    last: Event, needs: dict[Event, list[Event]], before: dict[Event, list[Event]], without: EdgeKind
) -> set[Event]:
    """All events that come before one."""
    found: set[Event] = set()
    open_ = [last]
    while open_:
        event = open_.pop()
        kept = [need for need in needs.get(event, []) if _kind(event, need) != without]
        new = {*kept, *before.get(event, [])} - found
        found |= new
        open_ += new
    return found


@cache
def _needs(schedule: Schedule) -> dict[Event, list[Event]]:
    """As the runner has them: the dense sum needs the gradients inside the last compute, not its end."""
    found = {}
    for program in schedule.events(_NUM_BATCHES).values():
        for event in program:
            needs = schedule.needs(event)
            if event.kind == "dense sum" and schedule.stream_of("dense sum") != MAIN:
                needs = [_backward(event.batch) if need.kind == "compute" else need for need in needs]
            found[event] = needs
            if _is_last_compute(schedule, event):
                found[_backward(event.batch)] = needs
    return found


@cache
def _in_stream(schedule: Schedule) -> dict[Event, list[Event]]:
    """The events that come before an event in its stream: the one before it, and for the last compute its backward."""
    found: dict[Event, list[Event]] = {}
    for program in schedule.events(_NUM_BATCHES).values():
        previous: list[Event] = []
        for event in program:
            found[event] = previous
            if _is_last_compute(schedule, event):
                found[_backward(event.batch)] = previous
                found[event] = [*previous, _backward(event.batch)]
            previous = [event]
    return found


def _backward(batch: int) -> Event:
    return Event("backward", batch)


def _is_last_compute(schedule: Schedule, event: Event) -> bool:
    return event.kind == "compute" and event.micro_batch == schedule.num_micro_batches - 1


def _kind(event: Event, need: Event) -> EdgeKind:
    return EdgeKind(event.kind, need.kind, event.batch - need.batch)


def _stream(schedule: Schedule, kind: str) -> str:
    return MAIN if kind == "backward" else schedule.stream_of(kind)  # type: ignore[arg-type]
