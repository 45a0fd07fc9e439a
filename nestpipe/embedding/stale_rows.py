"""Rows stale by one step, across barriers too: the row access of semi-asynchronous training.

A batch always misses the update of the previous batch. Between barriers the schedule ensures that:
the rows of a batch are sent before that update. At a barrier every update is done, because
checkpoints, evaluation and serving need complete rows. So the weights of the last batch are *kept*
as they were before its update, and the first batch after the barrier reads those:

    ... F(t) U(t-1)   keep, U(t) │ barrier: kept rows are checkpointed │ F(t+1) reads kept rows where it shares them ...

So results do not depend on where barriers are, nor on a kill and resume at one. Kept rows are
addressed by id: any number of ranks can resume with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nestpipe.embedding.prefetch_buffer import RowAccess, RowRefs
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.unique_ids import dedupe
from nestpipe.ops.device_memory import download, upload

KEPT = "kept."


@dataclass(frozen=True, slots=True, eq=False)
class PreviousRows:
    """Weights of one batch before its update: distinct ids [K], ascending, and rows [K, D]."""

    ids: Tensor
    rows: Tensor

    @staticmethod
    def read(content: Mapping[str, Tensor]) -> PreviousRows | None:
        """From an exported table, ids in any order; None if it has no kept rows."""
        if f"{KEPT}ids" not in content:
            return None
        ids, order = content[f"{KEPT}ids"].sort()
        return PreviousRows(ids, content[f"{KEPT}rows"].index_select(0, order))

    def export(self) -> dict[str, Tensor]:
        """Copies, under the names of an exported table."""
        return {f"{KEPT}ids": self.ids.clone(), f"{KEPT}rows": self.rows.clone()}

    def overwrite(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Overwrites rows [n, D] of ids [n] with the kept ones, where there are any."""
        if not len(self.ids):
            return rows
        place = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        known = (self.ids.index_select(0, place) == ids).nonzero().flatten()
        kept = upload(self.rows.index_select(0, place.index_select(0, known)), rows.device)
        return rows.index_copy_(0, upload(known, rows.device), kept)


class StaleRows:
    """Row access whose first batch after a barrier reads the kept rows; counts rows shared by neighbouring batches.

    Batches up to `sync_steps` are not stale: those of the synchronous warm-up and the one after it.
    """

    def __init__(self, inner: RowAccess, *, sync_steps: int = 0):
        self.table, self.inner = inner.table, inner
        self.previous: PreviousRows | None = None  # for the next batch
        self._sync_steps = sync_steps
        self._first: tuple[int, PreviousRows] | None = None  # a batch after a barrier, and the kept rows it reads
        self._before: Tensor | None = None  # ids of the previous batch, if known
        self._shares: dict[int, tuple[int, int]] = {}

    def take(self, ids: Tensor, step: int) -> RowRefs:
        refs = self.inner.take(ids, step)
        if self.previous is not None:
            self._first, self._before, self.previous = (step, self.previous), self.previous.ids, None
        is_stale = step > self._sync_steps and self._before is not None
        self._shares[step] = (_num_shared(ids, self._before) if is_stale else 0, len(ids))
        self._before = ids
        return refs

    def pop_shares(self, step: int) -> tuple[int, int]:
        """Number of stale rows of a batch, and of all its rows."""
        return self._shares.pop(step)

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        rows = self.inner.gather(refs, out)
        first = self._first  # read once: another stream may clear it, for a skipped batch
        return rows if first is None or first[0] != refs.step else first[1].overwrite(rows, refs.ids)

    def keep_previous(self, refs: RowRefs) -> None:
        """Keeps the rows of the last batch before a barrier; called before its update."""
        # As the next batch reads them between barriers, before this update.
        self.previous = PreviousRows(refs.ids, download(self.inner.gather(replace(refs, step=refs.step + 1))))

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        self._clear_first(refs)  # its rows have been sent
        self.inner.update(refs, grads, lr)

    def release(self, refs: RowRefs) -> None:
        self._clear_first(refs)  # a skipped batch has no update
        self.inner.release(refs)

    def _clear_first(self, refs: RowRefs) -> None:
        first = self._first  # read once: another stream may clear it
        if first is not None and first[0] == refs.step:
            self._first = None


def _num_shared(ids: Tensor, others: Tensor | None) -> int:
    """Number of distinct ids that are among other distinct ids."""
    return 0 if others is None else len(ids) + len(others) - len(dedupe(torch.cat([ids, others]))[0])
