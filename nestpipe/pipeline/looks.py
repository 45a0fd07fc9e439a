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

from nestpipe.pipeline.tune import MOST_DEPTH, MOST_PARTS, SAME_SIZE, Decision, Observed, after_look

LOOK_STEPS = 32  # before a look, that are recorded
TRIAL_STEPS = 18  # that tell what a setting takes, those that fill the pipeline included
_NO_CHANCE, _DOUBT = (
    12,
    2,
)  # batches larger than usual, or smaller, each that is not takes back two: the last of an epoch is small


class Size(NamedTuple):
    """Of a rank's batch, or of what is usual."""

    rows: float  # that it asks for
    tokens: float

    @staticmethod
    def mean(sizes: Collection[Size]) -> Size:
        return Size(fmean(one.rows for one in sizes), fmean(one.tokens for one in sizes))


def steps_to_look(number: int, period: int, patience: int) -> int:
    """After how many steps from `number` on to look again: at the end of a trial, or of so many periods."""
    short, left = min(TRIAL_STEPS, period), period - number % period
    if not patience:
        return short
    return left + period * (patience - (left >= short))


class Looks:
    """All but `saw`, `are_wanted` and `size` is the same on every rank."""

    def __init__(self, *, period: int, number: int, found: Sequence[Observed] = ()):
        """`number`: of the next step; `found`: what is known already."""
        self._period, self.found, self._last = period, list(found), number
        self._seen: deque[Size] = deque(maxlen=LOOK_STEPS)  # since the last look
        self._num_seen, self._usual = 0, Size(0, 0)
        self._evidence = [0, 0, 0, 0]  # for more and fewer rows, more and fewer tokens than usual
        self.since = self.due = number
        self._look_after(number, 0)

    def saw(self, size: Size) -> None:
        """Of the batch of a step that is done."""
        self._seen.append(size)
        self._num_seen += 1
        shares = [now / usual if usual else 1.0 for now, usual in zip(size, self._usual, strict=True)]
        differs = [other for share in shares for other in (share > 1 + SAME_SIZE, share < 1 - SAME_SIZE)]
        self._evidence = [
            max(count + (1 if other else -_DOUBT), 0) for count, other in zip(self._evidence, differs, strict=True)
        ]

    @property
    def size(self) -> Size:
        """The mean of what was seen since the last look."""
        return Size.mean(self._seen)

    @property
    def are_wanted(self) -> bool:
        """Whether so many batches are larger than usual, or smaller, that it is no chance; not twice in a period."""
        return any(self._usual) and self._num_seen >= self._period and max(self._evidence) >= _NO_CHANCE

    def restart(self, number: int) -> None:
        """What was seen since the last look is of two kinds: looks at what comes now."""
        self._usual = Size(0, 0)
        self._look_after(number, 0)

    def forget(self) -> None:
        """What was found says nothing any more."""
        self.found.clear()

    def postpone(self, number: int) -> None:
        """There was nothing to choose, or too little to look at."""
        self._look_after(number, 1)

    def take(
        self, number: int, seen: Observed, *, most_parts: int = MOST_PARTS, most_depth: int = MOST_DEPTH
    ) -> Decision:
        """How to go on after what all ranks saw."""
        now = replace(seen, num_steps=number - self._last)
        self.found, decision = after_look(self.found, now, most_parts=most_parts, most_depth=most_depth)
        self._last = number
        self._usual = Size(median(one.rows for one in self._seen), median(one.tokens for one in self._seen))
        self._look_after(number, decision.patience)
        return decision

    def _look_after(self, number: int, patience: int) -> None:
        self.since, self.due = number, number + steps_to_look(number, self._period, patience)
        self._seen.clear()
        self._num_seen, self._evidence = 0, [0, 0, 0, 0]
