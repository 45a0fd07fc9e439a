"""Which ids a window needs, told to their owners: counts first, so that everybody knows how much will come, then the ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.messages import Asked, Owned
from nestpipe.embedding.route import Counts, Plan, own_requests
from nestpipe.embedding.sharded import Sharded
from nestpipe.embedding.slices import Slices
from nestpipe.embedding.wire import Narrow, narrow_of


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What a rank knows when all have asked, table by table."""

    asked: dict[str, Asked]
    owned: dict[str, list[Owned]]  # slice by slice
    told: list[list[int]]  # what each rank said beside


def ask_owners(home: Sharded, plan: Plan, cuts: Mapping[str, Slices], beside: list[int], *, where: str) -> Answers:
    """Sends each owner the ids that this rank needs of it, and to all some numbers; every rank must call it."""
    lane, parts = home.keys, plan.num_parts
    own_counts = {name: cuts[name].first_counts if cuts else own.first_counts for name, own in plan.tables.items()}
    wanted = [[n for counts in own_counts.values() for n in counts[rank]] + beside for rank in range(home.world_size)]
    told = lane.exchange_sizes(wanted, name="counts")
    handles, found, begin = [], {}, 0
    narrow, theirs = narrow_of(plan), {}
    for name, own in plan.tables.items():
        end = begin + len(own_counts[name][0])
        counts, begin = [row[begin:end] for row in told], end
        sizes = [sum(row) for row in counts]
        ids, last_part = torch.empty(sum(sizes), dtype=torch.int64), torch.empty(sum(sizes), dtype=torch.uint8)
        found[name] = (ids, last_part, counts)
        handles += [
            lane.exchange(f"ids/{name}", own.ids.split(own.counts), ids.split(sizes), where=where),
            lane.exchange(f"last parts/{name}", own.last_part.split(own.counts), last_part.split(sizes), where=where),
        ]
        if name in narrow:
            mask, num = torch.empty(sum(sizes), dtype=torch.uint8), len(counts[0]) // parts
            by_part = [[sum(row[place : place + num]) for place in range(0, len(row), num)] for row in counts]
            theirs[name] = Narrow(narrow[name].wire, mask.view(torch.bool), by_part)
            sends = narrow[name].mask.view(torch.uint8).split(own.counts)
            handles.append(lane.exchange(f"narrow/{name}", sends, mask.split(sizes), where=where))
    for handle in handles:
        handle.wait()
    asked, owned = {}, {}
    for name, requests in found.items():
        table, own = home.tables[name], plan.tables[name]
        leaves = [table.empty_rows(own.leaf_size(part)) for part in range(parts)]
        asked[name] = Asked(own, leaves, [None] * parts, narrow.get(name))
        owned[name] = [Owned(own_requests(*some), theirs.get(name)) for some in _sliced(*requests, parts)]
    return Answers(asked, owned, [row[-len(beside) :] for row in told])


def _sliced(ids: Tensor, last_part: Tensor, counts: Counts, parts: int) -> Iterator[tuple[Tensor, Tensor, Counts]]:
    """The requests of all askers, slice by slice; counts are [asker][part and slice]."""
    num = len(counts[0]) // parts
    if num == 1:
        yield ids, last_part, counts
        return
    sizes = [n for row in counts for n in row]
    pieces, lasts = ids.split(sizes), last_part.split(sizes)
    for own in (slice(number, None, num) for number in range(num)):
        yield torch.cat(pieces[own]), torch.cat(lasts[own]), [row[own] for row in counts]
