"""Ids and what is remembered about each: its bucket, the last batch that used it, and in how many batches it was.

Beside the id -> slot index, by slot. Slots are unobservable: whatever is chosen or exported goes by id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from nestpipe.embedding.index import make_index
from nestpipe.embedding.owner import Owners
from nestpipe.embedding.store import Store

_NUMBERS = torch.empty(0, dtype=torch.int64)
_STRIDE = 64  # one row in so many is looked at to guess how far to look
Order = Literal["lru", "lfu"]


class Ledger:
    """Distinct ids with their bucket, last step and frequency. Calls take distinct ids."""

    def __init__(self, num_buckets: int, *, native: bool | None = None):
        self.index = make_index(native=native)
        self.sizes = torch.zeros(num_buckets, dtype=torch.int64)  # ids of each bucket
        self._owners = Owners(num_buckets, 1)
        self._columns = Store(dict.fromkeys(("id", "bucket", "last_step", "frequency"), _NUMBERS))

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
