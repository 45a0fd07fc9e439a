"""Rows one update old, over a barrier too: what semi-asynchronous training asks of whatever holds the rows.

A batch misses the update of the batch before it, always. Between barriers the schedule sees to that: its rows leave before
that update. At a barrier every update is done, because whoever saves, evaluates or serves wants whole rows; so the weights
of the last batch are *kept* as they were before its update, and the first batch afterwards reads those instead:

    ... F(t) U(t-1)   keep, U(t) │ barrier: saved with the checkpoint │ F(t+1) reads kept rows where it shares them ...

So it does not matter where barriers are, nor whether a run was killed at one. Kept rows go by id: any number of ranks can
go on with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.prefetch_buffer import RowAccess, RowRefs
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.unique_ids import dedupe

KEPT = "kept."


@dataclass(frozen=True, slots=True, eq=False)
class PreviousRows:
    """Weights of one batch before its update: distinct ids [K], ascending, and rows [K, D]."""

    ids: Tensor
    rows: Tensor

    @staticmethod
    def read(content: Mapping[str, Tensor]) -> PreviousRows | None:
        """From an exported table, ids in any order; None if nothing was kept."""
        if f"{KEPT}ids" not in content:
            return None
        ids, order = content[f"{KEPT}ids"].sort()
        return PreviousRows(ids, content[f"{KEPT}rows"].index_select(0, order))

    def export(self) -> dict[str, Tensor]:
        """Copies, under the names of an exported table."""
        return {f"{KEPT}ids": self.ids.clone(), f"{KEPT}rows": self.rows.clone()}

    def lay_over(self, rows: Tensor, ids: Tensor) -> Tensor:
        """The rows [n, D] of ids [n], with those that were kept as they were."""
        if not len(self.ids):
            return rows
        place = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        known = (self.ids.index_select(0, place) == ids).nonzero().flatten()
        return rows.index_copy_(0, known, self.rows.index_select(0, place.index_select(0, known)))


class StaleRows:
    """A holder whose first batch after a barrier reads what was kept there; counts rows that neighbours share.

    Batches up to `sync_steps` miss nothing: the first of them all, those of a synchronous warm-up, and the one after it.
    """

    def __init__(self, holder: RowAccess, *, sync_steps: int = 0):
        self.table, self.inner = holder.table, holder
        self.previous: PreviousRows | None = None  # for the next batch that is taken
        self._sync_steps = sync_steps
        self._first: tuple[int, PreviousRows] | None = None  # a batch after a barrier, and what it reads
        self._before: Tensor | None = None  # ids of the batch before, as far as they are known
        self._shares: dict[int, tuple[int, int]] = {}

    def take(self, ids: Tensor, step: int) -> RowRefs:
        refs = self.inner.take(ids, step)
        if self.previous is not None:
            self._first, self._before, self.previous = (step, self.previous), self.previous.ids, None
        misses = step > self._sync_steps and self._before is not None
        self._shares[step] = (_num_shared(ids, self._before) if misses else 0, len(ids))
        self._before = ids
        return refs

    def pop_shares(self, step: int) -> tuple[int, int]:
        """How many rows of a batch that was taken lack an update of the batch before, and how many there are."""
        return self._shares.pop(step)

    def gather(self, refs: RowRefs, out: Tensor | None = None) -> Tensor:
        rows = self.inner.gather(refs, out)
        first = self._first  # another lane may forget it meanwhile: that of a batch that is skipped
        return rows if first is None or first[0] != refs.step else first[1].lay_over(rows, refs.ids)

    def keep_previous(self, refs: RowRefs) -> None:
        """Notes the rows of the last batch before a barrier; called before its update."""
        self.previous = PreviousRows(refs.ids, self.inner.gather(refs))

    def update(self, refs: RowRefs, grads: Tensor | ArrivedGrads, lr: float) -> None:
        self._forget(refs)  # its rows have left
        self.inner.update(refs, grads, lr)

    def release(self, refs: RowRefs) -> None:
        self._forget(refs)  # a batch that is skipped has no update
        self.inner.release(refs)

    def _forget(self, refs: RowRefs) -> None:
        first = self._first  # another lane may forget it meanwhile
        if first is not None and first[0] == refs.step:
            self._first = None


def split_previous(
    content: Mapping[str, Tensor], owners: Owners, buckets: range
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Exported kept rows, bucket by bucket; nothing if nothing was kept."""
    if content:
        bucket = owners.bucket_of(content[f"{KEPT}ids"])
        for number in buckets:
            own = (bucket == number).nonzero().flatten()
            yield number, {name: values.index_select(0, own) for name, values in content.items()}


def _num_shared(ids: Tensor, others: Tensor | None) -> int:
    """How many of distinct ids are among other distinct ids."""
    return 0 if others is None else len(ids) + len(others) - len(dedupe(torch.cat([ids, others]))[0])
