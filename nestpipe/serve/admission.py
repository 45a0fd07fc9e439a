"""Admission before work: when a request arrived, and how long it would wait.

    bytes in the socket --loop lag--> read, parsed --predicted wait--> queued, or refused with 429

A deadline starts when the bytes are there. A request whose predicted wait exceeds what is left of its deadline is refused before
its history is touched. The prediction is the queued work with earlier deadlines at the speed of recent steps, and the error that
was usual: the median in a burst, else one that few exceeded. A queue that stands is kept short.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

from nestpipe.serve.requests import LateError

_MARGIN = 0.9  # share of the time that is left in which an answer should be ready: it must be sent, too
_BURST_MARGIN = 0.8  # in a burst, where half of the errors are larger
_STANDING_SHARE = 0.5  # of the time that is left, for which a request may wait in a queue that was not empty for long
_NUM_RECENT, _FEW = 64, 58  # recent measurements that are kept, and the rank of one that few exceed
_REFRESH = 8  # measurements after which that is looked up again
_KEPT = 0.9  # weight of the steps before, with each new one
_OUTLIER = 4.0  # times the expected time that a step, or an error, counts at most
_FRESH_S = 0.5  # after which a measurement loses half of its weight in each such time

ARRIVAL = "nestpipe.arrival"
"""The key of an ASGI scope that has the request's `Arrival`, if the server is ours."""
_arrived: ContextVar[float | None] = ContextVar("arrived", default=None)


def note_arrival(at: float) -> None:
    """Sets the time (monotonic) at which the bytes of the current task's request arrived."""
    _arrived.set(at)


def age_s() -> float:
    """Seconds since the request of the current task arrived; 0 for one that is not from a socket."""
    at = _arrived.get()
    return 0.0 if at is None else max(time.monotonic() - at, 0.0)


class CancellableConnection(Protocol):
    """A connection that cancels a task when it is lost."""

    running: asyncio.Task[Any] | None
    is_lost: bool


@dataclass(slots=True)
class Arrival:
    """When the last byte of a request arrived, and on which connection."""

    connection: CancellableConnection
    at: float | None = None

    def take_body(self) -> bytes | None:
        """The whole body, without waiting; None if it must be received."""
        return None

    def answer(self, status: int, body: bytes) -> bool:
        """Writes the whole answer, a JSON body, at once; False if it must be sent."""
        return False


@dataclass(slots=True, eq=False)
class _Queued:
    """A request that waits. It is overtaken by a later one with less than half of its time, and then its wait says nothing.

    Equal requests overtake each other too: one that waited unread has less time left. They do so as often as before.
    """

    deadline: float
    work: float
    is_overtaken: bool = False


