"""A table used by one batch at a time, through either holder: what the tests of tables and optimizers compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe.embedding.prefetch_buffer import InPlaceRows, PrefetchBuffer, RowAccess, RowRefs
from nestpipe.embedding.table import Table


class Plain:
    """Everything of a table, and rows by id."""

    def __init__(self, table: Table, *, pool: bool = False):
        self.table = table
        self._holder: RowAccess = PrefetchBuffer(table) if pool else InPlaceRows(table)
        self._held: RowRefs | None = None
        self._step = 0

    def __len__(self) -> int:
        return len(self.table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def advance(self, ids: Tensor, step: int) -> None:
        self.release()
        self._held = self._holder.take(ids, step)

    def fetch(self, ids: Tensor) -> Tensor:
        if self.table.config.has_limits and not self._holds(ids):
            return self.table.peek(ids)
        return self._holder.gather(self._hold(ids))

    def update(self, ids: Tensor, grads: Tensor, lr: float) -> None:
        self._holder.update(self._hold(ids), grads, lr)
        self.release()

    def _holds(self, ids: Tensor) -> bool:
        return self._held is not None and torch.equal(self._held.ids, ids)

    def _hold(self, ids: Tensor) -> RowRefs:
        if not self._holds(ids):
            self.advance(ids, self._step)
            self._step += 1
        assert self._held is not None
        return self._held

    def release(self) -> None:
        if self._held is not None:
            self._holder.release(self._held)
            self._held = None
