"""Rows on many ranks: what a window asks of the owners, and what it sends back.

    asker                                   owner
    plan ── counts, weight, ids ──────────▶ union of all askers' ids, rows fetched once
    rows of a part's first uses ◀────────── index_select of the union
    gradient sums of last uses ───────────▶ added in (part, rank) order; one optimizer step per row

One sum tree, whatever the number of parts and ranks that run it: occurrences of an id inside a part (backward), parts in
part order (asker), arrivals in (part of last use, asking rank) order (owner). No atomics, no order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.comm import Lane
from nestpipe.embedding.owner import Owners
from nestpipe.embedding.route import Plan, TablePlan, dedupe
from nestpipe.embedding.table import Table


@dataclass(slots=True, eq=False)
class _Owned:
    """An owner's side of one table in a window."""

    ids: Tensor  # [K] union over the askers, ascending
    rows: Tensor  # [K, D] frozen until the window is done
    grads: Tensor  # [K, D]
    places: list[Tensor]  # for each asker: where its ids, in its order, stand in the union
    first_counts: list[list[int]]  # [asker][part]
    last_part: list[Tensor]  # for each asker: the part that brings the gradient of each of its ids


@dataclass(slots=True, eq=False)
class _Asked:
    """An asker's side of one table in a window."""

    plan: TablePlan
    rows: Tensor  # [U, D] in the plan's order
    grads: Tensor  # [U, D]


