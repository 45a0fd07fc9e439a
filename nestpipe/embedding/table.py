"""The rows of one embedding table that live on one rank: ids -> slots -> rows with their optimizer state.

A slot is where a row happens to live; nothing outside this file sees one. Rows appear when they are first looked up,
with values that are a function of (seed, table, id), so the order of arrival leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.draw import Draw, bell
from nestpipe.embedding.index import make_index
from nestpipe.embedding.optim import RowOptimizer, State
from nestpipe.embedding.spec import TableSpec

_INIT_ROWS = 8192  # rows made at a time: the integers behind a row take eight times its size


class Table:
    """Rows of one table. `fetch` and `update` want distinct ids in ascending order, as an owner's union has them."""

    def __init__(
        self,
        spec: TableSpec,
        optimizer: RowOptimizer,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        native: bool | None = None,
    ):
        self.spec = spec
        self._optimizer = optimizer
        self._seed = seed
        self._dtype = dtype
        self._index = make_index(native=native)
        self._rows = torch.empty(0, spec.dim, dtype=dtype)
        self._state = self._new_state(0)

    def __len__(self) -> int:
        return len(self._index)

    def initial(self, ids: Tensor) -> Tensor:
        """The rows [n, D] that these ids start with."""
        keys = Draw(self._seed, 0).keys(f"init/{self.spec.name}", ids)
        rows = torch.empty(len(ids), self.spec.dim, dtype=self._dtype)
        for part, own in zip(rows.split(_INIT_ROWS), keys.split(_INIT_ROWS), strict=True):
            part.copy_(bell(own, self.spec.dim).mul_(self.spec.init_std))
        return rows

    def empty_rows(self, num_rows: int) -> Tensor:
        """Room for rows [n, D] of this table."""
        return torch.empty(num_rows, self.spec.dim, dtype=self._dtype)

    def fetch(self, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of distinct ids; unknown ids are admitted."""
        slots, added = self._index.find_or_add(ids)
        if len(added):
            self._grow(self._index.num_slots)
            fresh = slots.index_select(0, added)
            self._rows.index_copy_(0, fresh, self.initial(ids.index_select(0, added)))
        return self._rows.index_select(0, slots)

    def peek(self, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of any ids; unknown ids show their initial value and are not admitted."""
        slots = self._index.find(ids)
        unknown = (slots < 0).nonzero().flatten()
        if len(unknown) == len(ids):
            return self.initial(ids)
        rows = self._rows.index_select(0, slots.clamp(min=0))
        return rows.index_copy_(0, unknown, self.initial(ids.index_select(0, unknown)))

    def update(self, ids: Tensor, grads: Tensor, lr: float) -> None:
        """One optimizer step on the rows of distinct ids that are all known."""
        slots = self._index.find(ids)
        rows = self._rows.index_select(0, slots)
        state = {name: values.index_select(0, slots) for name, values in self._state.items()}
        self._optimizer.update(rows, state, grads, lr)
        self._rows.index_copy_(0, slots, rows)
        for name, values in state.items():
            self._state[name].index_copy_(0, slots, values)

    def export(self) -> dict[str, Tensor]:
        """Everything there is to know, in ascending order of ids."""
        ids, slots = self._index.export()
        state = {f"state.{name}": values.index_select(0, slots) for name, values in self._state.items()}
        return {"ids": ids, "rows": self._rows.index_select(0, slots), **state}

    def load(self, content: Mapping[str, Tensor]) -> None:
        """Replaces the content by an exported one, its ids in any order."""
        self._index.load(content["ids"], torch.arange(len(content["ids"])))
        self._rows = content["rows"].to(self._dtype)
        self._state = {name: content[f"state.{name}"] for name in self._state}

    def _new_state(self, num_rows: int) -> State:
        state = self._optimizer.new_state(num_rows, self.spec.dim)
        return {
            name: values.to(self._dtype) if values.is_floating_point() else values for name, values in state.items()
        }

    def _grow(self, num_rows: int) -> None:
        """Room for at least so many rows; doubled, so that growing costs little per row."""
        if num_rows <= len(self._rows):
            return
        missing = max(num_rows, 2 * len(self._rows), 1024) - len(self._rows)
        self._rows = torch.cat([self._rows, self._rows.new_zeros(missing, self.spec.dim)])
        fresh = self._new_state(missing)
        self._state = {name: torch.cat([values, fresh[name]]) for name, values in self._state.items()}
