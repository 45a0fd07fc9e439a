"""When events happen: a schedule's programs and edges, with what each event does given as phases.

One worker stands for all of them: they run the same programs at the same time, and what a straggler costs is part of the work.
Its lanes take their events in the order of their programs and wait for what each needs, as the runner does. An event is

    Work     its lane is busy: on a core, which it may have to share, then elsewhere (a device, a sleep)
    Send     a message leaves; it takes its turn on the worker's wire, and arrives a delay after its last byte
    Wait     the lane does nothing until a message has arrived

The result is a trace like those of real runs, so overlap.py divides its steps and timeline.py draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from nestpipe.pipeline.schedule import Event, Schedule
from nestpipe.trace import RankTrace, Span
from nestpipe.trace import Wait as Waited

_NOTHING_S = 1e-12  # what is left of work after so many subtractions


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a core, and then seconds that no core is needed for."""

    cpu_s: float = 0.0
    device_s: float = 0.0


class Message(NamedTuple):
    """Which message: of an event, and its number among those of the event."""

    event: Event
    number: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """A message to all other workers; the wire is this worker's line."""

    message: Message
    wire_s: float
    delay_s: float = 0.0
    cpu_s: float = 0.0  # of a core, beside the lanes, to move the bytes
    opened: Event | None = None  # the event that opened its receives; None: they are opened when it is sent
    num_bytes: int = 0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Until a message has arrived."""

    message: Message
    name: str  # one of trace.WAITS


Phase = Work | Send | Wait
Plan = Callable[[Event], Sequence[Phase]]


@dataclass(frozen=True, slots=True)
class Run:
    """What is executed."""

    schedule: Schedule
    plan: Plan
    num_batches: int
    cores: float = float("inf")  # of this worker; busy lanes share them
    world_size: int = 1  # what the trace says
    needs: Callable[[Event], Sequence[Event]] | None = None  # other edges than the schedule's

    def trace(self, rank: int = 0) -> RankTrace:
        """What one rank would have recorded; raises ValueError if the lanes wait for each other."""
        spans = _Clock(self).run()
        return RankTrace("model", rank, self.world_size, tuple(spans), {})


@dataclass(slots=True, eq=False)
class _Lane:
    name: str
    program: Iterator[Event]
    event: Event | None = None
    needs: list[Event] = field(default_factory=list)  # those that are not done
    phases: list[Phase] = field(default_factory=list)  # those that are not over
    begun: bool = False
    ready_s: float = 0.0
    begin_s: float = 0.0
    cpu_left: float = 0.0
    device_until: float | None = None
    waits_since: float | None = None
    working: bool = False
    waits: list[Waited] = field(default_factory=list)
    num_bytes: int = 0
    num_rows: int = 0


@dataclass(slots=True, eq=False)
class _Moving:
    """A message that still needs a core to be moved."""

    message: Message
    cpu_left: float
    wire_until: float


class _Clock:
    def __init__(self, run: Run):
        self._run, self._needs = run, run.needs or run.schedule.needs
        self._lanes = [_Lane(name, iter(events)) for name, events in _programs(run.schedule, run.num_batches)]
        self._now = self._wire_free = 0.0
        self._done: dict[Event, float] = {}
        self._under_way: dict[Message, float] = {}  # and when they will arrive
        self._arrived: set[Message] = set()
        self._moving: list[_Moving] = []
        self._spans: list[Span] = []

    def run(self) -> list[Span]:
        for lane in self._lanes:
            self._take(lane)
        while True:
            while sum(self._go_on(lane) for lane in self._lanes):  # an end may free another lane
                pass
            if all(lane.event is None for lane in self._lanes):
                return self._spans
            self._advance()

    def _take(self, lane: _Lane) -> None:
        lane.event = next(lane.program, None)
        lane.begun, lane.ready_s = False, self._now
        lane.needs = list(self._needs(lane.event)) if lane.event else []

    def _go_on(self, lane: _Lane) -> bool:
        """Goes on as far as no time has to pass; whether an event ended."""
        if lane.event is None:
            return False
        if not lane.begun:
            while lane.needs and self._is_done(lane.needs[-1]):
                lane.needs.pop()
            if lane.needs:
                return False
            lane.begun, lane.begin_s = True, self._now
            lane.phases, lane.waits = list(self._run.plan(lane.event)), []
            lane.num_bytes = lane.num_rows = 0
        while lane.phases:
            if not self._phase(lane, lane.phases[0]):
                return False
            lane.phases.pop(0)
        self._done[lane.event] = self._now
        times = (_ns(lane.ready_s), _ns(lane.begin_s), _ns(self._now))
        span = Span(lane.name, *lane.event, *times, lane.num_bytes, lane.num_rows, tuple(lane.waits))
        self._spans.append(span)
        self._take(lane)
        return True

    def _is_done(self, need: Event) -> bool:
        """Also true of what will never be."""
        return need in self._done or need.batch >= self._run.num_batches

    def _phase(self, lane: _Lane, phase: Phase) -> bool:
        """Whether the phase is over."""
        if isinstance(phase, Send):
            self._send(phase)
            lane.num_bytes += phase.num_bytes
            lane.num_rows += phase.num_rows
            return True
        if isinstance(phase, Wait):
            lane.waits_since = self._now if lane.waits_since is None else lane.waits_since
            if phase.message not in self._arrived:
                return False
            lane.waits.append(Waited(phase.name, _ns(lane.waits_since), _ns(self._now)))
            lane.waits_since = None
            return True
        if not lane.working:
            lane.working, lane.cpu_left, lane.device_until = True, phase.cpu_s, None
        if lane.cpu_left > _NOTHING_S:
            return False
        if lane.device_until is None:
            lane.device_until = self._now + phase.device_s
        if lane.device_until > self._now:
            return False
        lane.working = False
        return True

    def _send(self, send: Send) -> None:
        """A sender that has not yet heard of the open receives waits for word of them, which takes a delay."""
        opened = self._now if send.opened is None else self._done[send.opened]
        begin = max(self._now, self._wire_free, opened + send.delay_s)
        self._wire_free = begin + send.wire_s
        arrives = self._wire_free + send.delay_s
        if send.cpu_s > _NOTHING_S:
            self._moving.append(_Moving(send.message, send.cpu_s, arrives))
        elif arrives > self._now:
            self._under_way[send.message] = arrives
        else:
            self._arrived.add(send.message)

    def _advance(self) -> None:
        """To the next moment at which something ends."""
        busy = [lane for lane in self._lanes if lane.working and lane.cpu_left > _NOTHING_S]
        jobs: list[_Lane | _Moving] = [*busy, *self._moving]
        rate = min(1.0, self._run.cores / len(jobs)) if jobs else 1.0
        ends = [self._now + job.cpu_left / rate for job in jobs]
        ends += [
            lane.device_until
            for lane in self._lanes
            if lane.working and lane.device_until is not None and lane.device_until > self._now
        ]
        ends += self._under_way.values()
        if not ends:
            stuck = ", ".join(f"{lane.name}: {lane.event}" for lane in self._lanes if lane.event)
            raise ValueError(f"no lane can go on: {stuck}. The edges and the programs of the schedule contradict.")
        end = min(ends)
        passed, self._now = (end - self._now) * rate, end
        for job in jobs:
            job.cpu_left = 0.0 if job.cpu_left - passed <= _NOTHING_S else job.cpu_left - passed
        for moved in [one for one in self._moving if one.cpu_left == 0.0]:
            self._under_way[moved.message] = max(moved.wire_until, self._now)
            self._moving.remove(moved)
        for message in [message for message, time in self._under_way.items() if time <= self._now]:
            self._arrived.add(message)
            del self._under_way[message]


@lru_cache(maxsize=64)  # the same for every number of workers
def _programs(schedule: Schedule, num_batches: int) -> tuple[tuple[str, tuple[Event, ...]], ...]:
    return tuple((lane, tuple(events)) for lane, events in schedule.events(num_batches).items())


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
