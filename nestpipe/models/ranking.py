"""Ranking model: predicts the labels of candidates from the user's history, in which each event carries its action.

    token        input vector                          attends to
    event        item + features + action + position   itself and earlier events
    candidate    item + features + user + position     itself and all events, never other candidates
    scores       one per label, from a candidate's hidden state

The action of an event is the sum of the vectors of its label values, so the model can tell a dislike, a skip or a short view
from a like. A candidate has no action, because the action is what is predicted. All candidates of a request have one
position, behind the last event.

Positions count from the oldest event, and the divisor of attention is a constant. So the hidden state of an event depends on
the events up to it and on the time of the next one, and on nothing else. `Ranker` (prefix_inference.py) relies on that to
keep keys and values of all events but the last.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.data.schema import Label, Schema
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.errors import ConfigError
from nestpipe.jagged import Batch, Jagged
from nestpipe.models.backbone import TokenDropout, initial_weights
from nestpipe.models.config import RankingConfig
from nestpipe.models.contract import Coupling, Output
from nestpipe.models.feature_encoder import FeatureEncoder, feature_tables
from nestpipe.models.fuxi import FuXiRankingUnit
from nestpipe.models.heads import LabelHeads
from nestpipe.models.hstu import HSTUUnit
from nestpipe.models.item_encoder import kept_ids
from nestpipe.ops.attention import attention_layout
from nestpipe.rng import Rng

_UNITS: dict[str, type[HSTUUnit]] = {"hstu": HSTUUnit, "fuxi": FuXiRankingUnit}


class Ranking(nn.Module):
    """Trains every event but the first of a window as a candidate for the history before it."""

    coupling: Coupling = "none"
    anchored = False  # True for a model whose prefix rows depend on the request; see prefix_inference.py

    def __init__(self, config: RankingConfig, schema: Schema, *, max_len: int):
        super().__init__()
        self.config, self.max_len = config, max_len
        labels = named_labels(schema, config.labels)
        known = {feature.name: feature for feature in schema.features}
        chosen = tuple(known[name] for name in config.features if name in known)
        self.declared = (*chosen, *labels)
        self.history = FeatureEncoder("history", (f for f in chosen if f.scope in {"event", "item"}), dim=config.dim)
        self.candidate = FeatureEncoder("candidate", (f for f in chosen if f.scope == "item"), dim=config.dim)
        self.user = FeatureEncoder("user", (f for f in chosen if f.scope == "user"), dim=config.dim)
        self.actions = Actions(labels, dim=config.dim)
        # One position per event, and one behind the last event for candidates.
        self.place = nn.Parameter(torch.empty(max_len + 1, config.dim))
        nn.init.trunc_normal_(self.place, std=config.dim**-0.5)
        unit = _UNITS[config.backbone]
        self.units = nn.ModuleList(unit(config, max_len, num_positions=max_len + 1) for _ in range(config.num_blocks))
        self.tasks = LabelHeads(labels, dim=config.dim, hidden=config.head_dim)
        self.tables: tuple[TableSpec, ...] = (
            TableSpec(name="item", dim=config.dim, init_std=0.0)
            if config.id_dropout
            else TableSpec(name="item", dim=config.dim),
            TableSpec(name="action", dim=config.dim),
            *feature_tables(chosen, config.dim),
        )

    # Training

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        return self.target_lookups(batch)

    def target_lookups(self, batch: Batch) -> dict[str, Lookup]:
        """The rows that `target_scores` needs."""
        if batch.targets is None:
            raise ValueError("a training batch needs targets")
        return self.event_lookups(batch) | self.candidate_lookups(
            batch.targets, batch.target_features, batch.sample_features
        )

    def weight(self, batch: Batch) -> float:
        return self.tasks.weight(batch.target_features)

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        loss, logs = self.tasks.loss(self.target_scores(rows, batch, rng), batch.target_features)
        return Output(loss, logs)

    def target_scores(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng | None) -> Tensor:
        """Scores [T, labels] of the target of each event, as a candidate that attends to the events up to that one."""
        layout = attention_layout(
            batch.items, times=batch.times, query_times=batch.query_times, num_buckets=self.config.num_time_buckets
        )
        drop = TokenDropout(self.config.dropout, batch, rng)
        place, user = batch.items.positions(), batch.items.row_of_value()
        events = drop(self.events(rows, batch, place, rng), "input")
        asked = self.candidates(rows, batch.target_features, batch.sample_features, place + 1, user, rng)
        candidates = drop(asked, "asked")
        for number, unit in enumerate(self.blocks()):
            event, candidate = unit.project(events), unit.project(candidates)
            attended = unit.attend_as_next(candidate, event.k, event.v, layout)
            candidates = unit.finish(candidates, candidate.gate, attended, drop, f"block{number}/asked")
            if number + 1 < len(self.units):  # the last block's event states are never read
                attended = unit.attend(event.q, event.k, event.v, layout)
                events = unit.finish(events, event.gate, attended, drop, f"block{number}")
        return self.score(candidates)

    # Shared by training and serving

    def blocks(self) -> list[HSTUUnit]:
        return [unit for unit in self.units if isinstance(unit, HSTUUnit)]

    def event_lookups(self, batch: Batch) -> dict[str, Lookup]:
        return {
            "history/item": Lookup(table="item", ids=batch.items.values),
            **self.history.lookups(batch.event_features),
            **self.actions.lookups(batch.event_features),
        }

    def candidate_lookups(
        self, items: Jagged, features: Mapping[str, Jagged], user_features: Mapping[str, Jagged]
    ) -> dict[str, Lookup]:
        return {
            "candidate/item": Lookup(table="item", ids=items.values),
            **self.candidate.lookups(features),
            **self.user.lookups(user_features),
        }

    def events(self, rows: Mapping[str, Rows], batch: Batch, place: Tensor, rng: Rng | None = None) -> Tensor:
        """Input vectors [T, D] of events at their positions; `rng` draws id dropout in training."""
        features = self.history.vectors(rows, batch.event_features)
        actions = self.actions.vectors(rows, batch.event_features)
        return self._input([self._id_rows(rows["history/item"], rng), *features, *actions], place)

    def candidates(
        self,
        rows: Mapping[str, Rows],
        features: Mapping[str, Jagged],
        user_features: Mapping[str, Jagged],
        place: Tensor,
        user: Tensor,
        rng: Rng | None = None,
    ) -> Tensor:
        """Input vectors [C, D] of candidates at their positions; `user` [C] is the row of each one's user."""
        vectors = [self._id_rows(rows["candidate/item"], rng), *self.candidate.vectors(rows, features)]
        vectors += [F.embedding(user, one) for one in self.user.vectors(rows, user_features)]
        return self._input(vectors, place)

    def score(self, candidates: Tensor) -> Tensor:
        """Scores [C, labels] from the last hidden states."""
        scores: Tensor = self.tasks(F.layer_norm(candidates, candidates.shape[1:], eps=1e-6))
        return scores

    def place_of(self, event: Tensor, num_events: Tensor) -> Tensor:
        """Position of an event, or of a candidate (event = num_events), in a request with `num_events` events."""
        return event

    def anchor(self, num_events: int) -> str:
        """What the prefix rows of an anchored model depend on in the request; part of the prefix key."""
        return ""

    def _id_rows(self, rows: Rows, rng: Rng | None) -> Tensor:
        """Rows of item ids [n, D]; those of items that this step drops are zero, in history and candidates alike."""
        found = rows.gather()
        if rng is None or not self.config.id_dropout:
            return found
        kept = kept_ids(rows.lookup.ids, rng, self.config.id_dropout)
        return found * kept.unsqueeze(1).to(found.dtype)

    def _input(self, vectors: list[Tensor], place: Tensor) -> Tensor:
        total = vectors[0]
        for vector in vectors[1:]:
            total = total + vector
        return torch.add(total * self.config.dim**0.5, F.embedding(place, self.place))


