"""Which ids a window needs, told to their owners: counts first, so that everybody knows how much will come, then the ids.

On a busy line each of the two waits behind rows and gradients. So a pipeline that looks ahead announces the counts of a batch
while the ids of the batch before travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.comm import Handle
from nestpipe.embedding.messages import Asked, Owned
from nestpipe.embedding.route import Counts, Plan, own_requests
from nestpipe.embedding.sharded import Sharded
from nestpipe.embedding.slices import Slices
from nestpipe.embedding.wire import Narrow, narrow_of


@dataclass(frozen=True, slots=True, eq=False)
class Announced:
    """How many ids this rank needs of each owner, on its way to them, and the same of all others."""

    own: dict[str, Counts]  # table by table: [owner][part], or [owner][part and slice]
    rooms: Tensor  # [rank, n]: what each says
    handle: Handle

    def told(self) -> list[list[int]]:
        """What each rank has said, when it has come."""
        self.handle.wait()
        rows: list[list[int]] = self.rooms.tolist()
        return rows


def announce(home: Sharded, plan: Plan, cuts: Mapping[str, Slices], beside: list[int], *, where: str) -> Announced:
    """Tells each owner how many ids it will be asked for, and some numbers beside; every rank must call it."""
    own = {name: cuts[name].first_counts if cuts else one.first_counts for name, one in plan.tables.items()}
    wanted = [[n for counts in own.values() for n in counts[rank]] + beside for rank in range(home.world_size)]
    sends = torch.tensor(wanted, dtype=torch.int64, device=home.keys.world.device)
    rooms = torch.empty_like(sends)
    return Announced(own, rooms, home.keys.exchange("counts", sends.unbind(), rooms.unbind(), where=where))


@dataclass(slots=True, eq=False)
class Asking:
    """Ids on their way to their owners."""

    home: Sharded
    plan: Plan
    narrow: dict[str, Narrow]
    theirs: dict[str, Narrow] = field(default_factory=dict)
    found: dict[str, tuple[Tensor, Tensor, Counts]] = field(default_factory=dict)  # ids, their last parts, and counts
    handles: list[Handle] = field(default_factory=list)

    @staticmethod
    def of(home: Sharded, plan: Plan, own_counts: Mapping[str, Counts], told: list[list[int]], *, where: str) -> Asking:
        """Sends each owner the ids that this rank needs of it, when it is known how many all will send."""
        asking, begin = Asking(home, plan, narrow_of(plan)), 0
        for name in plan.tables:
            end = begin + len(own_counts[name][0])
            asking._launch(name, [row[begin:end] for row in told], where)
            begin = end
        return asking

    def _launch(self, name: str, counts: Counts, where: str) -> None:
        lane, own, sizes = self.home.keys, self.plan.tables[name], [sum(row) for row in counts]
        ids, last_part = torch.empty(sum(sizes), dtype=torch.int64), torch.empty(sum(sizes), dtype=torch.uint8)
        self.found[name] = (ids, last_part, counts)
        self.handles += [
            lane.exchange(f"ids/{name}", own.ids.split(own.counts), ids.split(sizes), where=where),
            lane.exchange(f"last parts/{name}", own.last_part.split(own.counts), last_part.split(sizes), where=where),
        ]
        if name in self.narrow:
            mask, num = torch.empty(sum(sizes), dtype=torch.uint8), len(counts[0]) // self.plan.num_parts
            by_part = [[sum(row[place : place + num]) for place in range(0, len(row), num)] for row in counts]
            self.theirs[name] = Narrow(self.narrow[name].wire, mask.view(torch.bool), by_part)
            sends = self.narrow[name].mask.view(torch.uint8).split(own.counts)
            self.handles.append(lane.exchange(f"narrow/{name}", sends, mask.split(sizes), where=where))

    def answers(self) -> tuple[dict[str, Asked], dict[str, list[Owned]]]:
        """What a rank asks for and, slice by slice, what it is asked for, when all ids have come."""
        for handle in self.handles:
            handle.wait()
        asked, owned, parts = {}, {}, self.plan.num_parts
        for name, requests in self.found.items():
            table, own = self.home.tables[name], self.plan.tables[name]
            leaves = [table.empty_rows(own.leaf_size(part)) for part in range(parts)]
            asked[name] = Asked(own, leaves, [None] * parts, self.narrow.get(name))
            owned[name] = [Owned(own_requests(*some), self.theirs.get(name)) for some in _sliced(*requests, parts)]
        return asked, owned


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
