"""Discrete-event simulation of a schedule: its programs and dependencies, with the cost of each event given as phases.

Where every worker has its own cores, one simulated worker stands for all: they run the same programs at the same time, and the
cost of stragglers is part of the work. Workers that share the cores of a machine are simulated one by one, because they do not run
in lockstep (cpu_model.py). Each then sends its share of a message, which costs CPU time half at the sender and half at the
receivers; a message has arrived at a rank when the shares of all others have.

The streams of a worker take events in the order of their programs and wait for their dependencies, as the runner does. An event
consists of

    StageWork     its stream is busy: on a core, which it may share, then on a device
    Send          a message is queued on the worker's link and arrives a delay after its last byte
    MessageWait   the stream is blocked until a message has arrived

The result is a trace like that of a real run, for overlap.py and timeline.py.
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
    """Core seconds, then device seconds, which take no core."""

    cpu_s: float = 0.0
    device_s: float = 0.0


class Message(NamedTuple):
    """A message, by its event and its number within the event."""

    event: Event
    number: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """A message to all other workers on this worker's link."""

    message: Message
    wire_s: float
    delay_s: float = 0.0
    burst_s: float = 0.0  # link time that an idle link does not charge
    fabric_s: float = 0.0  # time on the shared fabric, one message after the other
    cpu_s: float = 0.0  # core seconds of background threads that move the bytes
    opened: Event | None = None  # the event that opened its receives; None: they are opened when it is sent
    num_bytes: int = 0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class MessageWait:
    """Blocks until a message has arrived."""

    message: Message
    name: str  # one of trace_file.WAITS


Phase = StageWork | Send | MessageWait
Plan = Callable[[Event], Sequence[Phase]]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A simulation: a schedule with the costs of its events."""

    schedule: Schedule
    plan: Plan
    num_batches: int
    cores: Callable[[], Cores] = CoreSharing  # of all simulated workers
    world_size: int = 1  # recorded in the trace
    num_ranks: int = 1  # simulated one by one; 1 stands for all
    late: Callable[[int, Event], float] | None = None  # slowdown of a rank in an event
    needs: Callable[[Event], Sequence[Event]] | None = None  # dependencies, if not those of the schedule

    def traces(self) -> list[RankTrace]:
        """The trace of each simulated rank; raises ValueError if the streams deadlock."""
        spans_of_ranks = _Clock(self).run()
        return [
            RankTrace("model", rank, self.world_size, tuple(spans), {}) for rank, spans in enumerate(spans_of_ranks)
        ]

    def trace(self, rank: int = 0) -> RankTrace:
        """The trace of a rank, where one stands for all."""
        return replace(self.traces()[0], rank=rank)


@dataclass(slots=True, eq=False)
class _SimulatedStream:
    name: str
    rank: int
    program: Iterator[Event]
    event: Event | None = None
    needs: list[Event] = field(default_factory=list)  # not done yet
    phases: list[Phase] = field(default_factory=list)  # not over yet
    begun: bool = False
    ready_s: float = 0.0
    begin_s: float = 0.0
    job: CpuJob | None = None  # its running work
    device_until: float | None = None
    had_s: float = 0.0
    waits_since: float | None = None
    waits: list[Waited] = field(default_factory=list)
    num_bytes: int = 0
    num_rows: int = 0


@dataclass(slots=True, eq=False)
class _SimulatedLink:
    """The link of a rank: a FIFO queue with a burst allowance."""

    free_s: float = 0.0

    def send(self, begin: float, send: Send) -> float:
        """The time at which the last byte has left."""
        self.free_s = max(begin, self.free_s) + send.wire_s
        return max(self.free_s - send.burst_s, begin)


@dataclass(frozen=True, slots=True)
class _MessageShare:
    """One rank's share of a message, in flight."""

    message: Message
    sender: int
    arrives_s: float
    receive_s: float  # core seconds of each receiver


