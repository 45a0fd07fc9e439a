"""The item features that a model reads, by item number: of the sequence folder, and of the living catalogue of a service.

    numbers [n]  --rows-->  {"category": Jagged, "price": Jagged, "title": Jagged, ...}

An item of which nothing is known has no features: an empty row of ids, zero floats, and the replacement that a number's missing
rule names. Numbers are transformed with statistics that were fitted once, so a later item reads as it would have in training.
A text is a vector: that of the folder's items is given, that of a later one embedded when it is first read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch_builder import missing_values
from nestpipe.data.features import NumberStats, apply_number, fit_number
from nestpipe.data.item_content import ItemContent, ItemOverlay
from nestpipe.data.item_texts import ITEM_TEXTS, read_item_texts
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged, offsets_of, ranges

Ints = NDArray[np.int64]
Embed = Callable[[Sequence[str]], Tensor]
"""Vectors [n, D] of texts."""
TEXT = "text"  # a later item has one text, whatever the column of the folder's texts is called


class ItemFeatureRows:
    """Features of items. `live` is the living catalogue of a service, None offline."""

    def __init__(
        self,
        features: Sequence[Feature],
        items: Ints,
        stored: Mapping[str, StoredFeature],
        *,
        texts: Iterable[str] = (),
        embed: Embed | None = None,
        statistics: Mapping[str, NumberStats] | None = None,
    ):
        """Items [I], ascending, and their features as stored; `texts` are those whose vectors `embed` made."""
        self.features = tuple(_lenient(feature) for feature in features)
        self._items, self._stored = items, {feature.name: stored[feature.name] for feature in self.features}
        self._texts, self.embed = frozenset(texts), embed
        self._embedded: dict[str, NDArray[np.float32]] = {}
        self.live: ItemContent | None = None
        known = statistics or {}
        self.statistics = {
            feature.name: known.get(feature.name) or fit_number(feature, np.asarray(stored[feature.name].values))
            for feature in self.features
            if feature.kind == "number"
        }

    @property
    def revised_names(self) -> list[str]:
        """The names under which the living catalogue knows the features."""
        return [*(one.name for one in self.features if one.name not in self._texts), *([TEXT] if self._texts else [])]

    def rows(self, items: Ints, features: Iterable[Feature] | None = None) -> dict[str, Jagged]:
        """Some features of items [n] [default: all], and the weights of 'NAME' as 'NAME.weights' if it has any."""
        wanted = self.features if features is None else tuple(features)
        places, overlays = _places(self._items, items), self._overlays(items, wanted)
        found: dict[str, Jagged] = {}
        for feature in wanted:
            parts = (self._stored[feature.name], missing_values(feature, 1))
            rows = np.where(places < 0, len(self._items), places)
            if feature.name in overlays:
                later, own = overlays[feature.name]
                parts = (parts[0], _joined(later, parts[1]))
                # Rows of the folder come first, then those of the living catalogue, then one without any value.
                unknown = np.where(places < 0, len(self._items) + _num_rows(later), places)
                rows = np.where(own >= 0, len(self._items) + own, unknown)
            found |= self._pick(feature, parts, rows)
        return found

    def _overlays(self, items: Ints, features: Sequence[Feature]) -> dict[str, tuple[StoredFeature, Ints]]:
        """Of features that later content replaces: its values, and the row [n] of each item, -1 for none."""
        live = self.live
        if live is None or not len(live.changed()):
            return {}
        declared = [feature for feature in features if feature.name not in self._texts]
        overlay: ItemOverlay = live.overlay(items, declared)
        found = {feature.name: (overlay.features[feature.name], overlay.rows) for feature in declared}
        for feature in features:
            if feature.name in self._texts:
                found[feature.name] = self._later_texts(feature, live.texts(items))
        return found

    def _later_texts(self, feature: Feature, texts: Sequence[str | None]) -> tuple[StoredFeature, Ints]:
        own = [text for text in dict.fromkeys(texts) if text]
        if new := [text for text in own if text not in self._embedded]:
            assert self.embed is not None, "a service embeds the texts of new items"
            self._embedded |= dict(zip(new, self.embed(new).numpy(), strict=True))
        place = {text: number for number, text in enumerate(own)}
        values = np.stack([self._embedded[text] for text in own]) if own else np.empty((0, feature.dim), np.float32)
        return StoredFeature(values), np.array([place[text] if text else -1 for text in texts], np.int64)

    def _pick(self, feature: Feature, parts: tuple[StoredFeature, StoredFeature], rows: Ints) -> dict[str, Jagged]:
        """The feature's values at rows of the parts, one part after the other."""
        bound, (own, later) = len(self._items), parts
        is_later = rows >= bound
        if own.offsets is None or later.offsets is None:
            values = np.empty((len(rows), *own.values.shape[1:]), np.float32)
            values[~is_later], values[is_later] = own.values[rows[~is_later]], later.values[rows[is_later] - bound]
            if feature.kind == "number":
                values = apply_number(feature, self.statistics[feature.name], values)
            else:
                values = np.nan_to_num(values)  # a missing vector is zero
            return {feature.name: Jagged.singles(torch.from_numpy(values))}
        first, last = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for part, mask, base in ((own.offsets, ~is_later, 0), (later.offsets, is_later, bound)):
            first[mask], last[mask] = part[rows[mask] - base], part[rows[mask] - base + 1]
        lengths = torch.from_numpy(last - first)
        places = ranges(torch.from_numpy(first), lengths).numpy()
        of_later = np.repeat(is_later, last - first)
        picked = {feature.name: _jagged(own.values, later.values, places, of_later, lengths)}
        if own.weights is not None and later.weights is not None:
            picked[f"{feature.name}.weights"] = _jagged(own.weights, later.weights, places, of_later, lengths)
        return picked


