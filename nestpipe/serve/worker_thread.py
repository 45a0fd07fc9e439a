"""A thread that takes turns while requests come from other threads: what the engine and the generator have in common."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from nestpipe.serve.requests import BusyError, StoppingError

_log = logging.getLogger("nestpipe.serve")
_PAUSE_S = 0.2  # without news


class WorkerThread(ABC):
    """Takes steps until it is stopped and nothing waits any more. Who is asked for something queues it `while_open`."""

    def __init__(self, name: str, *, max_queue: int):
        self._name, self._max_queue = name, max_queue
        self._news, self._has_news = threading.Condition(), False
        self._thread: threading.Thread | None = None
        self.is_stopping = False

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests that have no answer yet and are not in a step."""

    @abstractmethod
    def step(self) -> bool:
        """One turn; False if there was nothing to do."""

    @abstractmethod
    def _look_around(self) -> None:
        """What is done between steps, also if nobody asks for anything."""

    def _pause_s(self) -> float:
        """How long nothing can be done unless something comes."""
        return _PAUSE_S

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """There is room for one more request, and the thread will see it; raises BusyError, StoppingError when it ends."""
        with self._news:
            if self.is_stopping:
                raise StoppingError("the instance is stopping; ask another.")
            if (num := self.num_waiting) >= self._max_queue:
                raise BusyError(f"{num} requests wait already; try again later, or ask another instance.")
            yield
            self._has_news = True
            self._news.notify()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answers what is queued, then ends."""
        with self._news:
            self.is_stopping = self._has_news = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not (self.is_stopping and not self.num_waiting):
            self._has_news = False
            try:
                is_idle = not self.step()
                self._look_around()
            except Exception:
                _log.exception("a step failed; the %s goes on", self._name)
                is_idle = True
            with self._news:
                if is_idle and not self._has_news:
                    self._news.wait(self._pause_s())
