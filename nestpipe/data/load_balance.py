"""Which rank gets which samples of a global batch: equal cost, not equal counts, because all ranks wait for the slowest.

A sample of L events costs a·L + b·L²: attention is the square, everything else, negatives included, is linear. The costliest
unit (a sample, or a group that must not be divided) goes first, each to the rank that has least so far; then samples of the
rank that has most are swapped with others, or moved, as long as that makes it less.

The answer is a function of lengths, ids and coefficients. The loader knows all of them on every rank before it reads a single
event, so each rank works it out for itself and reads its own samples: nothing is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Counted, not timed: a run may not depend on the clock.
_MOST_SWAPS = 1000
_MOST_PAIRS = 1 << 22  # looked at for one batch; a swap looks at every unit of the fullest rank with every other
_ENOUGH = 1e-3  # of the mean load


@dataclass(frozen=True, slots=True)
class SampleCost:
    """What a sample costs by its length, in any unit: `nestpipe tune balance` says microseconds."""

    linear: float = 1.0
    square: float = 0.0

    def of(self, lengths: Ints) -> Floats:
        length = lengths.astype(np.float64)
        return self.linear * length + self.square * length * length


@dataclass(frozen=True, slots=True)
class Imbalance:
    """How uneven ranks are, by what each has to do: all are 0 if they are equal, and below 1."""

    wait: float  # share of the slowest rank's time that ranks wait for it, on average
    spread: float  # (most - least) / most
    tokens: float  # the same of their numbers of events

    @staticmethod
    def of(loads: Floats, tokens: Floats) -> Imbalance:
        """Of the costs and numbers of events [world size] that ranks have."""
        most = loads.max()
        if not most > 0:
            return Imbalance(0.0, 0.0, 0.0)
        wait = float((most - loads).mean() / most)
        return Imbalance(wait, float((most - loads.min()) / most), float((tokens.max() - tokens.min()) / tokens.max()))


def assign(costs: Floats, ids: Ints, world_size: int, *, swaps: bool = True) -> Ints:
    """The rank [n] of each unit with costs [n] >= 0; ties go by ids [n], which are distinct, and then by rank."""
    rank_of = np.zeros(len(costs), dtype=np.int64)
    loads = np.zeros(world_size)
    for unit in np.lexsort((ids, -costs)):
        rank_of[unit] = rank = int(loads.argmin())
        loads[rank] += costs[unit]
    if swaps and world_size > 1:
        by_id, num_pairs = np.argsort(ids), 0
        for _ in range(_MOST_SWAPS):
            num_pairs += int((rank_of == loads.argmax()).sum()) * len(costs)
            if loads.max() <= (1 + _ENOUGH) * loads.mean() or num_pairs > _MOST_PAIRS:
                break
            if not _swap(costs, by_id, rank_of, loads):
                break
    return rank_of


def _swap(costs: Floats, by_id: Ints, rank_of: Ints, loads: Floats) -> bool:
    """Takes cost from the rank that has most, by the one swap or move that leaves least to the worse of the two ranks."""
    most = int(loads.argmax())
    given = by_id[rank_of[by_id] == most]
    taken = by_id[rank_of[by_id] != most]
    others = np.flatnonzero(np.arange(len(loads)) != most)
    # Columns: every unit of another rank in exchange, then for every other rank nothing in exchange.
    receiver = np.concatenate([rank_of[taken], others])
    returned = np.concatenate([costs[taken], np.zeros(len(others))])
    moved = costs[given][:, None] - returned
    worse = np.maximum(loads[most] - moved, loads[receiver] + moved)
    best = int(worse.argmin()) if worse.size else 0
    if not worse.size or not worse.flat[best] < loads[most] * (1 - 1e-12):
        return False
    row, column = divmod(best, worse.shape[1])
    rank_of[given[row]] = receiver[column]
    if column < len(taken):
        rank_of[taken[column]] = most
    for rank in (most, int(receiver[column])):
        loads[rank] = costs[by_id[rank_of[by_id] == rank]].sum()
    return True


def fixed(num_units: int, world_size: int) -> Ints:
    """As many units for each rank, in their order: what is done without balance."""
    sizes = [len(part) for part in np.array_split(np.arange(num_units), world_size)]
    return np.repeat(np.arange(world_size), sizes)


def loads_of(costs: Floats, rank_of: Ints, world_size: int) -> Floats:
    """What each rank has to do."""
    return np.bincount(rank_of, weights=costs, minlength=world_size).astype(np.float64)


def fit(lengths: list[Ints], seconds: Floats) -> tuple[SampleCost, float]:
    """Coefficients in microseconds from batches of samples and what each took; and the constant per batch, in seconds.

    Least squares of relative errors, none of the coefficients negative: one that would be is left out.
    """
    columns = np.array([[1.0, one.sum(), np.square(one.astype(np.float64)).sum()] for one in lengths])
    used = [0, 1, 2]
    while used:
        found, *_ = np.linalg.lstsq(columns[:, used] / seconds[:, None], np.ones(len(seconds)), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    values = np.zeros(3)
    values[used] = found if used else 0.0
    return SampleCost(float(values[1] * 1e6), float(values[2] * 1e6)), float(values[0])
