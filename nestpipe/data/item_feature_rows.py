"""The content of items: their features, by item number, of the sequence folder and of items that came later.

    numbers [n]  --rows-->  {"category": Jagged, "price": Jagged, "title": Jagged, ...}

An item that is not known has no features: an empty row of ids, zero floats, and the replacement that a number's missing rule
names. Numbers are transformed with statistics that were fitted once, so a later item reads as it would have in training.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch_builder import missing_values
from nestpipe.data.features import NumberStats, apply_number, fit_number
from nestpipe.data.item_texts import ITEM_TEXTS, read_item_texts
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged, offsets_of, ranges

Ints = NDArray[np.int64]
ItemValues = Mapping[str, Any]
"""Values of one item by feature: an int, a list of ints, a float or a list of floats; an absent one is missing."""


class ItemFeatureRows:
    """Features of items. `put` and `remove` change those of later items; readers never see half a change."""

    def __init__(
        self,
        features: Sequence[Feature],
        items: Ints,
        stored: Mapping[str, StoredFeature],
        *,
        statistics: Mapping[str, NumberStats] | None = None,
    ):
        """Items [I], ascending, and their features as stored; numbers are fitted unless statistics are given."""
        self.features = tuple(_lenient(feature) for feature in features)
        self._items, self._stored = items, {feature.name: stored[feature.name] for feature in self.features}
        self.statistics = dict(statistics) if statistics is not None else self._fit()
        self._later: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._overlay = self._overlay_of({})

    def rows(self, items: Ints, features: Iterable[Feature] | None = None) -> dict[str, Jagged]:
        """Some features of items [n] [default: all], and the weights of 'NAME' as 'NAME.weights' if it has any."""
        later, overlay = self._overlay
        places = _places(self._items, items)
        beyond = _places(later, items)
        # Rows of the folder come first, then those of later items, then one without any value.
        number = np.where(beyond >= 0, len(self._items) + beyond, places)
        number[(places < 0) & (beyond < 0)] = len(self._items) + len(later)
        found: dict[str, Jagged] = {}
        for feature in self.features if features is None else features:
            found |= self._pick(feature, (self._stored[feature.name], overlay[feature.name]), number)
        return found

    def put(self, values: Mapping[int, ItemValues]) -> None:
        """Features of new items, or other features of known ones; all of them become visible at once."""
        with self._lock:
            self._later = {**self._later, **{item: dict(one) for item, one in values.items()}}
            self._overlay = self._overlay_of(self._later)

    def remove(self, items: Iterable[int]) -> None:
        """Forgets what `put` brought; items of the folder have their own features again."""
        with self._lock:
            gone = set(items)
            self._later = {item: one for item, one in self._later.items() if item not in gone}
            self._overlay = self._overlay_of(self._later)

    def _overlay_of(self, later: Mapping[int, ItemValues]) -> tuple[Ints, dict[str, StoredFeature]]:
        items = np.array(sorted(later), dtype=np.int64)
        # The last row is of an item without features.
        records = [*(later[item] for item in items.tolist()), {}]
        return items, {feature.name: _stored(feature, records) for feature in self.features}

    def _pick(self, feature: Feature, parts: Sequence[StoredFeature], rows: Ints) -> dict[str, Jagged]:
        """The feature's values at rows of the parts, one part after the other."""
        bound = len(self._items)
        is_later = rows >= bound
        own, later = parts
        if own.offsets is None or later.offsets is None:
            values = np.empty((len(rows), *own.values.shape[1:]), np.float32)
            values[~is_later], values[is_later] = own.values[rows[~is_later]], later.values[rows[is_later] - bound]
            if feature.kind == "number":
                values = apply_number(feature, self.statistics[feature.name], values)
            else:
                values = np.nan_to_num(values)  # a missing vector is zero
            return {feature.name: Jagged.singles(torch.from_numpy(values))}
        first = np.empty(len(rows), np.int64)
        last = np.empty(len(rows), np.int64)
        for part, mask, base in ((own, ~is_later, 0), (later, is_later, bound)):
            assert part.offsets is not None
            first[mask], last[mask] = part.offsets[rows[mask] - base], part.offsets[rows[mask] - base + 1]
        lengths = torch.from_numpy(last - first)
        places = ranges(torch.from_numpy(first), lengths).numpy()
        of_later = np.repeat(is_later, last - first)
        picked = {feature.name: _jagged(own.values, later.values, places, of_later, lengths)}
        if own.weights is not None and later.weights is not None:
            picked[f"{feature.name}.weights"] = _jagged(own.weights, later.weights, places, of_later, lengths)
        return picked

    def _fit(self) -> dict[str, NumberStats]:
        return {
            feature.name: fit_number(feature, np.asarray(self._stored[feature.name].values))
            for feature in self.features
            if feature.kind == "number"
        }


