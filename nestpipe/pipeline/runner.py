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
from nestpipe.pipeline.lanes import Host, Place, place_of
from nestpipe.pipeline.schedule import MAIN, Event, Schedule
from nestpipe.pipeline.stages import BatchStage, PartStage, Rates, TrainState, Work

_GRACE_S = 2.0  # after a failure: for messages that other ranks still need, say that a value is not finite
_MEMORY = (
    16  # batches whose events are remembered beyond the oldest that is not written: more than any schedule looks back
)


class _Abandoned(Exception):  # noqa: N818 - not an error: how a lane leaves when another has failed
    pass


class Board:
    """Which events are done, how many batches there will be, and whether a lane has failed."""

    def __init__(self, lanes: tuple[str, ...], num_batches: int | None = None):
        self.num_batches = num_batches
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._done: dict[int, set[Event]] = {}
        self._forgotten = 0  # batches before this one are done with
        self._gates = {lane: threading.Lock() for lane in lanes}  # held while its lane waits
        for gate in self._gates.values():
            gate.acquire()
        self._waiting: dict[str, Event] = {}

    def wait(self, lane: str, event: Event, needs: list[Event]) -> bool:
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
                self._waiting[lane] = missing
            self._gates[lane].acquire()

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
            self._wake([lane for lane, need in self._waiting.items() if need == event])
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

    def _wake(self, lanes: list[str]) -> None:
        for lane in lanes:
            del self._waiting[lane]
            self._gates[lane].release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a run takes in, and whom it tells."""

    batches: Iterator[Batch]
    rates: Callable[[int], Rates]  # of a batch, by its number from the start of training
    num_batches: int | None = None  # the barrier, if it is known beforehand
    asks_to_stop: Callable[[], bool] = lambda: False  # any rank's wish ends the run after the batch that carries it
    on_step: Callable[[Work], None] = lambda work: None  # called in the main thread after each dense step


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """One run to a barrier."""

    feed: Feed
    board: Board
    place: Place
    first: int  # number of its first batch, from the start of training
    works: dict[int, Work] = field(default_factory=dict)  # batches in flight, counted from the first


@dataclass(slots=True, eq=False)
class Runner:
    """Runs a schedule on a state. `batch_stages` and `part_stages` may be wrapped; `before` is called before each event."""

    state: TrainState
    schedule: Schedule
    batch_stages: Mapping[str, BatchStage] = field(default_factory=lambda: stages.BATCH_STAGES)
    part_stages: Mapping[str, PartStage] = field(default_factory=lambda: stages.PART_STAGES)
    before: Callable[[str, Event], None] = lambda lane, event: None
    observe: Callable[[str, Event, int, int, int], None] | None = None  # lane, event, ready, begin and end in ns

    def run(self, feed: Feed) -> int:
        """Trains until the barrier; returns the number of batches. Raises what a lane raised, with no lane running."""
        self._protect_rows()
        board = Board(self.schedule.lanes, feed.num_batches)
        place = place_of(self.state.embedding.rows.world.device, self.schedule.lanes)
        segment, num_threads = _Segment(feed, board, place, self.state.num_steps), torch.get_num_threads()
        self._hand_over()

        def lane_of_its_own(lane: str) -> None:
            torch.set_num_threads(num_threads)
            with torch.no_grad():
                self._take(lane, segment)

        threads = [
            threading.Thread(target=lane_of_its_own, args=(lane,), name=f"nestpipe-{lane}", daemon=True)
            for lane in self.schedule.lanes
            if lane != MAIN
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

    def _take(self, lane: str, segment: _Segment) -> None:
        """Takes the events of a lane until there are no more."""
        board, place = segment.board, segment.place
        try:
            with place.lane(lane):
                for event in self.schedule.program(lane, lambda: board.num_batches):
                    ready, needs = time.monotonic_ns(), self.schedule.waits_for(event)
                    if not board.wait(lane, event, needs):
                        continue
                    self.before(lane, event)
                    begin = time.monotonic_ns()
                    place.begin(lane, needs)
                    self._execute(event, segment)
                    place.end(lane, event)
                    if self.observe:
                        self.observe(lane, event, ready, begin, time.monotonic_ns())
                    if board.done(event) == self.schedule.num_events:
                        del segment.works[event.batch]
        except _Abandoned:
            pass
        except BaseException as failure:  # handed to the main thread, which raises it
            board.fail(failure)

    def _execute(self, event: Event, segment: _Segment) -> None:
        kind, batch, part = event
        feed, number = segment.feed, segment.first + batch
        if kind == "read":
            data = next(feed.batches, None)
            if data is None:
                raise TrainError(f"the data ended before batch {number}; say so beforehand with `num_batches`.")
            rates, stop = feed.rates(number), feed.asks_to_stop()
            cut = self.schedule.split, self.schedule.slices
            segment.works[batch] = stages.read(self.state, data, rates, number, *cut, stop)
            return
        work = segment.works[batch]
        if kind == "update" and self.schedule.stale and batch + 1 == segment.board.num_batches:
            work.window.keep()
        if kind == "keys" and self.schedule.split:
            work.before = segment.works[batch - 1].window if batch else None
        elif kind == "keys" and self.schedule.looks_ahead and (after := segment.works.get(batch + 1)):
            work.after = after.window  # on every rank: keys let reading pass
        if kind in self.part_stages:
            self.part_stages[kind](self.state, work, part)
        else:
            self.batch_stages[kind](self.state, work)
        if kind == "keys" and work.window.asks_to_stop:
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
        for lane in self.state.lanes:
            lane.give_up(reason.rstrip("."), ranks=missing)
        for thread in threads:
            thread.join(_GRACE_S)

    def _hand_over(self) -> None:
        """Message lanes belong to the threads of this run, and afterwards to the caller's again."""
        for lane in self.state.lanes:
            lane.hand_over()


def run_in_order(state: TrainState, order: list[Event], feed: Feed, schedule: Schedule) -> None:
    """Runs events one after the other in the given order, whatever they need: how tests force an order on a schedule."""
    runner = Runner(state, schedule)
    segment = _Segment(feed, Board(()), Host(), state.num_steps)
    for event in order:
        runner._execute(event, segment)
