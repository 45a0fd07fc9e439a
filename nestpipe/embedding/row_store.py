"""Row storage in memory: columns that grow without moving.

Each column reserves as much address space as the machine could ever fill; memory is used only as
rows are added. So growing copies nothing, and concurrent readers keep valid addresses. A column is
one tensor: locating a row is one addition, however large the table is.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from nestpipe.embedding.row_ops import gather_rows, row_bytes, scatter_rows
from nestpipe.errors import TrainError

# MAP_NORESERVE, which Python 3.11 does not export: only written pages use memory.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MOST_BYTES = 256 << 30  # of address space per column, so that hundreds of columns fit into 47 bits
HUGE_BYTES = 4 << 20  # columns of this size use huge pages, or TLB misses cost as much as reading a row


class RowStore:
    """Columns of equal length, by name. New rows are zero."""

    def __init__(self, columns: Mapping[str, Tensor], *, huge_bytes: int = HUGE_BYTES):
        """Columns with the type and row shape of the given empty tensors; those of `huge_bytes` use huge pages."""
        self._huge_bytes = huge_bytes
        self._columns = dict(columns)
        self._regions: dict[str, _Region] = {}
        self._num_rows = 0
        self.pinned = False  # other threads use the columns, so growing must not move them

    def __len__(self) -> int:
        """Number of rows."""
        return self._num_rows

    def __getitem__(self, name: str) -> Tensor:
        """A column [num_rows, ...], to be read and written in place."""
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @property
    def columns(self) -> dict[str, Tensor]:
        """All columns, by name."""
        return dict(self._columns)

    def gather(self, name: str, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of the rows [n, ...] of a column; in `out` if given."""
        return gather_rows(self._columns[name], slots, out)

    def scatter(self, name: str, slots: Tensor, rows: Tensor) -> None:
        """Overwrites rows of a column."""
        scatter_rows(self._columns[name], slots, rows)

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """A copy of the rows of all columns."""
        return {name: self.gather(name, slots) for name in self._columns}

    def write(self, slots: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Overwrites rows of the given columns."""
        for name, values in rows.items():
            self.scatter(name, slots, values)

    def drop(self, slots: Tensor) -> None:
        """Tells that the rows of these slots are not needed any more. No effect: their slots are overwritten."""

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
                        "--pipeline.advanced.rows table."
                    )
                region = self._regions[name] = _Region(column, 2 * num_rows)
                region.rows[: self._num_rows] = column
            region.advise(num_rows, self._huge_bytes)
            self._columns[name] = region.rows[:num_rows]
        self._num_rows = num_rows

    def shrink(self, num_rows: int) -> None:
        """Cuts all columns to so many rows and returns the memory of the others."""
        for name, region in self._regions.items():
            region.free(num_rows, self._num_rows)
            self._columns[name] = region.rows[:num_rows]
        self._num_rows = num_rows


class _Region:
    """Address space for the rows of one column."""

    def __init__(self, like: Tensor, num_rows: int):
        """As many zero rows as the machine could hold; `num_rows` in ordinary memory where the system refuses that."""
        self._row_bytes = row_bytes(like)
        self._has_huge_pages = False
        num_bytes = max(_available_bytes() // self._row_bytes, num_rows) * self._row_bytes
        self._space = _reserve(num_bytes, least=num_rows * self._row_bytes)
        if self._space is None:
            self.rows = like.new_zeros(num_rows, *like.shape[1:])
            return
        self.rows = torch.frombuffer(self._space, dtype=like.dtype).view(-1, *like.shape[1:])

    def advise(self, num_rows: int, huge_bytes: int) -> None:
        """Requests huge pages for later writes, once the column is large."""
        if self._has_huge_pages or self._space is None or num_rows * self._row_bytes < huge_bytes:
            return
        self._has_huge_pages = True
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # advice may be refused
                self._space.madvise(mmap.MADV_HUGEPAGE)

    def free(self, begin: int, end: int) -> None:
        """Makes a range of rows zero and returns its memory, but for the pages that it shares with other rows."""
        self.rows[begin:end] = 0
        first, last = (edge * self._row_bytes for edge in (begin, end))
        first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._space is not None and first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._space.madvise(mmap.MADV_DONTNEED, first, last - first)


def _reserve(num_bytes: int, *, least: int) -> mmap.mmap | None:
    """Address space without memory: `num_bytes`, or halved down to `least` where a limit refuses more."""
    while num_bytes >= least:
        try:
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError):
            num_bytes = num_bytes // 2
    return None


def _available_bytes() -> int:
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _MOST_BYTES)