def item_feature_rows(
    sequences: Sequences, names: Sequence[str], *, texts: Mapping[str, Tensor] | None = None
) -> ItemFeatureRows:
    """The named item features of a folder; `texts` has vectors [I, D] of columns of its item texts. Raises ConfigError."""
    known = {feature.name: feature for feature in sequences.schema.of_scope("item")}
    texts = texts or {}
    if absent := [name for name in names if name not in known and name not in texts]:
        raise ConfigError(
            f"the model reads the item features {absent}, but {sequences.path} has only {sorted(known)}. Choose among these with "
            "--model.item-features, or ingest the log again with --items and a --feature NAME:KIND:item for each."
        )
    features, stored = [], {}
    for name in names:
        if name in known:
            features.append(known[name])
            stored[name] = sequences.item_features[name]
        else:
            features.append(Feature(name=name, kind="vector", scope="item", dim=texts[name].shape[1]))
            stored[name] = StoredFeature(texts[name].numpy())
    return ItemFeatureRows(features, sequences.catalogue, stored)


def text_columns(schema: Schema, names: Sequence[str]) -> list[str]:
    """Which of some item features are texts: those that the schema does not declare."""
    declared = {feature.name for feature in schema.features}
    return [name for name in names if name not in declared]


def catalogue_texts(sequences: Sequences, column: str) -> list[str]:
    """A text of each item of the catalogue, empty if it has none; raises ConfigError if the folder has no texts."""
    texts = read_item_texts(sequences, column)
    if texts is None:
        raise ConfigError(
            f"--model.item-features names '{column}', which is no item feature of {sequences.path}, and the folder has no "
            f"{ITEM_TEXTS} whose column it could be. Ingest the log with --texts FILE, or with a --feature {column}:KIND:item."
        )
    return [texts.get(item, "") for item in sequences.catalogue.tolist()]


def _lenient(feature: Feature) -> Feature:
    """A later item may lack what the items of the log must have: it is scored without."""
    return dataclasses.replace(feature, missing="zero") if feature.missing == "refuse" else feature


def _places(items: Ints, wanted: Ints) -> Ints:
    """Places of ids in ascending items; -1 for others."""
    if not len(items):
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(items, wanted), len(items) - 1)
    return np.where(items[places] == wanted, places, -1)


def _stored(feature: Feature, records: Sequence[ItemValues]) -> StoredFeature:
    """The values of some items as a folder stores them."""
    given = [record.get(feature.name) for record in records]
    empty = missing_values(feature, len(records))
    if empty.offsets is None:
        values = empty.values
        for row, value in enumerate(given):
            if value is not None:
                values[row] = value
        return StoredFeature(values)
    lists = [[] if one is None else one if isinstance(one, list) else [one] for one in given]
    lengths = np.array([len(one) for one in lists], np.int64)
    values = np.array([number for one in lists for number in one], np.int64)
    weights = None
    if feature.weights is not None:
        named = [record.get(f"{feature.name}.weights") for record in records]
        filled = [[1.0] * len(own) if one is None else one for own, one in zip(lists, named, strict=True)]
        weights = np.array([weight for one in filled for weight in one], np.float32)
    return StoredFeature(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), weights)


def _jagged(
    own: NDArray[Any], later: NDArray[Any], places: Ints, of_later: NDArray[np.bool_], lengths: Tensor
) -> Jagged:
    values = np.empty(len(places), own.dtype)
    values[~of_later], values[of_later] = own[places[~of_later]], later[places[of_later]]
    return Jagged(torch.from_numpy(values), offsets_of(lengths), int(lengths.max()) if len(lengths) else 0)
