"""A thread that takes steps while other threads queue requests: the base of all engines."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nestpipe.serve.config import EngineConfig
from nestpipe.serve.requests import BusyError, StoppingError
from nestpipe.serve.user_history import UserHistories

_log = logging.getLogger("nestpipe.serve")
_PAUSE_S = 0.2  # of an idle thread


class WorkerThread(ABC):
    """Takes steps until it is stopped and its queue is empty. Requests are queued inside `admitting`."""

    def __init__(self, name: str, histories: UserHistories, *, config: EngineConfig, clock: Callable[[], float]):
        self.histories, self.config, self.clock = histories, config, clock
        self._name = name
        self._wakeup, self._has_new = threading.Condition(), False
        self._thread: threading.Thread | None = None
        self.is_stopping = False

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Queued requests."""

    @abstractmethod
    def step(self) -> bool:
        """One step; False if there was nothing to do."""

    @abstractmethod
    def _refresh(self) -> None:
        """Called between steps, also while there are no requests."""

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Queue one request in the body, which wakes the thread. Raises BusyError if the queue is full, StoppingError at the end."""
        with self._wakeup:
            if self.is_stopping:
                raise StoppingError("the instance is stopping; try another.")
            if (num := self.num_waiting) >= self.config.max_queue:
                raise BusyError(f"{num} requests wait already; try again later, or another instance.")
            yield
            self._has_new = True
            self._wakeup.notify()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answers the queued requests, then ends the thread."""
        with self._wakeup:
            self.is_stopping = self._has_new = True
            self._wakeup.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not (self.is_stopping and not self.num_waiting):
            self._has_new = False
            try:
                is_idle = not self.step()
                self._refresh()
            except Exception:
                _log.exception("a step failed; the %s continues", self._name)
                is_idle = True
            with self._wakeup:
                if is_idle and not self._has_new:
                    self._wakeup.wait(_PAUSE_S)