class Actions(nn.Module):
    """What the user did with an item: the sum of the vectors of its label values; a number is mapped linearly."""

    def __init__(self, labels: tuple[Label, ...], *, dim: int):
        super().__init__()
        self._labels = labels
        sizes = [
            2 + max(label.num_levels, label.kind == "binary") for label in labels
        ]  # one for unobserved, then one per level
        self._first = [sum(sizes[:place]) for place in range(len(sizes))]
        self._numbers = [label for label in labels if label.kind == "regression"]
        self.numbers = nn.Linear(len(self._numbers), dim, bias=False) if self._numbers else None

    def lookups(self, given: Mapping[str, Jagged]) -> dict[str, Lookup]:
        columns = []
        for first, label in zip(self._first, self._labels, strict=True):
            values = given[label.name].values
            levels = torch.zeros_like(values) if label.kind == "regression" else torch.nan_to_num(values)
            columns.append(torch.where(values.isnan(), first, first + 1 + levels.to(torch.int64)))
        ids = torch.stack(columns, dim=1)
        offsets = torch.arange(len(ids) + 1) * len(columns)
        return {"history/action": Lookup(table="action", ids=ids.flatten(), offsets=offsets, pool="sum")}

    def vectors(self, rows: Mapping[str, Rows], given: Mapping[str, Jagged]) -> list[Tensor]:
        vectors = [rows["history/action"].gather()]
        if self.numbers is not None:
            values = torch.stack([torch.nan_to_num(given[label.name].values) for label in self._numbers], dim=1)
            vectors.append(self.numbers(values.to(self.numbers.weight.dtype)))
        return vectors


def named_labels(schema: Schema, names: tuple[str, ...]) -> tuple[Label, ...]:
    """The labels of a model; raises ConfigError if there are none."""
    labels = schema.labels_named(names)
    if not labels:
        raise ConfigError(
            "the log declares no label, so there is nothing to predict. Ingest it with --label, for example "
            "--label liked:binary:feature=rating:threshold=4."
        )
    return labels


def build_ranking(
    config: RankingConfig, schema: Schema, *, max_len: int, seed: int, dtype: torch.dtype = torch.float32
) -> Ranking:
    """A model whose initial dense weights are a function of the seed."""
    with initial_weights(seed):
        return Ranking(config, schema, max_len=max_len).to(dtype)
