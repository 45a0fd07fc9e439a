"""Which ids a window needs, told to their owners: counts first, so that everybody knows how much will come, then the ids.

On a busy line each of the two waits behind rows and gradients. So a pipeline that looks ahead announces the counts of a batch
while the ids of the batch before travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.distributed.process_group import Handle
from nestpipe.embedding.chunked_exchange import Chunks, SharedRows
from nestpipe.embedding.prefetch_buffer import RowRefs
from nestpipe.embedding.replica_groups import GroupUnion
from nestpipe.embedding.routing import Counts, OwnerRequests, Plan, TablePlan, own_requests
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.wire_format import NarrowRows, narrow_of
from nestpipe.errors import CommError


@dataclass(slots=True, eq=False)
class RequesterState:
    """An asker's side of one table in a window."""

    plan: TablePlan
    local_rows: list[Tensor]  # [part]: rows [u, D] of its distinct ids; new ones arrive there, the others are copied
    grads: list[Tensor | None]  # [part]: sums [u, D] of the parts up to this one, once it has computed
    narrow: NarrowRows | None = None  # if some rows travel in 16 bits
    shared: SharedRows = field(default_factory=SharedRows)  # of the first leaf, and of the last one
    # Of the first leaf, cold and hot rows as they arrive, and their positions.
    split_rows: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def computed_grads(self, micro_batch: int) -> Tensor:
        """The sums [u, D] of the parts up to this one; raises CommError if it has not computed yet."""
        if (grads := self.grads[micro_batch]) is None:
            raise CommError("gradients were needed before they were computed: a dependency is missing in the schedule.")
        return grads


@dataclass(slots=True, eq=False)
class OwnerState:
    """An owner's side of one table in a window, or of a slice of it."""

    requests: OwnerRequests
    narrow: NarrowRows | None = None  # if some rows travel in 16 bits
    shared: SharedRows = field(default_factory=SharedRows)  # of the ids of all askers
    num_collected: int = 0  # messages of gradients that have come
    row_refs: RowRefs | None = None
    split_updates: dict[bool, tuple[RowRefs, ArrivedGrads]] = field(
        default_factory=dict
    )  # cold and hot rows, and their sums, if split
    chunk_grads: ArrivedGrads | None = None  # of a slice, where they will be
    union: GroupUnion | None = None  # of all groups; then these are the requests that it has
    totals: Tensor | None = None  # [K, D] what they add up to, if somebody asked

    @property
    def retrieved(self) -> RowRefs:
        """Where its rows are, once they are retrieved."""
        if self.row_refs is None:
            raise CommError("rows were asked for before they were retrieved: a dependency is missing in the schedule.")
        return self.row_refs

    @property
    def united(self) -> GroupUnion:
        """The requests of all groups, once they are known."""
        if self.union is None:
            raise CommError("sums of groups before their ids were known: a dependency is missing in the schedule.")
        return self.union

    def check_collected(self, num_messages: int) -> None:
        if self.num_collected < num_messages:
            raise CommError("an update before its gradients were collected: a dependency is missing in the schedule.")


@dataclass(frozen=True, slots=True, eq=False)
class RowMessage:
    """One message of rows of a table, to every asker and from every owner."""

    handle: Handle
    refs: RowRefs  # the rows that travel, asker after asker
    send_buffer: Tensor  # room for them
    sends: list[Tensor]  # to each asker: its part of that
    receive_buffers: list[Tensor]  # for each owner: where its rows belong
    own_refs: RowRefs  # the rows that do not travel, but are copied to where they belong
    packed: list[Tensor] | None = None  # from each owner: bytes, if some rows travel in 16 bits


@dataclass(frozen=True, slots=True, eq=False)
class GradMessage:
    """One message of gradient sums of a table, to every owner and from every asker."""

    handle: Handle
    sent_positions: Tensor | None  # positions in the leaf, owner by owner, of what travels; None for all of it
    own_positions: Tensor | None  # positions of what is copied; None if it is used where it is
    send_counts: list[int]  # to each owner
    send_buffer: Tensor  # for what leaves, if that is not all of the leaf
    received: list[Tensor]  # of each asker


@dataclass(frozen=True, slots=True, eq=False)
class CountExchange:
    """How many ids this rank needs of each owner, on its way to them, and the same of all others."""

    local: dict[str, Counts]  # table by table: [owner][part], or [owner][part and slice]
    buffer: Tensor  # [rank, n]: what each says
    handle: Handle

    def wait(self) -> list[list[int]]:
        """What each rank has said, when it has come."""
        self.handle.wait()
        rows: list[list[int]] = self.buffer.tolist()
        return rows


