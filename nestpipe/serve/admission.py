"""Admission before work: when a request arrived, and how long it would wait.

    bytes in the socket --loop lag--> read, parsed --predicted wait--> queued, or refused with 429

A deadline starts when the bytes are there. A request whose predicted wait exceeds what is left of its deadline is refused before
its history is touched. The prediction is the work that is queued times the speed of recent steps, and the error that was usual.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

_MARGIN = 0.9  # share of the time that is left in which an answer should be ready: it must be sent, too
_NUM_ERRORS, _EXPECTED = 64, 58  # recent predictions whose errors are kept, and the rank of the error to expect
_REFRESH = 8  # answers after which that is looked up again
_KEPT = 0.9  # weight of the steps before, with each new one
_OUTLIER = 4.0  # times the expected time that a step, or an error, counts at most
_FRESH_S = 0.5  # after which a measurement loses half of its weight in each such time
_SOON_S = 0.005  # a loop that reads so soon after its last work did not sleep

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


class ArrivalClock:
    """Estimates when bytes arrived that an event loop reads now.

    Reads of one poll are a batch. A batch that follows work at once found bytes that may have waited since the batch before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._is_next = loop, True
        self._began = self._at = 0.0  # of the current batch: its first read, and when its bytes arrived
        self._worked_until = 0.0

    def read(self) -> float:
        """The time (monotonic) at which the bytes arrived, or somewhat earlier."""
        if self._is_next:
            before, self._began = self._began, time.monotonic()
            self._at = before if self._began - self._worked_until < _SOON_S else self._began
            self._is_next = False
            self._loop.call_soon(self._end_batch)  # runs after this poll, and before the next
        return self._at

    def note_work(self) -> None:
        """The loop has worked until now, so bytes may wait for it."""
        self._worked_until = time.monotonic()

    def _end_batch(self) -> None:
        self._is_next = True
        self.note_work()


class WaitEstimate:
    """Predicts how long a queued request waits: the work before it, at the speed of recent steps. From any thread.

    A batch costs less per request than a request alone, so small batches say little about the speed under load. The estimate
    is optimistic about what it has not measured: too many requests make full batches, which correct it at once; too few would
    keep batches small, and the estimate wrong.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._queued, self._num_queued = 0.0, 0
        self._busy_s, self._worked, self._measured_at = 0.0, 0.0, 0.0  # of recent steps
        self._errors: deque[float] = deque([0.0] * _NUM_ERRORS, maxlen=_NUM_ERRORS)
        self._error_s = 0.0  # by which an answer is later than predicted, or less
        self.answered, self.num_answered = 0.0, 0  # work that was answered in full, and requests

    def queue(self, reply: Future[Any], work: float) -> None:
        """Counts a request until it is answered."""
        with self._lock:
            self._queued, self._num_queued = self._queued + work, self._num_queued + 1
            began, expected_s = self._clock(), self._queued * self._unit_s()

        def settled(reply: Future[Any]) -> None:
            # A late or degraded answer took little time; counted as work it would promise a speed that leads to more of them.
            is_whole = not reply.cancelled() and reply.exception() is None
            is_whole = is_whole and not getattr(reply.result(), "degraded", False)
            with self._lock:
                self._num_queued -= 1
                self._queued = self._queued - work if self._num_queued else 0.0  # sums of fractions leave a rest
                self.answered += work * is_whole
                self.num_answered += is_whole
                if is_whole:
                    error_s = self._clock() - began - expected_s
                    self._errors.append(min(error_s, _OUTLIER * expected_s))
                    if self.num_answered % _REFRESH == 0:
                        self._error_s = max(sorted(self._errors)[_EXPECTED], 0.0)

        reply.add_done_callback(settled)

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

    def wait_s(self) -> float:
        """How long a request that is queued now would wait."""
        return self._queued * self._unit_s()

    def exceeds(self, left_s: float) -> bool:
        """Whether an answer would be late if the prediction is as wrong as it was. An idle worker refuses nothing."""
        wait_s = self.wait_s()
        return wait_s > 0 and wait_s + self._error_s > _MARGIN * left_s

    def _unit_s(self) -> float:
        if not self._worked:
            return 0.0
        old_s = max(self._clock() - self._measured_at - _FRESH_S, 0.0)
        return self._busy_s / self._worked * float(0.5 ** (old_s / _FRESH_S))


def measured(estimate: WaitEstimate, step: Callable[[], bool], *, num_waiting: int, max_batch: int) -> bool:
    """Takes a step, and notes its speed if it answered requests, of which `num_waiting` were there before."""
    before, num_before, began = estimate.answered, estimate.num_answered, time.perf_counter()
    has_worked = step()
    num, work = estimate.num_answered - num_before, estimate.answered - before
    if work > 0:
        estimate.observe(work, time.perf_counter() - began, is_full=num >= max_batch or num < num_waiting)
    return has_worked
