"""When a run that adapts looks at itself, and what it has seen so far: bookkeeping without a clock or a message.

    looks = Looks(period=100, number=0)
    looks.saw(Size(rows, tokens))          after every step of this rank
    looks.are_wanted                       batches of this rank have become others: it asks all for a barrier
    looks.due                              the step at which all look
    looks.restart(number)                  at a barrier that came before that
    looks.take(number, seen)               what all ranks saw together, and so how to go on

A look takes about as long as a short step, and its barrier another one. So it comes after a few steps while something is new, after a
period when that is known, and ever more rarely while nothing changes. That batches have become others needs no look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from nestpipe.autotune.search import (
    MAX_DEPTH,
    MAX_MICRO_BATCHES,
    SAME_SIZE,
    Measurement,
    TuningDecision,
    after_measurement,
)

MEASURE_STEPS = 32  # before a look, that are recorded


TRIAL_STEPS = 18  # that tell what a setting takes, those that fill the pipeline included


_NO_CHANCE, _DOUBT = (
    12,
    2,
)  # batches larger than usual, or smaller, each that is not takes back two: the last of an epoch is small


class BatchSize(NamedTuple):
    """Of a rank's batch, or of what is usual."""

    rows: float  # that it asks for
    tokens: float

    @staticmethod
    def mean(sizes: Collection[BatchSize]) -> BatchSize:
        return BatchSize(fmean(one.rows for one in sizes), fmean(one.tokens for one in sizes))


def steps_to_measurement(number: int, period: int, patience: int) -> int:
    """After how many steps from `number` on to look again: at the end of a trial, or of so many periods."""
    short, left = min(TRIAL_STEPS, period), period - number % period
    if not patience:
        return short
    return left + period * (patience - (left >= short))


class MeasurementTimer:
    """All but `saw`, `are_wanted` and `size` is the same on every rank."""

    def __init__(self, *, period: int, number: int, found: Sequence[Measurement] = ()):
        """`number`: of the next step; `found`: what is known already."""
        self._period, self.found, self._last = period, list(found), number
        self._seen: deque[BatchSize] = deque(maxlen=MEASURE_STEPS)  # since the last look
        self._num_seen, self._usual = 0, BatchSize(0, 0)
        self._evidence = [0, 0, 0, 0]  # for more and fewer rows, more and fewer tokens than usual
        self.since = self.due = number
        self._measure_after(number, 0)

    def record(self, size: BatchSize) -> None:
        """Of the batch of a step that is done."""
        self._seen.append(size)
        self._num_seen += 1
        shares = [now / usual if usual else 1.0 for now, usual in zip(size, self._usual, strict=True)]
        differs = [other for share in shares for other in (share > 1 + SAME_SIZE, share < 1 - SAME_SIZE)]
        self._evidence = [
            max(count + (1 if other else -_DOUBT), 0) for count, other in zip(self._evidence, differs, strict=True)
        ]

    @property
    def size(self) -> BatchSize:
        """The mean of what was seen since the last look."""
        return BatchSize.mean(self._seen)

    @property
    def is_requested(self) -> bool:
        """Whether so many batches are larger than usual, or smaller, that it is no chance; not twice in a period."""
        return any(self._usual) and self._num_seen >= self._period and max(self._evidence) >= _NO_CHANCE

    def restart(self, number: int) -> None:
        """What was seen since the last look is of two kinds: looks at what comes now."""
        self._usual = BatchSize(0, 0)
        self._measure_after(number, 0)

    def forget(self) -> None:
        """What was found says nothing any more."""
        self.found.clear()

    def postpone(self, number: int) -> None:
        """There was nothing to choose, or too little to look at."""
        self._measure_after(number, 1)

    def decide(
        self, number: int, seen: Measurement, *, max_micro_batches: int = MAX_MICRO_BATCHES, max_depth: int = MAX_DEPTH
    ) -> TuningDecision:
        """How to go on after what all ranks saw."""
        now = replace(seen, num_steps=number - self._last)
        self.found, decision = after_measurement(
            self.found, now, max_micro_batches=max_micro_batches, max_depth=max_depth
        )
        self._last = number
        self._usual = BatchSize(median(one.rows for one in self._seen), median(one.tokens for one in self._seen))
        self._measure_after(number, decision.patience)
        return decision

    def _measure_after(self, number: int, patience: int) -> None:
        self.since, self.due = number, number + steps_to_measurement(number, self._period, patience)
        self._seen.clear()
        self._num_seen, self._evidence = 0, [0, 0, 0, 0]
