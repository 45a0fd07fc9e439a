"""The contracts between a model and the training engine. Start with `Backbone`; most models need no more.

    Backbone      forward(vectors, batch) -> hidden              a network over the items of each history
    Model         lookups(batch) -> rows -> forward -> loss      own tables, own loss
    Recommender   Model + encode + item_vectors                  can also be evaluated and recommend
    Selecting     Model + select                                 reads only some events of a history

A backbone gets everything else from retrieval.py: the item table, negatives, the loss, evaluation and recommendation.

A model declares the rows it needs before it computes. So the engine can shard, prefetch and pipeline the lookups of any model
without tracing or patching it. The loss is a sum over the batch. The engine divides it by the weight of the global batch, so
the result does not depend on how samples are distributed over micro-batches and ranks.

`nestpipe check-model package.module:Class` runs these contracts on a class and names the one that it breaks.
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
    """A `torch.nn.Module` that maps item vectors [T, D] to hidden states [T, D]; built as `Class(config, max_len=...)`.

        @nestpipe.register_backbone(config=GRUConfig)      # a dataclass with defaults and a field `dim`
        class GRU(nn.Module):
            def __init__(self, config, *, max_len): ...
            def forward(self, vectors, batch): ...

    T counts the events of all histories, one history after the other; `batch.items` has their offsets. Row i may depend on
    the events of its own history up to i and on `batch.query_times`, never on later events or on other samples.

    `rng` is the source of random numbers, for example for dropout, and None in inference. A `forward` that draws no random
    numbers may omit the parameter.
    """

    def __call__(self, vectors: Tensor, batch: Batch, rng: Rng | None) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The loss summed over the batch, and sums of other quantities to log; both are divided by the global weight."""

    loss_sum: Tensor
    logs: Mapping[str, Tensor] = field(default_factory=dict)


class Model(Protocol):
    """A `torch.nn.Module`; its parameters are the dense part, its tables are sharded over the ranks."""

    tables: tuple[TableSpec, ...]
    coupling: Coupling  # which samples the loss may mix: none, those of one group (Batch.groups), or all of a batch

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        """The rows that `forward` needs, by name. Negatives are drawn here."""
        ...

    def weight(self, batch: Batch) -> float:
        """The weight of the batch in the global mean; must be known before `forward`."""
        ...

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        """The loss of the batch, from the rows that `lookups` named."""
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModelData:
    """The data that a registered model is built for: `Class(config, data)`."""

    catalogue: Tensor  # [I] all item ids, ascending
    max_len: int  # longest history of a sample
    schema: Schema


@runtime_checkable
class Selecting(Protocol):
    """A model that reads only some events of each history and selects them before their rows are looked up.

    Selection uses a snapshot of the weights, which the training loop refreshes between batches. So the selection for a batch
    depends on the batch's number and never on how batches overlap. A module that holds the snapshot as saved buffers sets
    `buffers_on_host = True`: selection runs on the host, also if the weights are on a device.
    """

    refresh_steps: int  # a snapshot is taken before batches 0, n, 2n ...; 0: never

    def refresh(self, num_steps: int) -> None:
        """Takes the snapshot."""
        ...

    def select(self, batch: Batch, rng: Rng | None) -> Batch:
        """The batch with the selected events only."""
        ...


@runtime_checkable
class Recommender(Model, Protocol):
    """A model that can also rank the whole catalogue by a dot product."""

    def encode_lookups(self, batch: Batch) -> dict[str, Lookup]:
        """The rows that `encode` needs."""
        ...

    def encode(self, rows: Mapping[str, Rows], batch: Batch) -> Tensor:
        """One query vector [B, D] per sample, for its query time."""
        ...

    def item_vectors(self, rows: Tensor) -> Tensor:
        """Item vectors [n, D] from the item table's rows [n, D]; score = query · item."""
        ...
