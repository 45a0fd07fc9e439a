"""When an adapting run measures itself: bookkeeping without a clock and without communication.

    timer = MeasurementTimer(period=100, number=0)
    timer.record(BatchSize(rows, tokens))     after every step of this rank
    timer.is_requested                        batch sizes of this rank have changed: it requests a barrier
    timer.due                                 the step at which all ranks measure
    timer.restart(number)                     at a barrier before that
    timer.decide(number, measurement)         at `due`, with the measurement of all ranks

A measurement costs about one short step, and its barrier another. So it comes after a few steps
while a setting is new, after a period when it is known, and with exponential back-off while nothing
changes. A change of batch sizes is noticed without one.
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

MEASURE_STEPS = 32  # recorded before a measurement
TRIAL_STEPS = 18  # of a new setting, pipeline warm-up included
# Evidence for a change: +1 for a batch outside the usual size, -2 for one inside (the last of an epoch is small).
_CHANGED, _USUAL_BATCH = 12, 2


class BatchSize(NamedTuple):
    """The size of a rank's batch, or the usual size."""

    rows: float  # requested
    tokens: float

    @staticmethod
    def mean(sizes: Collection[BatchSize]) -> BatchSize:
        return BatchSize(fmean(one.rows for one in sizes), fmean(one.tokens for one in sizes))


def steps_to_measurement(number: int, period: int, patience: int) -> int:
    """Steps from `number` to the next measurement: at the end of a trial, or of `patience` periods."""
    short, left = min(TRIAL_STEPS, period), period - number % period
    if not patience:
        return short
    return left + period * (patience - (left >= short))


class MeasurementTimer:
    """When to measure, and what was measured. All but `record`, `is_requested` and `size` is the same on every rank."""

    def __init__(self, *, period: int, number: int, known: Sequence[Measurement] = ()):
        """`number`: of the next step; `known`: earlier measurements."""
        self._period, self.known, self._last = period, list(known), number
        self._sizes: deque[BatchSize] = deque(maxlen=MEASURE_STEPS)  # since the last measurement
        self._num_sizes, self._usual = 0, BatchSize(0, 0)
        self._evidence = [0, 0, 0, 0]  # of more and fewer rows, more and fewer tokens
        self.since = self.due = number
        self._measure_after(number, 0)

    def record(self, size: BatchSize) -> None:
        """Adds the batch of a finished step."""
        self._sizes.append(size)
        self._num_sizes += 1
        shares = [now / usual if usual else 1.0 for now, usual in zip(size, self._usual, strict=True)]
        differs = [other for share in shares for other in (share > 1 + SAME_SIZE, share < 1 - SAME_SIZE)]
        self._evidence = [
            max(count + (1 if other else -_USUAL_BATCH), 0)
            for count, other in zip(self._evidence, differs, strict=True)
        ]

    @property
    def size(self) -> BatchSize:
        """The mean batch size since the last measurement."""
        return BatchSize.mean(self._sizes)

    @property
    def is_requested(self) -> bool:
        """Whether batch sizes have changed significantly; at most once per period."""
        return any(self._usual) and self._num_sizes >= self._period and max(self._evidence) >= _CHANGED

    def restart(self, number: int) -> None:
        """Starts a trial now: the batches since the last measurement are of two kinds."""
        self._usual = BatchSize(0, 0)
        self._measure_after(number, 0)

    def forget(self) -> None:
        """Drops all measurements."""
        self.known.clear()

    def postpone(self, number: int) -> None:
        """Postpones by a period: nothing to choose, or too few steps."""
        self._measure_after(number, 1)

    def decide(
        self,
        number: int,
        measured: Measurement,
        *,
        max_micro_batches: int = MAX_MICRO_BATCHES,
        max_depth: int = MAX_DEPTH,
    ) -> TuningDecision:
        """The decision after a measurement of all ranks."""
        now = replace(measured, num_steps=number - self._last)
        self.known, decision = after_measurement(
            self.known, now, max_micro_batches=max_micro_batches, max_depth=max_depth
        )
        self._last = number
        self._usual = BatchSize(median(one.rows for one in self._sizes), median(one.tokens for one in self._sizes))
        self._measure_after(number, decision.patience)
        return decision

    def _measure_after(self, number: int, patience: int) -> None:
        self.since, self.due = number, number + steps_to_measurement(number, self._period, patience)
        self._sizes.clear()
        self._num_sizes, self._evidence = 0, [0, 0, 0, 0]
