"""Load balance: assigns the samples of a global batch to ranks by cost, because all ranks wait for the slowest.

A sample of L events costs a·L + b·L²: attention is quadratic, everything else linear. A unit is a sample, or a group that
must not be divided.

    1  longest processing time first: each unit, in descending cost, goes to the rank with the least load
    2  local search: a swap or a move of the most loaded rank, as long as it lowers the maximum

The assignment is a pure function of lengths, ids and coefficients. Every rank computes it before it reads any event, so
nothing is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Limits are counts, because an assignment must not depend on the clock.
_MOST_SWAPS = 1000
_MOST_PAIRS = 1 << 22  # evaluated per batch; a swap evaluates every unit of the most loaded rank with every other
_ENOUGH = 1e-3  # relative excess over the mean load at which the search stops


@dataclass(frozen=True, slots=True)
class SampleCost:
    """Cost of a sample by its length, in any unit; `nestpipe tune balance` measures microseconds."""

    linear: float = 1.0
    square: float = 0.0

    def of(self, lengths: Ints) -> Floats:
        length = lengths.astype(np.float64)
        return self.linear * length + self.square * length * length


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Imbalance of the ranks: 0 if all are equal, always below 1."""

    wait: float  # mean waiting time, as a share of the slowest rank's time
    spread: float  # (max - min) / max of the loads
    tokens: float  # (max - min) / max of the numbers of events

    @staticmethod
    def of(loads: Floats, tokens: Floats) -> Imbalance:
        """From the load and number of events of each rank [world size]."""
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
    """Applies the swap or move of the most loaded rank that minimises the larger of the two loads; False if none helps."""
    most = int(loads.argmax())
    given = by_id[rank_of[by_id] == most]
    taken = by_id[rank_of[by_id] != most]
    others = np.flatnonzero(np.arange(len(loads)) != most)
    # Columns: a swap with each unit of another rank, then a move to each other rank.
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
    """Equal counts for all ranks, in order: the assignment without load balance."""
    sizes = [len(part) for part in np.array_split(np.arange(num_units), world_size)]
    return np.repeat(np.arange(world_size), sizes)


def loads_of(costs: Floats, rank_of: Ints, world_size: int) -> Floats:
    """The total cost of each rank."""
    return np.bincount(rank_of, weights=costs, minlength=world_size).astype(np.float64)


def fit(lengths: list[Ints], seconds: Floats) -> tuple[SampleCost, float]:
    """Fits cost coefficients (microseconds) and the constant per batch (seconds) to the measured times of batches.

    Non-negative least squares of relative errors: a coefficient that would be negative is left out.
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
