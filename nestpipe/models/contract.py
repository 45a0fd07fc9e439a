"""The contracts between models and the training engine.

`Backbone`, the first one, turns the item vectors of histories into hidden states; tables, loss, negatives, evaluation and
recommendation are those of every next-item model (retrieval.py). `Model` is the whole contract: `lookups` says which rows a batch
needs, `forward` computes with them. Nothing is traced or patched, so whatever a model does, its lookups can be sharded, prefetched
and pipelined. The loss is a *sum* over the batch. The engine divides it by the global weight, so the result does not depend on
how samples are spread over micro-batches and ranks.

`nestpipe check-model` runs these contracts on any class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from nestpipe.data.schema import Schema
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.jagged import Batch
from nestpipe.rng import Rng

Coupling = Literal["none", "group", "batch"]


class Backbone(Protocol):
    """Turns item vectors [T, D] into hidden states [T, D]; row i knows events up to i and the time that it answers for.

    Implementations are `torch.nn.Module`s, built as `Class(config, max_len=...)`. `rng` is None for inference; a `forward` that
    draws nothing may leave the parameter out.
    """

    def __call__(self, vectors: Tensor, batch: Batch, rng: Rng | None) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The loss summed over the batch, and sums of anything else worth logging (divided by the weight too)."""

    loss_sum: Tensor
    logs: Mapping[str, Tensor] = field(default_factory=dict)


class Model(Protocol):
    """What the engine trains. Implementations are `torch.nn.Module`s whose parameters are the dense part."""

    tables: tuple[TableSpec, ...]
    coupling: Coupling  # which samples the loss may mix: none, those of a group (Batch.groups), all of a batch

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        """The rows that `forward` will need, by name; negatives are drawn here."""
        ...

    def weight(self, batch: Batch) -> float:
        """How much the batch counts in the global mean; known before `forward`."""
        ...

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        """The loss of the batch."""
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModelData:
    """What a registered model is told about the data when it is built: `Class(config, data)`."""

    catalogue: Tensor  # [I] all item ids, ascending
    max_len: int  # longest history of a sample
    schema: Schema


@runtime_checkable
class Selecting(Protocol):
    """A model that reads some events of each history, chosen before their rows are looked up.

    It chooses by a snapshot of its weights, which the loop lets it take between batches: what is chosen for a batch depends on
    the batch's number, never on how batches overlap.
    """

    refresh_steps: int  # a snapshot is taken before batches 0, n, 2n ...; 0: never

    def refresh(self, num_steps: int) -> None:
        """Takes the snapshot."""
        ...

    def select(self, batch: Batch, rng: Rng | None) -> Batch:
        """The batch with the events that are read."""
        ...


@runtime_checkable
class Recommender(Model, Protocol):
    """A model that can also rank the whole catalogue by a dot product."""

    def encode_lookups(self, batch: Batch) -> dict[str, Lookup]:
        """The rows that `encode` will need."""
        ...

    def encode(self, rows: Mapping[str, Rows], batch: Batch) -> Tensor:
        """One query vector [B, D] per sample, for its query time."""
        ...

    def item_vectors(self, rows: Tensor) -> Tensor:
        """Item vectors [n, D] from the item table's rows [n, D]; score = query · item."""
        ...
