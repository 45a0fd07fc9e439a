"""One embedding table in one process: ids -> slots -> rows with their optimizer state.

A slot is where a row happens to live; nothing outside this file sees one. Rows appear when they are first looked up,
with values that are a function of (seed, table, id), so the order of arrival leaves no trace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.draw import Draw, bell
from nestpipe.embedding.optim import RowOptimizer, State
from nestpipe.embedding.spec import TableSpec

_INIT_ROWS = 8192  # rows made at a time: the integers behind a row take eight times its size


class Table:
    """Rows of one table. `take` and `update` want distinct ids in ascending order, as `route` makes them."""

    def __init__(self, spec: TableSpec, optimizer: RowOptimizer, *, seed: int, dtype: torch.dtype = torch.float32):
        self.spec = spec
        self._optimizer = optimizer
        self._seed = seed
        self._dtype = dtype
        self._ids = torch.empty(0, dtype=torch.int64)  # ascending
        self._slots = torch.empty(0, dtype=torch.int64)  # slot of each of them
        self._rows = torch.empty(0, spec.dim, dtype=dtype)
        self._state = self._new_state(0)

    def __len__(self) -> int:
        return len(self._ids)

    def initial(self, ids: Tensor) -> Tensor:
        """The rows [n, D] that these ids start with."""
        keys = Draw(self._seed, 0).keys(f"init/{self.spec.name}", ids)
        rows = torch.empty(len(ids), self.spec.dim, dtype=self._dtype)
        for part, own in zip(rows.split(_INIT_ROWS), keys.split(_INIT_ROWS), strict=True):
            part.copy_(bell(own, self.spec.dim).mul_(self.spec.init_std))
        return rows

    def fetch(self, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of distinct ascending ids; unknown ids are admitted."""
        found, known = self._find(ids)
        if not bool(known.all()):
            self._admit(ids[~known])
            found, _ = self._find(ids)
        return self._rows.index_select(0, found)

    def peek(self, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of any ids; unknown ids show their initial value and are not admitted."""
        found, known = self._find(ids)
        rows = self._rows.index_select(0, torch.where(known, found, 0)) if len(self) else self.initial(ids)
        if len(self) and not bool(known.all()):
            unknown = (~known).nonzero().flatten()
            rows.index_copy_(0, unknown, self.initial(ids.index_select(0, unknown)))
        return rows

    def update(self, ids: Tensor, grads: Tensor, lr: float) -> None:
        """One optimizer step on the rows of distinct ascending ids that are all known."""
        slots, _ = self._find(ids)
        rows = self._rows.index_select(0, slots)
        state = {name: values.index_select(0, slots) for name, values in self._state.items()}
        self._optimizer.update(rows, state, grads, lr)
        self._rows.index_copy_(0, slots, rows)
        for name, values in state.items():
            self._state[name].index_copy_(0, slots, values)

    def export(self) -> dict[str, Tensor]:
        """Everything there is to know, in ascending order of ids."""
        state = {f"state.{name}": values.index_select(0, self._slots) for name, values in self._state.items()}
        return {"ids": self._ids.clone(), "rows": self._rows.index_select(0, self._slots), **state}

    def load(self, content: dict[str, Tensor]) -> None:
        """Replaces the content by an exported one."""
        self._ids, self._rows = content["ids"].clone(), content["rows"].to(self._dtype)
        self._slots = torch.arange(len(self._ids))
        self._state = {name: content[f"state.{name}"] for name in self._state}

    def _new_state(self, num_rows: int) -> State:
        state = self._optimizer.new_state(num_rows, self.spec.dim)
        return {
            name: values.to(self._dtype) if values.is_floating_point() else values for name, values in state.items()
        }

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Slot of each id, and whether it is known (the slot of an unknown id means nothing)."""
        if not len(self._ids):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        place = torch.searchsorted(self._ids, ids).clamp_(max=len(self._ids) - 1)
        return self._slots.index_select(0, place), self._ids.index_select(0, place) == ids

    def _admit(self, ids: Tensor) -> None:
        first, last = len(self._ids), len(self._ids) + len(ids)
        if last > len(self._rows):
            self._grow(max(last, 2 * len(self._rows), 1024))
        self._rows[first:last] = self.initial(ids)
        merged, order = torch.cat([self._ids, ids]).sort()
        self._ids = merged
        self._slots = torch.cat([self._slots, torch.arange(first, last)]).index_select(0, order)

    def _grow(self, capacity: int) -> None:
        missing = capacity - len(self._rows)
        self._rows = torch.cat([self._rows, self._rows.new_zeros(missing, self.spec.dim)])
        fresh = self._new_state(missing)
        self._state = {name: torch.cat([values, fresh[name]]) for name, values in self._state.items()}
