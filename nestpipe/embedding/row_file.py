"""Rows in a file: a log of records, written in large appends and read one by one.

    record  = slot | row of every column        slot -> number of its newest record: 4 bytes of memory per slot
    segment = 4 MiB of records                  number of live records per segment

Writing a row at a place of its own costs 20 times as much as appending it to others, so a written row gets a new record
and its old one is dead. When more records are dead than live, the segments with the fewest live records are
copied to the end of the log and reused. So the file takes about twice the bytes of its rows.

Records that the system caches are copied from a mapping of the file, which costs a seventh of a read. The system owns
these pages, mapped or not, and takes them back when memory is needed; then records are read by system calls.
Process monitors show them as shared memory (RssFile), not as memory of the process (RssAnon).

The file has no name: it vanishes with the process, and no checkpoint depends on it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_int64
from pathlib import Path

import torch
from torch import Tensor

from nestpipe.embedding.record_kernels import record_kernels, record_rows
from nestpipe.embedding.row_ops import check_slots, gather_rows, row_bytes
from nestpipe.embedding.row_store import RowStore

SEGMENT_BYTES = 4 << 20
_MAX_APPEND_BYTES = 2 << 20  # packed and written at a time
_DEAD_PER_LIVE = 1.0  # records; less needs less disk, but copies more
_HEADER_BYTES = 8  # the slot
_ZEROS = bytes(1 << 16)
_MAX_PARTS = 512  # written in one call
_NONE = -1  # the record of a slot without one
_MAX_RECORDS = 2**31 - 1
EACH, RING, MAPPED = range(3)  # ways to read, as in records.cpp
_REASONS = {0: "the file ends before it", -1: "its record belongs to another slot", -2: "there is no place for it"}


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
        self._append_rows = max(min(append_bytes, _MAX_APPEND_BYTES) // self._record_bytes, 1)
        self._staging = torch.empty(self._append_rows, self._record_bytes, dtype=torch.uint8)
        self._segment_bytes = max(SEGMENT_BYTES, self._append_rows * self._record_bytes)
        self._segment_rows = self._segment_bytes // self._record_bytes
        self._functions = record_kernels() if native is None or native else None
        if self._functions is not None:
            layout = self._record_bytes, self._segment_rows, self._segment_bytes
            self._reader = self._functions.create(self._file, *layout)
            if self._reader is None:
                raise MemoryError(f"no memory to read rows from {folder}")
            weakref.finalize(self, self._functions.destroy, self._reader)
        self._records = RowStore({"record": torch.empty(0, dtype=torch.int32)})
        self._live = torch.empty(0, dtype=torch.int64)  # records per segment
        self._free: list[int] = []  # segments
        self.how = MAPPED  # the fastest way to read that is used, where it is possible
        self._end = self._open_end = 0  # the next record, and where its segment ends

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory, without those per slot."""
        return self._staging.nbytes * (2 if self._functions is None else 1)  # torch copies before it packs

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
        return len(self._live) * self._segment_bytes

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
        records = self._newest(slots)
        if not len(slots):
            return
        if self._functions is None or not all(column.is_contiguous() for column in columns.values()):
            self._read_each(slots, columns, places, records)
            return
        rows, keep = record_rows(slots, columns, places, self._offsets, self._record_bytes)
        error = c_int64()
        done = self._functions.read(self._reader, byref(rows), records.data_ptr(), self.how, byref(error))
        if done < len(slots):
            raise self._unreadable(int(slots[done]), error.value)
        del keep

    def write(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Appends the rows at places of all columns as the rows of distinct slots. Raises OSError if the disk is full."""
        begin = 0
        while begin < len(slots):
            own = slice(begin, begin + self._append_rows)
            self._pack(slots[own], columns, places[own])
            self._append(slots[own])
            begin += self._append_rows
        self._compact()

    def exchange(self, leaving: Tensor, arriving: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Writes the rows at distinct places as those of `leaving` [n], then reads the rows of `arriving` [n] to them.

        A slot of -1 in `leaving` is not written. No slot leaves and arrives.
        """
        if self._functions is None:
            dirty = (leaving >= 0).nonzero().flatten()
            self.write(leaving.index_select(0, dirty), columns, places.index_select(0, dirty))
            self.read(arriving, columns, places)
            return
        for begin in range(0, len(arriving), self._append_rows):
            own = slice(begin, begin + self._append_rows)
            slots, left = arriving[own], leaving[own].contiguous()
            records, error = self._newest(slots), c_int64()
            rows, keep = record_rows(slots, columns, places[own], self._offsets, self._record_bytes)
            memory = records.data_ptr(), left.data_ptr(), self._staging.data_ptr()
            done = self._functions.exchange(self._reader, byref(rows), *memory, self.how, byref(error))
            if done < len(slots):
                raise self._unreadable(int(slots[done]), error.value)
            del keep
            self._append(left[left >= 0])
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
                self._fill(segment)
                self._live = torch.cat([self._live, torch.zeros(1, dtype=torch.int64)])
            self._end = segment * self._segment_rows
            self._open_end = self._end + self._segment_rows
        return self._open_end - self._end

    def _append(self, slots: Tensor) -> None:
        """Writes the packed records of slots [n] to the end of the log, as the newest of their slots."""
        begin = 0
        while begin < len(slots):
            end = min(len(slots), begin + self._room())
            self._write_bytes(self._staging[begin:end])
            self._assign(slots[begin:end], self._end)
            self._end += end - begin
            begin = end

    def _fill(self, segment: int) -> None:
        """Writes zeros to a new segment: the system caches what is written at once in huge pages, a third faster to read."""
        begin, end = segment * self._segment_bytes, (segment + 1) * self._segment_bytes
        while begin < end:
            num_whole, rest = divmod(end - begin, len(_ZEROS))
            parts = [_ZEROS] * min(num_whole, _MAX_PARTS) or [_ZEROS[:rest]]
            with self._disk_errors(end - begin):
                begin += os.pwritev(self._file, parts, begin)

    def _write_bytes(self, packed: Tensor) -> None:
        data, offset = _memory(packed), self._offset(self._end)
        while data:
            with self._disk_errors(len(data)):
                written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written

    @contextmanager
    def _disk_errors(self, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._folder} has no space for {num_bytes:,} bytes more of rows after {self.file_bytes:,} "
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
        end = (segment + 1) * self._segment_rows
        for first in range(end - self._segment_rows, end, self._append_rows):
            if not int(self._live[segment]):
                break
            self._append(self._pack_live(first, min(self._append_rows, end - first)))
        self._free.append(segment)

    def _pack_live(self, first: int, number: int) -> Tensor:
        """Packs those of consecutive records that are the newest of their slots into the staging buffer; returns these."""
        newest = self._records["record"]
        if self._functions is not None:
            live, error = torch.empty(number, dtype=torch.int64), c_int64()
            memory = newest.data_ptr(), len(newest), self._staging.data_ptr(), live.data_ptr()
            num_live = self._functions.live(self._reader, first, number, *memory, self.how, byref(error))
            if num_live < 0:
                raise self._unreadable(_NONE, error.value)
            return live[:num_live]
        packed = self._read_records(first, self._staging[:number])
        slots = _part(packed, 0, _HEADER_BYTES).view(torch.int64).flatten()
        places = (newest.index_select(0, slots) == torch.arange(first, first + number)).nonzero().flatten()
        packed[: len(places)] = packed.index_select(0, places)
        return slots.index_select(0, places)

    def _read_records(self, first: int, packed: Tensor) -> Tensor:
        """Reads consecutive records of a segment into `packed`."""
        data, offset = _memory(packed), self._offset(first)
        while data:
            size = os.preadv(self._file, [data], offset)
            if not size:
                raise self._unreadable(_NONE, 0)
            data, offset = data[size:], offset + size
        return packed

    def _offset(self, record: int) -> int:
        """Where a record starts in the file."""
        segment, row = divmod(record, self._segment_rows)
        return segment * self._segment_bytes + row * self._record_bytes

    def _newest(self, slots: Tensor) -> Tensor:
        """The newest record [n] of each slot. Raises KeyError for a slot without one."""
        records = gather_rows(self._records["record"], slots).long()
        if len(slots) and int(records.min()) < 0:
            slot = int(slots[int(records.argmin())])
            raise KeyError(f"slot {slot} has no row in {self._folder}; it was not written, or dropped")
        return records

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
            rows, keep = record_rows(slots, columns, places, self._offsets, self._record_bytes)
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
            self._read_records(int(records[i]), packed[i : i + 1])
        found = _part(packed, 0, _HEADER_BYTES).view(torch.int64).flatten()
        wrong = (found != slots).nonzero().flatten()
        if len(wrong):
            raise self._unreadable(int(slots[wrong[0]]), -1)
        for name, column in columns.items():
            offset = self._offsets[name]
            own = _part(packed, offset, row_bytes(column))
            column.index_copy_(0, places, own.view(column.dtype).view(len(slots), *column.shape[1:]))

    def _unreadable(self, slot: int, error: int) -> OSError:
        reason = _REASONS.get(error) or os.strerror(error)
        return OSError(max(error, 0), f"cannot read the row of slot {slot} from {self._folder}: {reason}")


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


def _unnamed_file(folder: Path) -> int:
    """The descriptor of a new file without a name; it vanishes with its last descriptor."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
