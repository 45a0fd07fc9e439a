"""Groups: ranks as a grid [groups, shards], every group with a copy of all tables, sharded over its own ranks.

    rank            shard 0   shard 1   shard 2   shard 3
    group 0            0         1         2         3        rows and gradients travel inside a group,
    group 1            4         5         6         7        sums of gradients between *replicas*: 1 and 5

Replicas hold the same rows with the same optimizer state, bit for bit, after every step, because each of them does the same:

1. The ids of a shard are the union over all groups. After the ids of a group have come, replicas tell each other what was asked
   of them, so all of them admit, evict, take and write back the same rows.
2. An owner adds what its own group sends, in (part, rank) order, as without groups. Then replicas exchange these sums, which
   come with the part that makes them whole, and each adds them in group order. One optimizer step uses the result.

Replicas know each other's ids, so only sums travel. Weight, wish to stop and flags are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nestpipe.distributed.process_group import Channel, Handle, World
from nestpipe.embedding.routing import Counts, OwnerRequests, own_requests
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.unique_ids import group
from nestpipe.errors import CommError, ConfigError


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks of a world in groups of neighbours."""

    num_ranks: int
    num_groups: int

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_ranks % self.num_groups:
            raise ConfigError(
                f"{self.num_ranks} ranks do not make {self.num_groups} groups of equal size; set --pipeline.groups to "
                f"one of {', '.join(map(str, divisors(self.num_ranks)))}, or to 0, which chooses."
            )

    @property
    def num_shards(self) -> int:
        return self.num_ranks // self.num_groups

    def group_of(self, rank: int) -> range:
        """The ranks that share the tables with this one."""
        first = rank - rank % self.num_shards
        return range(first, first + self.num_shards)

    def replicas_of(self, rank: int) -> range:
        """The ranks that hold the same rows as this one."""
        return range(rank % self.num_shards, self.num_ranks, self.num_shards)


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """The ranks that hold the same rows, one of each group, seen from one of them."""

    keys: Channel  # of replicas, for the thread that asks for rows
    sums: Channel  # of replicas, for a thread of its own
    all_ranks: Channel  # of all ranks, for the thread that sends rows: flags are global

    @property
    def group(self) -> int:
        """The group of this rank."""
        return self.sums.world.rank

    @property
    def num_groups(self) -> int:
        return self.sums.world.size

    def unite(
        self, requests_of: dict[str, OwnerRequests], flags: Sequence[int], *, where: str = ""
    ) -> tuple[dict[str, GroupUnion], list[list[int]]]:
        """What all groups ask of this shard, table by table, and the flags of each, from those of this one's group."""
        lists = {name: _by_last_micro_batch(requests) for name, requests in requests_of.items()}
        sizes = [n for _, counts in lists.values() for n in counts]
        received = self.keys.all_gather_ints([*sizes, *flags], name="sizes of groups")
        handles, found = [], {}
        for number, (name, (order, own)) in enumerate(lists.items()):
            counts = [row[number * len(own) : (number + 1) * len(own)] for row in received]
            buffer = torch.empty(sum(map(sum, counts)), dtype=torch.int64)
            ids = requests_of[name].ids.index_select(0, order)
            buffers = list(buffer.split([sum(row) for row in counts]))
            handles.append(self.keys.exchange(f"ids of groups/{name}", [ids] * self.num_groups, buffers, where=where))
            found[name] = (buffer, counts, order)
        for handle in handles:
            handle.wait()
        unions = {name: GroupUnion.of(requests_of[name], *one, group=self.group) for name, one in found.items()}
        return unions, [row[len(sizes) :] for row in received]


