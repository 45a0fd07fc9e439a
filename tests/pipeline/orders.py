"""Total orders of a schedule's events: those that keep every edge, and those that break just one kind of edge.

A *kind of edge* is one line of `Schedule.needs`, for all batches at once: "update(t-1) -> rows(t.0)". Dropping it leaves all
other needs in force; if they still order every pair, the edge is implied and there is nothing to break.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from nestpipe.pipeline.deadlock_check import all_events
from nestpipe.pipeline.schedule import MICRO_BATCH_KINDS, Event, Kind, Schedule

Needs = dict[Event, list[Event]]


class Edge(NamedTuple):
    """`after` of batch t needs `before` of batch t - back."""

    before: Kind
    before_micro_batch: int
    back: int
    after: Kind
    after_micro_batch: int

    def __str__(self) -> str:
        first = _name(self.before, f"t{-self.back:+}" if self.back else "t", self.before_micro_batch)
        return f"{first} -> {_name(self.after, 't', self.after_micro_batch)}"


def _name(kind: Kind, batch: str, micro_batch: int) -> str:
    return f"{kind}({batch}{f'.{micro_batch}' if kind in MICRO_BATCH_KINDS else ''})"


def edges_of(schedule: Schedule) -> list[Edge]:
    """Every kind of edge, in the order of the sequential step."""
    far = 2 * schedule.depth + 8  # further on than any need looks back
    return [
        Edge(need.kind, need.micro_batch, far - need.batch, event.kind, event.micro_batch)
        for event in all_events(schedule, far + 1)
        if event.batch == far
        for need in schedule.needs(event)
    ]


def needs_without(schedule: Schedule, num_batches: int, dropped: Edge | None = None, *, inherit: bool = False) -> Needs:
    """What every event of so many batches needs, with one kind of edge left out.

    With `inherit`, who loses a need takes over what that one needed: it comes too early by this one event, not by more.
    """
    found = {}
    for event in all_events(schedule, num_batches):
        needs = dict.fromkeys(need for need in schedule.needs(event) if need.batch < num_batches)
        for need in list(needs):
            if Edge(need.kind, need.micro_batch, event.batch - need.batch, event.kind, event.micro_batch) == dropped:
                del needs[need]
                inherited = schedule.needs(need) if inherit else ()
                needs |= dict.fromkeys(one for one in inherited if one.batch < num_batches)
        found[event] = list(needs)
    return found


def pairs_of(edge: Edge, num_batches: int) -> list[tuple[Event, Event]]:
    """All (before, after) of a kind of edge."""
    return [
        (Event(edge.before, t - edge.back, edge.before_micro_batch), Event(edge.after, t, edge.after_micro_batch))
        for t in range(max(edge.back, 0), num_batches + min(edge.back, 0))
    ]


def ancestors(needs: Needs) -> dict[Event, set[Event]]:
    """All that comes before each event; the needs must be listed before what needs them."""
    found: dict[Event, set[Event]] = {}
    for event in in_order(needs, lambda ready: min(ready, key=list(needs).index)):
        found[event] = {one for need in needs[event] for one in (need, *found[need])}
    return found


def is_implied(schedule: Schedule, edge: Edge) -> bool:
    """Whether all other needs order the two events anyway."""
    num_batches = max(edge.back, 0) + 3
    before = ancestors(needs_without(schedule, num_batches, edge))
    return all(first in before[second] for first, second in pairs_of(edge, num_batches))


def in_order(needs: Needs, choose: Callable[[list[Event]], Event]) -> list[Event]:
    """All events in an order that keeps the needs; `choose` picks among those that are ready."""
    missing = {event: len(before) for event, before in needs.items()}
    afters: dict[Event, list[Event]] = {event: [] for event in needs}
    for event, before in needs.items():
        for need in before:
            afters[need].append(event)
    ready, order = [event for event, number in missing.items() if not number], []
    while ready:
        event = choose(ready)
        ready.remove(event)
        order.append(event)
        for after in afters[event]:
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    assert len(order) == len(needs), "the needs form a cycle"
    return order


def random_order(needs: Needs, seed: int | str) -> list[Event]:
    """Any order that keeps the needs."""
    source = random.Random(seed)
    return in_order(needs, source.choice)


def late(needs: Needs, kind: Kind, micro_batch: int) -> list[Event]:
    """The sequential order, but events of one kind wait until nothing else can go on, and then the last comes first."""
    place = {event: number for number, event in enumerate(needs)}

    def key(event: Event) -> tuple[bool, int]:
        waits = (event.kind, event.micro_batch) == (kind, micro_batch)
        return waits, -place[event] if waits else place[event]

    return in_order(needs, lambda ready: min(ready, key=key))


def early(needs: Needs, kind: Kind, micro_batch: int) -> list[Event]:
    """The sequential order, but events of one kind come as soon as what they need is done, and that as soon as possible."""
    place = {event: number for number, event in enumerate(needs)}
    order: dict[Event, None] = {}

    def run(event: Event) -> None:
        for need in sorted(needs[event], key=place.__getitem__):
            if need not in order:
                run(need)
        order[event] = None

    for event in [*(one for one in needs if (one.kind, one.micro_batch) == (kind, micro_batch)), *needs]:
        if event not in order:
            run(event)
    return list(order)


def breaks(order: Iterable[Event], edge: Edge) -> bool:
    """Whether an order has some pair of the edge the wrong way round."""
    place = {event: number for number, event in enumerate(order)}
    num_batches = max(event.batch for event in place) + 1
    return any(place[first] > place[second] for first, second in pairs_of(edge, num_batches))
