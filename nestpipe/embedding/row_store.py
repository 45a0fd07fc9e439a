"""Where rows are kept: columns that grow and never move, in memory or in files.

Each column reserves as much address space as the machine could ever fill; memory or disk is taken only as rows are
added. So growing copies nothing, needs no second copy beside the first, and whoever reads a row meanwhile reads it from
where it is. A column is one tensor: finding a row costs one addition, however large the table is.

In the `mmap` tier a column is a file, mapped. The file has no name: it is gone with the process, however that ends, and
no checkpoint depends on it. Disk space is claimed before it is written, so a full disk is an error that can be read.
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

# MAP_NORESERVE, for which Python 3.11 has no name: only what is written takes memory.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MOST_BYTES = 256 << 30  # reserved for a column at first, so that hundreds of columns fit into 47 bits
_CLAIM_BYTES = 64 << 20  # disk space is claimed in such pieces
_HUGE_BYTES = 64 << 20  # columns of this size lie in huge pages, or finding a page takes as long as reading a row


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Where the `mmap` tier keeps its files, and how much of a table may be mapped into memory at a time."""

    folder: Path
    memory_bytes: int


class RowStore:
    """Columns of one length, by name. New rows are zero."""

    def __init__(self, columns: Mapping[str, Tensor], files: RowFiles | None = None):
        """Columns with the type and row shape of the given empty tensors."""
        self._files = files
        self._columns = dict(columns)
        self._regions: dict[str, _Region] = {}
        self._num_rows = 0
        self._touched_bytes = 0
        self.pinned = False  # others use the columns meanwhile, so growing must not move them

    def __getitem__(self, name: str) -> Tensor:
        """A column [num_rows, ...], to be read and written in place."""
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @property
    def in_memory(self) -> bool:
        """Whether rows may be used where they are; in files only `gather` and `scatter` keep the budget."""
        return self._files is None

    def gather(self, name: str, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of the rows [n, ...] of a column; into `out` if given."""
        column = self._columns[name]
        if self._files is None:
            return gather_rows(column, slots, out)
        rows = column.new_empty(len(slots), *column.shape[1:]) if out is None else out
        for into, part in zip(rows.split(self._piece), slots.split(self._piece), strict=True):
            torch.index_select(column, 0, part, out=into)
            self._touch(column, len(part))
        return rows

    def scatter(self, name: str, slots: Tensor, rows: Tensor) -> None:
        """Overwrites rows of a column."""
        column = self._columns[name]
        if self._files is None:
            scatter_rows(column, slots, rows)
            return
        for part, values in zip(slots.split(self._piece), rows.split(self._piece), strict=True):
            column.index_copy_(0, part, values)
            self._touch(column, len(part))

    def grow(self, num_rows: int) -> None:
        """Makes room for so many rows in all."""
        if num_rows <= self._num_rows:
            return
        for name, column in self._columns.items():
            region = self._regions.get(name)
            if region is None or num_rows > len(region.rows):
                if self.pinned and self._num_rows:
                    raise TrainError(
                        f"{num_rows:,} rows do not fit where {self._num_rows:,} are, and they cannot move while other lanes use "
                        "them: address space is limited here (ulimit -v). Raise the limit, or use --pipeline.mode sequential "
                        "with --pipeline.rows table."
                    )
                region = self._regions[name] = _Region(column, 2 * num_rows, self._files)
                region.rows[: self._num_rows] = column
            region.claim(num_rows)
            self._columns[name] = region.rows[:num_rows]
        self._num_rows = num_rows

    @property
    def _piece(self) -> int:
        """Rows that may be touched before mapped pages are given back: an eighth of the budget, one page for each."""
        return max((self._files.memory_bytes if self._files else 0) // (8 * mmap.PAGESIZE), 1)

    def _touch(self, column: Tensor, num_rows: int) -> None:
        """Counts what was mapped, at most, and unmaps everything when the budget is spent; the files keep it."""
        self._touched_bytes += num_rows * (_row_bytes(column) + mmap.PAGESIZE)
        if self._files and self._touched_bytes > self._files.memory_bytes // 2:
            for region in self._regions.values():
                region.unmap()
            self._touched_bytes = 0


class _Region:
    """Address space for the rows of one column."""

    def __init__(self, like: Tensor, num_rows: int, files: RowFiles | None):
        """As many zero rows as the machine could hold; `num_rows`, and rows that move, where the system refuses that."""
        self._row_bytes = _row_bytes(like)
        self._space: mmap.mmap | None = None
        self._file = _nameless_file(files.folder) if files else None
        self._folder = files.folder if files else None
        self._claimed_bytes = 0
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

    def claim(self, num_rows: int) -> None:
        """Makes sure that so many rows can be written; raises OSError if the disk is full."""
        if self._file is None:
            self._advise(num_rows)
            return
        if num_rows * self._row_bytes <= self._claimed_bytes:
            return
        end = min(-(-num_rows * self._row_bytes // _CLAIM_BYTES) * _CLAIM_BYTES, self.rows.nbytes)
        try:
            os.posix_fallocate(self._file, self._claimed_bytes, end - self._claimed_bytes)
        except OSError as error:
            more = f"{end - self._claimed_bytes:,} bytes more for rows after {self._claimed_bytes:,}"
            advice = "make room there, or set embedding.mmap_folder to another disk"
            raise OSError(error.errno, f"{self._folder} has no room for {more} ({error.strerror}); {advice}") from error
        self._claimed_bytes = end

    def _advise(self, num_rows: int) -> None:
        """Asks for huge pages for what is written from now on, once the column is large."""
        if self._has_huge_pages or self._space is None or num_rows * self._row_bytes < _HUGE_BYTES:
            return
        self._has_huge_pages = True
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # only advice: may be refused
                self._space.madvise(mmap.MADV_HUGEPAGE)

    def unmap(self) -> None:
        """Gives mapped pages back; what was written stays in the file."""
        if self._space is not None and self._file is not None:
            self._space.madvise(mmap.MADV_DONTNEED)


def _reserve(num_bytes: int, *, least: int) -> mmap.mmap | None:
    """Address space without memory behind it: so much, or half and half again where a limit refuses that."""
    while num_bytes >= least:
        try:
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError):
            num_bytes = num_bytes // 2
    return None


def _nameless_file(folder: Path) -> int:
    """The descriptor of a new file that is gone when the last who has it open or mapped is."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _row_bytes(column: Tensor) -> int:
    return column.new_empty(1, *column.shape[1:]).nbytes


def _available_bytes(files: RowFiles | None) -> int:
    if files:
        return min(shutil.disk_usage(files.folder).free, _MOST_BYTES)
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _MOST_BYTES)
