"""Admission and eviction: which ids have a row, decided once per batch before any row of the batch is read.

For batch t, at the owner, bucket by bucket, so that every number of ranks decides the same:

1. Rows of the batch record the step and increment their frequency.
2. Every other id of the batch is counted; one that occurred in `admit_after` batches becomes a
   candidate for a row.
3. The candidates of a bucket follow by ascending id. While the bucket is full, the first row by
   (last step, id) for "lru", or by (frequency, last step, id) for "lfu", is evicted. Rows of batches
   t-P … t are never evicted; P is `protect_steps`. A candidate that finds no room keeps its count
   and competes again at its next occurrence.
4. Counts of ids without a row are bounded; the least recently used are dropped first, ties by id.

`max_rows` and the bound of counts are those of the table, divided over its buckets (`divide`). An
evicted row loses its weights and optimizer state. Decisions never depend on slots, on time or on
what is in flight. A batch whose update is skipped has been counted all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.buckets import divide
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.usage_ledger import Evicted, export_usage, make_ledger

_PENDING_PER_ROW = 4
_MAX_PENDING = 1 << 22  # counts of a table whose rows have no limit
PENDING = "pending."  # names of exported counts of ids without a row


@dataclass(frozen=True, slots=True, eq=False)
class Turnover:
    """What a batch changed: its slots [n], -1 for an id without a row, the ids that got one, and those that lost theirs."""

    slots: Tensor
    admitted: Tensor  # ids, in the order of the batch
    admitted_slots: Tensor
    evicted: Evicted


class Admission:
    """The ids with rows, the counts of those without, and the rules between them."""

    def __init__(self, config: EmbeddingConfig, num_buckets: int, *, native: bool | None = None):
        self._config = config
        self.rows = make_ledger(num_buckets, config.evict, native=native)
        self._pending = make_ledger(num_buckets, "lru", native=native)  # unused if admit_after is 1
        self._limits = divide(config.max_rows, num_buckets) if config.max_rows else None
        self._pending_limits = divide(_PENDING_PER_ROW * config.max_rows or _MAX_PENDING, num_buckets)
        self._step = -1

    def advance(self, ids: Tensor, step: int) -> Turnover:
        """Counts a batch of distinct ids, ascending in each bucket, and decides which of them have a row."""
        if step <= self._step:
            raise ValueError(
                f"batch {step} is counted after batch {self._step}; batches must be counted once, in order"
            )
        self._step = step
        slots = self.rows.touch(ids, step)
        unknown = (slots < 0).nonzero().flatten()
        others = ids.index_select(0, unknown)
        counts = self._count(others, step)
        ready = (counts >= self._config.admit_after).nonzero().flatten()
        candidates, places = others.index_select(0, ready), unknown.index_select(0, ready)
        fresh, evicted = self.rows.admit(
            candidates,
            counts.index_select(0, ready),
            step=step,
            before=step - self._config.protect_steps,
            limits=self._limits,
        )
        self.rows.append(slots.index_copy_(0, places, fresh))
        has_row = (fresh >= 0).nonzero().flatten()
        admitted = candidates.index_select(0, has_row)
        if self._config.admit_after > 1:
            self._pending.remove(admitted)
            self._pending.trim(others, self._pending_limits)
        return Turnover(slots, admitted, fresh.index_select(0, has_row), evicted)

    def export(self) -> dict[str, Tensor]:
        """Usage state of the rows by ascending id, and the counts of ids without a row."""
        own = export_usage(self.rows)
        content = {f"index.{name}": own[name] for name in ("last_step", "frequency")}
        if self._config.admit_after > 1:
            content |= {PENDING + name: values for name, values in export_usage(self._pending).items()}
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

    def _count(self, ids: Tensor, step: int) -> Tensor:
        """Counts ids without a row; returns the number [n] of batches in which each occurred."""
        if self._config.admit_after == 1:
            return torch.ones_like(ids)
        pending = self._pending
        slots = pending.touch(ids, step)
        new = (slots < 0).nonzero().flatten()
        fresh, _ = pending.admit(ids.index_select(0, new), torch.ones_like(new), step=step)
        pending.append(slots.index_copy_(0, new, fresh))
        return pending.state(slots)[1]