class _Recent:
    """Recent times: their median, and one that few exceed. Both lose weight while nothing is measured."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: deque[float] = deque([0.0] * _NUM_RECENT, maxlen=_NUM_RECENT)
        self._num, self._at = 0, 0.0
        self._median_s = self._few_s = 0.0

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._num, self._at = self._num + 1, self._clock()
        if self._num % _REFRESH == 0:
            ranked = sorted(self._seconds)
            self._median_s, self._few_s = max(ranked[_NUM_RECENT // 2], 0.0), max(ranked[_FEW], 0.0)

    def median_s(self) -> float:
        return self._median_s * _weight(self._clock() - self._at)

    def few_s(self) -> float:
        """What few of them exceeded."""
        return self._few_s * _weight(self._clock() - self._at)


class WaitEstimate:
    """Predicts how long a queued request waits: the work with earlier deadlines, at the speed of recent steps. From any thread.

    A batch costs less per request than a request alone, so small batches say little about the speed under load. The estimate
    is optimistic about what it has not measured: too many requests make full batches, which correct it at once; too few would
    keep batches small, and the estimate wrong.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._queue: list[_Queued] = []  # by deadline
        self._work = 0.0  # of all of them
        self._busy_s, self._worked, self._measured_at = 0.0, 0.0, 0.0  # of recent steps
        self._errors = _Recent(clock)  # by which answers were later than predicted
        self._deliveries = _Recent(clock)  # from an answer until its caller takes it
        self._empty_at = -math.inf  # when the queue was last empty
        self._step_at: float | None = None  # when the step began that is taken now
        self.answered, self.num_answered = 0.0, 0  # work that was answered in full, and requests

    def queue(self, reply: Future[Any], work: float, *, deadline: float) -> None:
        """Counts a request until it is answered. Its own work is no wait, so the time that it takes is an error."""
        queued = _Queued(deadline, work)
        with self._lock:
            began, wait_s = self._clock(), self._wait_s(deadline)
            most_s = _OUTLIER * (wait_s + work * self._unit_s())
            if work:  # not a prefill hint, for which nothing waits
                self._insert(queued)

        def settled(reply: Future[Any]) -> None:
            # A late or degraded answer took little time; counted as work it would promise a speed that leads to more of them.
            problem = None if reply.cancelled() else reply.exception()
            is_answer = not reply.cancelled() and problem is None
            is_whole = is_answer and not getattr(reply.result(), "degraded", False)
            with self._lock:
                self.answered += work * is_whole
                self.num_answered += is_whole
                if not work:
                    return
                self._queue.remove(queued)
                self._work = self._work - work if self._queue else 0.0  # sums of fractions leave a rest
                if not queued.is_overtaken and (is_answer or isinstance(problem, LateError)):
                    self._errors.note(min(self._clock() - began - wait_s, most_s))

        reply.add_done_callback(settled)

    def note_delivery(self, seconds: float) -> None:
        """An answer was taken that long after it was there: the event loop was behind."""
        self._deliveries.note(seconds)

    def begin_step(self) -> None:
        """The worker takes up the first of the queued requests, if there are any."""
        self._step_at = self._clock()

    def end_step(self) -> None:
        self._step_at = None

    def observe(self, work: float, seconds: float, *, is_full: bool) -> None:
        """A step answered requests; `is_full` if it could not have taken more of them."""
        expected_s = work * self._unit_s()
        if expected_s > 0:
            seconds = min(seconds, _OUTLIER * expected_s)  # the process did not run, or a prefill was finished
        if is_full or seconds < expected_s or not self._worked:
            self._busy_s = _KEPT * self._busy_s + seconds
            self._worked = _KEPT * self._worked + work
        if is_full or not self._measured_at:
            self._measured_at = self._clock()

    def wait_s(self, deadline: float = math.inf) -> float:
        """How long a request with this deadline would wait if it were queued now."""
        with self._lock:
            return self._wait_s(deadline)

    def exceeds(self, left_s: float) -> bool:
        """Whether an answer would be late if the prediction is as wrong as it was. An idle worker refuses nothing.

        A queue that was empty less than a deadline ago is a burst, not an overload: the median error is expected there. One that
        was not empty for two deadlines is kept short: a long one gives no more answers, and later ones.
        """
        now = self._clock()
        wait_s, stood_s = self.wait_s(now + left_s), now - self._empty_at
        error_s, margin = self._errors.few_s(), _MARGIN
        if stood_s < left_s:
            error_s, margin = self._errors.median_s(), _BURST_MARGIN
        is_long = stood_s >= 2 * left_s and wait_s > _STANDING_SHARE * left_s
        return wait_s > 0 and (is_long or wait_s + error_s + self._deliveries.few_s() > margin * left_s)

    def _insert(self, queued: _Queued) -> None:
        now, deadline = self._clock(), queued.deadline
        if not self._queue:
            self._empty_at = now
        for later in self._queue[bisect_right(self._queue, 2 * deadline - now, key=_deadline_of) :]:
            later.is_overtaken = True
        self._queue.insert(bisect_right(self._queue, deadline, key=_deadline_of), queued)
        self._work += queued.work

    def _wait_s(self, deadline: float) -> float:
        work, unit_s = self._work, self._unit_s()
        if self._queue and self._queue[-1].deadline > deadline:
            place = bisect_right(self._queue, deadline, key=_deadline_of)
            work = sum(one.work for one in self._queue[:place])
        if not work or self._step_at is None:
            return work * unit_s
        done_s = min(self._clock() - self._step_at, self._queue[0].work * unit_s)  # of the first, in the current step
        return max(work * unit_s - done_s, 0.0)

    def _unit_s(self) -> float:
        return self._busy_s / self._worked * _weight(self._clock() - self._measured_at) if self._worked else 0.0


def _weight(old_s: float) -> float:
    """Of what was measured that long ago."""
    return float(0.5 ** (max(old_s - _FRESH_S, 0.0) / _FRESH_S))


def _deadline_of(queued: _Queued) -> float:
    return queued.deadline


def measured(estimate: WaitEstimate, step: Callable[[], bool], *, num_waiting: int, max_batch: int) -> bool:
    """Takes a step, and notes its speed if it answered requests, of which `num_waiting` were there before."""
    before, num_before, began = estimate.answered, estimate.num_answered, time.perf_counter()
    estimate.begin_step()
    try:
        has_worked = step()
    finally:
        estimate.end_step()
    num, work = estimate.num_answered - num_before, estimate.answered - before
    if work > 0:
        estimate.observe(work, time.perf_counter() - began, is_full=num >= max_batch or num < num_waiting)
    return has_worked
