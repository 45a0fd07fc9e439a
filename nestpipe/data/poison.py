"""Poisons events of a log in memory: whoever reads them gives another result, whoever does not gives the same bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.folder_merge import gather_feature
from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.data.splits import Ints

_LATER_MS = 3_600_000


def poison_events(
    sequences: Sequences, first: Ints, *, items: bool = True, first_times: bool = True, keep: Collection[str] = ()
) -> Sequences:
    """Other items, features and times for the events of each user from position first[u] on.

    `items=False` keeps the items, `first_times=False` the time of the first poisoned event, `keep` some event features.
    """
    lengths = np.diff(sequences.offsets)
    place = np.arange(len(sequences.items)) - np.repeat(sequences.offsets[:-1], lengths)
    poisoned = place >= np.repeat(first, lengths)
    random = np.random.default_rng(0)
    changed = np.array(sequences.items)
    if items and len(sequences.catalogue) > 1:
        own = np.searchsorted(sequences.catalogue, changed[poisoned])
        other = own + random.integers(1, len(sequences.catalogue), size=len(own))
        changed[poisoned] = sequences.catalogue[other % len(sequences.catalogue)]
    times = sequences.times
    if times is not None:
        times = times + _LATER_MS * (poisoned if first_times else place > np.repeat(first, lengths))
    features = {
        feature.name: sequences.event_features[feature.name]
        if feature.name in keep
        else _poisoned(feature, sequences.event_features[feature.name], poisoned, random)
        for feature in sequences.schema.of_scope("event")
    }
    return replace(sequences, items=changed, times=times, event_features=features)


def _poisoned(
    feature: Feature, stored: StoredFeature, poisoned: NDArray[np.bool_], random: np.random.Generator
) -> StoredFeature:
    """Numbers are reflected in their range, which turns a binary one around; others are those of random events."""
    if feature.kind == "number":
        values = np.array(stored.values)
        if np.isfinite(values).any():
            values[poisoned] = np.nanmin(values) + np.nanmax(values) - values[poisoned]
        return replace(stored, values=values)
    rows = np.where(poisoned, random.integers(len(poisoned), size=len(poisoned)), np.arange(len(poisoned)))
    found, lengths, weights = gather_feature([stored], rows)
    offsets = None if lengths is None else np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return StoredFeature(found, offsets, weights)
