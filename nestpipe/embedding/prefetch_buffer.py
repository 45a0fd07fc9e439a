"""Access to the rows of batches in flight: in their table, or in a prefetch buffer in front of it.

A batch *holds* the rows of its ids from `take` to `release`. Two implementations of one contract,
bitwise identical:

    InPlaceRows      rows are read and updated in the table. For tables in memory.
    PrefetchBuffer   rows are copied into slots when the first batch takes them, and written back when the last batch
                     releases them; a row that neighbouring batches share stays in its slot. For slower tiers: only
                     `take` and `release` touch the table, so one thread hides its latency.

Invariants:

- One thread calls `take` and `release`; `take` in the order of batches.
- A row is its weights and all of its optimizer state.
- `take` decides whether an id has a row, and the batch remembers it: a later batch may admit an id
  whose gradient in an earlier batch must still be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.id_index import make_index
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.row_store import RowStore
from nestpipe.embedding.table import Table
from nestpipe.ops.device_memory import upload


@dataclass(frozen=True, slots=True, eq=False)
class RowRefs:
    """References to the rows of one batch, or to some of them."""

    step: int  # of the batch
    ids: Tensor  # [K] of a whole batch: distinct, ascending in each bucket
    table_slots: Tensor  # [K] slot in the table, -1 for an id without a row
    slots: Tensor  # [K] slot in use: in the buffer, or the same tensor as table_slots
    rowless: Tensor  # [k] places of the ids without a row
    initial: Tensor  # [k, D] in place: the initial values of those

    def at(self, places: Tensor) -> RowRefs:
        """The refs at these places, in this order."""
        table_slots = self.table_slots.index_select(0, places)
        slots = table_slots if self.slots is self.table_slots else self.slots.index_select(0, places)
        rowless, initial = self.rowless, self.initial
        if len(rowless):
            rowless = (table_slots < 0).nonzero().flatten()
        if len(initial):
            initial = initial.index_select(0, torch.searchsorted(self.rowless, places.index_select(0, rowless)))
        return RowRefs(self.step, self.ids.index_select(0, places), table_slots, slots, rowless, initial)

    @property
    def row_slots(self) -> Tensor:
        """The slot [K] of each row, -1 for an id without one."""
        return self.slots.index_fill(0, self.rowless, -1) if len(self.rowless) else self.slots


class RowAccess(Protocol):
    """Rows of one table for batches in flight."""

    table: Table

    def take(self, ids: Tensor, step: int) -> RowRefs:
        """Admits a batch's distinct ids, ascending in each bucket, and holds their rows."""
        ...

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        """A copy of the weights [n, D], in `out` if given. Refs may be some of a batch's, and repeat."""
        ...

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        """One optimizer step per row; gradients of ids without a row are dropped. Refs may be some of a batch's."""
        ...

    def release(self, refs: RowRefs) -> None:
        """Ends the batch's hold on its rows."""
        ...


class InPlaceRows:
    """Rows are read and updated in the table."""

    def __init__(self, table: Table):
        self.table = table

    def take(self, ids: Tensor, step: int) -> RowRefs:
        table_slots = self.table.advance(ids, step)
        rowless = (table_slots < 0).nonzero().flatten()
        initial = self.table.initial(ids.index_select(0, rowless))
        return RowRefs(step, ids, table_slots, table_slots, rowless, initial)

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        return _gather_with_initial(self.table, partial(self.table.gather, batch=refs.step), refs, out)

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        self.table.update(refs.row_slots, grads, lr, batch=refs.step)

    def release(self, refs: RowRefs) -> None:
        self.table.finish(refs.step)


class BufferedRows:
    """Rows are read and updated in the row buffer of a table; only `take` touches what is below it."""

    def __init__(self, table: Table):
        assert table.buffer is not None
        self.table, self._buffer = table, table.buffer

    def take(self, ids: Tensor, step: int) -> RowRefs:
        table_slots = self.table.advance(ids, step)
        rowless = (table_slots < 0).nonzero().flatten()
        initial = self.table.initial(ids.index_select(0, rowless))
        return RowRefs(step, ids, table_slots, self._buffer.hold(table_slots), rowless, initial)

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        gather = partial(self.table.gather_from, self._buffer.rows, batch=refs.step)
        return _gather_with_initial(self.table, gather, refs, out)

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        self.table.step(self._buffer.rows, refs.slots, grads, lr, batch=refs.step)
        self._buffer.mark_dirty(refs.slots)

    def release(self, refs: RowRefs) -> None:
        self._buffer.release(refs.slots)
        self.table.finish(refs.step)


