"""The sharded lookup of one batch: requests to owners, rows to requesters, gradient sums to owners, row updates.

    requester                                     owner
    plan ── counts, weight, flags, ids ─────────▶ union of all requested ids; rows taken     exchange_ids, retrieve
    rows of first use ◀────────────────────────── gathered from table or prefetch buffer     launch_rows, local_rows
    gradient sums of last use ──────────────────▶ added in (micro-batch, rank) order         add_grads, launch_grads, collect
                                                  sums of replica groups are exchanged       merge (replica_groups.py)
                                                  one optimizer step per row                 update, release

Invariants:

- One sum tree for every schedule: occurrences of an id inside a micro-batch (backward),
  micro-batches in order (requester), arrivals in (micro-batch of last use, requesting rank) order
  (owner), groups in group order. There are no atomics, and the order of arrival never matters.
- Each method of `Window` is a stage: called once, or once per micro-batch, by any thread, after the
  stages it depends on.
- One thread launches rows and gradients; whichever thread needs them waits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.embedding import chunked_exchange
from nestpipe.embedding.config import Chunking
from nestpipe.embedding.id_exchange import (
    CountExchange,
    GradMessage,
    IdExchange,
    Message,
    OwnerState,
    RequesterState,
    RowMessage,
    start_counts,
)
from nestpipe.embedding.prefetch_buffer import RowRefs
from nestpipe.embedding.replica_groups import Replicas
from nestpipe.embedding.routing import Plan
from nestpipe.embedding.row_ops import ArrivedGrads, add_from, copy_from, gather_rows, largest, scatter_rows
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.stale_rows import StaleRows
from nestpipe.ops.device_memory import upload, used_here


@dataclass(slots=True, eq=False)
class Window:
    """The rows of one batch, frozen until every micro-batch has contributed its gradients.

    With `chunks` the first rows and the last gradients are sent in several messages (chunked_exchange.py).
    """

    tables: ShardedTables
    plan: Plan
    number: int  # of the batch, from the start of training
    weight: float  # of this rank; of all ranks after exchange_ids
    stop_requested: bool = False  # by this rank; by any rank after exchange_ids
    chunks: Chunking = 1
    counts: CountExchange | None = None
    largest: dict[str, float | Tensor] = field(default_factory=dict)  # per table: the largest |gradient| sent
    requester: dict[str, RequesterState] = field(default_factory=dict)
    owner: dict[str, OwnerState] = field(default_factory=dict)
    row_messages: dict[Message, dict[str, RowMessage]] = field(default_factory=dict)  # per message and table
    grad_messages: dict[Message, dict[str, GradMessage]] = field(default_factory=dict)

    def start_counts(self, *, where: str = "") -> CountExchange:
        """Sends request counts to the owners, and weight and stop flag to all ranks. Collective."""
        flags = [*struct.unpack("<q", struct.pack("<d", self.weight)), int(self.stop_requested)]
        return start_counts(self.tables, self.plan, flags, where=where)

    def exchange_ids(self, previous: Window | None = None, following: Window | None = None, *, where: str = "") -> None:
        """Sends ids to their owners; agrees on the global weight and on whether to stop. Collective.

        The counts of `following`, if given (on every rank or on none), are sent while the ids are in flight, unless this
        batch is the last. A window with shared chunks then exchanges which rows it shares with `previous`.
        """
        counts = self.counts or self.start_counts(where=where)
        received = counts.wait()
        flags = [row[-2:] for row in received]
        exchange = IdExchange.start(self.tables, self.plan, received, where=where)
        if following is not None and not any(stop for _, stop in flags):
            following.counts = following.start_counts(where=f"the one after {where}")
        self.requester, self.owner = exchange.finish()
        if self.tables.replicas:
            flags = self._unite_groups(self.tables.replicas, flags, where)
        self.weight = sum(struct.unpack("<d", struct.pack("<q", weight))[0] for weight, _ in flags)  # in rank order
        self.stop_requested = any(stop for _, stop in flags)
        if self.num_chunks > 1:
            chunked_exchange.number_rows(self)
        if self.chunks == "shared" and previous is not None:
            chunked_exchange.exchange_shared(self, previous, where)

    def _unite_groups(self, replicas: Replicas, flags: list[list[int]], where: str) -> list[list[int]]:
        """Replaces the requested ids by the union over all groups; returns the flags of all ranks, in rank order."""
        requests = {name: owner.requests for name, owner in self.owner.items()}
        unions, flags = replicas.unite(requests, [one for row in flags for one in row], where=where)
        for name, union in unions.items():
            self.owner[name].requests, self.owner[name].union = union.requests, union
        return [row[place : place + 2] for row in flags for place in range(0, len(row), 2)]

    def retrieve(self) -> None:
        """Admits ids and takes their rows. Once per batch, in the order of batches."""
        for name, owner in self.owner.items():
            owner.row_refs = self.tables.row_access[name].take(owner.requests.ids, self.number)

    def post_receives(self, *, where: str = "") -> None:
        """Posts the receives of all row and gradient messages, so that no sender waits for its peer; locates what is sent."""
        last = self.plan.num_micro_batches - 1
        for micro_batch in range(self.plan.num_micro_batches):
            for name in self.requester:
                place = f"{where}, micro-batch {micro_batch}"
                if micro_batch == 0 and self.num_chunks > 1:
                    chunked_exchange.post_first_rows(self, name, place)
                else:
                    self._post_whole_rows(name, micro_batch, place)
                if micro_batch == last and self.num_chunks > 1:
                    chunked_exchange.post_last_grads(self, name, place)
                else:
                    self._post_whole_grads(name, micro_batch, place)

    def _post_whole_rows(self, name: str, micro_batch: int, where: str) -> None:
        requester, owner = self.requester[name], self.owner[name]
        buffer = [requester.local_rows[micro_batch][fresh] for fresh in requester.plan.fresh(micro_batch)]
        packed = None if requester.narrow is None else requester.narrow.buffers(micro_batch, buffer)
        places = owner.requests.rows_for(micro_batch)
        self.post_rows(name, (micro_batch, 0), owner.retrieved, places, buffer, packed, where=where)

    def _post_whole_grads(self, name: str, micro_batch: int, where: str) -> None:
        plan, is_last = self.requester[name].plan, micro_batch == self.plan.num_micro_batches - 1
        counts = self.owner[name].requests.arrival_counts[micro_batch]
        send_counts = [own[micro_batch] for own in plan.last_counts]
        # No id is used after the last micro-batch, so all of its sums are sent: positions None.
        ending = None if is_last else plan.ending[micro_batch]
        self.post_grads(name, (micro_batch, 0), ending, send_counts, counts, where=where)

    def post_rows(
        self,
        name: str,
        message: Message,
        refs: RowRefs,
        places: list[Tensor],
        buffers: list[Tensor],
        packed: list[Tensor] | None,
        *,
        where: str,
    ) -> None:
        """Posts a receive of rows into `buffers[owner]`; sends `refs` at `places[requester]`. Own rows are copied."""
        rank = self.tables.rank
        handle = self.tables.row_channel.post(f"rows/{name}", packed or buffers, where=where, own=False)
        own, places[rank] = refs.at(places[rank]), places[rank][:0]
        sent = refs.at(torch.cat(places))
        send_buffer = self.tables.tables[name].message_rows(len(sent.ids))
        sends = list(send_buffer.split([len(one) for one in places]))
        sends[rank] = buffers[rank]
        self.row_messages.setdefault(message, {})[name] = RowMessage(
            handle, sent, send_buffer, sends, buffers, own, packed
        )

    def post_grads(
        self,
        name: str,
        message: Message,
        positions: Tensor | None,
        send_counts: list[int],
        receive_counts: list[int],
        *,
        where: str,
    ) -> None:
        """Posts a receive of gradient sums; sends those at `positions`, by owner. None: all of them, without a copy.

        Own sums are not sent: they are copied, or used in place if all are sent.
        """
        rank = self.tables.rank
        own: Tensor | None = None
        if positions is not None:
            by_owner = list(positions.split(send_counts))
            own, by_owner[rank] = by_owner[rank], by_owner[rank][:0]
            positions, send_counts = torch.cat(by_owner), [len(one) for one in by_owner]
        else:
            receive_counts = [0 if peer == rank else count for peer, count in enumerate(receive_counts)]
        table = self.tables.tables[name]
        received = list(table.message_rows(sum(receive_counts)).split(receive_counts))
        handle = self.tables.row_channel.post(f"gradients/{name}", received, where=where, own=False)
        send_buffer = table.message_rows(0 if positions is None else len(positions))
        self.grad_messages.setdefault(message, {})[name] = GradMessage(
            handle, positions, own, send_counts, send_buffer, received
        )

    def launch_rows(self, micro_batch: int, chunk: int = 0) -> None:
        """Sends the rows that requesters use first in this micro-batch, or a chunk of them."""
        rank = self.tables.rank
        for name, message in self.row_messages[micro_batch, chunk].items():
            access, sends = self.tables.row_access[name], message.sends
            narrow = self.owner[name].narrow if message.packed is not None else None
            access.gather(message.refs, message.send_buffer)
            if narrow is not None:
                sends = [
                    rows if peer == rank else narrow.pack(rows, peer, micro_batch) for peer, rows in enumerate(sends)
                ]
            message.handle.launch(sends, num_rows=len(message.refs.ids) + len(message.own_refs.ids))
            # After the launch: no other rank waits for the rows that stay here.
            access.gather(message.own_refs, message.receive_buffers[rank])
            if narrow is not None:
                narrow.round_(message.receive_buffers[rank], rank, micro_batch)

    def local_rows(self, micro_batch: int) -> dict[str, Tensor]:
        """Rows [u, D] of the micro-batch's distinct ids as autograd leaves, per table. Blocks until they have arrived."""
        for requester in self.requester.values():  # rows of earlier micro-batches need no message
            used_here(*requester.local_rows)
            copy_from(
                requester.local_rows[micro_batch],
                requester.plan.repeated[micro_batch],
                requester.plan.source[micro_batch],
                requester.local_rows,
            )
        self.wait_rows(micro_batch)
        return {
            name: requester.local_rows[micro_batch].detach().requires_grad_()
            for name, requester in self.requester.items()
        }

    def wait_rows(self, micro_batch: int) -> None:
        """Blocks until the micro-batch's rows have arrived, and scatters them to their positions. Idempotent."""
        # Unshared rows, in chunk 1, arrived long ago: scatter them while shared ones are in flight.
        for chunk in reversed(range(self.num_chunks)):
            for name, message in self.row_messages.get((micro_batch, chunk), {}).items():
                requester = self.requester[name]
                message.handle.wait_arrived()
                if requester.narrow is not None and message.packed is not None:
                    for owner, (data, buffer) in enumerate(zip(message.packed, message.receive_buffers, strict=True)):
                        if owner != self.tables.rank:
                            requester.narrow.unpack(data, owner, micro_batch, buffer)
                if micro_batch == 0 and (received := requester.scattered.pop(chunk, None)):
                    rows, positions = received
                    scatter_rows(requester.local_rows[micro_batch], positions, rows)

    def add_grads(self, micro_batch: int, local_rows: Mapping[str, Tensor]) -> None:
        """Adds the sums of earlier micro-batches to this one's gradients, for the ids that they share."""
        for name, requester in self.requester.items():
            grad = local_rows[name].grad
            own = torch.zeros_like(requester.local_rows[micro_batch]) if grad is None else grad.contiguous()
            before = [requester.computed_grads(earlier) for earlier in range(micro_batch)]
            add_from(own, requester.plan.repeated[micro_batch], requester.plan.source[micro_batch], before)
            requester.grads[micro_batch] = own

    def launch_grads(self, micro_batch: int, chunk: int = 0) -> None:
        """Sends the gradient sums of ids last used in this micro-batch, or a chunk of them, to their owners."""
        is_last = micro_batch == self.plan.num_micro_batches - 1
        for name, message in self.grad_messages[micro_batch, chunk].items():
            sums, own = self.requester[name].computed_grads(micro_batch), message.received[self.tables.rank]
            used_here(sums, own)
            sent = (
                sums
                if message.sent_positions is None
                else gather_rows(sums, message.sent_positions, message.send_buffer)
            )
            sends = list(sent.split(message.send_counts))
            if message.own_positions is None:
                message.received[self.tables.rank] = sends[self.tables.rank]
            else:
                sends[self.tables.rank] = own
            message.handle.launch(sends)
            if message.own_positions is not None:
                gather_rows(sums, message.own_positions, own)  # no other rank waits for these
            # The non-finite flag is sent with chunk 0 of the last micro-batch, so that chunk checks the sums of all chunks.
            for values in () if chunk else (sums,) if is_last else (sent, own):
                self.largest[name] = larger(self.largest.get(name, 0.0), values)

    def collect(self, micro_batch: int, chunk: int = 0) -> None:
        """Blocks until the gradient sums of a micro-batch, or of a chunk of it, have arrived at this owner."""
        for name, message in self.grad_messages[micro_batch, chunk].items():
            message.handle.wait_arrived()
            self.owner[name].collected.add((micro_batch, chunk))

    def merge(self, micro_batch: int, chunk: int = 0, *, where: str = "") -> None:
        """Exchanges, between replicas, the group sums that are complete with this micro-batch, or with a chunk of it."""
        if (replicas := self.tables.replicas) is None:
            return
        handles = []
        for name, owner in self.owner.items():
            owner.check_collected(micro_batch, chunk, "group sums merged")
            arrived = self.arrivals(name, micro_batch)
            handles.append(owner.united.launch(replicas, f"sums/{name}", micro_batch + chunk, arrived, where=where))
        for handle in handles:
            handle.wait()

    def owned_grads(self) -> dict[str, Tensor]:
        """Complete gradient sums [K, D] of the owned rows, by ascending id, per table. Only after all are collected."""
        if self.num_chunks > 1:
            raise ValueError("a window with chunks has no complete sums: its chunks are updated one after the other.")
        totals = {}
        for name, owner in self.owner.items():
            self._check_summed(owner, 0)
            grads = self._sums(name)
            owner.totals = totals[name] = grads.total() if isinstance(grads, ArrivedGrads) else grads
            rowless = upload(owner.retrieved.rowless, owner.totals.device)
            owner.totals.index_fill_(0, rowless, 0.0)  # dropped: they must not count in a norm
        return totals

    def keep_previous(self) -> None:
        """Keeps the rows as they are before the update: the next batch reads them, even after a barrier."""
        for name, owner in self.owner.items():
            access = self.tables.row_access[name]
            if isinstance(access, StaleRows):
                access.keep_previous(owner.retrieved)

    def update(self, lr: float, chunk: int = 0) -> None:
        """One optimizer step for each owned row of the window, or of a chunk of it."""
        for name, owner in self.owner.items():
            self._check_summed(owner, chunk)
            refs, grads = owner.updates[chunk] if self.num_chunks > 1 else (owner.retrieved, self._sums(name))
            self.tables.row_access[name].update(refs, grads, lr)

    def _sums(self, name: str) -> Tensor | ArrivedGrads:
        """The gradients of the owned rows, added in (micro-batch, rank) order."""
        owner = self.owner[name]
        if owner.totals is not None:
            used_here(owner.totals)
            return owner.totals
        if owner.union is not None:
            return owner.union.grads(self.arrivals(name)[0])
        return ArrivedGrads(self.arrivals(name), owner.requests.starts, owner.requests.arrivals)

    def _check_summed(self, owner: OwnerState, chunk: int) -> None:
        last = self.plan.num_micro_batches - 1
        owner.check_collected(last, chunk, "rows updated")
        if owner.union is not None:
            owner.union.check_merged(last, chunk)

    def arrivals(self, name: str, last: int | None = None) -> list[Tensor]:
        """Received gradient sums, message after message, up to a micro-batch."""
        return [
            one
            for message in sorted(self.grad_messages)
            if last is None or message[0] <= last
            for one in self.grad_messages[message][name].received
        ]

    def release(self) -> None:
        """Blocks until everything is sent, and releases the rows."""
        rows = [message.handle for messages in self.row_messages.values() for message in messages.values()]
        grads = [message.handle for messages in self.grad_messages.values() for message in messages.values()]
        for handle in rows + grads:
            handle.wait()
        for name, owner in self.owner.items():
            self.tables.row_access[name].release(owner.retrieved)

    @property
    def num_chunks(self) -> int:
        """Chunks in which the first rows and the last gradients are sent."""
        return 2 if self.chunks == "shared" else self.chunks


def larger(so_far: float | Tensor, values: Tensor) -> float | Tensor:
    """The larger of a number and the largest |value|; nan if there is one. On a device, so that nobody waits for it."""
    if values.device.type != "cpu":
        if not values.numel():
            return so_far
        most = values.detach().abs().amax()
        return torch.maximum(so_far, most) if isinstance(so_far, Tensor) else most
    if isinstance(so_far, Tensor):
        raise TypeError("rows of a table are on a device and on the host")
    own = largest(values)
    return so_far if own <= so_far or math.isnan(so_far) else own
