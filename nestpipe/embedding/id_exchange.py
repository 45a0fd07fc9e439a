"""All-to-all of ids: which rows each rank requests from each owner.

    requester                             owner
    counts per (owner, micro-batch)   ──▶ request sizes                 start_counts() -> CountExchange.wait()
    ids, micro-batch of last use      ──▶ requests of all ranks         IdExchange.start() -> finish()

Sizes must be known before ids can be received, so there are two exchanges. With look-ahead, the
counts of batch t+1 are sent while the ids of batch t are in flight: on a saturated link each
exchange queues behind rows and gradients.

`RequesterState` and `OwnerState` are the two sides of one table in a window; `RowMessage` and
`GradMessage` are its messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.distributed.process_group import Handle
from nestpipe.embedding.chunked_exchange import RowChunks
from nestpipe.embedding.prefetch_buffer import RowRefs
from nestpipe.embedding.replica_groups import GroupUnion
from nestpipe.embedding.routing import Counts, OwnerRequests, Plan, TablePlan, own_requests
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.wire_format import NarrowRows, narrow_of
from nestpipe.errors import CommError

Message = tuple[int, int]  # (micro-batch, chunk)


@dataclass(slots=True, eq=False)
class RequesterState:
    """The requester side of one table in a window."""

    plan: TablePlan
    local_rows: list[Tensor]  # [micro-batch]: rows [u, D] of its distinct ids; fresh ones are received in place
    grads: list[Tensor | None]  # [micro-batch]: gradient sums [u, D] up to this one; None before its backward
    narrow: NarrowRows | None = None  # if some rows are sent in 16 bits
    chunks: RowChunks | None = None
    # chunk -> received rows of the first micro-batch and their positions, unless received in place
    scattered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def chunked(self) -> RowChunks:
        """The chunks of its rows. Raises CommError before they are known."""
        return _known(self.chunks)

    def computed_grads(self, micro_batch: int) -> Tensor:
        """Gradient sums [u, D] up to this micro-batch. Raises CommError before its backward."""
        if (grads := self.grads[micro_batch]) is None:
            raise CommError("gradients used before they were computed: the schedule lacks a dependency.")
        return grads


@dataclass(slots=True, eq=False)
class OwnerState:
    """The owner side of one table in a window."""

    requests: OwnerRequests
    narrow: NarrowRows | None = None  # if some rows are sent in 16 bits
    chunks: RowChunks | None = None
    collected: set[Message] = field(default_factory=set)  # gradient messages received
    row_refs: RowRefs | None = None
    # chunk -> its rows and their gradients, located before they arrive
    updates: dict[int, tuple[RowRefs, ArrivedGrads]] = field(default_factory=dict)
    union: GroupUnion | None = None  # of all replica groups; `requests` are then those of the union
    totals: Tensor | None = None  # [K, D] complete gradients, if a norm needs them

    @property
    def chunked(self) -> RowChunks:
        """The chunks of its ids. Raises CommError before they are known."""
        return _known(self.chunks)

    @property
    def retrieved(self) -> RowRefs:
        """The rows. Raises CommError before `Window.retrieve`."""
        if self.row_refs is None:
            raise CommError("rows used before they were retrieved: the schedule lacks a dependency.")
        return self.row_refs

    @property
    def united(self) -> GroupUnion:
        """The requests of all replica groups. Raises CommError before they are known."""
        if self.union is None:
            raise CommError("group sums used before the ids of all groups were known: the schedule lacks a dependency.")
        return self.union

    def check_collected(self, micro_batch: int, chunk: int, what: str) -> None:
        """Raises CommError unless all messages up to this micro-batch, of which only a chunk, have arrived."""
        if not self.collected.issuperset([*((earlier, 0) for earlier in range(micro_batch)), (micro_batch, chunk)]):
            raise CommError(f"{what} before their gradients were collected: the schedule lacks a dependency.")


def _known(chunks: RowChunks | None) -> RowChunks:
    if chunks is None:
        raise CommError("rows divided into chunks before their ids were known: the schedule lacks a dependency.")
    return chunks


@dataclass(frozen=True, slots=True, eq=False)
class RowMessage:
    """One all-to-all of rows of a table, from owners to requesters."""

    handle: Handle
    refs: RowRefs  # rows sent, requester after requester
    send_buffer: Tensor  # for all of them
    sends: list[Tensor]  # per requester: its view of the send buffer
    receive_buffers: list[Tensor]  # per owner: a view of local_rows
    own_refs: RowRefs  # rows that are copied here instead of sent
    packed: list[Tensor] | None = None  # per owner: bytes to receive, if some rows are sent in 16 bits


@dataclass(frozen=True, slots=True, eq=False)
class GradMessage:
    """One all-to-all of gradient sums of a table, from requesters to owners."""

    handle: Handle
    sent_positions: Tensor | None  # positions in local_rows, owner by owner, of the sums sent; None: all
    own_positions: Tensor | None  # positions of the sums copied here; None: used in place
    send_counts: list[int]  # per owner
    send_buffer: Tensor  # empty if all sums are sent
    received: list[Tensor]  # per requester


@dataclass(frozen=True, slots=True, eq=False)
class CountExchange:
    """Request counts of every rank, in flight."""

    buffer: Tensor  # [rank, n], valid after wait()
    handle: Handle

    def wait(self) -> list[list[int]]:
        """Blocks until the counts of every rank have arrived; returns one row per rank."""
        self.handle.wait()
        rows: list[list[int]] = self.buffer.tolist()
        return rows


def start_counts(tables: ShardedTables, plan: Plan, extra: list[int], *, where: str) -> CountExchange:
    """Sends request counts, and `extra` integers, to all owners. Collective."""
    rows = [
        [n for own in plan.tables.values() for n in own.first_counts[owner]] + extra
        for owner in range(tables.world_size)
    ]
    sends = torch.tensor(rows, dtype=torch.int64, device=tables.id_channel.device)
    buffer = torch.empty_like(sends)
    handle = tables.id_channel.exchange("counts", sends.unbind(), buffer.unbind(), where=where)
    return CountExchange(buffer, handle)


@dataclass(slots=True, eq=False)
class IdExchange:
    """Ids in flight to their owners."""

    tables: ShardedTables
    plan: Plan
    narrow: dict[str, NarrowRows]
    remote_narrow: dict[str, NarrowRows] = field(default_factory=dict)
    received: dict[str, tuple[Tensor, Tensor, Counts]] = field(default_factory=dict)  # ids, last uses, counts
    handles: list[Handle] = field(default_factory=list)

    @staticmethod
    def start(tables: ShardedTables, plan: Plan, received: list[list[int]], *, where: str) -> IdExchange:
        """Sends ids to their owners. `received` are the counts of all ranks."""
        exchange, size = IdExchange(tables, plan, narrow_of(plan)), plan.num_micro_batches
        for number, name in enumerate(plan.tables):
            exchange._launch(name, [row[number * size : (number + 1) * size] for row in received], where)
        return exchange

    def _launch(self, name: str, counts: Counts, where: str) -> None:
        channel, own, sizes = self.tables.id_channel, self.plan.tables[name], [sum(row) for row in counts]
        ids, last_use = torch.empty(sum(sizes), dtype=torch.int64), torch.empty(sum(sizes), dtype=torch.uint8)
        self.received[name] = (ids, last_use, counts)
        self.handles += [
            channel.exchange(f"ids/{name}", own.ids.split(own.counts), ids.split(sizes), where=where),
            channel.exchange(f"last uses/{name}", own.last_use.split(own.counts), last_use.split(sizes), where=where),
        ]
        if name in self.narrow:
            mask = torch.empty(sum(sizes), dtype=torch.uint8)
            self.remote_narrow[name] = NarrowRows(self.narrow[name].wire, mask.view(torch.bool), counts)
            sends = self.narrow[name].mask.view(torch.uint8).split(own.counts)
            self.handles.append(channel.exchange(f"narrow/{name}", sends, mask.split(sizes), where=where))

    def finish(self) -> tuple[dict[str, RequesterState], dict[str, OwnerState]]:
        """Blocks until all ids have arrived; returns both sides of each table."""
        for handle in self.handles:
            handle.wait()
        requester, owner, micro_batches = {}, {}, self.plan.num_micro_batches
        for name, requests in self.received.items():
            table, own = self.tables.tables[name], self.plan.tables[name]
            local_rows = [table.message_rows(own.num_local(micro_batch)) for micro_batch in range(micro_batches)]
            requester[name] = RequesterState(own, local_rows, [None] * micro_batches, self.narrow.get(name))
            owner[name] = OwnerState(own_requests(*requests), self.remote_narrow.get(name))
        return requester, owner
