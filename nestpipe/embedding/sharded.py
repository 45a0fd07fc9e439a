"""Rows on many ranks: what a window asks of the owners, and what it sends back.

    asker                                        owner
    plan ── counts, weight, flags, ids ────────▶ union of all askers' ids; rows taken        ask, retrieve
    rows of a part's first uses ◀─────────────── gathered from where they are held          launch_rows, leaves
    gradient sums of last uses ────────────────▶ added in (part, rank) order                add_grads, launch_grads, collect
                                                 one optimizer step per row                 update, release

One sum tree, whatever the number of parts and ranks that run it: occurrences of an id inside a part (backward), parts in
part order (asker), arrivals in (part of last use, asking rank) order (owner). No atomics, no order of arrival.

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

from nestpipe.comm import Handle, Lane
from nestpipe.embedding.held import Held, Holder, InPlace
from nestpipe.embedding.lagging import Lagging
from nestpipe.embedding.owner import Owners
from nestpipe.embedding.route import Plan, Requests, TablePlan, own_requests
from nestpipe.embedding.rows import Arrived, add_from, copy_from, gather_rows, largest
from nestpipe.embedding.table import Table
from nestpipe.embedding.wire import Narrow, narrow_of
from nestpipe.errors import CommError


class Sharded:
    """All tables of a model, each rank holding the rows of its buckets."""

    def __init__(self, tables: Mapping[str, Table], keys: Lane, rows: Lane, owners: Owners):
        self.tables, self.keys, self.rows, self.owners = dict(tables), keys, rows, owners
        self.holders: dict[str, Holder] = {name: InPlace(table) for name, table in self.tables.items()}
        for name, table in self.tables.items():
            if table.config.has_limits and table.config.num_buckets != owners.num_buckets:
                raise ValueError(
                    f"table '{name}' limits {table.config.num_buckets} buckets but there are {owners.num_buckets}; "
                    "with another number every rank would decide on its own"
                )

    @property
    def rank(self) -> int:
        return self.rows.world.rank

    @property
    def world_size(self) -> int:
        return self.rows.world.size

    def peek(self, name: str, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of any ids; admits nothing. Every rank must call it, each with ids of its own."""
        owner = self.owners.owner_of(ids)
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=self.world_size).tolist()
        wanted = [row[self.rank] for row in self.rows.all_gather_ints(counts)]
        asked = [torch.empty(count, dtype=torch.int64) for count in wanted]
        self.rows.exchange(f"peek/{name}", ids.index_select(0, order).split(counts), asked).wait()
        table = self.tables[name]
        rows = table.empty_rows(len(ids))
        self.rows.exchange(f"peeked/{name}", [table.peek(part) for part in asked], rows.split(counts)).wait()
        return torch.empty_like(rows).index_copy_(0, order, rows)


@dataclass(slots=True, eq=False)
class _Asked:
    """An asker's side of one table in a window."""

    plan: TablePlan
    leaves: list[Tensor]  # [part]: rows [u, D] of its distinct ids; new ones arrive there, the others are copied
    grads: list[Tensor | None]  # [part]: sums [u, D] of the parts up to this one, once it has computed
    narrow: Narrow | None = None  # if some rows travel in 16 bits
    packed: list[list[Tensor]] = field(default_factory=list)  # [part][owner]: then, the bytes that come


@dataclass(slots=True, eq=False)
class _Owned:
    """An owner's side of one table in a window."""

    requests: Requests
    arrivals: list[list[Tensor]]  # [part][asker]: sums that come with the part
    narrow: Narrow | None = None  # if some rows travel in 16 bits
    num_collected: int = 0  # parts of which they have come
    held: Held | None = None
    totals: Tensor | None = None  # [K, D] what they add up to, if somebody asked

    def grads(self, num_parts: int) -> Tensor | Arrived:
        """The gradients of all rows."""
        if self.num_collected < num_parts:
            raise CommError("an update before all gradients were collected: a dependency is missing in the schedule.")
        if self.totals is not None:
            return self.totals
        segments = [one for part in self.arrivals for one in part]
        return Arrived(segments, self.requests.starts, self.requests.arrivals)


