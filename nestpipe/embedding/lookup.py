"""The model's side of a lookup: tables it declares, ids it requests, rows it gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_ops import gather_each
from nestpipe.ops.device_memory import upload

Pool = Literal["none", "sum", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """One embedding table. Rows start near normal with deviation `init_std`, a function of (seed, name, id)."""

    name: str
    dim: int
    init_std: float = 0.02
    optimizer: OptimizerConfig | None = None  # None: the run's `embedding` section


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Lookup:
    """Ids [n] to find in a table; any int64 is legal.

    With `pool` "none" the model gets one vector per id; else one per bag, where bag i is ids[offsets[i]:offsets[i+1]],
    optionally weighted. An empty bag gives a zero vector. `wire` is a 16-bit type that is precise enough for this use: ids
    whose uses in a window all have it are sent in it (see `Rows.rounded`).
    """

    table: str
    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    pool: Pool = "none"
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64:
            raise ValueError(f"lookup in table '{self.table}' has {self.ids.dtype} ids; ids are int64")
        if (self.pool == "none") != (self.offsets is None):
            raise ValueError(
                f"lookup in table '{self.table}' needs offsets if and only if it is pooled (pool={self.pool!r})"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The result of a `Lookup`: the distinct rows [U, D] of its table in this micro-batch, and the position of each id.

    `unique` is one autograd leaf shared by all lookups in the table, so the gradients of a row are summed there. Code that
    cannot afford one vector per id (negatives) works on `unique` and `index` directly.
    """

    unique: Tensor
    index: Tensor
    lookup: Lookup
    host: Tensor | None = None  # of rows on a device: `index` on the host

    @property
    def host_index(self) -> Tensor:
        """The position of each id, on the host."""
        return self.index if self.host is None else self.host

    def moved(self, device: torch.device) -> Rows:
        """The same on a device, where its rows are; the lookup's ids stay on the host."""
        lookup = self.lookup
        offsets, weights = (None if one is None else upload(one, device) for one in (lookup.offsets, lookup.weights))
        moved = replace(lookup, offsets=offsets, weights=weights)
        return Rows(self.unique, upload(self.index, device), moved, self.index)

    def rounded(self) -> Tensor:
        """`unique` [U, D] rounded to the lookup's wire type, also where a row was sent in full because of another use.

        So results do not depend on which lookups share a window. The gradient is that of the unrounded row.
        """
        if self.lookup.wire is None:
            return self.unique
        rounded: Tensor = _Round.apply(self.unique, self.lookup.wire)  # type: ignore[no-untyped-call]
        return rounded

    def gather(self) -> Tensor:
        """One vector per id [n, D], or one per bag."""
        vectors = gather_each(self.rounded(), self.index.reshape(-1))
        if self.lookup.offsets is None:
            return vectors.reshape(*self.index.shape, self.unique.shape[1])
        if self.lookup.weights is not None:
            vectors = vectors * self.lookup.weights.unsqueeze(1)
        return pool_bags(vectors, self.lookup.offsets, self.lookup.pool)


def moved_rows(rows: Mapping[str, Rows], device: torch.device) -> Mapping[str, Rows]:
    """Rows of the host on a device; those that several lookups share are copied once."""
    if device.type == "cpu":
        return rows
    unique = {id(one.unique): upload(one.unique, device) for one in rows.values()}
    return {name: replace(one, unique=unique[id(one.unique)]).moved(device) for name, one in rows.items()}


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, wire: torch.dtype) -> Tensor:
        return values.to(wire).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def pool_bags(vectors: Tensor, offsets: Tensor, pool: Pool) -> Tensor:
    """Sum or mean of each bag, [num_bags, D]; zero for an empty bag."""
    lengths = offsets.diff()
    bag_of_id = torch.arange(len(lengths), device=vectors.device).repeat_interleave(lengths, output_size=len(vectors))
    pooled = vectors.new_zeros(len(lengths), vectors.shape[1]).index_add(0, bag_of_id, vectors)
    if pool == "mean":
        pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
    return pooled
