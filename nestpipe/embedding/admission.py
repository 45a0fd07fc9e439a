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

import torch
from torch import Tensor

from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.ledger import Ledger, rank_in_bucket

_PENDING_PER_ROW = 4
_MAX_PENDING = 65_536
PENDING = "pending."  # names of exported counts of ids without a row


class Admission:
    """The ids that have rows, those that wait for one, and the rules between them."""

    def __init__(self, config: EmbeddingConfig, *, native: bool | None = None):
        self._config = config
        self.rows = Ledger(config.num_buckets, native=native)
        self._pending = Ledger(config.num_buckets, native=native)  # unused if ids are admitted at first sight
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
