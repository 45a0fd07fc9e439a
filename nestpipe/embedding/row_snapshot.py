"""The rows of a table as they were at one moment, read section by section while training continues.

    loop     snapshot │ update: rows not read yet leave a copy in the log │ update ...
    thread            └▶ read section 0 ──▶ read section 1: table, overwritten by the log ──▶ ...

No second copy of the rows: the log holds only rows that were updated before their section was read, and never more than
1 / `_LOG_SHARE` of the rows. An update for which it has no room waits until sections have been read; the reader never waits for
an update. Ids and slots are copied (16 bytes per row), and there are 8 bytes per row to find what is in the log.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.row_buffer import RowBuffer
from nestpipe.embedding.row_store import RowStore

_LOG_SHARE = 32  # rows of the table per row of the log
_MIN_LOG_ROWS = 1024
_NUM_PASSES = 16  # in which a large index is sorted
_CHUNK_ROWS = 1 << 16


class RowSnapshot:
    """Rows of distinct slots, by place: the i-th is that of `slots[i]`. `read` takes places in order; `close` ends it."""

    def __init__(self, store: RowStore | RowBuffer, slots: Tensor, *, concurrent: bool, log_rows: int = 0):
        """With `concurrent`, every change of the store must be announced by `preserve` before it is made: rows in memory."""
        self._store, self._slots = store, slots
        self._condition = threading.Condition()
        self._next = 0  # the first place that has not been read
        self._is_closed = not concurrent
        log_rows = min(log_rows or max(len(slots) // _LOG_SHARE, _MIN_LOG_ROWS), len(slots)) if concurrent else 0
        num_slots = int(slots.max()) + 1 if concurrent and len(slots) else 0
        self._place = torch.full((num_slots,), -1, dtype=torch.int32)  # by slot
        if num_slots:
            self._place[slots] = torch.arange(len(slots), dtype=torch.int32)
        self._entry = torch.full((len(slots) if concurrent else 0,), -1, dtype=torch.int32)  # of the log, by place
        columns = store.columns if isinstance(store, RowStore) and concurrent else {}
        self._log = {name: one.new_empty(log_rows, *one.shape[1:]) for name, one in columns.items()}
        self._free = torch.arange(log_rows, dtype=torch.int32)
        self._num_free = log_rows

    @property
    def is_tight(self) -> bool:
        """Whether half of the log is in use, so that an update may soon have to wait."""
        has_bound = len(self._free) < len(self._slots)
        return has_bound and not self._is_closed and 2 * self._num_free < len(self._free)

    def preserve(self, slots: Tensor) -> None:
        """Copies the rows of these slots that have not been read; waits while the log is full. Before any change of them."""
        with self._condition:
            known = slots[(slots >= 0) & (slots < len(self._place))]
            while not self._is_closed:
                places = self._place.index_select(0, known)
                wanted = (places >= self._next).nonzero().flatten()
                wanted = wanted[self._entry.index_select(0, places.index_select(0, wanted)) < 0]
                if len(wanted) <= self._num_free:
                    self._copy(known.index_select(0, wanted), places.index_select(0, wanted).long())
                    return
                self._condition.wait()

    def read(self, begin: int, end: int) -> dict[str, Tensor]:
        """The rows of these places, per column."""
        slots = self._slots[begin:end]
        with self._condition:
            rows = self._store.read(slots)
            if not self._is_closed:
                entries = self._entry[begin:end]
                logged = (entries >= 0).nonzero().flatten()
                used = entries.index_select(0, logged)
                for name, values in rows.items():
                    values.index_copy_(0, logged, self._log[name].index_select(0, used))
                self._free[self._num_free : self._num_free + len(used)] = used
                self._num_free += len(used)
                self._next = end
                self._condition.notify_all()
        return rows

    def close(self) -> None:
        """Ends the snapshot: nothing is preserved from now on, and nobody waits."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _copy(self, slots: Tensor, places: Tensor) -> None:
        self._num_free -= len(slots)
        entries = self._free[self._num_free : self._num_free + len(slots)].clone()
        self._entry.index_copy_(0, places, entries)
        for name, column in self._log.items():
            column.index_copy_(0, entries.long(), self._store.gather(name, slots))


@dataclass(frozen=True, slots=True, eq=False)
class TableSection:
    """A range of buckets of one table."""

    buckets: range
    index: dict[str, Tensor]  # ids with their usage, and columns that have ids of their own
    rows: dict[str, Tensor]  # weights and optimizer state, in the order of the ids


