"""Next-item retrieval model: a backbone over the history, dot products with item vectors, a softmax loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.errors import ConfigError
from nestpipe.jagged import Batch
from nestpipe.models.backbone import initial_weights
from nestpipe.models.config import LossConfig
from nestpipe.models.contract import Backbone, Coupling, Output
from nestpipe.models.losses import full_softmax, in_batch_softmax
from nestpipe.models.negative_sampling import blocks_of, draw_negatives, group_runs
from nestpipe.ops.device_memory import upload
from nestpipe.ops.negatives import sampled_softmax
from nestpipe.ops.precision import full_precision, widened
from nestpipe.registry import entry_of
from nestpipe.rng import Rng

_WIRES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Retrieval(nn.Module):
    """Trains every event of a history to predict the next one; recommends from its last event."""

    coupling: Coupling
    catalogue: Tensor  # [I] ids, ascending
    log_q: Tensor  # [I] log of each item's share of the training events; empty unless the loss is in_batch

    def __init__(
        self, backbone: Backbone, loss: LossConfig, catalogue: Tensor, *, dim: int, counts: Tensor | None = None
    ):
        super().__init__()
        if loss.kind == "full" and len(catalogue) > loss.max_full_catalogue:
            raise ConfigError(
                f"loss.kind 'full' scores every event against all {len(catalogue):,} items, above "
                f"loss.max_full_catalogue {loss.max_full_catalogue:,}; use --loss.kind sampled or raise the limit."
            )
        if loss.kind == "in_batch" and counts is None:
            raise ValueError(
                "loss.kind 'in_batch' corrects scores by popularity; pass the training events of each item as counts"
            )
        self.backbone = backbone
        self._takes_rng = "rng" in inspect.signature(getattr(backbone, "forward", backbone)).parameters
        self.loss = loss
        self.coupling = "group" if loss.mixes_groups else "none"
        self.tables: tuple[TableSpec, ...] = (TableSpec(name="item", dim=dim),)
        self.register_buffer("catalogue", catalogue, persistent=False)
        shares = torch.empty(0) if counts is None else counts.clamp(min=1) / counts.sum()
        self.register_buffer("log_q", shares.log(), persistent=False)

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        if batch.targets is None:
            raise ValueError("a training batch needs targets")
        lookups = self._history_lookups(batch)
        if self.loss.kind == "full":
            # forward() finds a target's catalogue position by its row, so both lookups share the table's rows.
            lookups["catalogue"] = Lookup(table="item", ids=self.catalogue)
        elif self.loss.kind == "sampled":
            places = draw_negatives(self.loss, batch, rng, len(self.catalogue))
            ids = self.catalogue.index_select(0, places.flatten()).reshape(places.shape)
            lookups["negatives"] = Lookup(table="item", ids=ids, wire=_WIRES[self.loss.wire])
        lookups["targets"] = Lookup(table="item", ids=batch.targets.values)
        return lookups

    def weight(self, batch: Batch) -> float:
        return float(batch.num_tokens)

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        hidden = self._hidden(rows, batch, rng)
        with full_precision(hidden.device):
            return Output(self._loss_sum(widened(hidden), rows, batch, rng))

    def _loss_sum(self, hidden: Tensor, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Tensor:
        queries = self._unit(hidden) / self.loss.temperature
        items = self._unit(rows["targets"].unique)
        targets, segment = rows["targets"], self.loss.segment
        if self.loss.kind == "full":
            catalogue = F.embedding(rows["catalogue"].index, items)
            place = torch.full((len(items),), -1).index_copy_(
                0, rows["catalogue"].host_index, torch.arange(len(self.catalogue))
            )
            positives = upload(place.index_select(0, targets.host_index), items.device)
            loss = full_softmax(queries, catalogue, positives, segment=segment)
        elif self.loss.kind == "in_batch":
            log_q = self.log_q.index_select(0, torch.searchsorted(self.catalogue, targets.lookup.ids))
            loss = in_batch_softmax(queries, items, targets.host_index, log_q, group_runs(batch)[0], segment=segment)
        else:
            negatives = rows["negatives"]
            rounded = negatives.rounded()
            loss = sampled_softmax(
                queries,
                items if rounded is rows["targets"].unique else self._unit(rounded),
                targets.index,
                negatives.index,
                segment=segment,
                positive_rows=items,
                blocks=blocks_of(self.loss, batch, rng),
            )
        return loss

    def encode_lookups(self, batch: Batch) -> dict[str, Lookup]:
        return self._history_lookups(batch)

    def _history_lookups(self, batch: Batch) -> dict[str, Lookup]:
        return {"history": Lookup(table="item", ids=batch.items.values)}

    def encode(self, rows: Mapping[str, Rows], batch: Batch) -> Tensor:
        hidden = self._hidden(rows, batch, None)
        has_history = batch.items.lengths() > 0
        last = (batch.items.offsets[1:] - 1).clamp(min=0)
        padded = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])
        return self._unit(padded.index_select(0, torch.where(has_history, last, len(hidden))))

    def item_vectors(self, rows: Tensor) -> Tensor:
        return self._unit(rows)

    def _hidden(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng | None) -> Tensor:
        vectors = rows["history"].gather()
        return self.backbone(vectors, batch, rng) if self._takes_rng else self.backbone(vectors, batch)  # type: ignore[call-arg]

    def _unit(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=1, eps=1e-6) if self.loss.normalise else vectors


def build_retrieval(
    config: Any,
    loss: LossConfig,
    *,
    catalogue: Tensor,
    max_len: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    counts: Tensor | None = None,
) -> Retrieval:
    """A next-item model around a registered backbone; its initial dense weights are a function of the seed.

    `counts` is the number of training events of each item; loss.kind 'in_batch' needs it.
    """
    with initial_weights(seed):
        backbone = entry_of(config).load()(config, max_len=max_len)
    return Retrieval(backbone, loss, catalogue, dim=config.dim, counts=counts).to(dtype)