def item_feature_rows(
    sequences: Sequences,
    names: Sequence[str],
    *,
    texts: Mapping[str, Tensor] | None = None,
    embed: Embed | None = None,
    statistics: Mapping[str, NumberStats] | None = None,
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
    is_text = [name for name in names if name not in known]
    return ItemFeatureRows(features, sequences.catalogue, stored, texts=is_text, embed=embed, statistics=statistics)


def text_columns(schema: Schema, names: Sequence[str]) -> list[str]:
    """Which of some item features are texts: those that the schema does not declare."""
    declared = {feature.name for feature in schema.features}
    return [name for name in names if name not in declared]


def catalogue_texts(sequences: Sequences, column: str) -> list[str]:
    """A text of each item of the catalogue, empty if it has none; raises ConfigError if the folder has no texts."""
    try:
        texts = read_item_texts(sequences, column)
        lacking = f"the folder has no {ITEM_TEXTS}"
    except DataError as error:
        texts, lacking = None, str(error).rstrip(".")
    if texts is None:
        declared = sorted(feature.name for feature in sequences.schema.of_scope("item"))
        raise ConfigError(
            f"--model.item-features names '{column}', which is neither an item feature of {sequences.path} ({declared}) nor a "
            f"column of its item texts: {lacking}. Ingest the log with --texts FILE, or with a --feature {column}:KIND:item."
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


def _num_rows(stored: StoredFeature) -> int:
    return len(stored.values) if stored.offsets is None else len(stored.offsets) - 1


def _joined(a: StoredFeature, b: StoredFeature) -> StoredFeature:
    """The rows of both, one after the other."""
    values = np.concatenate([a.values, b.values])
    if a.offsets is None or b.offsets is None:
        return StoredFeature(values)
    weights = None if a.weights is None or b.weights is None else np.concatenate([a.weights, b.weights])
    return StoredFeature(values, np.concatenate([a.offsets, a.offsets[-1] + b.offsets[1:]]), weights)


def _jagged(
    own: NDArray[Any], later: NDArray[Any], places: Ints, of_later: NDArray[np.bool_], lengths: Tensor
) -> Jagged:
    values = np.empty(len(places), own.dtype)
    values[~of_later], values[of_later] = own[places[~of_later]], later[places[of_later]]
    return Jagged(torch.from_numpy(values), offsets_of(lengths), int(lengths.max()) if len(lengths) else 0)
