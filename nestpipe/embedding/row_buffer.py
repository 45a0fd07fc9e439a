"""Row buffer: the rows in use and recently used, in bounded memory over a slower store that has all rows.

    slot -> position -> row, dirty bit                        position_clock.py says which slot has which position
      │ none                ▲ read      │ written back if dirty, when the position is taken for another row
      └──────────▶ slower store: a file (row_file.py)

Rules of retention:

- A row that a batch in flight holds keeps its position. Other rows stay until their position is
  needed; rows used more often stay longer.
- A row that was changed is dirty. It is written back before its position is reused, together with
  others. Until then the slower store has an old row or none, so every reader asks the buffer first.
- A slot that is dropped, because its id was evicted from the table, leaves the buffer without being
  written back.
- A slot of -1, an id without a row, is never in the buffer.
- Reading without holding (evaluation, checkpoints) retains nothing, so it does not push out the
  rows of training.
- Memory never exceeds the bound. Rows, bookkeeping and the memory of the slower store count. A batch
  that does not fit is refused.

Which rows are retained changes no results.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.device_rows import DeviceColumns
from nestpipe.embedding.position_clock import PositionClock
from nestpipe.embedding.row_ops import row_bytes, scatter_rows
from nestpipe.embedding.row_store import RowStore
from nestpipe.errors import TrainError

_NONE = -1
_WRITE_ROWS = 1 << 16  # written through the buffer at a time
_HUGE_PAGE = 2 << 20
_LARGE_BYTES = 64 << 20  # a buffer of this size has room for the last huge page of each column


class SlowerStore(Protocol):
    """Rows by slot, all columns together, in something larger and slower than memory."""

    slot_bytes: int
    """Bytes of memory per slot."""

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory, without those per slot."""
        ...

    def grow(self, num_slots: int) -> None:
        """Extends the slots; new ones have no row."""
        ...

    def read(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Copies the rows of slots to distinct places of columns, all or some. Raises KeyError for a slot without a row."""
        ...

    def write(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Overwrites the rows of distinct slots by those at places of all columns."""
        ...

    def exchange(self, leaving: Tensor, arriving: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Like `write` of the rows at distinct places to the slots `leaving` [n], but for those of -1, and then `read` of
        the slots `arriving` [n] to these places. No slot leaves and arrives."""
        ...

    def drop(self, slots: Tensor) -> None:
        """Forgets the rows of distinct slots; those without one are ignored."""
        ...


class RowBuffer:
    """Rows of one table by slot. Any thread may call; rows at held positions are used without a lock."""

    def __init__(
        self,
        name: str,
        columns: Mapping[str, Tensor],
        below: SlowerStore,
        num_bytes: int,
        *,
        native: bool | None = None,
        on_device: DeviceColumns | None = None,
    ):
        """An empty buffer of at most `num_bytes` for rows with the type and shape of the given tensors' rows.

        With `on_device` its rows are there, as many as fit; what is decided about them stays in host memory.
        """
        self._name, self._below, self._num_bytes = name, below, num_bytes
        self._lock = threading.RLock()
        self._is_large = num_bytes >= _LARGE_BYTES
        huge_bytes = 0 if self._is_large else num_bytes + 1  # from the first row on, or never
        self._on_device = on_device
        self.rows: RowStore | DeviceColumns = (  # by position
            RowStore(columns, huge_bytes=huge_bytes) if on_device is None else on_device
        )
        self._dirty = RowStore({"dirty": torch.empty(0, dtype=torch.bool)})  # by position
        self.rows.pinned = self._dirty.pinned = True
        self._clock = PositionClock(huge_bytes=huge_bytes, native=native)
        self._row_bytes = sum(map(row_bytes, columns.values())) + 1 + self._clock.position_bytes
        self._slot_bytes = self._clock.slot_bytes + below.slot_bytes
        self._capacity = self._planned_slots = 0
        self.most_held = 0  # rows at once, by batches in flight
        self._is_moving = False  # rows are between buffer and store; stays so if that fails

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    @property
    def slots(self) -> Tensor:
        """The slots of all rows in the buffer."""
        return self._clock.slots

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in use; never more than the bound."""
        return self._fixed_bytes + len(self.rows) * self._row_bytes + self._clock.num_slots * self._slot_bytes

    @property
    def _fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of rows: those of the store below, and the last page of each column."""
        num_columns = len(self.rows.columns) + 6
        return self._below.memory_bytes + num_columns * (_HUGE_PAGE if self._is_large else mmap.PAGESIZE)

    def grow(self, num_slots: int) -> None:
        """Extends the slots; new ones have no row. Their bytes are taken from the rows in the buffer."""
        with self._lock:
            if num_slots <= self._clock.num_slots:
                return
            if self._on_device is not None:
                self._capacity = self._on_device.capacity
                self._clock.grow(num_slots)
                self._below.grow(num_slots)
                return
            if num_slots > self._planned_slots:
                self._planned_slots = num_slots + num_slots // 16 + 1024
                self._capacity = self._rows_beside(self._planned_slots)
            self._trim()
            if self.memory_bytes + (num_slots - self._clock.num_slots) * self._slot_bytes > self._num_bytes:
                raise self._too_small(len(self.rows))  # batches in flight hold the last positions
            self._clock.grow(num_slots)
            self._below.grow(num_slots)

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self._capacity if self._on_device is None else self._on_device.capacity

    def resize_on_device(self, num_rows: int) -> None:
        """Makes room for so many rows on the device; no batch is in flight. All rows are then in the store below."""
        assert self._on_device is not None
        with self._lock:
            if self._clock.num_held:
                raise RuntimeError(
                    f"table '{self._name}' is resized while {self._clock.num_held:,} of its rows are held"
                )
            self._capacity = 0
            self._trim()
            self._on_device.resize(num_rows)
            self._capacity = num_rows

    def hold(self, slots: Tensor) -> Tensor:
        """Brings the rows of distinct slots into the buffer until `release`; returns their positions, -1 for slots of -1."""
        with self._lock:
            known = None if not len(slots) or int(slots.min()) >= 0 else (slots >= 0).nonzero().flatten()
            positions = self._hold(slots if known is None else slots.index_select(0, known))
            self.most_held = max(self.most_held, self._clock.num_held)
            return positions if known is None else torch.full_like(slots, _NONE).index_copy_(0, known, positions)

    def mark_dirty(self, positions: Tensor) -> None:
        """Tells that the rows at held positions were changed; positions of -1 are skipped."""
        if len(positions) and int(positions.min()) < 0:
            positions = positions[positions >= 0]
        self._dirty["dirty"].index_fill_(0, positions, True)

    def release(self, positions: Tensor) -> None:
        """Ends a hold; rows stay in the buffer until others need their room."""
        with self._lock:
            self._clock.release(positions)

    def gather(self, name: str, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of the rows [n, ...] of a column; in `out` if given. Retains nothing."""
        column = self.rows[name]
        out = torch.empty(len(slots), *column.shape[1:], dtype=column.dtype) if out is None else out
        self._copy_rows(slots, {name: out})
        return out

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """A copy of the rows of all columns. Retains nothing."""
        columns = self.rows.columns.items()
        out = {name: torch.empty(len(slots), *one.shape[1:], dtype=one.dtype) for name, one in columns}
        self._copy_rows(slots, out)
        return out

    def write(self, slots: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Overwrites rows of the given columns at distinct slots."""
        begin, is_whole = 0, all(name in rows for name in self.rows)
        while begin < len(slots):
            with self._lock:
                size = min(len(slots) - begin, _WRITE_ROWS, max(self._capacity - self._clock.num_held, 1))
                own = slice(begin, begin + size)
                positions = self._hold(slots[own], is_read=not is_whole)
                self.rows.write(positions, {name: values[own] for name, values in rows.items()})
                self.mark_dirty(positions)
                self.release(positions)
            begin += size

    def drop(self, slots: Tensor) -> None:
        """Forgets the rows of distinct slots; dirty ones are not written back."""
        if not len(slots):
            return
        with self._lock:
            positions = self._clock.find(slots)
            positions = positions[positions >= 0]
            held = positions[self._clock.is_held(positions)]
            if len(held):
                slot = int(self._clock.slots_at(held[:1]))
                raise RuntimeError(
                    f"slot {slot} of table '{self._name}' is dropped while a batch in flight holds its row"
                )
            self._clock.unlink(slots, positions)
            self._clock.forget(slots)
            self._dirty["dirty"].index_fill_(0, positions, False)
            self._below.drop(slots)

    def _copy_rows(self, slots: Tensor, out: Mapping[str, Tensor]) -> None:
        with self._lock:
            self._check_whole()
            positions = self._clock.find(slots)
            missing = (positions < 0).nonzero().flatten()
            if not len(missing):
                for name, rows in out.items():
                    self.rows.gather(name, positions, rows)
                return
            found = (positions >= 0).nonzero().flatten()
            for name, rows in out.items() if len(found) else ():
                scatter_rows(rows, found, self.rows.gather(name, positions.index_select(0, found)))
            self._below.read(slots.index_select(0, missing), out, missing)

    def _hold(self, slots: Tensor, *, is_read: bool = True) -> Tensor:
        self._check_whole()
        positions, missing = self._clock.hold(slots)
        if (needed := self._clock.num_held + len(missing)) > self._capacity:
            self._clock.release(positions)
            raise self._too_small(needed)
        if len(missing):
            new = slots.index_select(0, missing)
            free = self._free_positions(len(missing))
            self._is_moving = True
            leaving = self._leave(free)
            if is_read:
                self._below.exchange(leaving, new, self.rows.columns, free)
            else:
                self._write_back(leaving, free)
            self._clock.link(new, free)
            self._is_moving = False
            positions.index_copy_(0, missing, free)
        return positions

    def _free_positions(self, num_rows: int) -> Tensor:
        """So many positions, held; those that are not new may have a row."""
        begin = len(self.rows)
        end = max(min(begin + num_rows, self._capacity), begin)
        self.rows.grow(end)
        self._dirty.grow(end)
        fresh = self._clock.add(end - begin)
        if len(fresh) == num_rows:
            return fresh
        return torch.cat([fresh, self._clock.take(num_rows - len(fresh), min(begin, self._capacity))])

    def _evict(self, positions: Tensor) -> None:
        """Removes the rows at positions, writing dirty ones back."""
        self._is_moving = True
        self._write_back(self._leave(positions), positions)
        self._is_moving = False

    def _leave(self, positions: Tensor) -> Tensor:
        """Takes positions from their slots; returns the slots [n] of dirty rows, which must be written back, else -1."""
        slots = self._clock.slots_at(positions)
        leaving = slots.where(self._dirty["dirty"].index_select(0, positions), _NONE)
        self._dirty["dirty"].index_fill_(0, positions, False)
        self._clock.unlink(slots[slots >= 0], positions)
        return leaving

    def _write_back(self, leaving: Tensor, positions: Tensor) -> None:
        dirty = (leaving >= 0).nonzero().flatten()
        self._below.write(leaving.index_select(0, dirty), self.rows.columns, positions.index_select(0, dirty))

    def _check_whole(self) -> None:
        if self._is_moving:
            raise TrainError(
                f"rows of table '{self._name}' were lost when they could not be moved between its buffer and its file, as "
                "the first error says. Nothing is read from it any more; resume from the last checkpoint."
            )

    def _rows_beside(self, num_slots: int) -> int:
        """Rows that fit into the bound beside so many slots."""
        fixed_bytes = self._fixed_bytes + num_slots * self._slot_bytes
        if fixed_bytes + self._row_bytes > self._num_bytes:
            raise TrainError(
                f"the index of {num_slots:,} rows of table '{self._name}' takes {fixed_bytes:,} bytes, which leaves no room for "
                f"a row in its buffer of {self._num_bytes:,} bytes. Set --embedding.buffer-bytes to a tenth of "
                f"the table's {num_slots * self._row_bytes:,} bytes, or more."
            )
        return (self._num_bytes - fixed_bytes) // self._row_bytes

    def _too_small(self, needed: int) -> TrainError:
        if self._on_device is not None:
            each = sum(map(row_bytes, self.rows.columns.values()))
            return TrainError(
                f"the batches in flight use {needed:,} rows of table '{self._name}' at once, {needed * each:,} bytes, but there is "
                f"room for {self._capacity:,} on the device, {self._capacity * each:,} bytes. Set --embedding.device-bytes "
                f"{needed * each} or more, or use a smaller --data.batch-size."
            )
        least = self._num_bytes + (needed - self._capacity) * self._row_bytes
        return TrainError(
            f"the batches in flight use {needed:,} rows of table '{self._name}' at once, but its buffer of "
            f"{self._num_bytes:,} bytes has room for {self._capacity:,}. Set --embedding.buffer-bytes {least} or more, "
            "or use a smaller --data.batch-size."
        )

    def _trim(self) -> None:
        """Returns the memory of positions above the capacity, as far as no batch holds one."""
        if len(self.rows) <= self._capacity:
            return
        tail = torch.arange(self._capacity, len(self.rows))
        is_held = self._clock.is_held(tail)
        self._evict(tail[~is_held])
        end = int(tail[is_held].max()) + 1 if bool(is_held.any()) else self._capacity
        self.rows.shrink(end)
        self._dirty.shrink(end)
        self._clock.shrink(end)
