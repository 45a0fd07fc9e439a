"""Which ids have a row: admission and eviction, decided once per batch, before anything of the batch is read.

For batch t, at the owner, bucket by bucket, so that every number of ranks decides the same:

1. Rows of the batch note the step and count the batch.
2. Every other id of the batch is counted; one that was seen in `admit_after` batches asks for a row.
3. A bucket with more askers than room evicts rows, those of batches t-P … t excepted, by (last step, id) or
   (frequency, id), just as many as it needs. P is `protect_steps`.
4. The askers with the lowest ids get the room. The others keep their count and ask again when they are seen again.
5. Counts of ids without a row are bounded: a bucket keeps 4 x `max_rows_per_bucket` of them, or 65,536 if its rows have no
   limit, and forgets those not seen for the longest time first, ties by id.

An evicted row starts again from nothing. Nothing here depends on slots, on the clock or on what is in flight, and a
batch that is skipped later has been counted all the same.
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

_NUMBERS = torch.empty(0, dtype=torch.int64)

_STRIDE = 64  # one row in so many is looked at to guess how far to look

Order = Literal["lru", "lfu"]


class UsageLedger:
    """Distinct ids with their bucket, last step and frequency. Calls take distinct ids."""

    def __init__(self, num_buckets: int, *, native: bool | None = None):
        self.index = make_index(native=native)
        self.sizes = torch.zeros(num_buckets, dtype=torch.int64)  # ids of each bucket
        self._owners = Owners(num_buckets, 1)
        self._columns = RowStore(dict.fromkeys(("id", "bucket", "last_step", "frequency"), _NUMBERS))

    def __len__(self) -> int:
        return len(self.index)

    def bucket_of(self, ids: Tensor) -> Tensor:
        """The bucket [n] of each id."""
        return self._owners.bucket_of(ids)

    def touch(self, slots: Tensor, step: int) -> None:
        """The ids of these slots are in batch `step`."""
        self._columns["last_step"].index_fill_(0, slots, step)
        frequency = self._columns["frequency"]
        frequency.index_copy_(0, slots, frequency.index_select(0, slots).add_(1))

    def frequency(self, slots: Tensor) -> Tensor:
        """In how many batches [n] the ids of these slots were."""
        return self._columns["frequency"].index_select(0, slots)

    def add(self, ids: Tensor, *, last_step: Tensor, frequency: Tensor) -> Tensor:
        """Takes in ids that are unknown; returns their slots."""
        slots, _ = self.index.find_or_add(ids)
        self._columns.grow(self.index.num_slots)
        bucket = self.bucket_of(ids)
        values = {"id": ids, "bucket": bucket, "last_step": last_step, "frequency": frequency}
        for name, column in values.items():
            self._columns[name].index_copy_(0, slots, column)
        self.sizes += torch.bincount(bucket, minlength=len(self.sizes))
        return slots

    def remove(self, ids: Tensor) -> None:
        """Forgets ids that are known."""
        slots = self.index.remove(ids)
        bucket = self._columns["bucket"]
        self.sizes -= torch.bincount(bucket.index_select(0, slots), minlength=len(self.sizes))
        bucket.index_fill_(0, slots, len(self.sizes))  # a free slot is in no bucket

    def choose(self, counts: Tensor, order: Order, *, before: int) -> Tensor:
        """The first counts[b] ids of each bucket b, or all there are, of those last used before a step.

        "lru": by (last step, id); "lfu": by (frequency, id). Looks at every id, but only if some count is above 0.
        """
        counts = counts.clamp(min=0)
        if not bool(counts.any()):
            return _NUMBERS
        wanted = torch.cat([counts > 0, torch.zeros(1, dtype=torch.bool)])
        slots = (wanted.index_select(0, self._columns["bucket"]) & (self._columns["last_step"] < before)).nonzero()
        names = ("id", "last_step" if order == "lru" else "frequency", "bucket")
        ids, keys, bucket = (self._columns[name].index_select(0, slots.flatten()) for name in names)
        near = _near(ids, keys, bucket, counts)
        ids, keys, bucket = (column.index_select(0, near) for column in (ids, keys, bucket))
        by = _sorted_by(ids, keys, bucket)
        bucket = bucket.index_select(0, by)
        first = rank_in_bucket(bucket, len(counts)) < counts.index_select(0, bucket)
        return ids.index_select(0, by[first])

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
    """The order in which rows ascend by all columns, of which the last one matters most."""
    by = torch.arange(len(columns[0]))
    for column in columns:
        by = by.index_select(0, column.index_select(0, by).argsort(stable=True))
    return by


def _near(ids: Tensor, keys: Tensor, bucket: Tensor, counts: Tensor) -> Tensor:
    """Places that hold, in any order, the first counts[b] ids of each bucket b by (key, id): far fewer than all.

    A sample guesses how far to look, and looking says whether that was enough, so the answer does not depend on it.
    """
    enough = counts.minimum(torch.bincount(bucket, minlength=len(counts)))
    sample = _sorted_by(ids[::_STRIDE], keys[::_STRIDE]) * _STRIDE
    guess = 2 * int(enough.sum()) // _STRIDE + _STRIDE
    while guess < len(sample):
        last_id, last_key = ids[sample[guess]], keys[sample[guess]]
        near = ((keys < last_key) | ((keys == last_key) & (ids <= last_id))).nonzero().flatten()
        found = torch.bincount(bucket.index_select(0, near), minlength=len(counts))
        if bool((found >= enough).all()):
            return near
        guess *= 4
    return torch.arange(len(ids))


def rank_in_bucket(bucket: Tensor, num_buckets: int) -> Tensor:
    """How many of the same bucket stand before each [n], where equal buckets stand together."""
    sizes = torch.bincount(bucket, minlength=num_buckets)
    first = sizes.cumsum(0) - sizes
    return torch.arange(len(bucket)) - first.index_select(0, bucket)


_PENDING_PER_ROW = 4
_MAX_PENDING = 65_536
PENDING = "pending."  # names of exported counts of ids without a row


class Admission:
    """The ids that have rows, those that wait for one, and the rules between them."""

    def __init__(self, config: EmbeddingConfig, *, native: bool | None = None):
        self._config = config
        self.rows = UsageLedger(config.num_buckets, native=native)
        self._pending = UsageLedger(config.num_buckets, native=native)  # unused if ids are admitted at first sight
        self._step = -1

    def advance(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Counts a batch of distinct ids, ascending in each bucket; returns those that got a row, in order, and their slots."""
        if step <= self._step:
            raise ValueError(f"batch {step} is counted after batch {self._step}; batches are counted once, in order")
        self._step = step
        slots = self.rows.index.find(ids)
        self.rows.touch(slots[slots >= 0], step)
        asking, counts = self._count(ids[slots < 0], step)
        places = self._make_room(asking, step)
        admitted = asking.index_select(0, places)
        fresh = self.rows.add(
            admitted, last_step=torch.full_like(admitted, step), frequency=counts.index_select(0, places)
        )
        if self._config.admit_after > 1:
            self._pending.remove(admitted)
            self._forget()
        return admitted, fresh

    def export(self) -> dict[str, Tensor]:
        """What is beside the rows: index state by ascending id, and the pending counts, which are as many as they are."""
        own = self.rows.export()
        content = {f"index.{name}": own[name] for name in ("last_step", "frequency")}
        if self._config.admit_after > 1:
            content |= {PENDING + name: values for name, values in self._pending.export().items()}
        return content

    def load(self, content: Mapping[str, Tensor]) -> None:
        """Replaces everything. Rows that come without index state were last used before the first batch, once."""
        ids = content["ids"]
        self.rows.load(
            {
                "ids": ids,
                "last_step": content.get("index.last_step", torch.full_like(ids, -1)),
                "frequency": content.get("index.frequency", torch.ones_like(ids)),
            }
        )
        none = ids.new_empty(0)
        names = ("ids", "last_step", "frequency")
        self._pending.load({name: content.get(PENDING + name, none) for name in names})
        self._step = -1

    def _count(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Counts ids without a row; returns those that ask for one, in order, and in how many batches they were."""
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
        """Evicts as many rows as needed and allowed; returns which of the asking ids, ascending in each bucket, get a row."""
        limit = self._config.max_rows_per_bucket
        if not limit or not len(ids):
            return torch.arange(len(ids))
        bucket = self.rows.bucket_of(ids)
        asked = torch.bincount(bucket, minlength=self._config.num_buckets)
        victims = self.rows.choose(
            self.rows.sizes + asked - limit, self._config.evict, before=step - self._config.protect_steps
        )
        self.rows.remove(victims)
        room = limit - self.rows.sizes
        by = bucket.argsort(stable=True)
        bucket = bucket.index_select(0, by)
        return by[rank_in_bucket(bucket, len(room)) < room.index_select(0, bucket)].sort().values

    def _forget(self) -> None:
        """Drops the oldest counts of buckets that have too many."""
        most = _PENDING_PER_ROW * self._config.max_rows_per_bucket or _MAX_PENDING
        self._pending.remove(self._pending.choose(self._pending.sizes - most, "lru", before=self._step + 1))
