"""Replica groups: ranks as a grid [groups, shards]. Every group holds all tables, sharded over its own ranks.

    rank            shard 0   shard 1   shard 2   shard 3
    group 0            0         1         2         3        rows and gradients stay inside a group,
    group 1            4         5         6         7        gradient sums are exchanged between *replicas*: 1 and 5

Replicas hold the same rows with the same optimizer state, bitwise, after every step, because each
of them does the same:

1. The ids of a shard are the union over all groups. After the id exchange of its group, each
   replica sends the ids requested from it to the others, so all of them admit, evict, take and
   write back the same rows.
2. An owner adds the gradients of its own group in (micro-batch, rank) order, as without groups.
   Replicas exchange these sums with the micro-batch that completes them, those of the last one in
   chunks if the window has any; each adds them in group order and makes one optimizer step.

Replicas know each other's ids, so only sums are sent. Weight, stop flag and non-finite flags are
those of all ranks.
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
    """The ranks of a world in groups of consecutive ranks."""

    num_ranks: int
    num_groups: int

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_ranks % self.num_groups:
            raise ConfigError(
                f"{self.num_ranks} ranks do not make {self.num_groups} groups of equal size; set --pipeline.groups to "
                f"one of {', '.join(map(str, divisors(self.num_ranks)))}, or to 0 for an automatic choice."
            )

    @property
    def num_shards(self) -> int:
        return self.num_ranks // self.num_groups

    def group_of(self, rank: int) -> range:
        """The ranks over which this one's tables are sharded."""
        first = rank - rank % self.num_shards
        return range(first, first + self.num_shards)

    def replicas_of(self, rank: int) -> range:
        """The ranks that hold the same rows as this one."""
        return range(rank % self.num_shards, self.num_ranks, self.num_shards)


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """The ranks that hold the same rows, one per group, as one of them sees it."""

    keys: Channel  # of replicas, for the thread that exchanges ids
    sums: Channel  # of replicas, for the thread that merges
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
        """The requests of all groups to this shard, per table, and the flags of each group. Collective over replicas."""
        lists = {name: _by_last_micro_batch(requests) for name, requests in requests_of.items()}
        sizes = [n for _, counts in lists.values() for n in counts]
        received = self.keys.all_gather_ints([*sizes, *flags], name="sizes of groups")
        handles, lists_of_all = [], {}
        for number, (name, (order, own)) in enumerate(lists.items()):
            counts = [row[number * len(own) : (number + 1) * len(own)] for row in received]
            buffer = torch.empty(sum(map(sum, counts)), dtype=torch.int64)
            ids = requests_of[name].ids.index_select(0, order)
            buffers = list(buffer.split([sum(row) for row in counts]))
            handles.append(self.keys.exchange(f"ids of groups/{name}", [ids] * self.num_groups, buffers, where=where))
            lists_of_all[name] = (buffer, counts, order)
        for handle in handles:
            handle.wait()
        unions = {name: GroupUnion.of(requests_of[name], *one, group=self.group) for name, one in lists_of_all.items()}
        return unions, [row[len(sizes) :] for row in received]