class TableSnapshot:
    """A table, or what has changed in it, as it was at one moment; read once, section by section."""

    def __init__(self, rows: RowSnapshot, sections: list[tuple[range, dict[str, Tensor]]]):
        self.rows, self._sections = rows, sections

    @property
    def num_rows(self) -> int:
        return sum(len(index["ids"]) for _, index in self._sections)

    def read(self) -> Iterator[TableSection]:
        """The sections, in order; at most one has its rows in memory."""
        begin = 0
        while self._sections:
            buckets, index = self._sections.pop(0)
            end = begin + len(index["ids"])
            yield TableSection(buckets, index, self.rows.read(begin, end))
            begin = end


def by_section(
    content: dict[str, Tensor], owners: Owners, buckets: range, *, rows_per_section: int
) -> list[tuple[range, dict[str, Tensor]]]:
    """Columns of a table, by ranges of buckets with at most so many ids, or one bucket; ordered by bucket.

    A column belongs to the ids of the same prefix: `pending.last_step` to `pending.ids`, `gone` to itself, others to `ids`.
    `content` is emptied, so that columns are freed one by one.
    """
    if not len(buckets):
        return []
    names: dict[str, list[str]] = {"ids": []}
    for name in content:
        names.setdefault(ids_column(name), []).append(name)
    edges: list[int] = []
    sections: list[dict[str, Tensor]] = []
    for key, own in names.items():  # those of `ids` are first, and decide where sections begin
        bucket = _bucket_numbers(content[key], owners)
        ends = _bucket_ends(bucket, buckets)
        edges = edges or _edges(ends, buckets, rows_per_section)
        sections = sections or [{} for _ in edges[1:]]
        places = [0, *(int(ends[edge - buckets.start - 1]) for edge in edges[1:])]
        columns = _sorted_columns({name: content.pop(name) for name in own}, bucket, buckets, ends)
        for section, (begin, end) in zip(sections, itertools.pairwise(places), strict=True):
            section.update({name: values[begin:end] for name, values in columns.items()})
    return list(zip((range(*one) for one in itertools.pairwise(edges)), sections, strict=True))


def ids_column(name: str) -> str:
    """The column of ids to which a column belongs."""
    if name == "gone" or name.endswith(".gone"):
        return name
    prefix = name.partition(".")[0]
    return f"{prefix}.ids" if prefix in {"pending", "kept"} else "ids"


def _bucket_numbers(ids: Tensor, owners: Owners) -> Tensor:
    """The bucket of each id, in 4 bytes."""
    numbers = torch.empty(len(ids), dtype=torch.int32)
    for target, chunk in zip(numbers.split(_CHUNK_ROWS), ids.split(_CHUNK_ROWS), strict=True):
        target.copy_(owners.bucket_of(chunk))
    return numbers


def _bucket_ends(bucket: Tensor, buckets: range) -> Tensor:
    """Number of ids up to and in each of these buckets, without those of other buckets."""
    counts = torch.zeros(buckets.stop + 1, dtype=torch.int64)
    for chunk in bucket.split(_CHUNK_ROWS):
        counts += torch.bincount(chunk.clamp(max=buckets.stop), minlength=buckets.stop + 1)
    return counts[buckets.start : buckets.stop].cumsum(0)


def _edges(ends: Tensor, buckets: range, rows_per_section: int) -> list[int]:
    """Where sections begin, and the end."""
    edges, done = [buckets.start], 0
    while edges[-1] < buckets.stop:
        fitting = buckets.start + int(torch.searchsorted(ends, done + rows_per_section, right=True))
        edges.append(max(fitting, edges[-1] + 1))
        done = int(ends[edges[-1] - buckets.start - 1])
    return edges


def _sorted_columns(columns: dict[str, Tensor], bucket: Tensor, buckets: range, ends: Tensor) -> dict[str, Tensor]:
    """Columns of the ids in these buckets, by bucket and then as given; in passes, which need little memory each."""
    total = int(ends[-1])
    found = {name: values.new_empty(total, *values.shape[1:]) for name, values in columns.items()}
    begin, first = 0, buckets.start
    for edge in _edges(ends, buckets, max(total // _NUM_PASSES, _CHUNK_ROWS))[1:]:
        own = ((bucket >= first) & (bucket < edge)).nonzero().flatten()
        order = own.index_select(0, bucket.index_select(0, own).argsort(stable=True))
        for name, values in columns.items():
            found[name][begin : begin + len(order)] = values.index_select(0, order)
        begin, first = begin + len(order), edge
    return found
