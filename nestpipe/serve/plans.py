"""What an engine has under way: prefills, ranks with the paths they take, and what was measured of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nestpipe.models.prefix import Prefix
from nestpipe.serve.cache import Entry
from nestpipe.serve.jobs import Choice, Rank
from nestpipe.serve.prefix import Asked

_FEW = 32  # of which no percentile says anything


@dataclass(slots=True, eq=False)
class Work:
    """A prefill under way, perhaps from a shorter prefix on."""

    asked: Asked
    lease: Entry[Prefix]
    kept: Prefix | None

    @property
    def rest(self) -> tuple[int, int]:
        """From how many events to how many."""
        return self.asked.key.length, length_of(self.kept)


@dataclass(slots=True, eq=False)
class Plan:
    """A rank, the path it takes, and what that needs."""

    rank: Rank
    asked: Asked
    choice: Choice
    prefix: Prefix | None = None
    take_made: Callable[[], Prefix] | None = None  # the prefix that full inference made on its way


class Recent:
    """Milliseconds that were measured, each with its time."""

    def __init__(self, clock: Callable[[], float], *, window_s: float):
        self._clock, self._window_s = clock, window_s
        self._measured: deque[tuple[float, float]] = deque(maxlen=512)

    def note(self, ms: float) -> None:
        self._measured.append((self._clock(), ms))

    def p99(self) -> float:
        """Of the window; nothing if there were only few. From any thread."""
        since = self._clock() - self._window_s
        late = [ms for at, ms in list(self._measured) if at > since]
        return float(np.percentile(late, 99)) if len(late) >= _FEW else 0.0


def length_of(prefix: Prefix | None) -> int:
    return prefix.key.length if prefix else 0
