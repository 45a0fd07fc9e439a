"""Runs a schedule: one thread per stream, one runner for every schedule.

    program of a stream ──▶ wait for dependencies (EventBoard) ──▶ stage(state, work) ──▶ mark the event as done

The main stream is the calling thread; autograd, the dense compute and the caller's `on_step` run
there. Waiting for other ranks happens inside stages, on exchanges with their own deadlines.

A run ends at a *barrier*: after a batch that is known beforehand, or after the batch in whose id
exchange a rank requested to stop. Then every row is back in its table and no thread is running, so
the state can be saved, evaluated or dropped. Batches that were read beyond it are discarded; the
cursor rides on the batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from nestpipe.errors import CommError, ConfigError, NestPipeError, TrainError
from nestpipe.jagged import Batch
from nestpipe.pipeline import stages
from nestpipe.pipeline.schedule import MAIN, Event, Schedule
from nestpipe.pipeline.stages import BatchStage, BatchWork, MicroBatchStage, Rates, TrainState
from nestpipe.pipeline.streams import HostStreams, StreamBackend, stream_backend

_GRACE_S = 2.0  # after a failure: for messages that other ranks still need, such as a non-finite flag
_MEMORY = 16  # batches whose events are remembered after their write; no schedule looks further back


class _AbortedError(Exception):
    """Ends a stream after another one has failed."""


class EventBoard:
    """Which events are done, the number of batches if known, and the first failure. Shared by all streams."""

    def __init__(self, streams: tuple[str, ...], num_batches: int | None = None):
        self.num_batches = num_batches
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._done: dict[int, set[Event]] = {}
        self._first_kept = 0  # all events of earlier batches are done
        self._gates = {stream: threading.Lock() for stream in streams}  # locked while its stream waits
        for gate in self._gates.values():
            gate.acquire()
        self._waiting: dict[str, Event] = {}

    def wait(self, stream: str, event: Event, needs: list[Event]) -> bool:
        """Blocks until all needs are done; False if the event turns out to be beyond the last batch."""
        while True:
            with self._lock:
                if self.failure is not None:
                    raise _AbortedError
                if self.num_batches is not None and event.batch >= self.num_batches:
                    return False
                missing = next((need for need in needs if not self._is_done(need)), None)
                if missing is None:
                    return True
                self._waiting[stream] = missing
            self._gates[stream].acquire()

    def _is_done(self, event: Event) -> bool:
        """Also true of events beyond the last batch."""
        beyond = self.num_batches is not None and event.batch >= self.num_batches
        return beyond or event.batch < self._first_kept or event in self._done.get(event.batch, ())

    def done(self, event: Event) -> int:
        """Marks an event and wakes the streams that wait for it; returns the number of done events of its batch."""
        with self._lock:
            done = self._done.setdefault(event.batch, set())
            done.add(event)
            if event.kind == "write":
                self._done.pop(self._first_kept - 1, None)
                self._first_kept = max(self._first_kept, event.batch - _MEMORY)
            self._wake([stream for stream, need in self._waiting.items() if need == event])
            return len(done)

    def end_after(self, batch: int) -> None:
        """Makes this batch the last one."""
        with self._lock:
            self.num_batches = min(batch + 1, batch + 1 if self.num_batches is None else self.num_batches)
            self._wake(list(self._waiting))

    def fail(self, failure: BaseException) -> None:
        """Records the first failure; later ones follow from it."""
        with self._lock:
            self.failure = self.failure or failure
            self._wake(list(self._waiting))

    def _wake(self, streams: list[str]) -> None:
        for stream in streams:
            del self._waiting[stream]
            self._gates[stream].release()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFeed:
    """The input and the callbacks of a run."""

    batches: Iterator[Batch]
    rates: Callable[[int], Rates]  # by the number of the batch from the start of training
    num_batches: int | None = None  # until the barrier, if known beforehand
    stop_requested: Callable[[], bool] = lambda: False  # if any rank's is true, the run ends after that batch
    on_step: Callable[[BatchWork], None] = lambda work: None  # called in the main thread after each dense step


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """One run up to a barrier."""

    feed: BatchFeed
    board: EventBoard
    backend: StreamBackend
    first: int  # number of its first batch, from the start of training
    works: dict[int, BatchWork] = field(default_factory=dict)  # batches in flight, counted from the first


@dataclass(slots=True, eq=False)
class Runner:
    """Runs a schedule on a state. Stages may be wrapped; `before` is called before each event."""

    state: TrainState
    schedule: Schedule
    batch_stages: Mapping[str, BatchStage] = field(default_factory=lambda: stages.BATCH_STAGES)
    micro_batch_stages: Mapping[str, MicroBatchStage] = field(default_factory=lambda: stages.MICRO_BATCH_STAGES)
    before: Callable[[str, Event], None] = lambda stream, event: None
    observe: Callable[[str, Event, int, int, int], None] | None = None  # stream, event, ready, begin and end in ns

    def run(self, feed: BatchFeed) -> int:
        """Trains until the barrier; returns the number of batches. Raises the first failure, after all streams have ended."""
        self._protect_rows()
        board = EventBoard(self.schedule.streams, feed.num_batches)
        backend = stream_backend(self.state.embedding.row_channel.device, self.schedule.streams)
        segment, num_threads = _Segment(feed, board, backend, self.state.num_steps), torch.get_num_threads()
        self._hand_over()

        def run_thread(stream: str) -> None:
            torch.set_num_threads(num_threads)
            with torch.no_grad():
                self._run_stream(stream, segment)

        threads = [
            threading.Thread(target=run_thread, args=(stream,), name=f"nestpipe-{stream}", daemon=True)
            for stream in self.schedule.streams
            if stream != MAIN
        ]
        for thread in threads:
            thread.start()
        self._run_stream(MAIN, segment)
        for thread in threads:
            if board.failure is None:
                thread.join()
        if board.failure is not None:
            self._abort(threads, board.failure)
        backend.join()
        self._hand_over()
        if board.failure is not None:
            raise board.failure
        return board.num_batches or 0

    def _run_stream(self, stream: str, segment: _Segment) -> None:
        """Runs the program of a stream to its end, or until any stream fails."""
        board, backend = segment.board, segment.backend
        num_events = self.schedule.num_events + len(self.state.dense.buckets) * self._hides_dense
        try:
            with backend.stream(stream):
                for event in self.schedule.program(stream, lambda: board.num_batches):
                    ready, needs = time.monotonic_ns(), self._needs(event)
                    if not board.wait(stream, event, needs + self.schedule.yields_to(event)):
                        continue
                    self.before(stream, event)
                    begin = time.monotonic_ns()
                    backend.begin(stream, needs)
                    self._execute(event, segment)
                    backend.end(stream, event)
                    if self.observe:
                        self.observe(stream, event, ready, begin, time.monotonic_ns())
                    if board.done(event) == num_events:
                        del segment.works[event.batch]
        except _AbortedError:
            pass
        except BaseException as failure:  # raised by the main thread
            board.fail(failure)

    def _execute(self, event: Event, segment: _Segment) -> None:
        kind, batch, micro_batch = event
        feed, number = segment.feed, segment.first + batch
        if kind == "read":
            data = next(feed.batches, None)
            if data is None:
                raise TrainError(
                    f"the data ended before batch {number}; set `num_batches` if the number of batches is limited."
                )
            rates, stop = feed.rates(number), feed.stop_requested()
            segment.works[batch] = stages.read(self.state, data, rates, number, self.schedule.chunks, stop)
            if self._hides_dense:
                self._connect(segment.works[batch], batch, segment)
            return
        work = segment.works[batch]
        if kind == "update" and self.schedule.stale and batch + 1 == segment.board.num_batches:
            work.window.keep_previous()
        if kind == "keys" and self.schedule.chunks == "shared":
            work.previous = segment.works[batch - 1].window if batch else None
        elif kind == "keys" and self.schedule.looks_ahead and (after := segment.works.get(batch + 1)):
            work.next = after.window  # on every rank: `keys` yields to reading
        if kind in self.micro_batch_stages:
            self.micro_batch_stages[kind](self.state, work, micro_batch)
        else:
            self.batch_stages[kind](self.state, work)
        if kind == "keys" and work.window.stop_requested:
            segment.board.end_after(batch)
        elif kind == "dense step":
            feed.on_step(work)

    @property
    def _hides_dense(self) -> bool:
        return self.schedule.stream_of("dense sum") != MAIN

    def _needs(self, event: Event) -> list[Event]:
        """Dependencies. The dense sum does not need the end of the last compute, but each bucket of gradients inside it."""
        needs = self.schedule.needs(event)
        if event.kind == "dense sum" and self._hides_dense:
            return [Event("backward", event.batch) if one.kind == "compute" else one for one in needs]
        return needs

    def _connect(self, work: BatchWork, batch: int, segment: _Segment) -> None:
        """Connects the backward, which marks complete buckets, with the dense sum, which waits for them."""
        board, backend, channel = segment.board, segment.backend, self.state.dense.channel
        stream = self.schedule.stream_of("dense sum")

        def mark(bucket: int) -> None:
            backend.end(MAIN, Event("backward", batch, bucket))
            board.done(Event("backward", batch, bucket))

        def wait(bucket: int) -> None:
            event = Event("backward", batch, bucket)
            with channel.watch.waiting("sum") if channel.watch else nullcontext():
                board.wait(stream, event, [event])
            backend.begin(stream, [event])

        work.mark_bucket, work.await_bucket = mark, wait

    def _protect_rows(self) -> None:
        """Pins rows in memory. Raises ConfigError if a row could be evicted while a batch holds it."""
        for name, table in self.state.embedding.tables.items():
            if self.schedule.depth:
                table.pin()
            least = self.schedule.depth + 1
            if table.config.max_rows and table.config.protect_steps < least:
                raise ConfigError(
                    f"table '{name}' protects rows of {table.config.protect_steps} batches from eviction, but rows are "
                    f"retrieved {self.schedule.depth} batches ahead: set embedding.protect_steps to at least {least}."
                )

    def _abort(self, threads: list[threading.Thread], failure: BaseException) -> None:
        """Aborts all channels, which ends the waits of this rank's threads and of the other ranks."""
        end = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))
        ranks = failure.ranks if isinstance(failure, CommError) else ()
        reason = str(failure) if isinstance(failure, NestPipeError) else f"{type(failure).__name__}: {failure}"
        for channel in self.state.channels:
            channel.abort(reason.rstrip("."), ranks=ranks)
        for thread in threads:
            thread.join(_GRACE_S)

    def _hand_over(self) -> None:
        """Passes the channels to the threads of this run, and afterwards back to the caller's."""
        for channel in self.state.channels:
            channel.hand_over()


class _NoWaits(EventBoard):
    """Nothing is waited for."""

    def wait(self, stream: str, event: Event, needs: list[Event]) -> bool:
        return True


def run_in_order(state: TrainState, order: list[Event], feed: BatchFeed, schedule: Schedule) -> None:
    """Runs events one after the other in the given order, ignoring dependencies. Tests force orders with it."""
    runner = Runner(state, schedule)
    segment = _Segment(feed, _NoWaits(()), HostStreams(), state.num_steps)
    for event in order:
        runner._execute(event, segment)