@dataclass(slots=True, eq=False)
class Window:
    """The rows of one batch, frozen until every part has contributed."""

    home: Sharded
    plan: Plan
    number: int  # of the batch, from the start of training
    weight: float  # this rank's; global once the ids have been asked for
    asks_to_stop: bool = False  # of this rank; of any rank once the ids have been asked for
    largest: dict[str, float] = field(default_factory=dict)  # the largest |gradient| sent, table by table
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _owned: dict[str, _Owned] = field(default_factory=dict)
    _rows: list[list[Handle]] = field(default_factory=list)  # [part]: launched row exchanges, table by table
    _grads: list[list[Handle]] = field(default_factory=list)

    def ask(self, *, where: str = "") -> None:
        """Tells the owners which ids the window needs; agrees on the global weight and on whether to stop."""
        lane, parts = self.home.keys, self.plan.num_parts
        flags = [*struct.unpack("<q", struct.pack("<d", self.weight)), int(self.asks_to_stop)]
        wanted = [
            [n for plan in self.plan.tables.values() for n in plan.first_counts[rank]] + flags
            for rank in range(self.home.world_size)
        ]
        counts = lane.exchange_sizes(wanted, name="counts")
        self.weight = sum(struct.unpack("<d", struct.pack("<q", row[-2]))[0] for row in counts)  # in rank order
        self.asks_to_stop = any(row[-1] for row in counts)
        handles, found = [], {}
        narrow, theirs = narrow_of(self.plan), {}
        for number, (name, plan) in enumerate(self.plan.tables.items()):
            first_counts = [row[number * parts : (number + 1) * parts] for row in counts]
            sizes = [sum(row) for row in first_counts]
            ids, last_part = torch.empty(sum(sizes), dtype=torch.int64), torch.empty(sum(sizes), dtype=torch.uint8)
            found[name] = (ids, last_part, first_counts)
            handles += [
                lane.exchange(f"ids/{name}", plan.ids.split(plan.counts), ids.split(sizes), where=where),
                lane.exchange(
                    f"last parts/{name}", plan.last_part.split(plan.counts), last_part.split(sizes), where=where
                ),
            ]
            if name in narrow:
                mask = torch.empty(sum(sizes), dtype=torch.uint8)
                theirs[name] = Narrow(narrow[name].wire, mask.view(torch.bool), first_counts)
                sends = narrow[name].mask.view(torch.uint8).split(plan.counts)
                handles.append(lane.exchange(f"narrow/{name}", sends, mask.split(sizes), where=where))
        for handle in handles:
            handle.wait()
        for name, (ids, last_part, first_counts) in found.items():
            table, plan = self.home.tables[name], self.plan.tables[name]
            leaves = [table.empty_rows(plan.leaf_size(part)) for part in range(parts)]
            self._asked[name] = _Asked(plan, leaves, [None] * parts, narrow.get(name))
            self._owned[name] = _own(table, own_requests(ids, last_part, first_counts), self.home.rank)
            self._owned[name].narrow = theirs.get(name)

    def retrieve(self) -> None:
        """Decides which ids have a row, and takes the rows; once per batch, in order."""
        for name, owned in self._owned.items():
            owned.held = self.home.holders[name].take(owned.requests.ids, self.number)

    def post(self, *, where: str = "") -> None:
        """Opens the receives of all row and gradient messages of the window, so that none of them waits for its peer."""
        lane = self.home.rows
        for part in range(self.plan.num_parts):
            place = f"{where}, part {part}"
            self._rows.append(
                [
                    lane.post(f"rows/{name}", _receives(asked, part), where=place, own=False)
                    for name, asked in self._asked.items()
                ]
            )
            self._grads.append(
                [
                    lane.post(f"gradients/{name}", owned.arrivals[part], where=place, own=False)
                    for name, owned in self._owned.items()
                ]
            )

    def launch_rows(self, part: int) -> None:
        """Sends the rows that askers use in this part for the first time; the own ones are copied to where they are used."""
        rank = self.home.rank
        for handle, (name, owned) in zip(self._rows[part], self._owned.items(), strict=True):
            holder, held, places = self.home.holders[name], _held(owned), owned.requests.wanted(part)
            own = _room(self._asked[name], part)[rank]
            holder.gather(held, places[rank], own)
            others = [place for asker, place in enumerate(places) if asker != rank]
            rows = holder.gather(held, torch.cat(others)) if others else own
            sends = list(rows.split([len(place) for place in others])) if others else []
            sends = [*sends[:rank], own, *sends[rank:]]
            if owned.narrow is not None:
                owned.narrow.round_(own, rank, part)
                for asker in (asker for asker in range(len(sends)) if asker != rank):
                    sends[asker] = owned.narrow.pack(sends[asker], asker, part)
            handle.launch(sends)

    def leaves(self, part: int) -> dict[str, Tensor]:
        """Leaf rows [u, D] of the part's distinct ids, table by table, once those of all parts so far have arrived."""
        for handle in self._rows[part]:
            handle.wait_arrived()
        for asked in self._asked.values():
            if asked.narrow is not None:
                for owner, (data, room) in enumerate(zip(asked.packed[part], _room(asked, part), strict=True)):
                    if owner != self.home.rank:
                        asked.narrow.unpack(data, owner, part, room)
            copy_from(asked.leaves[part], asked.plan.again[part], asked.plan.source[part], asked.leaves)
        return {name: asked.leaves[part].detach().requires_grad_() for name, asked in self._asked.items()}

    def add_grads(self, part: int, leaves: Mapping[str, Tensor]) -> None:
        """Adds the sums so far to the part's gradients, for the ids that it shares with parts before."""
        for name, asked in self._asked.items():
            grad = leaves[name].grad
            own = torch.zeros_like(asked.leaves[part]) if grad is None else grad.contiguous()
            add_from(
                own, asked.plan.again[part], asked.plan.source[part], [_computed(one) for one in asked.grads[:part]]
            )
            asked.grads[part] = own

    def launch_grads(self, part: int) -> None:
        """Sends the sums of ids whose last use this part was."""
        for handle, (name, asked) in zip(self._grads[part], self._asked.items(), strict=True):
            sums = _computed(asked.grads[part])
            if part < self.plan.num_parts - 1:  # all that the last part has goes home with it
                sums = gather_rows(sums, asked.plan.leaving[part])
            sends = sums.split([counts[part] for counts in asked.plan.last_counts])
            self._owned[name].arrivals[part][self.home.rank] = sends[self.home.rank]
            handle.launch(sends)
            self.largest[name] = larger(self.largest.get(name, 0.0), sums)

    def collect(self, part: int) -> None:
        """The sums that come with a part have arrived."""
        for handle, owned in zip(self._grads[part], self._owned.values(), strict=True):
            handle.wait_arrived()
            owned.num_collected += 1

    def owned_grads(self) -> dict[str, Tensor]:
        """The full gradient sums [K, D] of the rows that this rank owns, by ascending id, once all are collected."""
        found = {}
        for name, owned in self._owned.items():
            grads = owned.grads(self.plan.num_parts)
            owned.totals = found[name] = grads.total() if isinstance(grads, Arrived) else grads
            owned.totals.index_fill_(0, _held(owned).rowless, 0.0)  # they are dropped and count nowhere
        return found

    def keep(self) -> None:
        """The batch after this one reads the rows as they are now, also if a barrier comes first."""
        for name, owned in self._owned.items():
            holder = self.home.holders[name]
            if isinstance(holder, Lagging):
                holder.keep(_held(owned))

    def update(self, lr: float) -> None:
        """One optimizer step for each row of the window that this rank owns; gradients are added in (part, rank) order."""
        for name, owned in self._owned.items():
            self.home.holders[name].update(_held(owned), owned.grads(self.plan.num_parts), lr)

    def release(self) -> None:
        """The window is done with its rows, and all it sent has left."""
        for handles in (*self._rows, *self._grads):
            for handle in handles:
                handle.wait()
        for name, owned in self._owned.items():
            self.home.holders[name].release(_held(owned))

    def peek_owned(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The ids [K] that this rank owns and their weights [K, D] as they are held now."""
        found = {}
        for name, owned in self._owned.items():
            ids = owned.requests.ids
            found[name] = (ids, self.home.holders[name].gather(_held(owned), torch.arange(len(ids))))
        return found


def _own(table: Table, requests: Requests, rank: int) -> _Owned:
    """Room for what arrives; the own sums will be taken from where they are."""
    sizes = [[0 if asker == rank else n for asker, n in enumerate(counts)] for counts in requests.arrival_counts]
    rooms = iter(table.empty_rows(sum(map(sum, sizes))).split([n for counts in sizes for n in counts]))
    return _Owned(requests, [[next(rooms) for _ in counts] for counts in sizes])


def _room(asked: _Asked, part: int) -> list[Tensor]:
    """Where the rows that each owner sends for a part belong."""
    return [asked.leaves[part][fresh] for fresh in asked.plan.fresh(part)]


def _receives(asked: _Asked, part: int) -> list[Tensor]:
    """Where they arrive: there, or as bytes if some are narrow."""
    rooms = _room(asked, part)
    if asked.narrow is None:
        return rooms
    sizes = [asked.narrow.num_bytes(owner, part, room) for owner, room in enumerate(rooms)]
    asked.packed.append([torch.empty(size, dtype=torch.uint8) for size in sizes])
    return asked.packed[part]


def _computed(grads: Tensor | None) -> Tensor:
    if grads is None:
        raise CommError("gradients were needed before they were computed: a dependency is missing in the schedule.")
    return grads


def _held(owned: _Owned) -> Held:
    if owned.held is None:
        raise CommError("rows were asked for before they were retrieved: a dependency is missing in the schedule.")
    return owned.held


def larger(so_far: float, values: Tensor) -> float:
    """The larger of a number and the largest |value|; nan if there is one."""
    own = largest(values)
    return so_far if own <= so_far or math.isnan(so_far) else own
