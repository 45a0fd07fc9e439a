"""Where the rows of batches in flight are: in their table, or in a pool of slots in front of it.

A batch *holds* the rows of its ids from `take` to `release`. Two ways, one contract, the same bits:

`InPlace`  rows stay in the table and are read and updated there. For rows in memory that the batch may touch directly.
`Pool`     rows are copied into slots of their own when the first batch takes them and go home when the last one has
           released them; a row that neighbouring batches share stays where it is. For tables behind a slower memory: only
           `take` and `release` touch the table, so one thread can hide its latency.

`take` and `release` are called by one thread, `take` in the order of batches. A row is weights and all optimizer state.
Whether an id has a row is decided by `take` and remembered by the batch: a later batch may admit an id whose earlier
gradient still has to be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.id_index import make_index
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.row_store import RowStore
from nestpipe.embedding.table import WEIGHTS, Table


@dataclass(frozen=True, slots=True, eq=False)
class RowRefs:
    """The rows of one batch, or some of them, and where each is."""

    step: int  # of the batch
    ids: Tensor  # [K] of a batch: distinct, and ascending in each bucket
    table_slots: Tensor  # [K] slot in the table, -1 for an id without a row
    slots: Tensor  # [K] where the row is held; the same as homes if that is in place
    rowless: Tensor  # [k] places among the ids of those without a row
    initial: Tensor  # [k, D] in place: what those read

    def at(self, places: Tensor) -> RowRefs:
        """Those at these places, in this order."""
        homes = self.table_slots.index_select(0, places)
        slots = homes if self.slots is self.table_slots else self.slots.index_select(0, places)
        rowless, initial = self.rowless, self.initial
        if len(rowless):
            rowless = (homes < 0).nonzero().flatten()
        if len(initial):
            initial = initial.index_select(0, torch.searchsorted(self.rowless, places.index_select(0, rowless)))
        return RowRefs(self.step, self.ids.index_select(0, places), homes, slots, rowless, initial)

    def split(self, sizes: Sequence[int]) -> Iterator[RowRefs]:
        """Pieces of these sizes, one after the other."""
        if len(sizes) == 1:
            yield self
            return
        begin = 0
        for size in sizes:
            own = slice(begin, begin + size)
            homes = self.table_slots[own]
            slots = homes if self.slots is self.table_slots else self.slots[own]
            rowless = slice(*torch.searchsorted(self.rowless, torch.tensor([own.start, own.stop])).tolist())
            yield RowRefs(self.step, self.ids[own], homes, slots, self.rowless[rowless] - begin, self.initial[rowless])
            begin += size

    @property
    def row_slots(self) -> Tensor:
        """Where each row is held [K], -1 for an id without one."""
        return self.slots.index_fill(0, self.rowless, -1) if len(self.rowless) else self.slots


class RowAccess(Protocol):
    """Holds rows of one table for batches in flight."""

    table: Table

    def take(self, ids: Tensor, step: int) -> RowRefs:
        """Decides which of a batch's distinct ids, in each bucket ascending, have a row, and holds them."""
        ...

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        """A copy of the weights [n, D]; into `out` if given. They may be some of a batch's, and repeat."""
        ...

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        """One optimizer step on each row; without a row there is none. They may be some of a batch's."""
        ...

    def release(self, refs: RowRefs) -> None:
        """The batch is done with its rows."""
        ...


class InPlaceRows:
    """Rows are used where they live."""

    def __init__(self, table: Table):
        self.table = table

    def take(self, ids: Tensor, step: int) -> RowRefs:
        homes = self.table.advance(ids, step)
        rowless = (homes < 0).nonzero().flatten()
        return RowRefs(step, ids, homes, homes, rowless, self.table.initial(ids.index_select(0, rowless)))

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        if not len(refs.rowless):
            return self.table.gather(refs.slots, out)
        rows = self.table.empty_rows(len(refs.slots)) if out is None else out
        known = (refs.slots >= 0).nonzero().flatten()
        rows.index_copy_(0, known, self.table.gather(refs.slots.index_select(0, known)))
        return rows.index_copy_(0, refs.rowless, refs.initial)

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        self.table.update(refs.row_slots, grads, lr)

    def release(self, refs: RowRefs) -> None:
        pass


class PrefetchBuffer:
    """Rows are copied into slots, each counted by the batches that hold it."""

    def __init__(self, table: Table, *, native: bool | None = None):
        self.table = table
        self._index = make_index(native=native)
        self._columns = RowStore(table.read(torch.empty(0, dtype=torch.int64)))
        self._columns.pinned = True
        self._holders = RowStore({"holders": torch.empty(0, dtype=torch.int64)})

    def __len__(self) -> int:
        """How many rows are held."""
        return len(self._index)

    def reserve(self, num_rows: int) -> None:
        """Makes room for so many rows, so that the first batches need not."""
        self._columns.grow(num_rows)
        self._holders.grow(num_rows)

    def take(self, ids: Tensor, step: int) -> RowRefs:
        homes = self.table.advance(ids, step)
        slots, fresh = self._index.find_or_add(ids)
        self._columns.grow(self._index.num_slots)
        self._holders.grow(self._index.num_slots)
        self._count(slots, 1)
        self._load(ids.index_select(0, fresh), homes.index_select(0, fresh), slots.index_select(0, fresh))
        rowless = (homes < 0).nonzero().flatten()
        return RowRefs(step, ids, homes, slots, rowless, self.table.empty_rows(0))

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        return self._columns.gather(WEIGHTS, refs.slots, out)

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        self.table.step(self._columns, refs.row_slots, grads, lr)

    def release(self, refs: RowRefs) -> None:
        holders = self._count(refs.slots, -1)
        gone = (holders == 0).nonzero().flatten()
        tables = (holders == 0).logical_and_(refs.table_slots >= 0).nonzero().flatten()
        self.table.write(refs.table_slots.index_select(0, tables), self._read(refs.slots.index_select(0, tables)))
        self._index.remove(refs.ids.index_select(0, gone))

    def _load(self, ids: Tensor, homes: Tensor, slots: Tensor) -> None:
        known, unknown = ((homes >= 0).nonzero().flatten(), (homes < 0).nonzero().flatten())
        self._write(slots.index_select(0, known), self.table.read(homes.index_select(0, known)))
        self._write(slots.index_select(0, unknown), self.table.new_rows(ids.index_select(0, unknown)))

    def _count(self, slots: Tensor, change: int) -> Tensor:
        """Changes the number of batches that hold each slot; returns it [n]."""
        holders = self._holders["holders"]
        counts = holders.index_select(0, slots).add_(change)
        holders.index_copy_(0, slots, counts)
        return counts

    def _read(self, slots: Tensor) -> dict[str, Tensor]:
        return {name: self._columns.gather(name, slots) for name in self._columns}

    def _write(self, slots: Tensor, rows: dict[str, Tensor]) -> None:
        for name, values in rows.items():
            self._columns.scatter(name, slots, values)
