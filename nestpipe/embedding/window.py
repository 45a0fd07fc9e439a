"""Rows on many ranks: what a window asks of the owners, and what it sends back.

    asker                                        owner
    plan ── counts, weight, flags, ids ────────▶ union of all askers' ids; rows taken        ask, retrieve
    rows of a part's first uses ◀─────────────── gathered from where they are held          launch_rows, leaves
    gradient sums of last uses ────────────────▶ added in (part, rank) order                add_grads, launch_grads, collect
                                                 sums of groups are exchanged, if any       merge (groups.py)
                                                 one optimizer step per row                 update, release

One sum tree, whatever the number of parts and ranks that run it: occurrences of an id inside a part (backward), parts in
part order (asker), arrivals in (part of last use, asking rank) order (owner), groups in group order. No atomics, no order of
arrival.

Each method of a `Window` is a stage: called once (or once per part), by any thread, after those it depends on. Rows and
gradients are *launched* by one thread and waited for by whoever needs them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.embedding import chunked_exchange
from nestpipe.embedding.chunked_exchange import Chunks
from nestpipe.embedding.id_exchange import (
    CountExchange,
    GradMessage,
    IdExchange,
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
from nestpipe.errors import CommError

UNSHARED = 1  # of two halves; the hot one is 0
Message = tuple[int, int]  # part, and which half or slice of it


@dataclass(slots=True, eq=False)
class Window:
    """The rows of one batch, frozen until every part has contributed.

    If it is `split`, rows of the first part and gradients of the last one travel in two halves (hot.py), and if it has `cuts` (all
    tables or none) in slices (slices.py).
    """

    tables: ShardedTables
    plan: Plan
    number: int  # of the batch, from the start of training
    weight: float  # this rank's; global once the ids have been asked for
    stop_requested: bool = False  # of this rank; of any rank once the ids have been asked for
    split: bool = False
    chunks: Mapping[str, Chunks] = field(default_factory=dict)
    counts: CountExchange | None = None
    largest: dict[str, float] = field(default_factory=dict)  # the largest |gradient| sent, table by table
    requester: dict[str, RequesterState] = field(default_factory=dict)
    owner_chunks: dict[str, list[OwnerState]] = field(default_factory=dict)  # slice by slice
    row_refs: dict[str, RowRefs] = field(default_factory=dict)  # those of all slices, one after the other
    row_messages: dict[Message, dict[str, RowMessage]] = field(default_factory=dict)  # table by table
    grad_messages: dict[Message, dict[str, GradMessage]] = field(default_factory=dict)

    def start_counts(self, *, where: str = "") -> CountExchange:
        """Tells the owners how many ids the window will ask for, and all ranks its weight and whether to stop."""
        flags = [*struct.unpack("<q", struct.pack("<d", self.weight)), int(self.stop_requested)]
        return start_counts(self.tables, self.plan, self.chunks, flags, where=where)

    def exchange_ids(self, previous: Window | None = None, following: Window | None = None, *, where: str = "") -> None:
        """Tells the owners which ids the window needs; agrees on the global weight and on whether to stop.

        If it is split, the owners tell what it shares with the window before, if there is one. The window after, if it is given (on
        every rank or on none) and there will be one, is announced meanwhile.
        """
        announced = self.counts or self.start_counts(where=where)
        received = announced.wait()
        flags = [row[-2:] for row in received]
        asking = IdExchange.start(self.tables, self.plan, announced.local, received, where=where)
        if following is not None and not any(asks for _, asks in flags):
            following.counts = following.start_counts(where=f"the one after {where}")
        self.requester, self.owner_chunks = asking.finish()
        if self.tables.replicas:
            flags = self._unite_groups(self.tables.replicas, flags, where)
        self.weight = sum(struct.unpack("<d", struct.pack("<q", weight))[0] for weight, _ in flags)  # in rank order
        self.stop_requested = any(asks for _, asks in flags)
        if self.split and previous is not None:
            chunked_exchange.exchange_shared(self, previous, where)

    def _unite_groups(self, replicas: Replicas, flags: list[list[int]], where: str) -> list[list[int]]:
        """The ids become those of all groups; returns what all ranks told, in rank order, from what this one's group did."""
        requester = {name: owner.requests for name, (owner,) in self.owner_chunks.items()}
        unions, flags = replicas.unite(requester, [one for row in flags for one in row], where=where)
        for name, union in unions.items():
            self.owner_chunks[name][0].requests, self.owner_chunks[name][0].union = union.requests, union
        return [row[place : place + 2] for row in flags for place in range(0, len(row), 2)]

    def retrieve(self) -> None:
        """Decides which ids have a row, and takes the rows; once per batch, in order."""
        for name, chunks in self.owner_chunks.items():
            ids = [owner.requests.ids for owner in chunks]
            refs = self.row_refs[name] = self.tables.row_access[name].take(torch.cat(ids), self.number)
            for owner, own in zip(chunks, refs.split([len(one) for one in ids]), strict=True):
                owner.row_refs = own

    def post_receives(self, *, where: str = "") -> None:
        """Opens the receives of all row and gradient messages, so that none of them waits for its peer, and finds what is sent."""
        last = self.plan.num_micro_batches - 1
        for micro_batch in range(self.plan.num_micro_batches):
            for name in self.requester:
                place = f"{where}, part {micro_batch}"
                if micro_batch == 0 and (self.split or self.chunks):
                    (chunked_exchange.post_split_rows if self.split else chunked_exchange.post_chunk_rows)(
                        self, name, place
                    )
                else:
                    self._post_rows(name, micro_batch, place)
                if micro_batch == last and (self.split or self.chunks):
                    (chunked_exchange.post_split_grads if self.split else chunked_exchange.post_chunk_grads)(
                        self, name, place
                    )
                else:
                    self._post_grads(name, micro_batch, place)

    def _post_rows(self, name: str, micro_batch: int, where: str) -> None:
        requester = self.requester[name]
        buffer = [requester.local_rows[micro_batch][fresh] for fresh in requester.plan.fresh(micro_batch)]
        packed = None if requester.narrow is None else requester.narrow.buffers(micro_batch, buffer)
        self.open_rows(
            name, (micro_batch, 0), self._row_refs(name), self._wanted(name, micro_batch), buffer, packed, where=where
        )

    def _wanted(self, name: str, micro_batch: int) -> list[Tensor]:
        """Places among all rows that are held of those that each asker gets with a part."""
        found, begin = [], 0
        for owner in self.owner_chunks[name]:
            found.append([places + begin if begin else places for places in owner.requests.rows_for(micro_batch)])
            begin += len(owner.requests.ids)
        return [torch.cat(own) for own in zip(*found, strict=True)] if len(found) > 1 else found[0]

    def _post_grads(self, name: str, micro_batch: int, where: str) -> None:
        plan, is_last = self.requester[name].plan, micro_batch == self.plan.num_micro_batches - 1
        counts = [
            sum(own)
            for own in zip(*(one.requests.arrival_counts[micro_batch] for one in self.owner_chunks[name]), strict=True)
        ]
        leaving = self.chunks[name].leaving[micro_batch] if self.chunks else plan.ending[micro_batch]
        # All that the last part has goes home with it.
        sent = [own[micro_batch] for own in plan.last_counts]
        self.open_grads(name, (micro_batch, 0), None if is_last else leaving, sent, counts, where=where)

    def open_rows(
        self,
        name: str,
        message: Message,
        refs: RowRefs,
        wanted: list[Tensor],
        buffer: list[Tensor],
        packed: list[Tensor] | None,
        *,
        where: str,
    ) -> None:
        """Opens receives of rows: of each owner into its room. Own rows do not travel."""
        rank = self.tables.rank
        handle = self.tables.row_channel.post(f"rows/{name}", packed or buffer, where=where, own=False)
        own, wanted[rank] = refs.at(wanted[rank]), wanted[rank][:0]
        travel = refs.at(torch.cat(wanted))
        leaving = self.tables.tables[name].empty_rows(len(travel.ids))
        sends = list(leaving.split([len(places) for places in wanted]))
        sends[rank] = buffer[rank]
        self.row_messages.setdefault(message, {})[name] = RowMessage(
            handle, travel, leaving, sends, buffer, own, packed
        )

    def open_grads(
        self, name: str, message: Message, leaving: Tensor | None, sent: list[int], counts: list[int], *, where: str
    ) -> None:
        """Opens receives of so many sums from each asker. Own ones do not travel, but are copied; all of a leaf is not even that."""
        rank = self.tables.rank
        own: Tensor | None = None
        if leaving is not None:
            places = list(leaving.split(sent))
            own, places[rank] = places[rank], places[rank][:0]
            leaving, sent = torch.cat(places), [len(one) for one in places]
        else:
            counts = [0 if requester == rank else count for requester, count in enumerate(counts)]
        table = self.tables.tables[name]
        arrivals = list(table.empty_rows(sum(counts)).split(counts))
        handle = self.tables.row_channel.post(f"gradients/{name}", arrivals, where=where, own=False)
        buffer = table.empty_rows(0 if leaving is None else len(leaving))
        self.grad_messages.setdefault(message, {})[name] = GradMessage(handle, leaving, own, sent, buffer, arrivals)

    def launch_rows(self, micro_batch: int, chunk: int = 0) -> None:
        """Sends the rows that askers use in this part for the first time, or a half or slice of them."""
        rank = self.tables.rank
        for name, message in self.row_messages[micro_batch, chunk].items():
            holder, sends = self.tables.row_access[name], message.sends
            narrow = self.owner_chunks[name][0].narrow if message.packed is not None else None
            holder.gather(message.refs, message.send_buffer)
            if narrow is not None:
                others = enumerate(sends)
                sends = [
                    rows if requester == rank else narrow.pack(rows, requester, micro_batch)
                    for requester, rows in others
                ]
            message.handle.launch(sends, num_rows=len(message.refs.ids) + len(message.own_refs.ids))
            holder.gather(message.own_refs, message.receive_buffers[rank])  # nobody else waits for these
            if narrow is not None:
                narrow.round_(message.receive_buffers[rank], rank, micro_batch)

    def local_rows(self, micro_batch: int) -> dict[str, Tensor]:
        """Leaf rows [u, D] of the part's distinct ids, table by table, once those of all parts so far have arrived."""
        for requester in self.requester.values():  # needs no message of this part
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
        """Waits for the part's rows and brings them to their places, once."""
        # Cold rows are long there, and are brought to their places while hot ones travel.
        for chunk in (UNSHARED, 0) if self.split else range(self.num_chunks):
            for name, message in self.row_messages.get((micro_batch, chunk), {}).items():
                requester = self.requester[name]
                message.handle.wait_arrived()
                if requester.narrow is not None and message.packed is not None:
                    for owner, (data, buffer) in enumerate(zip(message.packed, message.receive_buffers, strict=True)):
                        if owner != self.tables.rank:
                            requester.narrow.unpack(data, owner, micro_batch, buffer)
                if micro_batch == 0 and (received := requester.split_rows.pop(bool(chunk), None)):
                    rows, places = received
                    scatter_rows(requester.local_rows[micro_batch], places, rows)

    def add_grads(self, micro_batch: int, local_rows: Mapping[str, Tensor]) -> None:
        """Adds the sums so far to the part's gradients, for the ids that it shares with parts before."""
        for name, requester in self.requester.items():
            grad = local_rows[name].grad
            own = torch.zeros_like(requester.local_rows[micro_batch]) if grad is None else grad.contiguous()
            before = [requester.computed_grads(earlier) for earlier in range(micro_batch)]
            add_from(own, requester.plan.repeated[micro_batch], requester.plan.source[micro_batch], before)
            requester.grads[micro_batch] = own

    def launch_grads(self, micro_batch: int, chunk: int = 0) -> None:
        """Sends the sums of ids whose last use this part was, or a half or slice of them."""
        is_last = micro_batch == self.plan.num_micro_batches - 1
        for name, message in self.grad_messages[micro_batch, chunk].items():
            sums, own = self.requester[name].computed_grads(micro_batch), message.received[self.tables.rank]
            leaving = (
                sums
                if message.sent_positions is None
                else gather_rows(sums, message.sent_positions, message.send_buffer)
            )
            sends = list(leaving.split(message.send_counts))
            if message.own_positions is None:
                message.received[self.tables.rank] = sends[self.tables.rank]
            else:
                sends[self.tables.rank] = own
            message.handle.launch(sends)
            if message.own_positions is not None:
                gather_rows(sums, message.own_positions, own)  # nobody else waits for these
            # All of the last part leaves: its hot half or first slice comes first, and the flag that travels with it is about all.
            for values in () if chunk else (sums,) if is_last else (leaving, own):
                self.largest[name] = larger(self.largest.get(name, 0.0), values)

    def collect(self, micro_batch: int, chunk: int = 0) -> None:
        """The sums that come with a part, or a half or slice of them, have arrived."""
        is_one = self.chunks and micro_batch == self.plan.num_micro_batches - 1
        for name, message in self.grad_messages[micro_batch, chunk].items():
            message.handle.wait_arrived()
            for owner in [self.owner_chunks[name][chunk]] if is_one else self.owner_chunks[name]:
                owner.num_collected += 1

    def merge(self, micro_batch: int, *, where: str = "") -> None:
        """Replicas exchange the sums of their groups that are whole with this part; each adds them in group order, in `update`."""
        if (replicas := self.tables.replicas) is None:
            return
        handles = []
        for name, (owner,) in self.owner_chunks.items():
            if owner.num_collected <= micro_batch:
                raise CommError("sums of a group before they were collected: a dependency is missing in the schedule.")
            arrived = [one for number in range(micro_batch + 1) for one in self.grad_messages[number, 0][name].received]
            handles.append(owner.united.launch(replicas, f"sums/{name}", micro_batch, arrived, where=where))
        for handle in handles:
            handle.wait()

    def owned_grads(self) -> dict[str, Tensor]:
        """The full gradient sums [K, D] of the rows that this rank owns, by ascending id, once all are collected."""
        if self.split or self.chunks:
            raise ValueError("the sums of a split window are never whole: its pieces are updated one after the other.")
        found = {}
        for name, (owner,) in self.owner_chunks.items():
            grads = self._sums(name, 0)
            owner.totals = found[name] = grads.total() if isinstance(grads, ArrivedGrads) else grads
            owner.totals.index_fill_(0, owner.retrieved.rowless, 0.0)  # they are dropped and count nowhere
        return found

    def keep_previous(self) -> None:
        """The batch after this one reads the rows as they are now, also if a barrier comes first."""
        for name, (owner,) in self.owner_chunks.items():
            holder = self.tables.row_access[name]
            if isinstance(holder, StaleRows):
                holder.keep_previous(owner.retrieved)

    def update(self, lr: float, chunk: int = 0) -> None:
        """One optimizer step for each row of the window, or of a half or slice of it, that this rank owns."""
        for name, chunks in self.owner_chunks.items():
            owner = chunks[0 if self.split else chunk]
            if self.split:
                owner.check_collected(self.plan.num_micro_batches + chunk)  # the cold half comes after the hot one
            refs, grads = owner.split_updates[bool(chunk)] if self.split else (owner.retrieved, self._sums(name, chunk))
            self.tables.row_access[name].update(refs, grads, lr)

    def _sums(self, name: str, chunk: int) -> Tensor | ArrivedGrads:
        """The gradients of the rows of a slice that this rank owns, added in (part, rank) order."""
        owner = self.owner_chunks[name][chunk]
        owner.check_collected(self.plan.num_micro_batches)
        if owner.totals is not None:
            return owner.totals
        if owner.union is not None:
            return owner.union.sums(self.plan.num_micro_batches)
        return owner.chunk_grads or ArrivedGrads(self.arrivals(name), owner.requests.starts, owner.requests.arrivals)

    def arrivals(self, name: str) -> list[Tensor]:
        """Sums as they arrive, message by message."""
        return [
            one for key in sorted(self.grad_messages, key=_as_counted) for one in self.grad_messages[key][name].received
        ]

    def release(self) -> None:
        """The window is done with its rows, and all it sent has left."""
        rows = [message.handle for messages in self.row_messages.values() for message in messages.values()]
        grads = [message.handle for messages in self.grad_messages.values() for message in messages.values()]
        for handle in rows + grads:
            handle.wait()
        for name in self.owner_chunks:
            self.tables.row_access[name].release(self._row_refs(name))

    @property
    def num_chunks(self) -> int:
        """In how many the first rows and the last gradients travel."""
        return next((len(cut.last_counts[0][0]) for cut in self.chunks.values()), 1)

    def _row_refs(self, name: str) -> RowRefs:
        if name not in self.row_refs:
            raise CommError("rows were asked for before they were retrieved: a dependency is missing in the schedule.")
        return self.row_refs[name]


def _as_counted(message: Message) -> tuple[int, bool]:
    """Parts in order, the cold half of a part first."""
    return message[0], message[1] != UNSHARED


def larger(so_far: float, values: Tensor) -> float:
    """The larger of a number and the largest |value|; nan if there is one."""
    own = largest(values)
    return so_far if own <= so_far or math.isnan(so_far) else own
