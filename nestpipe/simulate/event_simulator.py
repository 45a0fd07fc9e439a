"""When events happen: a schedule's programs and edges, with what each event does given as phases.

Where every worker has cores of its own, one stands for all: they run the same programs at the same time, and what a straggler costs
is part of the work. Workers that share the cores of a machine are simulated one by one, because they do not run at the same
time (cores.py). Each then sends its share of a message, which a core moves half at the sender and half at the receivers, and
the message has arrived at a rank when it has the shares of all others.

The lanes of a worker take their events in the order of their programs and wait for what each needs, as the runner does. An event is

    Work     its lane is busy: on a core, which it may have to share, then elsewhere (a device, a sleep)
    Send     a message leaves; it takes its turn on the worker's wire, and arrives a delay after its last byte
    Wait     the lane does nothing until a message has arrived

The result is a trace like those of real runs, so overlap.py divides its steps and timeline.py draws it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from nestpipe.pipeline.schedule import Event, Schedule
from nestpipe.profiling.trace_file import RankTrace, Span
from nestpipe.profiling.trace_file import RecordedWait as Waited
from nestpipe.simulate.cpu_model import Cores, CoreSharing, CpuJob


@dataclass(frozen=True, slots=True)
class StageWork:
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
    burst_s: float = 0.0  # of the wire's time, which an idle wire has saved up
    fabric_s: float = 0.0  # of what all workers share, one message after the other
    cpu_s: float = 0.0  # of a core, beside the lanes, to move the bytes
    opened: Event | None = None  # the event that opened its receives; None: they are opened when it is sent
    num_bytes: int = 0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class MessageWait:
    """Until a message has arrived."""

    message: Message
    name: str  # one of trace.WAITS


Phase = StageWork | Send | MessageWait
Plan = Callable[[Event], Sequence[Phase]]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What is executed."""

    schedule: Schedule
    plan: Plan
    num_batches: int
    cores: Callable[[], Cores] = CoreSharing  # of all workers that are simulated
    world_size: int = 1  # what the trace says
    num_ranks: int = 1  # simulated one by one; 1 stands for all
    late: Callable[[int, Event], float] | None = None  # how many times as long a rank works on an event
    needs: Callable[[Event], Sequence[Event]] | None = None  # other edges than the schedule's

    def traces(self) -> list[RankTrace]:
        """What each simulated rank would have recorded; raises ValueError if the lanes wait for each other."""
        found = _Clock(self).run()
        return [RankTrace("model", rank, self.world_size, tuple(spans), {}) for rank, spans in enumerate(found)]

    def trace(self, rank: int = 0) -> RankTrace:
        """What one rank would have recorded, where one stands for all."""
        return replace(self.traces()[0], rank=rank)


@dataclass(slots=True, eq=False)
class _SimulatedStream:
    name: str
    rank: int
    program: Iterator[Event]
    event: Event | None = None
    needs: list[Event] = field(default_factory=list)  # those that are not done
    phases: list[Phase] = field(default_factory=list)  # those that are not over
    begun: bool = False
    ready_s: float = 0.0
    begin_s: float = 0.0
    job: CpuJob | None = None  # the work it is at
    device_until: float | None = None
    had_s: float = 0.0
    waits_since: float | None = None
    waits: list[Waited] = field(default_factory=list)
    num_bytes: int = 0
    num_rows: int = 0


@dataclass(slots=True, eq=False)
class _SimulatedLink:
    """What a rank sends on: a byte's turn comes when those before it are through, less what may pass at once."""

    free_s: float = 0.0

    def pass_on(self, begin: float, send: Send) -> float:
        """When the last byte has left."""
        self.free_s = max(begin, self.free_s) + send.wire_s
        return max(self.free_s - send.burst_s, begin)


@dataclass(frozen=True, slots=True)
class _MessageShare:
    """What one rank sends of a message, on its way."""

    message: Message
    sender: int
    arrives_s: float
    receive_s: float  # of a core of each receiver


