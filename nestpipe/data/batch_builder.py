"""Builds a `Batch` from memory-mapped sequences: ranges of events of some users, with their features and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.features import NumberStats, apply_number, fit_number, label_values, label_weights
from nestpipe.data.item_content import REVISION, ItemOverlay
from nestpipe.data.live_features import laid_over
from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.data.splits import Ints, Split, Windows, train_mask
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Batch, Cursor, Jagged, offsets_of, ranges

Rows = NDArray[Any] | slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a model reads in addition to items and times. The features 'user' and 'item' are the ids themselves."""

    features: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()  # event features that a request already has, such as the device
    layout: Literal["next", "events"] = "next"  # the target of a row is the next event, or the event itself


class BatchBuilder:
    """Reads sequences; number features are transformed with statistics of the training events."""

    def __init__(
        self,
        sequences: Sequences,
        split: Split | None,
        inputs: ModelInputs | None = None,
        *,
        statistics: Mapping[str, NumberStats] | None = None,
    ):
        """Takes a split, or statistics that were fitted on one."""
        inputs = inputs or ModelInputs()
        self._sequences, self._layout = sequences, inputs.layout
        known = {feature.name: feature for feature in sequences.schema.features if feature.scope != "request"}
        own = tuple(name for name in inputs.features if name not in {"user", "item"})
        if missing := [name for name in (*own, *inputs.requests) if name not in known]:
            raise ConfigError(
                f"the model reads the features {missing}, but {sequences.path} has only {sorted(known)}. Choose among these with --model.features, or ingest the log again with a --feature for each."
            )
        self._features = tuple(known[name] for name in own)
        self._requests = tuple(known[name] for name in inputs.requests)
        self._with_user = "user" in inputs.features
        self._labels = sequences.schema.labels_named(inputs.labels) if inputs.labels else ()
        if statistics is None:
            assert split is not None, "statistics are fitted on the events that a split trains on"
            statistics = self._fit(split)
        self.statistics = dict(statistics)

    def over(self, sequences: Sequences) -> BatchBuilder:
        """The same inputs and statistics over other events of the same schema."""
        other = object.__new__(BatchBuilder)
        other.__dict__.update(self.__dict__, _sequences=sequences)
        return other

    def training(self, cursor: Cursor, samples: Tensor, windows: Windows) -> Batch:
        """A training batch of some windows; see `ModelInputs.layout`. Labels of context rows are masked."""
        batch = self._build(
            cursor, samples, windows.user, windows.start, windows.end, with_targets=self._layout == "next"
        )
        is_context = batch.items.positions() < torch.from_numpy(windows.counted - windows.start).index_select(
            0, batch.items.row_of_value()
        )
        if not self._labels or not bool(is_context.any()):
            return batch
        masked = {
            label.name: Jagged.singles(batch.target_features[label.name].values.masked_fill(is_context, torch.nan))
            for label in self._labels
        }
        return dataclasses.replace(batch, target_features={**batch.target_features, **masked})

    def history(self, samples: Tensor, start: Ints, end: Ints, *, request_ms: Ints | None) -> Batch:
        """Events start .. end - 1 of each sample; the last one's query time is the time of the request."""
        batch = self._build(Cursor(0, 0), samples, samples.numpy(), start, end, with_targets=False)
        if batch.query_times is None or request_ms is None:
            return batch
        last = batch.items.offsets[1:] - 1
        has_events = batch.items.lengths() > 0
        request_s = torch.from_numpy(request_ms // 1000)
        values = batch.query_times.values.index_copy(0, last[has_events], request_s[has_events])
        return dataclasses.replace(batch, query_times=batch.query_times.with_values(values))

    def request(self, events: Sequences, first: int, *, query_s: int | None) -> Batch:
        """The events of one user from the first on: the batch that `history` builds, by slices in the place of gathers.

        `query_s` is the time of the request. Items and features may share memory with `events`.
        """
        own, num = self.over(events), len(events.items) - first
        rows = slice(first, first + num)
        offsets, times, query_times = torch.from_numpy(np.array([0, num])), None, None
        if events.times is not None:
            seconds = events.times[rows] // 1000
            asked = np.empty_like(seconds)
            asked[:-1], asked[-1:] = seconds[1:], seconds[-1:] if query_s is None else query_s
            times, query_times = Jagged(torch.from_numpy(seconds), offsets, num), torch.from_numpy(asked)
        return Batch(
            cursor=Cursor(0, 0),
            sample_ids=torch.from_numpy(events.users),
            items=Jagged(torch.from_numpy(events.items[rows]), offsets, num),
            times=times,
            query_times=None if query_times is None else Jagged(query_times, offsets, num),
            event_features=own._features_of_events(rows),
            sample_features=own._features_of_users(slice(0, 1)),
        )

    def item_features(self, items: NDArray[np.int64]) -> dict[str, Jagged]:
        """The item features of candidates [n]; raises DataError for an item that is not in the catalogue."""
        return self._features_of_items(items)

    def candidate_events(self, history: Batch, items: NDArray[np.int64]) -> Batch:
        """Items [n] as events of one user that have not happened: features of the event itself are missing."""
        features = self._features_of_items(items)
        for feature in self._features:
            if feature.scope == "event":
                features |= self._pick(_lenient(feature), missing_values(feature, len(items)), np.arange(len(items)))
        rows = Jagged(torch.from_numpy(items), torch.tensor([0, len(items)]), len(items))
        return Batch(
            cursor=history.cursor,
            sample_ids=history.sample_ids,
            items=rows,
            event_features=features,
            sample_features=history.sample_features,
        )

    def requests(self, events: NDArray[Any]) -> dict[str, Jagged]:
        """The request features (`ModelInputs.requests`) of some events; a missing value is an empty row."""
        found = {}
        for feature in self._requests:
            stored = self._stored(feature)
            found[feature.name] = self._pick(feature, stored, events)[feature.name]
            if feature.kind == "vector":
                has = torch.from_numpy(~np.isnan(stored.values[events]).any(1))
                values = found[feature.name].values.index_select(0, has.nonzero().flatten())
                found[feature.name] = Jagged(values, offsets_of(has.to(torch.int64)), 1)
        return found

    def _build(
        self, cursor: Cursor, samples: Tensor, users: Ints, start: Ints, end: Ints, *, with_targets: bool
    ) -> Batch:
        counts = torch.from_numpy(end - start)
        first = torch.from_numpy(self._sequences.offsets[users] + start)
        offsets, events = offsets_of(counts), ranges(first, counts).numpy()
        following = np.minimum(events + 1, len(self._sequences.items) - 1)
        max_len = int((end - start).max()) if len(end) else 0

        def rows(column: NDArray[np.int64], places: NDArray[Any]) -> Jagged:
            return Jagged(torch.from_numpy(column[places]), offsets, max_len)

        def seconds(places: NDArray[Any]) -> Jagged | None:
            times = self._sequences.times
            return None if times is None else Jagged(torch.from_numpy(times[places] // 1000), offsets, max_len)

        return Batch(
            cursor=cursor,
            sample_ids=samples,
            items=rows(self._sequences.items, events),
            times=seconds(events),
            query_times=seconds(following),
            targets=rows(self._sequences.items, following) if with_targets else None,
            event_features=self._features_of_events(events),
            sample_features=self._features_of_users(users),
            target_features=self._features_of_targets(following) if with_targets else {},
        )

    def _features_of_events(self, events: Rows) -> dict[str, Jagged]:
        """Features of past events: their own, those of their items, and their labels."""
        found = self._features_of_items(self._sequences.items[events])
        found |= self._revisions(self._sequences.items[events])
        for feature in self._features:
            if feature.scope == "event":
                found |= self._pick(feature, self._stored(feature), events)
        return found | self._label_rows(events)

    def _features_of_targets(self, events: NDArray[Any]) -> dict[str, Jagged]:
        """Features of targets: those of their items, the labels to predict, and the request features."""
        if not self._labels:
            return self.requests(events)
        return self._features_of_items(self._sequences.items[events]) | self._label_rows(events) | self.requests(events)

    def _features_of_items(self, items: NDArray[np.int64]) -> dict[str, Jagged]:
        found: dict[str, Jagged] = {}
        features = [feature for feature in self._features if feature.scope == "item"]
        if features:
            catalogue, live = self._sequences.catalogue, self._sequences.live
            places = np.minimum(np.searchsorted(catalogue, items), len(catalogue) - 1)
            is_known = catalogue[places] == items
            overlay = None if live is None else live.overlay(items, features)
            if overlay is not None and not (is_known & (overlay.rows < 0)).all():
                return self._living_features(features, np.where(is_known, places, -1), overlay)
            if len(unknown := np.flatnonzero(~is_known)):
                raise DataError(
                    f"item {items[unknown[0]]} (position {unknown[0]}) is not in the catalogue of {self._sequences.path} "
                    f"({len(catalogue):,} items), so its features are unknown. Leave it out, or ingest a log that has it."
                )
            for feature in features:
                found |= self._pick(feature, self._stored(feature), places)
        return found

    def _living_features(
        self, features: Sequence[Feature], places: NDArray[np.int64], overlay: ItemOverlay
    ) -> dict[str, Jagged]:
        """Item features where the living catalogue has content, or an item that nothing is known of: its values are missing."""
        found: dict[str, Jagged] = {}
        for feature in features:
            mixed = laid_over(self._stored(feature), places, overlay.features[feature.name], overlay.rows)
            found |= self._pick(_lenient(feature), mixed, np.arange(len(places)))
        return found

    def _revisions(self, items: NDArray[np.int64]) -> dict[str, Jagged]:
        """The content revisions of items, if the model reads item features and these can change."""
        names = [feature.name for feature in self._features if feature.scope == "item"]
        if self._sequences.live is None or not names:
            return {}
        return {REVISION: Jagged.singles(torch.from_numpy(self._sequences.live.revisions(items, names)))}

    def _features_of_users(self, users: Rows) -> dict[str, Jagged]:
        found: dict[str, Jagged] = {}
        if self._with_user:
            found["user"] = Jagged.singles(torch.from_numpy(self._sequences.users[users]))
        for feature in self._features:
            if feature.scope == "user":
                found |= self._pick(feature, self._stored(feature), users)
        return found

    def _label_rows(self, events: Rows) -> dict[str, Jagged]:
        """Labels by name, and 'name.weights' if events have weights."""
        found = {}
        for label in self._labels:
            stored = self._sequences.event_features
            found[label.name] = Jagged.singles(torch.from_numpy(label_values(label, stored, events)))
            if (weights := label_weights(label, stored, events)) is not None:
                found[f"{label.name}.weights"] = Jagged.singles(torch.from_numpy(weights))
        return found

    def _pick(self, feature: Feature, stored: StoredFeature, rows: Rows) -> dict[str, Jagged]:
        """The feature's values at some rows, and its weights as 'name.weights' if it has any."""
        if stored.offsets is None:
            values = stored.values[rows]
            if feature.kind == "number":
                values = apply_number(feature, self.statistics[feature.name], values)
            else:
                values = np.nan_to_num(values)  # a missing vector is zero
            return {feature.name: Jagged.singles(torch.from_numpy(np.ascontiguousarray(values)))}
        if isinstance(rows, slice):
            return _picked(feature.name, stored.between(rows.start, rows.stop))
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
        """Statistics of the number features; those of events are fitted on training events only."""
        statistics = {}
        for feature in self._features:
            if feature.kind == "number":
                values = self._stored(feature).values
                if feature.scope == "event":
                    values = values[train_mask(self._sequences, split)]
                statistics[feature.name] = fit_number(feature, np.asarray(values))
        return statistics


def _picked(name: str, stored: StoredFeature) -> dict[str, Jagged]:
    """All rows of an id feature."""
    assert stored.offsets is not None
    offsets, lengths = torch.from_numpy(stored.offsets), np.diff(stored.offsets)
    max_len = int(lengths.max()) if len(lengths) else 0
    picked = {name: Jagged(torch.from_numpy(stored.values), offsets, max_len)}
    if stored.weights is not None:
        picked[f"{name}.weights"] = Jagged(torch.from_numpy(stored.weights), offsets, max_len)
    return picked


def _lenient(feature: Feature) -> Feature:
    """The feature where a value may be missing, though ingest refuses such records."""
    return dataclasses.replace(feature, missing="zero") if feature.missing == "refuse" else feature


def missing_values(feature: Feature, num_rows: int) -> StoredFeature:
    """A feature that no row has a value for."""
    if feature.kind in {"id", "ids"}:
        weights = np.empty(0, np.float32) if feature.weights is not None else None
        return StoredFeature(np.empty(0, np.int64), np.zeros(num_rows + 1, np.int64), weights)
    shape = (num_rows, feature.dim) if feature.kind == "vector" else (num_rows,)
    return StoredFeature(np.full(shape, np.nan, np.float32))
