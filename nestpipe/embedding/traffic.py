"""How many groups of ranks fit (groups.py): what a step sends inside groups and between them, and what that takes.

For M groups of I shards, with u(n) distinct ids of n neighbouring ranks in a batch and rows of b bytes, a rank

    sends inside its group      2 · u(1) · b · (I - 1) / I            rows out, gradients home
    sends to its replicas       (M - 1) · u(I) / I · (b + 8)          sums of its group, and ids
    updates                     u(M · I) / I                          rows: all groups' ids of its shard

and each of the three takes its measured time: an exchange starts in `start_s` and goes at `bytes_per_s`. Since u(I) ≥ u(1), more
groups never send less. They pay where ranks of a group are closer to each other than to the rest (one machine), or where it is
the number of messages that takes the time. They always cost memory: every group holds all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nestpipe.embedding.groups import divisors

_ID_BYTES = 8
_MARGIN = 0.02  # more groups take more memory: they must be faster by this


@dataclass(frozen=True, slots=True)
class Wire:
    """An exchange of some ranks while all others have theirs: what it takes to start, and bytes per second of each rank."""

    start_s: float
    bytes_per_s: float

    def seconds(self, num_exchanges: int, num_bytes: float) -> float:
        return num_exchanges * self.start_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Wires:
    """Those of one number of groups."""

    inside: Wire
    between: Wire


@dataclass(frozen=True, slots=True)
class Demand:
    """What a batch asks of one table."""

    row_bytes: int
    distinct: Mapping[int, float]  # u: by number of neighbouring ranks, all divisors of their number


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step with a number of groups; a pipeline hides some of them."""

    inside_s: float
    between_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.inside_s + self.between_s + self.update_s


def cost(
    num_ranks: int, num_groups: int, tables: Sequence[Demand], wires: Wires, *, num_parts: int, row_s: float
) -> Cost:
    """What a step takes, beside compute, by the model above; of so many parts the messages are waited for."""
    shards = num_ranks // num_groups
    sent = sum(2 * one.distinct[1] * one.row_bytes for one in tables) * (shards - 1) / shards
    shared = sum(one.distinct[shards] / shards * (one.row_bytes + _ID_BYTES) for one in tables) * (num_groups - 1)
    updated = sum(one.distinct[num_ranks] for one in tables) / shards
    # Rows and gradients of every part, and ids with their last parts; sums of every part, and ids. Alone there is nobody to send to.
    exchanges = (len(tables) * (2 * num_parts + 2) * (shards > 1), len(tables) * (num_parts + 1) * (num_groups > 1))
    return Cost(wires.inside.seconds(exchanges[0], sent), wires.between.seconds(exchanges[1], shared), updated * row_s)


def choose_groups(
    num_ranks: int, tables: Sequence[Demand], wires: Mapping[int, Wires], *, num_parts: int, row_s: float
) -> tuple[int, str]:
    """The number of groups with which a step takes least, and why; `wires` has those of every number that may be chosen."""
    costs = {
        number: cost(num_ranks, number, tables, wires[number], num_parts=num_parts, row_s=row_s)
        for number in divisors(num_ranks)
        if number in wires
    }
    best = min(costs)
    for number, one in costs.items():
        if one.total_s < costs[best].total_s * (1 - _MARGIN):
            best = number
    return best, _why(num_ranks, best, costs)


def _why(num_ranks: int, best: int, costs: Mapping[int, Cost]) -> str:
    own = costs[best]
    shape = f"{best} group{'s' * (best > 1)} of {num_ranks // best} rank{'s' * (num_ranks > best)}"
    others = ", ".join(f"{_ms(one.total_s)} with {number}" for number, one in costs.items() if number != best)
    parts = f"{_ms(own.inside_s)} inside groups, {_ms(own.between_s)} between them, {_ms(own.update_s)} to update rows"
    return f"{shape}: {_ms(own.total_s)} a step expected beside compute ({parts})" + (f"; {others}" if others else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
