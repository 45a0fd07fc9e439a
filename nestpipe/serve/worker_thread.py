"""A thread that takes steps while other threads queue requests: the base of all engines."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from nestpipe.serve.admission import WaitEstimate, measured
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.requests import BusyError, LateError, StoppingError
from nestpipe.serve.user_history import UserHistories

Answer = TypeVar("Answer")
_log = logging.getLogger("nestpipe.serve")
_STOPPING = "the instance is stopping; try another."
_PAUSE_S = 0.2  # of an idle thread
_REFRESH_S = 0.05  # between two refreshes, at least


class WakeUp:
    """Wakes one thread that waits, or that waits next. A lock costs a tenth of a `threading.Condition`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with suppress(RuntimeError):  # it is set already
            self._lock.release()

    def wait(self, timeout_s: float) -> None:
        self._lock.acquire(timeout=timeout_s)


async def replied(reply: Future[Answer], waits: WaitEstimate) -> Answer:
    """What a worker answers; cancels the request if the caller is cancelled. `asyncio.wrap_future` costs twice as much."""
    loop = asyncio.get_running_loop()
    answered, answered_at = loop.create_future(), 0.0

    def wake(_: Future[Answer]) -> None:
        nonlocal answered_at
        answered_at = time.monotonic()
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, answered)

    reply.add_done_callback(wake)
    try:
        await answered
    except asyncio.CancelledError:
        reply.cancel()
        raise
    waits.note_delivery(time.monotonic() - answered_at)
    return reply.result()


def _settle(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class WorkerThread(ABC):
    """Takes steps until it is stopped and its queue is empty. Requests are queued inside `admitting`."""

    def __init__(self, name: str, histories: UserHistories, *, config: EngineConfig, clock: Callable[[], float]):
        self.histories, self.config, self.clock = histories, config, clock
        self._name = name
        self._queueing, self._wake_up = threading.Lock(), WakeUp()
        self._thread: threading.Thread | None = None
        self.is_stopping = False
        self.waits = WaitEstimate(clock)

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Queued requests."""

    @abstractmethod
    def step(self) -> bool:
        """One step; False if there was nothing to do."""

    @abstractmethod
    def _refresh(self) -> None:
        """Called between steps now and then, also while there are no requests."""

    def admit(self, left_s: float) -> None:
        """Raises BusyError if a request would wait longer than it can, before anything is read or queued for it."""
        if self.is_stopping:
            raise StoppingError(_STOPPING)
        if left_s <= 0:
            raise LateError("the deadline passed before the request could be queued.")
        if self.waits.exceeds(left_s):
            wait_ms, left_ms = 1000 * self.waits.wait_s(self.clock() + left_s), 1000 * left_s
            raise BusyError(
                f"{self.num_waiting} requests wait, for about {wait_ms:.0f} ms, and {left_ms:.0f} ms of the deadline are left; "
                "try again later, or another instance."
            )

    @contextmanager
    def admitting(self, reply: Future[Any], *, deadline: float, work: float = 1.0) -> Iterator[None]:
        """Queue one request in the body, which wakes the thread. Raises BusyError if the queue is full, StoppingError at the end.

        `work` is its expected cost in a unit of the worker. Requests with an earlier deadline are taken first.
        """
        with self._queueing:
            if self.is_stopping:
                raise StoppingError(_STOPPING)
            if (num := self.num_waiting) >= self.config.max_queue:
                raise BusyError(f"{num} requests wait already; try again later, or another instance.")
            yield
        self.waits.queue(reply, work, deadline=deadline)
        self._wake_up.set()

    def wake(self) -> None:
        """Ends the pause of an idle thread. From any thread."""
        self._wake_up.set()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answers the queued requests, then ends the thread."""
        with self._queueing:
            self.is_stopping = True
        self._wake_up.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        refresh_at = 0.0
        while not (self.is_stopping and not self.num_waiting):
            try:
                is_idle = not measured(
                    self.waits, self.step, num_waiting=self.num_waiting, max_batch=self.config.max_batch
                )
                if (now := time.monotonic()) >= refresh_at:
                    self._refresh()
                    refresh_at = now + _REFRESH_S
            except Exception:
                _log.exception("a step failed; the %s continues", self._name)
                is_idle = True
            if is_idle:
                self._wake_up.wait(_PAUSE_S)