@dataclass(slots=True, eq=False)
class GroupUnion:
    """What the replicas of a shard know of one table in a window. A group's list of ids goes by (part with which its sum is whole, id)."""

    requests: (
        OwnerRequests  # of the own group, places in the union of all groups, sums in the order of the group's list
    )
    counts: Counts  # [group][part]: sums of a group that are whole with the part
    starts: Tensor  # [K + 1] and
    order: Tensor  # how the sums of all groups, list after list, add up to the gradient of each id
    buffers: list[Tensor] = field(default_factory=list)  # of each group: its sums [n, D] in the order of its list
    num_merged: int = 0  # parts whose sums have come from all groups

    @staticmethod
    def of(own: OwnerRequests, ids: Tensor, counts: Counts, order: Tensor, *, group: int) -> GroupUnion:
        """From the lists of all groups, back to back, and the order in which the own one has the ids of the requests."""
        sizes = [sum(row) for row in counts]
        # Groups are askers of one part: their arrivals for an id go by group.
        everyone = own_requests(ids, torch.zeros(len(ids), dtype=torch.uint8), [[size] for size in sizes])
        place = torch.empty_like(order).index_copy_(0, order, everyone.places.split(sizes)[group])
        starts, arrivals = _in_order(own, order)
        requests = replace(
            own, ids=everyone.ids, places=place.index_select(0, own.places), starts=starts, arrivals=arrivals
        )
        return GroupUnion(requests, counts, everyone.starts, everyone.arrivals)

    def launch(self, replicas: Replicas, name: str, micro_batch: int, arrived: list[Tensor], *, where: str) -> Handle:
        """Sends the own group's sums that are whole with a part to all replicas; `arrived` are the rows that came so far."""
        if not self.buffers:
            self.buffers = [arrived[0].new_empty(sum(row), *arrived[0].shape[1:]) for row in self.counts]
        begins = [sum(row[:micro_batch]) for row in self.counts]
        micro_batches = [
            buffer[begin : begin + row[micro_batch]]
            for buffer, begin, row in zip(self.buffers, begins, self.counts, strict=True)
        ]
        begin, own = begins[replicas.group], micro_batches[replicas.group]
        starts = self.requests.starts[begin : begin + len(own) + 1]
        order = self.requests.arrivals[int(starts[0]) : int(starts[-1])]
        ArrivedGrads(arrived, starts - starts[0], order).total(own)
        self.num_merged += 1
        return replicas.sums.post(name, micro_batches, where=where, own=False).launch([own] * replicas.num_groups)

    def sums(self, num_micro_batches: int) -> ArrivedGrads:
        """The gradients of all ids, once all groups' sums are in."""
        if self.num_merged < num_micro_batches:
            raise CommError(
                "an update before groups had exchanged their sums: a dependency is missing in the schedule."
            )
        return ArrivedGrads(self.buffers, self.starts, self.order)


def join(world: World, num_groups: int, all_ranks: Channel) -> tuple[Channel, Channel, Replicas]:
    """The lanes of keys and rows inside this rank's group, and its replicas; a meeting of all ranks."""
    grid = RankGrid(world.size, num_groups)
    own, replicas = grid.group_of(world.rank), grid.replicas_of(world.rank)
    keys, rows = (world.channel(name, ranks=own) for name in ("keys", "rows"))
    replica_keys, sums = (world.channel(name, ranks=replicas) for name in ("keys of replicas", "sums"))
    return keys, rows, Replicas(replica_keys, sums, all_ranks)


def _by_last_micro_batch(requests: OwnerRequests) -> tuple[Tensor, list[int]]:
    """The places of the ids by (part with which the last arrival for each comes, id), and how many each part has."""
    last = requests.arrivals.index_select(0, requests.starts[1:] - 1)
    ends = torch.tensor([sum(counts) for counts in requests.arrival_counts]).cumsum(0)
    order, counts = group(torch.searchsorted(ends, last, right=True), len(ends))
    return order, counts.tolist()


def _in_order(requests: OwnerRequests, order: Tensor) -> tuple[Tensor, Tensor]:
    """`starts` and `arrivals` of requests for the ids in another order."""
    sizes = requests.starts.diff().index_select(0, order)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    shift = (requests.starts[:-1].index_select(0, order) - starts[:-1]).repeat_interleave(sizes)
    return starts, requests.arrivals.index_select(0, shift + torch.arange(len(requests.arrivals)))
