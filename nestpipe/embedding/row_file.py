"""Rows in a file: a log of records, written in large appends and read one by one.

    record  = slot | row of every column        slot -> number of its newest record: 4 bytes of memory per slot
    segment = 4 MiB of records                  number of live records per segment

Writing a row at a place of its own costs 20 times as much as appending it to others, so a written row gets a new record
and its old one is dead. When more records are dead than live, the segments with the fewest live records are
copied to the end of the log and reused. So the file takes about twice the bytes of its rows.

Records are read by system calls, not through a mapping: one page fault maps up to 2 MiB of cached pages, so mapped
bytes could not be bounded.

The file has no name: it vanishes with the process, and no checkpoint depends on it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestpipe.embedding.row_ops import check_slots, gather_rows, row_bytes
from nestpipe.embedding.row_store import RowStore
from nestpipe.ops.native_library import Native, library

SEGMENT_BYTES = 4 << 20
_MAX_APPEND_BYTES = 2 << 20  # packed and written at a time
_DEAD_PER_LIVE = 1.0  # records; less needs less disk, but copies more
_HEADER_BYTES = 8  # the slot
_NONE = -1  # the record of a slot without one
_MAX_RECORDS = 2**31 - 1


class RowFile:
    """The rows of one table by slot, all columns together."""

    slot_bytes = 4

    def __init__(
        self,
        columns: Mapping[str, Tensor],
        folder: Path,
        *,
        append_bytes: int = _MAX_APPEND_BYTES,
        native: bool | None = None,
    ):
        """A file for rows with the type and shape of the given tensors' rows."""
        self._folder = folder
        self._file = _unnamed_file(folder)
        weakref.finalize(self, os.close, self._file)
        self._offsets, self._record_bytes = _layout(columns)
        self._functions = _functions() if native is None or native else None
        if self._functions is not None:
            self._reader = self._functions.create(self._file, self._record_bytes)
            if self._reader is None:
                raise MemoryError(f"no memory to read rows from {folder}")
            weakref.finalize(self, self._functions.destroy, self._reader)
        self._append_rows = max(min(append_bytes, _MAX_APPEND_BYTES) // self._record_bytes, 1)
        self._staging, self._copied = torch.empty(2, self._append_rows, self._record_bytes, dtype=torch.uint8)
        self._segment_rows = max(SEGMENT_BYTES // self._record_bytes, self._append_rows)
        self._records = RowStore({"record": torch.empty(0, dtype=torch.int32)})
        self._live = torch.empty(0, dtype=torch.int64)  # records per segment
        self._free: list[int] = []  # segments
        self.is_batched = True  # many reads in one system call, where that is possible
        self._end = self._open_end = 0  # the next record, and where its segment ends

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory, without those per slot."""
        return 2 * self._append_rows * self._record_bytes

    @property
    def num_live(self) -> int:
        """Number of slots with a record."""
        return int(self._live.sum())

    @property
    def num_dead(self) -> int:
        """Number of records that a newer one or `drop` has replaced."""
        num_written = (len(self._live) - len(self._free)) * self._segment_rows - (self._open_end - self._end)
        return num_written - self.num_live

    @property
    def file_bytes(self) -> int:
        """Bytes of all segments."""
        return len(self._live) * self._segment_rows * self._record_bytes

    def grow(self, num_slots: int) -> None:
        """Extends the slots."""
        before = len(self._records["record"])
        self._records.grow(num_slots)
        self._records["record"][before:] = _NONE

    def has(self, slots: Tensor) -> Tensor:
        """Whether each slot [n] has a record."""
        return gather_rows(self._records["record"], slots) >= 0

    def read(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Copies the rows of slots to distinct places of columns, all or some. Raises KeyError for a slot without a row."""
        records = gather_rows(self._records["record"], slots).long()
        missing = (records < 0).nonzero().flatten()
        if len(missing):
            raise KeyError(
                f"slot {int(slots[missing[0]])} has no row in {self._folder}; it was not written, or dropped"
            )
        if not len(slots):
            return
        if self._functions is None or not all(column.is_contiguous() for column in columns.values()):
            self._read_each(slots, columns, places, records)
            return
        rows, keep = self._rows(slots, columns, places)
        error = c_int64()
        done = self._functions.read(self._reader, byref(rows), records.data_ptr(), self.is_batched, byref(error))
        if done < len(slots):
            raise _unreadable(self._folder, int(slots[done]), error.value)
        del keep

    def write(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Appends the rows at places of all columns as the rows of distinct slots. Raises OSError if the disk is full."""
        begin = 0
        while begin < len(slots):
            size = min(self._append_rows, len(slots) - begin, self._room())
            own = slice(begin, begin + size)
            self._pack(slots[own], columns, places[own])
            self._append(slots[own], self._staging[:size])
            begin += size
        self._compact()

    def drop(self, slots: Tensor) -> None:
        """Forgets the rows of distinct slots; those without one are ignored."""
        self._assign(slots, _NONE)

    def _room(self) -> int:
        """Records that fit into the open segment; opens one if it is full."""
        if self._end == self._open_end:
            if self._free:
                segment = self._free.pop()
            else:
                segment = len(self._live)
                if (segment + 1) * self._segment_rows > _MAX_RECORDS:
                    raise OSError(f"a file of rows holds at most {_MAX_RECORDS:,} records; use more ranks")
                self._live = torch.cat([self._live, torch.zeros(1, dtype=torch.int64)])
            self._end = segment * self._segment_rows
            self._open_end = self._end + self._segment_rows
        return self._open_end - self._end

    def _append(self, slots: Tensor, packed: Tensor) -> None:
        """Writes packed records to the open segment, which has room for them, as the newest of their slots."""
        self._write_bytes(packed)
        self._assign(slots, self._end)
        self._end += len(slots)

    def _write_bytes(self, packed: Tensor) -> None:
        data, offset = _memory(packed), self._end * self._record_bytes
        try:
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._folder} has no space for {len(data):,} bytes more of rows after {self.file_bytes:,} "
                f"({error.strerror}); free some, or set embedding.files_folder to another disk",
            ) from error

    def _compact(self) -> None:
        """Copies live records to the end of the log until few enough records are dead."""
        while self.num_dead > max(_DEAD_PER_LIVE * self.num_live, self._segment_rows):
            live = self._live.clone()
            live[self._free] = self._segment_rows
            if self._end < self._open_end:
                live[self._end // self._segment_rows] = self._segment_rows
            self._free_segment(int(live.argmin()))

    def _free_segment(self, segment: int) -> None:
        """Copies the live records of a full segment to the end of the log."""
        first = segment * self._segment_rows
        for begin in range(first, first + self._segment_rows, self._append_rows):
            if not int(self._live[segment]):
                break
            records = torch.arange(begin, min(begin + self._append_rows, first + self._segment_rows))
            packed = self._read_records(records, self._copied)
            slots = _part(packed, 0, _HEADER_BYTES).view(torch.int64).flatten()
            live = (self._records["record"].index_select(0, slots) == records).nonzero().flatten()
            for own in _chunks(live, self._room):
                self._append(slots.index_select(0, own), gather_rows(packed, own, self._staging[: len(own)]))
        self._free.append(segment)

    def _read_records(self, records: Tensor, out: Tensor) -> Tensor:
        """Consecutive records, packed, in `out`."""
        packed = out[: len(records)]
        data, offset = _memory(packed), int(records[0]) * self._record_bytes
        while data:
            size = os.preadv(self._file, [data], offset)
            if not size:
                raise _unreadable(self._folder, _NONE, 0)
            data, offset = data[size:], offset + size
        return packed

    def _assign(self, slots: Tensor, first: int) -> None:
        """Makes records `first`, `first` + 1, … the newest of distinct slots; none at all if `first` is negative."""
        records = self._records["record"]
        if self._functions is not None:
            slots = slots.contiguous()
            call = (records.data_ptr(), len(records), slots.data_ptr(), len(slots), first)
            check_slots(self._functions.assign(*call, self._live.data_ptr(), self._segment_rows), slots, len(records))
            return
        before = records.index_select(0, slots)
        new = (
            torch.arange(first, first + len(slots), dtype=torch.int32) if first >= 0 else torch.full_like(before, _NONE)
        )
        records.index_copy_(0, slots, new)
        for own, change in ((before, -1), (new, 1)):
            segments = own[own >= 0].div(self._segment_rows, rounding_mode="floor")
            self._live += change * torch.bincount(segments, minlength=len(self._live))

    def _pack(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Packs rows into the staging buffer."""
        if self._functions is not None:
            rows, keep = self._rows(slots, columns, places)
            done = self._functions.pack(byref(rows), self._staging.data_ptr())
            if done < len(slots):
                raise IndexError(f"place {int(places[done])} is not among the rows of the buffer")
            del keep
            return
        packed = self._staging[: len(slots)]
        packed[:, :_HEADER_BYTES] = slots.contiguous().view(torch.uint8).view(-1, _HEADER_BYTES)
        for name, offset in self._offsets.items():
            own = _bytes_of(columns[name].index_select(0, places))
            packed[:, offset : offset + own.shape[1]] = own

    def _read_each(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor, records: Tensor) -> None:
        """`read` without native code."""
        packed = torch.empty(len(records), self._record_bytes, dtype=torch.uint8)
        for i in range(len(records)):
            self._read_records(records[i : i + 1], packed[i : i + 1])
        found = _part(packed, 0, _HEADER_BYTES).view(torch.int64).flatten()
        wrong = (found != slots).nonzero().flatten()
        if len(wrong):
            raise _unreadable(self._folder, int(slots[wrong[0]]), -1)
        for name, column in columns.items():
            offset = self._offsets[name]
            own = _part(packed, offset, row_bytes(column))
            column.index_copy_(0, places, own.view(column.dtype).view(len(slots), *column.shape[1:]))

    def _rows(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> tuple[_RecordRows, Any]:
        """Arguments of native functions, and what must live as long as they do."""
        slots, places = slots.contiguous(), places.contiguous()
        each = (_RecordColumn * len(columns))(
            *(
                _RecordColumn(column.data_ptr(), row_bytes(column), self._offsets[name])
                for name, column in columns.items()
            )
        )
        num_rows = min((len(column) for column in columns.values()), default=0)
        sizes = (slots.data_ptr(), len(slots), self._record_bytes)
        return _RecordRows(each, len(columns), num_rows, places.data_ptr(), *sizes), (each, slots, places)


def _chunks(places: Tensor, room: Any) -> Iterator[Tensor]:
    """Places in chunks of at most room() each."""
    begin = 0
    while begin < len(places):
        size = min(room(), len(places) - begin)
        yield places[begin : begin + size]
        begin += size


def _layout(columns: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
    """The offset of each column in a record, and the bytes of a record."""
    offsets, end = {}, _HEADER_BYTES
    for name, column in columns.items():
        offsets[name] = end
        end += row_bytes(column)
    return offsets, end


def _memory(packed: Tensor) -> memoryview:
    """The bytes of contiguous records."""
    return packed.numpy().reshape(-1).data


def _part(packed: Tensor, offset: int, num_bytes: int) -> Tensor:
    """A copy [n, num_bytes] of a part of each record, aligned for any type."""
    return packed.new_empty(len(packed), num_bytes).copy_(packed[:, offset : offset + num_bytes])


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.contiguous().view(len(rows), -1).view(torch.uint8)


def _unreadable(folder: Path, slot: int, error: int) -> OSError:
    reasons = {0: "the file ends before it", -1: "its record belongs to another slot", -2: "there is no place for it"}
    return OSError(
        max(error, 0), f"cannot read the row of slot {slot} from {folder}: {reasons.get(error) or os.strerror(error)}"
    )


def _unnamed_file(folder: Path) -> int:
    """The descriptor of a new file without a name; it vanishes with its last descriptor."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


class _RecordColumn(Structure):
    """nestpipe_record_column of records.cpp."""

    _fields_ = (("rows", c_void_p), ("row_bytes", c_int64), ("offset", c_int64))


class _RecordRows(Structure):
    """nestpipe_record_rows of records.cpp."""

    _fields_ = (
        ("columns", POINTER(_RecordColumn)),
        ("num_columns", c_int64),
        ("num_rows", c_int64),
        ("places", c_void_p),
        ("slots", c_void_p),
        ("n", c_int64),
        ("record_bytes", c_int64),
    )


class _RecordFunctions:
    """The functions of records.cpp."""

    def __init__(self, native: Native):
        rows = POINTER(_RecordRows)
        self.pack = native.function("nestpipe_records_pack", c_int64, rows, c_void_p)
        numbers = (c_void_p, c_int64) * 2 + (c_int64, c_void_p, c_int64)
        self.assign = native.function("nestpipe_records_assign", c_int64, *numbers)
        self.create = native.function("nestpipe_reader_create", c_void_p, c_int32, c_int64)
        self.destroy = native.function("nestpipe_reader_destroy", None, c_void_p)
        self.read = native.function(
            "nestpipe_records_read", c_int64, c_void_p, rows, c_void_p, c_int64, POINTER(c_int64)
        )


@cache
def _functions() -> _RecordFunctions | None:
    native = library()
    return _RecordFunctions(native) if native else None