@dataclass(slots=True, eq=False)
class GroupUnion:
    """The union of all groups' requests for one table of a shard.

    A group lists its ids by (micro-batch that completes the sum, chunk in the last micro-batch, id). A message is a
    micro-batch, or a chunk of the last one.
    """

    group: int  # the own one
    requests: OwnerRequests  # of the own group: places in the union, sums in the order of the group's list
    counts: Counts  # [group][message]: sums that the message completes
    places: Tensor  # [n] place in the union of each listed id, list after list, as the groups sent them
    starts: Tensor  # [K + 1]: where each id starts in `order`
    order: Tensor  # numbers of the groups' sums, list after list, in the order in which they are added
    buffers: list[Tensor] = field(default_factory=list)  # per group: its sums [n, D] in the order of its list
    merged: set[int] = field(default_factory=set)  # messages that were launched

    @staticmethod
    def of(own: OwnerRequests, ids: Tensor, counts: Counts, order: Tensor, *, group: int) -> GroupUnion:
        """From the id lists of all groups, back to back, and the order of the own requests' ids in the own list."""
        sizes = [sum(row) for row in counts]
        # Each group acts as a requester with one micro-batch, so the arrivals of an id are in group order.
        union = own_requests(ids, torch.zeros(len(ids), dtype=torch.uint8), [[size] for size in sizes])
        place = torch.empty_like(order).index_copy_(0, order, union.places.split(sizes)[group])
        starts, arrivals = _in_order(own.starts, own.arrivals, order)
        requests = replace(
            own, ids=union.ids, places=place.index_select(0, own.places), starts=starts, arrivals=arrivals
        )
        return GroupUnion(group, requests, counts, union.places, union.starts, union.arrivals)

    def divide(self, chunk_of: Tensor, num_chunks: int, arrivals: Tensor) -> None:
        """Divides the last message by the chunk of each id of the union, alike on all replicas.

        `arrivals`: the same as before, numbered as they arrive in chunks.
        """
        num, sizes = len(self.counts[0]), [sum(row) for row in self.counts]
        number = torch.arange(len(sizes) * num).repeat_interleave(torch.tensor(self.counts).flatten())
        chunk = chunk_of.index_select(0, self.places).to(torch.int64).mul_(number % num == num - 1)
        message = number + number // num * (num_chunks - 1) + chunk
        order, counts = group(message, len(sizes) * (num + num_chunks - 1))
        position = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        self.order, self.counts = position.index_select(0, self.order), counts.reshape(len(sizes), -1).tolist()
        own = order.split(sizes)[self.group] - sum(sizes[: self.group])
        starts, arrivals = _in_order(self.requests.starts, arrivals, own)
        self.requests = replace(self.requests, starts=starts, arrivals=arrivals)

    def grads(self, like: Tensor) -> ArrivedGrads:
        """The gradients of all ids, in group order, where `launch` receives them; rows like these [n, D]."""
        if not self.buffers:
            self.buffers = [like.new_empty(sum(row), *like.shape[1:]) for row in self.counts]
        return ArrivedGrads(self.buffers, self.starts, self.order)

    def launch(self, replicas: Replicas, name: str, message: int, arrived: list[Tensor], *, where: str) -> Handle:
        """Sends the own group's sums that a message completes to all replicas; `arrived`: at least all gradients of these."""
        self.grads(arrived[0])
        begins = [sum(row[:message]) for row in self.counts]
        receives = [
            buffer[begin : begin + row[message]]
            for buffer, begin, row in zip(self.buffers, begins, self.counts, strict=True)
        ]
        begin, own = begins[replicas.group], receives[replicas.group]
        starts = self.requests.starts[begin : begin + len(own) + 1]
        order = self.requests.arrivals[int(starts[0]) : int(starts[-1])]
        ArrivedGrads(arrived, starts - starts[0], order).total(own)
        self.merged.add(message)
        return replicas.sums.post(name, receives, where=where, own=False).launch([own] * replicas.num_groups)

    def check_merged(self, micro_batch: int, chunk: int) -> None:
        """Raises CommError unless the sums of all micro-batches up to this one, of which only a chunk, were launched."""
        if not self.merged.issuperset([*range(micro_batch), micro_batch + chunk]):
            raise CommError("rows updated before the groups' sums were merged: the schedule lacks a dependency.")


def join(world: World, num_groups: int, all_ranks: Channel) -> tuple[Channel, Channel, Replicas]:
    """The id and row channels of this rank's group, and its replicas. Collective."""
    grid = RankGrid(world.size, num_groups)
    own, replicas = grid.group_of(world.rank), grid.replicas_of(world.rank)
    keys, rows = world.channel("keys", ranks=own), world.channel("rows", ranks=own, on="device")
    replica_keys = world.channel("keys of replicas", ranks=replicas)
    sums = world.channel("sums", ranks=replicas, on="device")
    return keys, rows, Replicas(replica_keys, sums, all_ranks)


def _by_last_micro_batch(requests: OwnerRequests) -> tuple[Tensor, list[int]]:
    """Places of the ids by (micro-batch of the last arrival, id), and their number per micro-batch."""
    last = requests.arrivals.index_select(0, requests.starts[1:] - 1)
    ends = torch.tensor([sum(counts) for counts in requests.arrival_counts]).cumsum(0)
    order, counts = group(torch.searchsorted(ends, last, right=True), len(ends))
    return order, counts.tolist()


def _in_order(starts: Tensor, arrivals: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """`starts` and `arrivals` of requests for the ids in another order."""
    sizes = starts.diff().index_select(0, order)
    ordered = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    shift = (starts[:-1].index_select(0, order) - ordered[:-1]).repeat_interleave(sizes)
    return ordered, arrivals.index_select(0, shift + torch.arange(len(arrivals)))
