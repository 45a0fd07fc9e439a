"""Where stages run: one runner for every schedule, one thread for every lane of it.

The main lane is the calling thread; autograd, the dense part and whatever the caller does between steps happen there. A lane
takes its events in the order of its program, waits for what each needs, runs the stage and says so. Waiting for other
ranks happens inside stages, on messages that carry their own deadlines.

A run ends at a *barrier*: after a batch that was fixed beforehand, or after the batch in whose key exchange a rank asked to
stop. Then every row of every batch is back in its table and no lane is running, so that the state can be saved, evaluated or
left. Batches that had been read beyond it are dropped; the cursor rides on the batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from nestpipe.errors import CommError, ConfigError, NestPipeError, TrainError
from nestpipe.jagged import Batch
from nestpipe.pipeline import stages
from nestpipe.pipeline.schedule import MAIN, Event, Schedule
from nestpipe.pipeline.stages import BatchStage, BatchWork, MicroBatchStage, Rates, TrainState
from nestpipe.pipeline.streams import HostStreams, StreamBackend, place_of

_GRACE_S = 2.0  # after a failure: for messages that other ranks still need, say that a value is not finite
_MEMORY = (
    16  # batches whose events are remembered beyond the oldest that is not written: more than any schedule looks back
)


class _Abandoned(Exception):  # noqa: N818 - not an error: how a lane leaves when another has failed
    pass


class EventBoard:
    """Which events are done, how many batches there will be, and whether a lane has failed."""

    def __init__(self, streams: tuple[str, ...], num_batches: int | None = None):
        self.num_batches = num_batches
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._done: dict[int, set[Event]] = {}
        self._forgotten = 0  # batches before this one are done with
        self._gates = {stream: threading.Lock() for stream in streams}  # held while its lane waits
        for gate in self._gates.values():
            gate.acquire()
        self._waiting: dict[str, Event] = {}

    def wait(self, stream: str, event: Event, needs: list[Event]) -> bool:
        """Returns when all needs are done; False if the event turns out to be beyond the last batch."""
        while True:
            with self._lock:
                if self.failure is not None:
                    raise _Abandoned
                if self.num_batches is not None and event.batch >= self.num_batches:
                    return False
                missing = next((need for need in needs if not self._is_done(need)), None)
                if missing is None:
                    return True
                self._waiting[stream] = missing
            self._gates[stream].acquire()

    def _is_done(self, event: Event) -> bool:
        """Also true of what will never be."""
        beyond = self.num_batches is not None and event.batch >= self.num_batches
        return beyond or event.batch < self._forgotten or event in self._done.get(event.batch, ())

    def done(self, event: Event) -> int:
        """Wakes who waits for the event; returns how many of its batch are done."""
        with self._lock:
            done = self._done.setdefault(event.batch, set())
            done.add(event)
            if event.kind == "write":
                self._done.pop(self._forgotten - 1, None)
                self._forgotten = max(self._forgotten, event.batch - _MEMORY)
            self._wake([stream for stream, need in self._waiting.items() if need == event])
            return len(done)

    def end_after(self, batch: int) -> None:
        """No batch comes after this one."""
        with self._lock:
            self.num_batches = min(batch + 1, batch + 1 if self.num_batches is None else self.num_batches)
            self._wake(list(self._waiting))

    def fail(self, failure: BaseException) -> None:
        """Only the first failure counts; the others follow from it."""
        with self._lock:
            self.failure = self.failure or failure
            self._wake(list(self._waiting))

    def _wake(self, streams: list[str]) -> None:
        for stream in streams:
            del self._waiting[stream]
            self._gates[stream].release()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFeed:
    """What a run takes in, and whom it tells."""

    batches: Iterator[Batch]
    rates: Callable[[int], Rates]  # of a batch, by its number from the start of training
    num_batches: int | None = None  # the barrier, if it is known beforehand
    stop_requested: Callable[[], bool] = lambda: False  # any rank's wish ends the run after the batch that carries it
    on_step: Callable[[BatchWork], None] = lambda work: None  # called in the main thread after each dense step


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """One run to a barrier."""

    feed: BatchFeed
    board: EventBoard
    place: StreamBackend
    first: int  # number of its first batch, from the start of training
    works: dict[int, BatchWork] = field(default_factory=dict)  # batches in flight, counted from the first


@dataclass(slots=True, eq=False)
class Runner:
    """Runs a schedule on a state. `batch_stages` and `part_stages` may be wrapped; `before` is called before each event."""

    state: TrainState
    schedule: Schedule
    batch_stages: Mapping[str, BatchStage] = field(default_factory=lambda: stages.BATCH_STAGES)
    micro_batch_stages: Mapping[str, MicroBatchStage] = field(default_factory=lambda: stages.MICRO_BATCH_STAGES)
    before: Callable[[str, Event], None] = lambda stream, event: None
    observe: Callable[[str, Event, int, int, int], None] | None = None  # lane, event, ready, begin and end in ns

    def run(self, feed: BatchFeed) -> int:
        """Trains until the barrier; returns the number of batches. Raises what a lane raised, with no lane running."""
        self._protect_rows()
        board = EventBoard(self.schedule.streams, feed.num_batches)
        place = place_of(self.state.embedding.row_channel.world.device, self.schedule.streams)
        segment, num_threads = _Segment(feed, board, place, self.state.num_steps), torch.get_num_threads()
        self._hand_over()

        def lane_of_its_own(stream: str) -> None:
            torch.set_num_threads(num_threads)
            with torch.no_grad():
                self._take(stream, segment)

        threads = [
            threading.Thread(target=lane_of_its_own, args=(stream,), name=f"nestpipe-{stream}", daemon=True)
            for stream in self.schedule.streams
            if stream != MAIN
        ]
        for thread in threads:
            thread.start()
        self._take(MAIN, segment)
        for thread in threads:
            if board.failure is None:
                thread.join()
        if board.failure is not None:
            self._give_up(threads, board.failure)
        self._hand_over()
        if board.failure is not None:
            raise board.failure
        return board.num_batches or 0

    def _take(self, stream: str, segment: _Segment) -> None:
        """Takes the events of a lane until there are no more."""
        board, place = segment.board, segment.place
        try:
            with place.stream(stream):
                for event in self.schedule.program(stream, lambda: board.num_batches):
                    ready, needs = time.monotonic_ns(), self.schedule.waits_for(event)
                    if not board.wait(stream, event, needs):
                        continue
                    self.before(stream, event)
                    begin = time.monotonic_ns()
                    place.begin(stream, needs)
                    self._execute(event, segment)
                    place.end(stream, event)
                    if self.observe:
                        self.observe(stream, event, ready, begin, time.monotonic_ns())
                    if board.done(event) == self.schedule.num_events:
                        del segment.works[event.batch]
        except _Abandoned:
            pass
        except BaseException as failure:  # handed to the main thread, which raises it
            board.fail(failure)

    def _execute(self, event: Event, segment: _Segment) -> None:
        kind, batch, micro_batch = event
        feed, number = segment.feed, segment.first + batch
        if kind == "read":
            data = next(feed.batches, None)
            if data is None:
                raise TrainError(f"the data ended before batch {number}; say so beforehand with `num_batches`.")
            rates, stop = feed.rates(number), feed.stop_requested()
            cut = self.schedule.split, self.schedule.num_chunks
            segment.works[batch] = stages.read(self.state, data, rates, number, *cut, stop)
            return
        work = segment.works[batch]
        if kind == "update" and self.schedule.stale and batch + 1 == segment.board.num_batches:
            work.window.keep_previous()
        if kind == "keys" and self.schedule.split:
            work.previous = segment.works[batch - 1].window if batch else None
        elif kind == "keys" and self.schedule.looks_ahead and (after := segment.works.get(batch + 1)):
            work.next = after.window  # on every rank: keys let reading pass
        if kind in self.micro_batch_stages:
            self.micro_batch_stages[kind](self.state, work, micro_batch)
        else:
            self.batch_stages[kind](self.state, work)
        if kind == "keys" and work.window.stop_requested:
            segment.board.end_after(batch)
        elif kind == "dense step":
            feed.on_step(work)

    def _protect_rows(self) -> None:
        """Rows in flight do not move; raises ConfigError if one could be evicted while a batch holds it."""
        for name, table in self.state.embedding.tables.items():
            if self.schedule.depth:
                table.pin()
            least = self.schedule.depth + 1
            if table.config.max_rows_per_bucket and table.config.protect_steps < least:
                raise ConfigError(
                    f"table '{name}' protects rows of {table.config.protect_steps} batches from eviction, but rows are "
                    f"retrieved {self.schedule.depth} batches ahead: set embedding.protect_steps to at least {least}."
                )

    def _give_up(self, threads: list[threading.Thread], failure: BaseException) -> None:
        """Ends threads that wait for messages, and tells the other ranks that this one will not go on."""
        end = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))
        missing = failure.ranks if isinstance(failure, CommError) else ()
        reason = str(failure) if isinstance(failure, NestPipeError) else f"{type(failure).__name__}: {failure}"
        for stream in self.state.channels:
            stream.abort(reason.rstrip("."), ranks=missing)
        for thread in threads:
            thread.join(_GRACE_S)

    def _hand_over(self) -> None:
        """Message lanes belong to the threads of this run, and afterwards to the caller's again."""
        for stream in self.state.channels:
            stream.hand_over()


def run_in_order(state: TrainState, order: list[Event], feed: BatchFeed, schedule: Schedule) -> None:
    """Runs events one after the other in the given order, whatever they need: how tests force an order on a schedule."""
    runner = Runner(state, schedule)
    segment = _Segment(feed, EventBoard(()), HostStreams(), state.num_steps)
    for event in order:
        runner._execute(event, segment)
