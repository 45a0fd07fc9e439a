"""Row storage: columns that grow without moving, in memory or in files.

Each column reserves as much address space as the machine could ever fill; memory or disk is used
only as rows are added. So growing copies nothing, and concurrent readers keep valid addresses. A
column is one tensor: locating a row is one addition, however large the table is.

In the `mmap` tier a column is a mapped, unnamed file. It vanishes with the process, and no
checkpoint depends on it. Disk space is allocated before it is written, so a full disk raises
OSError instead of SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nestpipe.embedding.row_ops import gather_rows, scatter_rows
from nestpipe.errors import TrainError

# MAP_NORESERVE, which Python 3.11 does not export: only written pages use memory.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MOST_BYTES = 256 << 30  # of address space per column, so that hundreds of columns fit into 47 bits
_ALLOCATE_BYTES = 64 << 20  # step in which disk space is allocated
_HUGE_BYTES = 64 << 20  # columns of this size use huge pages, or TLB misses cost as much as reading a row


@dataclass(frozen=True, slots=True)
class RowFiles:
    """The folder of the `mmap` tier, and its budget of mapped memory per table."""

    folder: Path
    memory_bytes: int


class RowStore:
    """Columns of equal length, by name. New rows are zero."""

    def __init__(self, columns: Mapping[str, Tensor], files: RowFiles | None = None):
        """Columns with the type and row shape of the given empty tensors."""
        self._files = files
        self._columns = dict(columns)
        self._regions: dict[str, _Region] = {}
        self._num_rows = 0
        self._touched_bytes = 0
        self.pinned = False  # other threads use the columns, so growing must not move them

    def __getitem__(self, name: str) -> Tensor:
        """A column [num_rows, ...], to be read and written in place."""
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @property
    def in_memory(self) -> bool:
        """Whether columns may be used directly; in files only `gather` and `scatter` respect the memory budget."""
        return self._files is None

    def gather(self, name: str, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of the rows [n, ...] of a column; in `out` if given."""
        column = self._columns[name]
        if self._files is None:
            return gather_rows(column, slots, out)
        rows = column.new_empty(len(slots), *column.shape[1:]) if out is None else out
        for target, chunk in zip(rows.split(self._chunk_rows), slots.split(self._chunk_rows), strict=True):
            torch.index_select(column, 0, chunk, out=target)
            self._touch(column, len(chunk))
        return rows

    def scatter(self, name: str, slots: Tensor, rows: Tensor) -> None:
        """Overwrites rows of a column."""
        column = self._columns[name]
        if self._files is None:
            scatter_rows(column, slots, rows)
            return
        for chunk, values in zip(slots.split(self._chunk_rows), rows.split(self._chunk_rows), strict=True):
            column.index_copy_(0, chunk, values)
            self._touch(column, len(chunk))

    def grow(self, num_rows: int) -> None:
        """Extends all columns to so many rows."""
        if num_rows <= self._num_rows:
            return
        for name, column in self._columns.items():
            region = self._regions.get(name)
            if region is None or num_rows > len(region.rows):
                if self.pinned and self._num_rows:
                    raise TrainError(
                        f"{num_rows:,} rows do not fit into the address space of {self._num_rows:,}, and rows cannot move while other "
                        "streams use them. Raise the limit (ulimit -v), or use --pipeline.mode sequential with "
                        "--pipeline.rows table."
                    )
                region = self._regions[name] = _Region(column, 2 * num_rows, self._files)
                region.rows[: self._num_rows] = column
            region.allocate(num_rows)
            self._columns[name] = region.rows[:num_rows]
        self._num_rows = num_rows

    @property
    def _chunk_rows(self) -> int:
        """Rows per chunk: an eighth of the memory budget at one page per row."""
        return max((self._files.memory_bytes if self._files else 0) // (8 * mmap.PAGESIZE), 1)

    def _touch(self, column: Tensor, num_rows: int) -> None:
        """Adds an upper bound of the mapped bytes, and unmaps everything at half of the budget."""
        self._touched_bytes += num_rows * (_row_bytes(column) + mmap.PAGESIZE)
        if self._files and self._touched_bytes > self._files.memory_bytes // 2:
            for region in self._regions.values():
                region.unmap()
            self._touched_bytes = 0


class _Region:
    """Address space for the rows of one column."""

    def __init__(self, like: Tensor, num_rows: int, files: RowFiles | None):
        """As many zero rows as the machine could hold; `num_rows` in ordinary memory where the system refuses that."""
        self._row_bytes = _row_bytes(like)
        self._space: mmap.mmap | None = None
        self._file = _unnamed_file(files.folder) if files else None
        self._folder = files.folder if files else None
        self._allocated_bytes = 0
        self._has_huge_pages = False
        num_bytes = max(_available_bytes(files) // self._row_bytes, num_rows) * self._row_bytes
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)
            os.truncate(self._file, num_bytes)
            self._space = mmap.mmap(self._file, num_bytes)
            if hasattr(mmap, "MADV_RANDOM"):
                self._space.madvise(mmap.MADV_RANDOM)
        else:
            self._space = _reserve(num_bytes, least=num_rows * self._row_bytes)
            if self._space is None:
                self.rows = like.new_zeros(num_rows, *like.shape[1:])
                return
        self.rows = torch.frombuffer(self._space, dtype=like.dtype).view(-1, *like.shape[1:])

    def allocate(self, num_rows: int) -> None:
        """Allocates storage for so many rows. Raises OSError if the disk is full."""
        if self._file is None:
            self._advise(num_rows)
            return
        if num_rows * self._row_bytes <= self._allocated_bytes:
            return
        end = min(-(-num_rows * self._row_bytes // _ALLOCATE_BYTES) * _ALLOCATE_BYTES, self.rows.nbytes)
        try:
            os.posix_fallocate(self._file, self._allocated_bytes, end - self._allocated_bytes)
        except OSError as error:
            more = f"{end - self._allocated_bytes:,} bytes more for rows after {self._allocated_bytes:,}"
            advice = "free some, or set embedding.mmap_folder to another disk"
            raise OSError(
                error.errno, f"{self._folder} has no space for {more} ({error.strerror}); {advice}"
            ) from error
        self._allocated_bytes = end

    def _advise(self, num_rows: int) -> None:
        """Requests huge pages for later writes, once the column is large."""
        if self._has_huge_pages or self._space is None or num_rows * self._row_bytes < _HUGE_BYTES:
            return
        self._has_huge_pages = True
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # advice may be refused
                self._space.madvise(mmap.MADV_HUGEPAGE)

    def unmap(self) -> None:
        """Unmaps all pages; the file keeps their content."""
        if self._space is not None and self._file is not None:
            self._space.madvise(mmap.MADV_DONTNEED)


def _reserve(num_bytes: int, *, least: int) -> mmap.mmap | None:
    """Address space without memory: `num_bytes`, or halved down to `least` where a limit refuses more."""
    while num_bytes >= least:
        try:
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError):
            num_bytes = num_bytes // 2
    return None


def _unnamed_file(folder: Path) -> int:
    """The descriptor of a new file without a name; it vanishes with its last descriptor and mapping."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _row_bytes(column: Tensor) -> int:
    return column.new_empty(1, *column.shape[1:]).nbytes


def _available_bytes(files: RowFiles | None) -> int:
    if files:
        return min(shutil.disk_usage(files.folder).free, _MOST_BYTES)
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _MOST_BYTES)
