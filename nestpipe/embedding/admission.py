"""Admission and eviction: which ids have a row, decided once per batch before any row of the batch is read.

For batch t, at the owner, bucket by bucket, so that every number of ranks decides the same:

1. Rows of the batch record the step and increment their frequency.
2. Every other id of the batch is counted; one that occurred in `admit_after` batches becomes a
   candidate for a row.
3. A bucket with more candidates than free rows evicts as many rows as it needs, by (last step, id)
   for "lru" or (frequency, id) for "lfu". Rows of batches t-P … t are never evicted; P is
   `protect_steps`.
4. The candidates with the lowest ids are admitted. The others keep their count and compete again at
   their next occurrence.
5. Counts of ids without a row are bounded: a bucket keeps 4 x `max_rows_per_bucket` of them, or
   65,536 if its rows have no limit, and drops the least recently used first, ties by id.

An evicted row loses its weights and optimizer state. Decisions never depend on slots, on time or on
what is in flight. A batch whose update is skipped has been counted all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.id_index import make_index
from nestpipe.embedding.row_store import RowStore

_EMPTY = torch.empty(0, dtype=torch.int64)

_STRIDE = 64  # one row in 64 is sampled to estimate the eviction threshold

Order = Literal["lru", "lfu"]


class UsageLedger:
    """Distinct ids with their bucket, last step and frequency. Arguments are distinct ids."""

    def __init__(self, num_buckets: int, *, native: bool | None = None):
        self.index = make_index(native=native)
        self.sizes = torch.zeros(num_buckets, dtype=torch.int64)  # ids per bucket
        self._owners = Owners(num_buckets, 1)
        self._columns = RowStore(dict.fromkeys(("id", "bucket", "last_step", "frequency"), _EMPTY))

    def __len__(self) -> int:
        return len(self.index)

    def bucket_of(self, ids: Tensor) -> Tensor:
        """The bucket [n] of each id."""
        return self._owners.bucket_of(ids)

    def touch(self, slots: Tensor, step: int) -> None:
        """Records that the ids of these slots occur in batch `step`."""
        self._columns["last_step"].index_fill_(0, slots, step)
        frequency = self._columns["frequency"]
        frequency.index_copy_(0, slots, frequency.index_select(0, slots).add_(1))

    def frequency(self, slots: Tensor) -> Tensor:
        """Number of batches [n] in which the ids of these slots occurred."""
        return self._columns["frequency"].index_select(0, slots)

    def add(self, ids: Tensor, *, last_step: Tensor, frequency: Tensor) -> Tensor:
        """Adds unknown ids; returns their slots."""
        slots, _ = self.index.find_or_add(ids)
        self._columns.grow(self.index.num_slots)
        bucket = self.bucket_of(ids)
        values = {"id": ids, "bucket": bucket, "last_step": last_step, "frequency": frequency}
        for name, column in values.items():
            self._columns[name].index_copy_(0, slots, column)
        self.sizes += torch.bincount(bucket, minlength=len(self.sizes))
        return slots

    def remove(self, ids: Tensor) -> Tensor:
        """Removes known ids; returns the slots [n] that they had."""
        slots = self.index.remove(ids)
        bucket = self._columns["bucket"]
        self.sizes -= torch.bincount(bucket.index_select(0, slots), minlength=len(self.sizes))
        bucket.index_fill_(0, slots, len(self.sizes))  # a free slot is in no bucket
        return slots

    def choose(self, counts: Tensor, order: Order, *, before: int) -> Tensor:
        """Up to counts[b] ids of each bucket b that were last used before step `before`: the first in `order`.

        "lru": by (last step, id); "lfu": by (frequency, id). Scans all ids if any count is above 0.
        """
        counts = counts.clamp(min=0)
        if not bool(counts.any()):
            return _EMPTY
        wanted = torch.cat([counts > 0, torch.zeros(1, dtype=torch.bool)])
        slots = (wanted.index_select(0, self._columns["bucket"]) & (self._columns["last_step"] < before)).nonzero()
        names = ("id", "last_step" if order == "lru" else "frequency", "bucket")
        ids, keys, bucket = (self._columns[name].index_select(0, slots.flatten()) for name in names)
        near = _preselect(ids, keys, bucket, counts)
        ids, keys, bucket = (column.index_select(0, near) for column in (ids, keys, bucket))
        order_by = _sorted_by(ids, keys, bucket)
        bucket = bucket.index_select(0, order_by)
        first = rank_in_bucket(bucket, len(counts)) < counts.index_select(0, bucket)
        return ids.index_select(0, order_by[first])

    def export(self) -> dict[str, Tensor]:
        """Ids in ascending order, with last step and frequency."""
        ids, slots = self.index.export()
        return {"ids": ids, **{name: self._columns[name].index_select(0, slots) for name in ("last_step", "frequency")}}

    def load(self, content: Mapping[str, Tensor]) -> None:
        """Replaces the content by an exported one, its ids in any order; the i-th gets slot i."""
        self.index.clear()
        self.sizes.zero_()
        self.add(content["ids"], last_step=content["last_step"], frequency=content["frequency"])


def _sorted_by(*columns: Tensor) -> Tensor:
    """The permutation that sorts by all columns; the last one is the most significant."""
    order = torch.arange(len(columns[0]))
    for column in columns:
        order = order.index_select(0, column.index_select(0, order).argsort(stable=True))
    return order


def _preselect(ids: Tensor, keys: Tensor, bucket: Tensor, counts: Tensor) -> Tensor:
    """A superset, usually small, of the places of the first counts[b] ids of each bucket b by (key, id).

    A threshold is estimated from a sample and then verified, so the result of `choose` does not depend on the sample.
    """
    needed = counts.minimum(torch.bincount(bucket, minlength=len(counts)))
    sample = _sorted_by(ids[::_STRIDE], keys[::_STRIDE]) * _STRIDE
    guess = 2 * int(needed.sum()) // _STRIDE + _STRIDE
    while guess < len(sample):
        last_id, last_key = ids[sample[guess]], keys[sample[guess]]
        near = ((keys < last_key) | ((keys == last_key) & (ids <= last_id))).nonzero().flatten()
        found = torch.bincount(bucket.index_select(0, near), minlength=len(counts))
        if bool((found >= needed).all()):
            return near
        guess *= 4
    return torch.arange(len(ids))


def rank_in_bucket(bucket: Tensor, num_buckets: int) -> Tensor:
    """The number [n] of earlier entries of the same bucket; equal buckets are adjacent."""
    sizes = torch.bincount(bucket, minlength=num_buckets)
    first = sizes.cumsum(0) - sizes
    return torch.arange(len(bucket)) - first.index_select(0, bucket)


_PENDING_PER_ROW = 4
_MAX_PENDING = 65_536
PENDING = "pending."  # names of exported counts of ids without a row


class Admission:
    """The ids with rows, the counts of those without, and the rules between them."""

    def __init__(self, config: EmbeddingConfig, *, native: bool | None = None):
        self._config = config
        self.rows = UsageLedger(config.num_buckets, native=native)
        self._pending = UsageLedger(config.num_buckets, native=native)  # unused if admit_after is 1
        self._step = -1
        self.evicted = _EMPTY  # slots of the rows that the last `advance` evicted

    def advance(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Counts a batch of distinct ids, ascending in each bucket; returns the admitted ones, in order, and their slots."""
        if step <= self._step:
            raise ValueError(
                f"batch {step} is counted after batch {self._step}; batches must be counted once, in order"
            )
        self._step = step
        slots = self.rows.index.find(ids)
        self.rows.touch(slots[slots >= 0], step)
        candidates, counts = self._count(ids[slots < 0], step)
        places = self._make_room(candidates, step)
        admitted = candidates.index_select(0, places)
        fresh = self.rows.add(
            admitted, last_step=torch.full_like(admitted, step), frequency=counts.index_select(0, places)
        )
        if self._config.admit_after > 1:
            self._pending.remove(admitted)
            self._drop_oldest_counts()
        return admitted, fresh

    def export(self) -> dict[str, Tensor]:
        """Usage state of the rows by ascending id, and the counts of ids without a row."""
        own = self.rows.export()
        content = {f"index.{name}": own[name] for name in ("last_step", "frequency")}
        if self._config.admit_after > 1:
            content |= {PENDING + name: values for name, values in self._pending.export().items()}
        return content

    def load(self, content: Mapping[str, Tensor]) -> None:
        """Replaces everything. Rows without usage state count as used once, before the first batch."""
        ids = content["ids"]
        self.rows.load(
            {
                "ids": ids,
                "last_step": content.get("index.last_step", torch.full_like(ids, -1)),
                "frequency": content.get("index.frequency", torch.ones_like(ids)),
            }
        )
        names = ("ids", "last_step", "frequency")
        self._pending.load({name: content.get(PENDING + name, ids.new_empty(0)) for name in names})
        self._step = -1

    def _count(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Counts ids without a row; returns the candidates for one, in order, and their counts."""
        if self._config.admit_after == 1:
            return ids, torch.ones_like(ids)
        pending = self._pending
        slots = pending.index.find(ids)
        pending.touch(slots[slots >= 0], step)
        new = ids[slots < 0]
        pending.add(new, last_step=torch.full_like(new, step), frequency=torch.ones_like(new))
        counts = pending.frequency(pending.index.find(ids))
        ready = counts >= self._config.admit_after
        return ids[ready], counts[ready]

    def _make_room(self, ids: Tensor, step: int) -> Tensor:
        """Evicts as many rows as needed and allowed; returns places of the candidates to admit. Ascending per bucket."""
        limit = self._config.max_rows_per_bucket
        self.evicted = _EMPTY
        if not limit or not len(ids):
            return torch.arange(len(ids))
        bucket = self.rows.bucket_of(ids)
        num_candidates = torch.bincount(bucket, minlength=self._config.num_buckets)
        victims = self.rows.choose(
            self.rows.sizes + num_candidates - limit, self._config.evict, before=step - self._config.protect_steps
        )
        self.evicted = self.rows.remove(victims)
        room = limit - self.rows.sizes
        order = bucket.argsort(stable=True)
        bucket = bucket.index_select(0, order)
        return order[rank_in_bucket(bucket, len(room)) < room.index_select(0, bucket)].sort().values

    def _drop_oldest_counts(self) -> None:
        """Bounds the counts of each bucket."""
        limit = _PENDING_PER_ROW * self._config.max_rows_per_bucket or _MAX_PENDING
        self._pending.remove(self._pending.choose(self._pending.sizes - limit, "lru", before=self._step + 1))