def start_counts(
    tables: ShardedTables, plan: Plan, chunks: Mapping[str, Chunks], extra: list[int], *, where: str
) -> CountExchange:
    """Tells each owner how many ids it will be asked for, and some numbers beside; every rank must call it."""
    own = {name: chunks[name].first_counts if chunks else one.first_counts for name, one in plan.tables.items()}
    wanted = [[n for counts in own.values() for n in counts[rank]] + extra for rank in range(tables.world_size)]
    sends = torch.tensor(wanted, dtype=torch.int64, device=tables.id_channel.world.device)
    buffers = torch.empty_like(sends)
    return CountExchange(
        own, buffers, tables.id_channel.exchange("counts", sends.unbind(), buffers.unbind(), where=where)
    )


@dataclass(slots=True, eq=False)
class IdExchange:
    """Ids on their way to their owners."""

    tables: ShardedTables
    plan: Plan
    narrow: dict[str, NarrowRows]
    remote_narrow: dict[str, NarrowRows] = field(default_factory=dict)
    received: dict[str, tuple[Tensor, Tensor, Counts]] = field(
        default_factory=dict
    )  # ids, their last parts, and counts
    handles: list[Handle] = field(default_factory=list)

    @staticmethod
    def start(
        tables: ShardedTables, plan: Plan, own_counts: Mapping[str, Counts], flags: list[list[int]], *, where: str
    ) -> IdExchange:
        """Sends each owner the ids that this rank needs of it, when it is known how many all will send."""
        asking, begin = IdExchange(tables, plan, narrow_of(plan)), 0
        for name in plan.tables:
            end = begin + len(own_counts[name][0])
            asking._launch(name, [row[begin:end] for row in flags], where)
            begin = end
        return asking

    def _launch(self, name: str, counts: Counts, where: str) -> None:
        channel, own, sizes = self.tables.id_channel, self.plan.tables[name], [sum(row) for row in counts]
        ids, last_micro_batch = torch.empty(sum(sizes), dtype=torch.int64), torch.empty(sum(sizes), dtype=torch.uint8)
        self.received[name] = (ids, last_micro_batch, counts)
        self.handles += [
            channel.exchange(f"ids/{name}", own.ids.split(own.counts), ids.split(sizes), where=where),
            channel.exchange(
                f"last uses/{name}", own.last_use.split(own.counts), last_micro_batch.split(sizes), where=where
            ),
        ]
        if name in self.narrow:
            mask, num = torch.empty(sum(sizes), dtype=torch.uint8), len(counts[0]) // self.plan.num_micro_batches
            by_micro_batch = [[sum(row[place : place + num]) for place in range(0, len(row), num)] for row in counts]
            self.remote_narrow[name] = NarrowRows(self.narrow[name].wire, mask.view(torch.bool), by_micro_batch)
            sends = self.narrow[name].mask.view(torch.uint8).split(own.counts)
            self.handles.append(channel.exchange(f"narrow/{name}", sends, mask.split(sizes), where=where))

    def finish(self) -> tuple[dict[str, RequesterState], dict[str, list[OwnerState]]]:
        """What a rank asks for and, slice by slice, what it is asked for, when all ids have come."""
        for handle in self.handles:
            handle.wait()
        requester, owner, micro_batches = {}, {}, self.plan.num_micro_batches
        for name, requests in self.received.items():
            table, own = self.tables.tables[name], self.plan.tables[name]
            local_rows = [table.empty_rows(own.num_local(micro_batch)) for micro_batch in range(micro_batches)]
            requester[name] = RequesterState(own, local_rows, [None] * micro_batches, self.narrow.get(name))
            owner[name] = [
                OwnerState(own_requests(*some), self.remote_narrow.get(name))
                for some in _by_chunk(*requests, micro_batches)
            ]
        return requester, owner


def _by_chunk(
    ids: Tensor, last_micro_batch: Tensor, counts: Counts, micro_batches: int
) -> Iterator[tuple[Tensor, Tensor, Counts]]:
    """The requests of all askers, slice by slice; counts are [asker][part and slice]."""
    num = len(counts[0]) // micro_batches
    if num == 1:
        yield ids, last_micro_batch, counts
        return
    sizes = [n for row in counts for n in row]
    pieces, lasts = ids.split(sizes), last_micro_batch.split(sizes)
    for own in (slice(number, None, num) for number in range(num)):
        yield torch.cat(pieces[own]), torch.cat(lasts[own]), [row[own] for row in counts]
