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
from nestpipe.embedding.ids import dedupe, group
from nestpipe.embedding.lagging import Lagging
from nestpipe.embedding.owner import Owners
from nestpipe.embedding.route import Plan, TablePlan
from nestpipe.embedding.rows import add_rows, gather_rows
from nestpipe.embedding.table import Table
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
    rows: Tensor  # [U, D] in the plan's order
    grads: Tensor  # [U, D]
    leaving: list[list[Tensor]]  # [owner][part]: places of the sums that go home with the part


@dataclass(slots=True, eq=False)
class _Owned:
    """An owner's side of one table in a window. Requests are what was asked for, rank by rank in the askers' order."""

    ids: Tensor  # [K] union over the askers, ascending
    wanted: list[list[Tensor]]  # [asker][part]: places in the union of the rows that travel with the part
    arriving: list[list[Tensor]]  # [asker][part]: places in the union of the sums that arrive with the part
    grads: Tensor  # [K, D]
    arrivals: list[list[Tensor]]  # [asker][part]: room for those sums
    held: Held | None = None


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
        for handle in handles:
            handle.wait()
        for name, (ids, last_part, first_counts) in found.items():
            self._owned[name] = _own(self.home.tables[name], ids, last_part, first_counts)
            self._asked[name] = _ask(self.home.tables[name], self.plan.tables[name])

    def retrieve(self) -> None:
        """Decides which ids have a row, and takes the rows; once per batch, in order."""
        for name, owned in self._owned.items():
            owned.held = self.home.holders[name].take(owned.ids, self.number)

    def post(self, *, where: str = "") -> None:
        """Opens the receives of all row and gradient messages of the window, so that none of them waits for its peer."""
        lane = self.home.rows
        for part in range(self.plan.num_parts):
            self._rows.append(
                [
                    lane.post(f"rows/{name}", _row_room(asked, part), where=f"{where}, part {part}")
                    for name, asked in self._asked.items()
                ]
            )
            self._grads.append(
                [
                    lane.post(
                        f"gradients/{name}", [parts[part] for parts in owned.arrivals], where=f"{where}, part {part}"
                    )
                    for name, owned in self._owned.items()
                ]
            )

    def launch_rows(self, part: int) -> None:
        """Sends the rows that askers use in this part for the first time."""
        for handle, (name, owned) in zip(self._rows[part], self._owned.items(), strict=True):
            places = [parts[part] for parts in owned.wanted]
            rows = self.home.holders[name].gather(_held(owned), torch.cat(places))
            handle.launch(rows.split([len(one) for one in places]))

    def leaves(self, part: int) -> dict[str, Tensor]:
        """Leaf rows [u, D] of the part's distinct ids, table by table, once those of all parts so far have arrived."""
        for handle in self._rows[part]:
            handle.wait_arrived()
        return {
            name: gather_rows(asked.rows, asked.plan.places[part]).requires_grad_()
            for name, asked in self._asked.items()
        }

    def add_grads(self, part: int, leaves: Mapping[str, Tensor]) -> None:
        """Adds the part's gradients to the window's."""
        for name, asked in self._asked.items():
            grad = leaves[name].grad
            if grad is not None:
                add_rows(asked.grads, asked.plan.places[part], grad)

    def launch_grads(self, part: int) -> None:
        """Sends the sums of ids whose last use this part was."""
        for handle, (name, asked) in zip(self._grads[part], self._asked.items(), strict=True):
            places = [parts[part] for parts in asked.leaving]
            sums = gather_rows(asked.grads, torch.cat(places))
            handle.launch(sums.split([len(one) for one in places]))
            self.largest[name] = larger(self.largest.get(name, 0.0), sums)

    def collect(self, part: int) -> None:
        """Adds the sums that arrived with a part, in rank order; parts are collected in order."""
        for handle, owned in zip(self._grads[part], self._owned.values(), strict=True):
            handle.wait_arrived()
            for places, sums in zip(owned.arriving, owned.arrivals, strict=True):
                add_rows(owned.grads, places[part], sums[part])

    def owned_grads(self) -> dict[str, Tensor]:
        """The full gradient sums [K, D] of the rows that this rank owns, by ascending id, once all are collected."""
        for owned in self._owned.values():
            owned.grads.index_fill_(0, _held(owned).rowless, 0.0)  # they are dropped and count nowhere
        return {name: owned.grads for name, owned in self._owned.items()}

    def keep(self) -> None:
        """The batch after this one reads the rows as they are now, also if a barrier comes first."""
        for name, owned in self._owned.items():
            holder = self.home.holders[name]
            if isinstance(holder, Lagging):
                holder.keep(_held(owned))

    def update(self, lr: float) -> None:
        """One optimizer step for each row of the window that this rank owns."""
        for name, owned in self._owned.items():
            self.home.holders[name].update(_held(owned), owned.grads, lr)

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
            places = torch.arange(len(owned.ids))
            found[name] = (owned.ids, self.home.holders[name].gather(_held(owned), places))
        return found


def _ask(table: Table, plan: TablePlan) -> _Asked:
    rows = table.empty_rows(len(plan.ids))
    return _Asked(plan, rows, torch.zeros_like(rows), _cut(plan.leaving, plan.last_counts))


def _own(table: Table, ids: Tensor, last_part: Tensor, first_counts: list[list[int]]) -> _Owned:
    """What an owner knows after the ids of all askers came, back to back."""
    size, parts = len(first_counts), len(first_counts[0])
    union, places = dedupe(ids)
    asker = torch.arange(size).repeat_interleave(torch.tensor([sum(counts) for counts in first_counts]))
    order, counts = group(asker * parts + last_part, size * parts)
    last_counts: list[list[int]] = counts.reshape(size, parts).tolist()
    arriving = places.index_select(0, order)
    grads = table.empty_rows(len(union)).zero_()
    return _Owned(
        ids=union,
        wanted=_cut(places, first_counts),
        arriving=_cut(arriving, last_counts),
        grads=grads,
        arrivals=_cut(table.empty_rows(len(ids)), last_counts),
    )


def _row_room(asked: _Asked, part: int) -> list[Tensor]:
    """Where the rows that each owner sends for a part belong."""
    room = []
    for rows, counts in zip(asked.rows.split(asked.plan.counts), asked.plan.first_counts, strict=True):
        first = sum(counts[:part])
        room.append(rows[first : first + counts[part]])
    return room


def _cut(values: Tensor, counts: list[list[int]]) -> list[list[Tensor]]:
    """Consecutive pieces [rank][part] of these sizes."""
    pieces = iter(values.split([count for row in counts for count in row]))
    return [[next(pieces) for _ in row] for row in counts]


def _held(owned: _Owned) -> Held:
    if owned.held is None:
        raise CommError("rows were asked for before they were retrieved: a dependency is missing in the schedule.")
    return owned.held


def larger(largest: float, values: Tensor) -> float:
    """The larger of a number and the largest |value|; nan if there is one."""
    own = float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0
    return largest if own <= largest or math.isnan(largest) else own
