"""Admission before work: when a request arrived, and how long it would wait.

    bytes in the socket --loop lag--> read, parsed --predicted wait--> queued, or refused with 429

A deadline starts when the bytes are there. A request whose predicted wait exceeds what is left of its deadline is refused before
its history is touched. The prediction is the work that is queued times the speed of recent steps, so an idle worker refuses nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

_MARGIN = 0.8  # share of the time that is left which the predicted wait may take: it is a mean
_KEPT = 0.9  # weight of the steps before, with each new one
_SOON_S = 0.001  # a loop that polls so soon after its last callback did not sleep

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


class ArrivalClock:
    """Estimates when bytes arrived that an event loop reads now.

    A poll that follows the last callbacks at once found bytes that may have waited since the poll before. uvloop's time is that
    of the poll, before Python's lock was waited for; that of asyncio is the current time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._poll, self._done = 0.0, 0.0  # the current poll, and when the callbacks of the last one were done
        self._at = 0.0

    def read(self) -> float:
        """The time (monotonic) at which the bytes arrived, or somewhat earlier."""
        poll = min(self._loop.time(), time.monotonic())
        if poll != self._poll:
            before, self._poll = self._poll, poll
            self._at = before if poll - self._done < _SOON_S else poll
            self._loop.call_soon(self._note_done)
        return self._at

    def _note_done(self) -> None:
        self._done = time.monotonic()


class WaitEstimate:
    """Predicts how long a queued request waits: the work before it, at the speed of recent steps. From any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._queued = 0.0
        self._busy_s, self._worked = 0.0, 0.0  # of recent steps
        self.answered = 0.0  # work that was answered in full

    def queue(self, reply: Future[Any], work: float) -> None:
        """Counts a request until it is answered."""
        with self._lock:
            self._queued += work

        def settled(reply: Future[Any]) -> None:
            # A late or degraded answer took little time; counted as work it would promise a speed that leads to more of them.
            is_whole = not reply.cancelled() and reply.exception() is None
            is_whole = is_whole and not getattr(reply.result(), "degraded", False)
            with self._lock:
                self._queued -= work
                self.answered += work * is_whole

        reply.add_done_callback(settled)

    def observe(self, work: float, seconds: float) -> None:
        """A step answered requests."""
        self._busy_s = _KEPT * self._busy_s + seconds
        self._worked = _KEPT * self._worked + work

    def wait_s(self) -> float:
        """How long a request that is queued now would wait."""
        worked = self._worked
        return max(self._queued, 0.0) * self._busy_s / worked if worked > 0 else 0.0

    def exceeds(self, left_s: float) -> bool:
        """Whether the predicted wait leaves no time to answer."""
        return left_s <= 0 or self.wait_s() > _MARGIN * left_s


def measured(estimate: WaitEstimate, step: Callable[[], bool]) -> bool:
    """Takes a step, and notes its speed if it answered requests."""
    before, began = estimate.answered, time.perf_counter()
    has_worked = step()
    if (work := estimate.answered - before) > 0:
        estimate.observe(work, time.perf_counter() - began)
    return has_worked
