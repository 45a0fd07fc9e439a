"""A table used by one batch at a time through either row access, for tests of tables and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe.embedding.prefetch_buffer import PrefetchBuffer, RowAccess, RowRefs, rows_where_they_are
from nestpipe.embedding.table import Table


class Plain:
    """All of a table, and its rows by id."""

    def __init__(self, table: Table, *, buffered: bool = False):
        self.table = table
        self._access: RowAccess = PrefetchBuffer(table) if buffered else rows_where_they_are(table)
        self._refs: RowRefs | None = None
        self._step = 0

    def __len__(self) -> int:
        return len(self.table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def advance(self, ids: Tensor, step: int) -> None:
        self.release()
        self._refs = self._access.take(ids, step)

    def fetch(self, ids: Tensor) -> Tensor:
        if self.table.config.has_limits and not self._holds(ids):
            return self.table.peek(ids)
        return self._access.gather(self._hold(ids))

    def update(self, ids: Tensor, grads: Tensor, lr: float) -> None:
        self._access.update(self._hold(ids), grads, lr)
        self.release()

    def _holds(self, ids: Tensor) -> bool:
        return self._refs is not None and torch.equal(self._refs.ids, ids)

    def _hold(self, ids: Tensor) -> RowRefs:
        if not self._holds(ids):
            self.advance(ids, self._step)
            self._step += 1
        assert self._refs is not None
        return self._refs

    def release(self) -> None:
        if self._refs is not None:
            self._access.release(self._refs)
            self._refs = None
