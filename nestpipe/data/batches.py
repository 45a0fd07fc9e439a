"""Builds a `Batch` from memory-mapped sequences: the events of some users between two positions, with their features."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.numbers import NumberStats, apply_number, fit_number
from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.data.splits import Ints, Split, train_mask
from nestpipe.errors import ConfigError
from nestpipe.jagged import Batch, Cursor, Jagged, offsets_of, ranges


class BatchBuilder:
    """Reads sequences; numbers are transformed by statistics fitted on the events that the split trains on."""

    def __init__(self, sequences: Sequences, split: Split, features: tuple[str, ...] = ()):
        self._sequences = sequences
        known = {feature.name: feature for feature in sequences.schema.features if feature.scope != "request"}
        if missing := [name for name in features if name not in known]:
            raise ConfigError(f"{sequences.path} has no feature {missing}; it has {sorted(known)}.")
        self._features = tuple(known[name] for name in features)
        self.statistics = self._fit(split)

    def training(self, cursor: Cursor, samples: Tensor, start: Ints, end: Ints) -> Batch:
        """Events start .. end - 2 of each sample, each with the next one as its target."""
        return self._build(cursor, samples, start, end - 1, with_targets=True)

    def history(self, samples: Tensor, start: Ints, end: Ints, *, asked_ms: Ints | None) -> Batch:
        """Events start .. end - 1 of each sample, asked for a recommendation at a time (if the log has times)."""
        batch = self._build(Cursor(0, 0), samples, start, end, with_targets=False)
        if batch.query_times is None or asked_ms is None:
            return batch
        last = batch.items.offsets[1:] - 1
        has_events = batch.items.lengths() > 0
        asked = torch.from_numpy(asked_ms // 1000)
        values = batch.query_times.values.index_copy(0, last[has_events], asked[has_events])
        return dataclasses.replace(batch, query_times=batch.query_times.with_values(values))

    def _build(self, cursor: Cursor, samples: Tensor, start: Ints, end: Ints, *, with_targets: bool) -> Batch:
        first = torch.from_numpy(self._sequences.offsets[samples.numpy()] + start)
        lengths = torch.from_numpy(end - start)
        offsets, events = offsets_of(lengths), ranges(first, lengths).numpy()
        following = np.minimum(events + 1, len(self._sequences.items) - 1)
        max_len = int(lengths.max()) if len(lengths) else 0

        def rows(column: NDArray[np.int64], places: NDArray[Any]) -> Jagged:
            return Jagged(torch.from_numpy(column[places]), offsets, max_len)

        def seconds(places: NDArray[Any]) -> Jagged | None:
            times = self._sequences.times
            return None if times is None else Jagged(torch.from_numpy(times[places] // 1000), offsets, max_len)

        event_features, sample_features = self._feature_rows(events, samples.numpy())
        return Batch(
            cursor=cursor,
            sample_ids=samples,
            items=rows(self._sequences.items, events),
            times=seconds(events),
            query_times=seconds(following),
            targets=rows(self._sequences.items, following) if with_targets else None,
            event_features=event_features,
            sample_features=sample_features,
        )

    def _feature_rows(self, events: NDArray[Any], users: NDArray[Any]) -> tuple[dict[str, Jagged], dict[str, Jagged]]:
        per_event: dict[str, Jagged] = {}
        per_sample: dict[str, Jagged] = {}
        for feature in self._features:
            stored = self._stored(feature)
            if feature.scope == "user":
                per_sample |= self._pick(feature, stored, users)
            elif feature.scope == "event":
                per_event |= self._pick(feature, stored, events)
            else:
                places = np.searchsorted(self._sequences.catalogue, self._sequences.items[events])
                per_event |= self._pick(feature, stored, places)
        return per_event, per_sample

    def _pick(self, feature: Feature, stored: StoredFeature, rows: NDArray[Any]) -> dict[str, Jagged]:
        """The feature's values at some rows, and its weights as 'name.weights' if it has any."""
        if stored.offsets is None:
            values = stored.values[rows]
            if feature.kind == "number":
                values = apply_number(feature, self.statistics[feature.name], values)
            else:
                values = np.nan_to_num(values)  # a missing vector is zero
            return {feature.name: Jagged.singles(torch.from_numpy(np.ascontiguousarray(values)))}
        first = torch.from_numpy(stored.offsets[rows])
        lengths = torch.from_numpy(stored.offsets[rows + 1]) - first
        offsets, places = offsets_of(lengths), ranges(first, lengths).numpy()
        max_len = int(lengths.max()) if len(lengths) else 0
        picked = {feature.name: Jagged(torch.from_numpy(stored.values[places]), offsets, max_len)}
        if stored.weights is not None:
            picked[f"{feature.name}.weights"] = Jagged(torch.from_numpy(stored.weights[places]), offsets, max_len)
        return picked

    def _stored(self, feature: Feature) -> StoredFeature:
        sequences = self._sequences
        by_scope = {"event": sequences.event_features, "item": sequences.item_features, "user": sequences.user_features}
        return by_scope[feature.scope][feature.name]

    def _fit(self, split: Split) -> dict[str, NumberStats]:
        """Statistics of the number features; event features count only the events that are trained on."""
        statistics = {}
        for feature in self._features:
            if feature.kind == "number":
                values = self._stored(feature).values
                if feature.scope == "event":
                    values = values[train_mask(self._sequences, split)]
                statistics[feature.name] = fit_number(feature, np.asarray(values))
        return statistics
