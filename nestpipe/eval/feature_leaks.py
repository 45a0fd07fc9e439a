"""Finds features of items and users that were computed from held-out events, such as the time of the target or a full count.

A number feature is compared with statistics of each item's (or user's) events. A statistic of all events, or of the held-out
ones, that explains it exactly where that of the training events does not, is what it was computed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split, train_mask
from nestpipe.eval.topk_metrics import Array, Counts

_MIN_ROWS = 10  # items or users that tell the statistics apart
_UNEXPLAINED = 0.01  # of the variance, at most: computed, not only correlated
_BETTER = 0.25  # of what the statistic of training events leaves unexplained, at most


@dataclass(frozen=True, slots=True)
class FeatureLeak:
    """A feature and the statistic of held-out events that explains it."""

    feature: str
    scope: str
    statistic: str
    explained: float
    explained_by_training: float

    def __str__(self) -> str:
        return (
            f"{self.scope} feature '{self.feature}' is the {self.statistic}: that explains {self.explained:.1%} of it where held-out "
            f"events matter, training events explain {self.explained_by_training:.1%}"
        )


def find_feature_leaks(sequences: Sequences, split: Split) -> list[FeatureLeak]:
    """The number features of items and users that held-out events explain; at most one statistic each."""
    trained = train_mask(sequences, split)
    users = np.repeat(np.arange(len(sequences.users)), np.diff(sequences.offsets))
    items = np.searchsorted(sequences.catalogue, sequences.items)
    owners = {"item": (items, len(sequences.catalogue)), "user": (users, len(sequences.users))}
    found = []
    for feature in sequences.schema.of_scope("item", "user"):
        if feature.kind == "number":
            stored = sequences.item_features if feature.scope == "item" else sequences.user_features
            values = np.asarray(stored[feature.name].values, np.float64)
            rows, num_rows = owners[feature.scope]
            found += list(_explained(feature, values, sequences, rows, num_rows, trained))[:1]
    return found


def _explained(
    feature: Feature, values: Array, sequences: Sequences, rows: Counts, num_rows: int, trained: NDArray[np.bool_]
) -> Iterator[FeatureLeak]:
    of_training = dict(_statistics(sequences, rows, num_rows, trained))
    for part, mask in (("all events", np.ones_like(trained)), ("held-out events", ~trained)):
        for name, statistic in _statistics(sequences, rows, num_rows, mask):
            usual = of_training[name]
            known = np.isfinite(values) & np.isfinite(statistic) & np.isfinite(usual)
            differ = known & (statistic != usual)
            if differ.sum() < _MIN_ROWS or not values[differ].std():
                continue
            own, training = (_unexplained(values, one, known, differ) for one in (statistic, usual))
            if own < _UNEXPLAINED and own < _BETTER * training:
                yield FeatureLeak(feature.name, feature.scope, f"{name} of {part}", 1 - own, max(0.0, 1 - training))


def _statistics(
    sequences: Sequences, rows: Counts, num_rows: int, mask: NDArray[np.bool_]
) -> Iterator[tuple[str, Array]]:
    """Statistics of the events of each row; NaN for a mean or a time without events."""
    own = rows[mask]
    counts = np.bincount(own, minlength=num_rows).astype(np.float64)
    yield "number", counts
    yield "logarithm of the number", np.log1p(counts)
    means = {
        name: one.values
        for name, one in sequences.event_features.items()
        if one.offsets is None and one.values.ndim == 1
    }
    if sequences.times is not None:
        times = (sequences.times[mask] - sequences.times.min()) / 1000  # small numbers keep their digits
        for name, extreme, start in (("first time", np.minimum, np.inf), ("last time", np.maximum, -np.inf)):
            found = np.full(num_rows, start)
            extreme.at(found, own, times)
            yield name, np.where(np.isfinite(found), found, np.nan)
        means["time"] = (sequences.times - sequences.times.min()) / 1000
    for name, column in means.items():
        kept = np.asarray(column[mask], np.float64)
        is_known = np.isfinite(kept)
        sums = np.bincount(own[is_known], kept[is_known], minlength=num_rows)
        with np.errstate(invalid="ignore"):
            yield f"mean {name}", sums / np.bincount(own[is_known], minlength=num_rows)


def _unexplained(values: Array, statistic: Array, known: NDArray[np.bool_], differ: NDArray[np.bool_]) -> float:
    """The share of the variance of values that a straight line over the statistic leaves, where the statistics differ."""
    x, y = statistic[known], values[known]
    x, y = (x - x.mean()) / (x.std() or 1.0), y - y.mean()
    slope = float((x * y).mean())
    left = (y - slope * x)[differ[known]]
    return float((left**2).mean() / values[differ].var())