class Sharded:
    """All tables of a model, each rank holding the rows of its buckets."""

    def __init__(self, tables: Mapping[str, Table], lane: Lane, owners: Owners):
        self.tables, self.lane, self.owners = dict(tables), lane, owners
        self.num_opened = 0  # windows so far
        for name, table in self.tables.items():
            if table.config.has_limits and table.config.num_buckets != owners.num_buckets:
                raise ValueError(
                    f"table '{name}' limits {table.config.num_buckets} buckets but there are {owners.num_buckets}; "
                    "with another number every rank would decide on its own"
                )

    @property
    def rank(self) -> int:
        return self.lane.world.rank

    def open(self, plan: Plan, weight: float, *, step: int | None = None) -> Window:
        """Tells the owners what the window needs and lets them fetch it; agrees on the global weight.

        `step` is the batch's number, by which rows have ages; by default the number of windows opened before.
        """
        step = self.num_opened if step is None else step
        self.num_opened = step + 1
        size, parts = self.lane.world.size, plan.num_parts
        wanted = [[n for name in self.tables for n in plan.tables[name].first_counts[rank]] for rank in range(size)]
        counts = self.lane.exchange_sizes(wanted, name="counts")
        asked, owned = {}, {}
        for number, (name, table) in enumerate(self.tables.items()):
            one = plan.tables[name]
            owned[name] = self._exchange_ids(
                name, table, one, [row[number * parts : (number + 1) * parts] for row in counts], step
            )
            rows = table.empty_rows(len(one.ids))
            asked[name] = _Asked(one, rows, torch.zeros_like(rows))
        weights = self.lane.all_gather_floats([weight], name="weight")
        return Window(self, plan, asked, owned, sum(value for (value,) in weights))  # in rank order

    def peek(self, name: str, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of any ids; admits nothing. Every rank must call it, each with ids of its own."""
        owner = self.owners.owner_of(ids)
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=self.lane.world.size).tolist()
        wanted = [row[self.lane.world.rank] for row in self.lane.all_gather_ints(counts)]
        asked = [torch.empty(count, dtype=torch.int64) for count in wanted]
        self.lane.exchange(f"peek/{name}", ids.index_select(0, order).split(counts), asked).wait()
        table = self.tables[name]
        rows = table.empty_rows(len(ids))
        self.lane.exchange(f"peeked/{name}", [table.peek(part) for part in asked], rows.split(counts)).wait()
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def _exchange_ids(
        self, name: str, table: Table, plan: TablePlan, first_counts: list[list[int]], step: int
    ) -> _Owned:
        sizes = [sum(counts) for counts in first_counts]
        ids = [torch.empty(size, dtype=torch.int64) for size in sizes]
        last_part = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        handles = [
            self.lane.exchange(f"ids/{name}", plan.ids.split(plan.counts), ids),
            self.lane.exchange(f"last parts/{name}", plan.last_part.split(plan.counts), last_part),
        ]
        for handle in handles:
            handle.wait()
        union, places = dedupe(torch.cat(ids))
        table.advance(union, step)  # who has a row is decided before anything is read
        rows = table.fetch(union)
        return _Owned(union, rows, torch.zeros_like(rows), list(places.split(sizes)), first_counts, last_part)


class Window:
    """The rows of one batch, frozen until every part has contributed. Parts are fetched and returned in order."""

    def __init__(self, home: Sharded, plan: Plan, asked: dict[str, _Asked], owned: dict[str, _Owned], weight: float):
        self._home, self._plan, self._asked, self._owned = home, plan, asked, owned
        self.weight = weight  # global: over all ranks

    def fetch(self, part: int) -> dict[str, Tensor]:
        """Leaf rows [u, D] of the part's distinct ids, table by table; those of first use come from their owners now."""
        for name, asked in self._asked.items():
            owned = self._owned[name]
            send = [
                owned.rows.index_select(0, places[slice(*_range(counts, part))])
                for places, counts in zip(owned.places, owned.first_counts, strict=True)
            ]
            receive = [
                rows[slice(*_range(counts, part))]
                for rows, counts in zip(asked.rows.split(asked.plan.counts), asked.plan.first_counts, strict=True)
            ]
            self._home.lane.exchange(f"rows/{name}", send, receive).wait()
        return {
            name: asked.rows.index_select(0, asked.plan.places[part]).requires_grad_()
            for name, asked in self._asked.items()
        }

    def send_grads(self, part: int, leaves: Mapping[str, Tensor]) -> None:
        """Adds the part's gradients to the window's; sums of ids whose last use this was go home."""
        for name, asked in self._asked.items():
            grad = leaves[name].grad
            if grad is not None:
                asked.grads.index_add_(0, asked.plan.places[part], grad)
            owned = self._owned[name]
            done = _split_done(asked.plan.last_part, asked.plan.counts, part)
            grads = asked.grads.split(asked.plan.counts)
            send = [sums.index_select(0, places) for sums, places in zip(grads, done, strict=True)]
            arriving = [(last == part).nonzero().flatten() for last in owned.last_part]
            receive = [owned.grads.new_empty(len(places), owned.grads.shape[1]) for places in arriving]
            self._home.lane.exchange(f"gradients/{name}", send, receive).wait()
            for places, arrived, sums in zip(owned.places, arriving, receive, strict=True):  # in rank order
                owned.grads.index_add_(0, places.index_select(0, arrived), sums)

    def sent_grads(self) -> dict[str, Tensor]:
        """The gradient sums [U, D] that this rank sends, table by table."""
        return {name: asked.grads for name, asked in self._asked.items()}

    def owned_grads(self) -> dict[str, Tensor]:
        """The full gradient sums [K, D] of the rows that this rank owns, by ascending id, once all parts are back."""
        for name, owned in self._owned.items():
            self._home.tables[name].drop_rowless(owned.ids, owned.grads)
        return {name: owned.grads for name, owned in self._owned.items()}

    def update(self, lr: float) -> None:
        """One optimizer step for each row of the window that this rank owns."""
        for name, owned in self._owned.items():
            self._home.tables[name].update(owned.ids, owned.grads, lr)


def _range(counts: Sequence[int], part: int) -> tuple[int, int]:
    """Where the ids of a part's first uses begin and end among an owner's ids."""
    first = sum(counts[:part])
    return first, first + counts[part]


def _split_done(last_part: Tensor, counts: list[int], part: int) -> list[Tensor]:
    """For each owner: places among its ids whose last use is this part."""
    return [(last == part).nonzero().flatten() for last in last_part.split(counts)]
