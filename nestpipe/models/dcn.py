"""DCN-v2: cross layers (products of features) in parallel with an MLP over the same input.

    x0 = concatenated features of an event          x(l+1) = x0 · (W_l x_l + b_l) + x_l
    score = heads([x_L, MLP(x0)])

Every event is a sample of its own, without a history. A cross matrix may have low rank: W = U V'.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.data.schema import Feature, Schema
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.errors import ConfigError
from nestpipe.jagged import Batch
from nestpipe.models.backbone import initial_weights
from nestpipe.models.config import DCNConfig
from nestpipe.models.contract import Coupling, Output
from nestpipe.models.feature_encoder import FeatureEncoder, feature_tables
from nestpipe.models.heads import LabelHeads
from nestpipe.models.ranking import named_labels
from nestpipe.rng import Rng


class DCN(nn.Module):
    """Predicts the labels of events from the features of event, item and user."""

    coupling: Coupling = "none"

    def __init__(self, config: DCNConfig, schema: Schema):
        super().__init__()
        self.config = config
        ids = {name: Feature(name=name, kind="id", scope="user") for name in ("user", "item")}
        known = {feature.name: feature for feature in schema.features}
        chosen = tuple(known[name] for name in config.features if name not in ids)
        if unlogged := [feature.name for feature in chosen if feature.scope == "request"]:
            raise ConfigError(
                f"features {unlogged} are request features: the log does not have them, so they cannot be learned. "
                "Remove them from model.features."
            )
        self.event = FeatureEncoder("event", (f for f in chosen if f.scope in {"event", "item"}), dim=config.dim)
        self.user = FeatureEncoder("user", (f for f in chosen if f.scope == "user"), dim=config.dim)
        self._ids = tuple(name for name in ids if name in config.features)
        self.tables: tuple[TableSpec, ...] = (
            *(TableSpec(name=name, dim=config.dim) for name in self._ids),
            *feature_tables(chosen, config.dim),
        )
        width = (self.event.num_vectors + self.user.num_vectors + len(self._ids)) * config.dim
        self.cross = nn.ModuleList(_Cross(width, config.rank) for _ in range(config.num_cross))
        sizes = [width, *config.hidden]
        self.deep = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.tasks = LabelHeads(named_labels(schema, config.labels), dim=width + sizes[-1], hidden=config.hidden[-1])

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        return self.event_lookups(batch)

    def event_lookups(self, batch: Batch) -> dict[str, Lookup]:
        lookups = {**self.event.lookups(batch.event_features), **self.user.lookups(batch.sample_features)}
        if "item" in self._ids:
            lookups["item"] = Lookup(table="item", ids=batch.items.values)
        if "user" in self._ids:
            lookups["user"] = Lookup(table="user", ids=batch.sample_features["user"].values)
        return lookups

    def weight(self, batch: Batch) -> float:
        return self.tasks.weight(batch.event_features)

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        loss, logs = self.tasks.loss(self.event_scores(rows, batch), batch.event_features)
        return Output(loss, logs)

    def event_scores(self, rows: Mapping[str, Rows], batch: Batch) -> Tensor:
        """Scores [T, labels] of all events."""
        user = batch.items.row_of_value()
        event_vectors = self.event.vectors(rows, batch.event_features)
        user_vectors = self.user.vectors(rows, batch.sample_features)
        if "item" in self._ids:
            event_vectors.append(rows["item"].gather())
        if "user" in self._ids:
            user_vectors.append(rows["user"].gather())
        x0 = torch.cat([*event_vectors, *(F.embedding(user, one) for one in user_vectors)], dim=1)
        x0 = x0 * self.config.dim**0.5
        crossed = deep = x0
        for cross in self.cross:
            crossed = cross(x0, crossed)
        for layer in self.deep:
            deep = F.relu(layer(deep))
        scores: Tensor = self.tasks(torch.cat([crossed, deep], dim=1))
        return scores


class _Cross(nn.Module):
    def __init__(self, width: int, rank: int):
        super().__init__()
        self.narrow = nn.Linear(width, rank, bias=False) if rank else None
        self.wide = nn.Linear(rank or width, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, x0, self.wide(x if self.narrow is None else self.narrow(x)))


def build_dcn(config: DCNConfig, schema: Schema, *, seed: int, dtype: torch.dtype = torch.float32) -> DCN:
    """A model whose initial dense weights are a function of the seed."""
    with initial_weights(seed):
        return DCN(config, schema).to(dtype)