class _Clock:
    def __init__(self, run: SimulatedRun):
        self._run, self._needs = run, run.needs or run.schedule.waits_for
        programs = _programs(run.schedule, run.num_batches)
        self._streams = [
            [_SimulatedStream(name, rank, iter(own)) for name, own in programs] for rank in range(run.num_ranks)
        ]
        self._links, self._fabric_free = [_SimulatedLink() for _ in self._streams], 0.0
        self._now, self._cores = 0.0, run.cores()
        self._done: list[dict[Event, float]] = [{} for _ in self._streams]
        self._num_shares = max(run.num_ranks - 1, 1)  # of a message; a rank that stands for all waits for its own
        self._num_arrived: Counter[tuple[Message, int]] = Counter()  # by receiver
        self._timers: list[
            tuple[float, int, int | _MessageShare]
        ] = []  # of a rank that continues, or a share that arrives
        self._num_timers = 0
        self._jobs: dict[
            CpuJob, int | _MessageShare | tuple[Message, int]
        ] = {}  # owner: a rank's stream; sending; receiving
        self._spans: list[list[Span]] = [[] for _ in self._streams]

    def run(self) -> list[list[Span]]:
        for stream in (stream for own in self._streams for stream in own):
            self._take(stream)
        awake = set(range(len(self._streams)))
        while True:
            for rank in sorted(awake):
                while sum(
                    self._progress(stream) for stream in self._streams[rank]
                ):  # an end may unblock another stream
                    pass
            if all(stream.event is None for own in self._streams for stream in own):
                return self._spans
            awake = self._advance()

    def _take(self, stream: _SimulatedStream) -> None:
        stream.event = next(stream.program, None)
        stream.begun, stream.ready_s = False, self._now
        stream.needs = list(self._needs(stream.event)) if stream.event else []

    def _progress(self, stream: _SimulatedStream) -> bool:
        """Continues as far as no time has to pass; returns whether an event ended."""
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
        """Also true for events after the last batch."""
        return need in self._done[rank] or need.batch >= self._run.num_batches

    def _phase(self, stream: _SimulatedStream, event: Event, phase: Phase) -> bool:
        """Executes or continues a phase; returns whether it is over."""
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
        """A sender waits for the notice that receives are open, which takes one delay."""
        opened = self._now if send.opened is None else self._done[rank][send.opened]
        left = self._links[rank].send(max(self._now, opened + send.delay_s), send)
        if send.fabric_s:
            self._fabric_free = left = max(left, self._fabric_free + send.fabric_s)
        receive_s = send.cpu_s / 2 if self._run.num_ranks > 1 else 0.0  # a rank that stands for all does both
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
        """Advances to the next time at which something ends; returns the ranks that may continue."""
        until = self._cores.until_s()
        end = min(self._now + until, self._timers[0][0] if self._timers else float("inf"))
        if end == float("inf"):
            stuck = ", ".join(
                f"{stream.name}: {stream.event}" for own in self._streams for stream in own if stream.event
            )
            raise ValueError(
                f"deadlock: no stream can continue: {stuck}. The dependencies contradict the programs of the schedule."
            )
        passed, self._now, awake = min(end - self._now, until), end, set[int]()
        for job in self._cores.go_on(passed):
            of = self._jobs.pop(job)
            if isinstance(of, _MessageShare):
                self._wake_at(max(of.arrives_s, self._now), of)
            else:
                awake.add(of if isinstance(of, int) else self._received(*of))
        while self._timers and self._timers[0][0] <= self._now:
            _, _, what = heapq.heappop(self._timers)
            awake |= {what} if isinstance(what, int) else self._arrived(what)
        return awake

    def _arrived(self, share: _MessageShare) -> set[int]:
        """Starts receiving a share; returns the ranks that have received it at no cost."""
        received = set[int]()
        for rank in range(self._run.num_ranks):
            if rank != share.sender or self._run.num_ranks == 1:
                job = CpuJob(share.receive_s)
                if job.is_done:
                    received.add(self._received(share.message, rank))
                else:
                    self._begin(job, (share.message, rank))
        return received

    def _received(self, message: Message, rank: int) -> int:
        self._num_arrived[message, rank] += 1
        return rank


@lru_cache(maxsize=64)  # equal for every number of workers
def _programs(schedule: Schedule, num_batches: int) -> tuple[tuple[str, tuple[Event, ...]], ...]:
    return tuple((stream, tuple(events)) for stream, events in schedule.events(num_batches).items())


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