def rows_where_they_are(table: Table) -> RowAccess:
    """Rows in the table if it is in memory, otherwise in its buffer."""
    return InPlaceRows(table) if table.buffer is None else BufferedRows(table)


def _gather_with_initial(
    table: Table, gather: Callable[[Tensor, Tensor | None], Tensor], refs: RowRefs, out: Tensor | None
) -> Tensor:
    """A copy of the rows in slots, and the initial values of ids without one."""
    if not len(refs.rowless):
        return gather(refs.slots, out)
    rows = table.message_rows(len(refs.slots)) if out is None else out
    known = (refs.slots >= 0).nonzero().flatten()
    rows.index_copy_(0, upload(known, rows.device), gather(refs.slots.index_select(0, known), None))
    initial = upload(table.decayed(refs.initial, refs.step), rows.device)
    return rows.index_copy_(0, upload(refs.rowless, rows.device), initial)


class PrefetchBuffer:
    """Rows are copied into slots, reference-counted by batches."""

    def __init__(self, table: Table, *, native: bool | None = None):
        self.table = table
        self._index = make_index(native=native)
        self._columns = RowStore(table.read(torch.empty(0, dtype=torch.int64)))
        self._columns.pinned = True
        self._holders = RowStore({"holders": torch.empty(0, dtype=torch.int64)})

    def __len__(self) -> int:
        """Number of rows in the buffer."""
        return len(self._index)

    def take(self, ids: Tensor, step: int) -> RowRefs:
        table_slots = self.table.advance(ids, step)
        slots, fresh = self._index.find_or_add(ids)
        self._columns.grow(self._index.num_slots)
        self._holders.grow(self._index.num_slots)
        self._count(slots, 1)
        self._load(ids.index_select(0, fresh), table_slots.index_select(0, fresh), slots.index_select(0, fresh))
        rowless = (table_slots < 0).nonzero().flatten()
        return RowRefs(step, ids, table_slots, slots, rowless, self.table.empty_rows(0))

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        return self.table.gather_from(self._columns, refs.slots, out, batch=refs.step)

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        self.table.step(self._columns, refs.row_slots, grads, lr, batch=refs.step)

    def release(self, refs: RowRefs) -> None:
        holders = self._count(refs.slots, -1)
        unheld = (holders == 0).nonzero().flatten()
        dirty = (holders == 0).logical_and_(refs.table_slots >= 0).nonzero().flatten()
        self.table.write(refs.table_slots.index_select(0, dirty), self._read(refs.slots.index_select(0, dirty)))
        self._index.remove(refs.ids.index_select(0, unheld))
        self.table.finish(refs.step)

    def _load(self, ids: Tensor, table_slots: Tensor, slots: Tensor) -> None:
        known, unknown = ((table_slots >= 0).nonzero().flatten(), (table_slots < 0).nonzero().flatten())
        self._write(slots.index_select(0, known), self.table.read(table_slots.index_select(0, known)))
        self._write(slots.index_select(0, unknown), self.table.new_rows(ids.index_select(0, unknown)))

    def _count(self, slots: Tensor, change: int) -> Tensor:
        """Changes the reference count of each slot; returns the counts [n]."""
        holders = self._holders["holders"]
        counts = holders.index_select(0, slots).add_(change)
        holders.index_copy_(0, slots, counts)
        return counts

    def _read(self, slots: Tensor) -> dict[str, Tensor]:
        return {name: self._columns.gather(name, slots) for name in self._columns}

    def _write(self, slots: Tensor, rows: dict[str, Tensor]) -> None:
        for name, values in rows.items():
            self._columns.scatter(name, slots, values)
