"""How many units of work one call or one write takes, fitted to the measured speed.

A fast template writes 64 users in milliseconds and a small language model takes seconds per text. Whoever waits, and whatever
a crash repeats, should be some seconds in both cases.
"""

from __future__ import annotations


class FittedSize:
    """The number of units that take about `target_s`, between `least` and `most`."""

    def __init__(self, *, target_s: float, most: int, least: int = 1, first: int = 1):
        self._target_s, self._least, self._most = target_s, least, most
        self._per_unit_s: float | None = None
        self.value = min(max(first, least), most)

    def add(self, num_units: int, seconds: float) -> None:
        """A measurement. The size at most doubles, since the first units say little about many."""
        measured = seconds / max(num_units, 1)
        self._per_unit_s = measured if self._per_unit_s is None else (self._per_unit_s + measured) / 2
        fitting = int(self._target_s / self._per_unit_s) if self._per_unit_s > 0 else self._most
        self.value = min(max(fitting, self._least), self._most, 2 * self.value)

    def halve(self) -> None:
        """After a call that was not finished in time."""
        self.value = max(self.value // 2, self._least)