class _Clock:
    def __init__(self, run: SimulatedRun):
        self._run, self._needs = run, run.needs or run.schedule.waits_for
        programs = _programs(run.schedule, run.num_batches)
        self._streams = [
            [_SimulatedStream(name, rank, iter(own)) for name, own in programs] for rank in range(run.num_ranks)
        ]
        self._lines, self._fabric_free = [_SimulatedLink() for _ in self._streams], 0.0
        self._now, self._cores = 0.0, run.cores()
        self._done: list[dict[Event, float]] = [{} for _ in self._streams]
        self._num_shares = max(run.num_ranks - 1, 1)  # of a message; one that stands for all waits for its own
        self._num_arrived: Counter[tuple[Message, int]] = Counter()  # by receiver
        self._timers: list[
            tuple[float, int, int | _MessageShare]
        ] = []  # a rank has something to do, or a share arrives
        self._num_timers = 0
        self._jobs: dict[CpuJob, int | _MessageShare | tuple[Message, int]] = {}  # of a rank's lane; sending; receiving
        self._spans: list[list[Span]] = [[] for _ in self._streams]

    def run(self) -> list[list[Span]]:
        for stream in (stream for own in self._streams for stream in own):
            self._take(stream)
        awake = set(range(len(self._streams)))
        while True:
            for rank in sorted(awake):
                while sum(self._go_on(stream) for stream in self._streams[rank]):  # an end may free another lane
                    pass
            if all(stream.event is None for own in self._streams for stream in own):
                return self._spans
            awake = self._advance()

    def _take(self, stream: _SimulatedStream) -> None:
        stream.event = next(stream.program, None)
        stream.begun, stream.ready_s = False, self._now
        stream.needs = list(self._needs(stream.event)) if stream.event else []

    def _go_on(self, stream: _SimulatedStream) -> bool:
        """Goes on as far as no time has to pass; whether an event ended."""
        if stream.event is None:
            return False
        if not stream.begun:
            while stream.needs and self._is_done(stream.rank, stream.needs[-1]):
                stream.needs.pop()
            if stream.needs:
                return False
            stream.begun, stream.begin_s = True, self._now
            stream.phases, stream.waits = list(self._run.plan(stream.event)), []
            stream.num_bytes = stream.num_rows = 0
        while stream.phases:
            if not self._phase(stream, stream.event, stream.phases[0]):
                return False
            stream.phases.pop(0)
        self._done[stream.rank][stream.event] = self._now
        times = (_ns(stream.ready_s), _ns(stream.begin_s), _ns(self._now))
        span = Span(stream.name, *stream.event, *times, stream.num_bytes, stream.num_rows, tuple(stream.waits))
        self._spans[stream.rank].append(span)
        self._take(stream)
        return True

    def _is_done(self, rank: int, need: Event) -> bool:
        """Also true of what will never be."""
        return need in self._done[rank] or need.batch >= self._run.num_batches

    def _phase(self, stream: _SimulatedStream, event: Event, phase: Phase) -> bool:
        """Whether the phase is over."""
        if isinstance(phase, Send):
            self._send(stream.rank, phase)
            stream.num_bytes += phase.num_bytes
            stream.num_rows += phase.num_rows
            return True
        if isinstance(phase, MessageWait):
            stream.waits_since = self._now if stream.waits_since is None else stream.waits_since
            if self._num_arrived[phase.message, stream.rank] < self._num_shares:
                return False
            stream.waits.append(Waited(phase.name, _ns(stream.waits_since), _ns(self._now)))
            stream.waits_since = None
            return True
        late = self._run.late(stream.rank, event) if self._run.late else 1.0
        if stream.job is None:
            stream.job = CpuJob(phase.cpu_s * late, stream.had_s)
            if not stream.job.is_done:
                self._begin(stream.job, stream.rank)
        if not stream.job.is_done:
            return False
        if stream.device_until is None:
            stream.device_until = self._now + phase.device_s * late
            if phase.device_s:
                self._wake_at(stream.device_until, stream.rank)
        if stream.device_until > self._now:
            return False
        stream.had_s, stream.job, stream.device_until = stream.job.had_s, None, None
        return True

    def _send(self, rank: int, send: Send) -> None:
        """A sender that has not yet heard of the open receives waits for word of them, which takes a delay."""
        opened = self._now if send.opened is None else self._done[rank][send.opened]
        left = self._lines[rank].pass_on(max(self._now, opened + send.delay_s), send)
        if send.fabric_s:
            self._fabric_free = left = max(left, self._fabric_free + send.fabric_s)
        receive_s = send.cpu_s / 2 if self._run.num_ranks > 1 else 0.0  # one that stands for all does both at once
        share = _MessageShare(send.message, rank, left + send.delay_s, receive_s / self._num_shares)
        job = CpuJob(send.cpu_s - receive_s)
        if job.is_done:
            self._wake_at(share.arrives_s, share)
        else:
            self._begin(job, share)

    def _begin(self, job: CpuJob, of: int | _MessageShare | tuple[Message, int]) -> None:
        self._jobs[job] = of
        self._cores.add(job)

    def _wake_at(self, time_s: float, what: int | _MessageShare) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (time_s, self._num_timers, what))

    def _advance(self) -> set[int]:
        """To the next moment at which something ends; the ranks that may go on."""
        until = self._cores.until_s()
        end = min(self._now + until, self._timers[0][0] if self._timers else float("inf"))
        if end == float("inf"):
            stuck = ", ".join(
                f"{stream.name}: {stream.event}" for own in self._streams for stream in own if stream.event
            )
            raise ValueError(f"no lane can go on: {stuck}. The edges and the programs of the schedule contradict.")
        passed, self._now, awake = min(end - self._now, until), end, set[int]()
        for job in self._cores.go_on(passed):
            of = self._jobs.pop(job)
            if isinstance(of, _MessageShare):
                self._wake_at(max(of.arrives_s, self._now), of)
            else:
                awake.add(of if isinstance(of, int) else self._received(*of))
        while self._timers and self._timers[0][0] <= self._now:
            _, _, what = heapq.heappop(self._timers)
            awake |= {what} if isinstance(what, int) else self._came(what)
        return awake

    def _came(self, share: _MessageShare) -> set[int]:
        """A share is there, for a core to be received; the ranks that have it already."""
        found = set[int]()
        for rank in range(self._run.num_ranks):
            if rank != share.sender or self._run.num_ranks == 1:
                job = CpuJob(share.receive_s)
                if job.is_done:
                    found.add(self._received(share.message, rank))
                else:
                    self._begin(job, (share.message, rank))
        return found

    def _received(self, message: Message, rank: int) -> int:
        self._num_arrived[message, rank] += 1
        return rank


@lru_cache(maxsize=64)  # the same for every number of workers
def _programs(schedule: Schedule, num_batches: int) -> tuple[tuple[str, tuple[Event, ...]], ...]:
    return tuple((stream, tuple(events)) for stream, events in schedule.events(num_batches).items())


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
