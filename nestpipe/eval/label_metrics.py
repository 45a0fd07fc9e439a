"""Metrics of label predictions: ranking (AUC, GAUC), error (log loss, MSE) and calibration, with bootstrap intervals.

    auc          share of pairs of events with different labels that the scores order correctly; a tie counts half
    gauc         AUC within the events of each user, averaged over users by their number of events
    log_loss     of probabilities (binary)
    mse          mean squared error (ordinal, regression)
    calibration  sum of predictions / sum of labels; 1 is calibrated on average
    calibration_error    mean |prediction - label| of ten bins with equally many events, by prediction

For ordinal labels AUC counts every pair of different levels. All metrics but `auc` and `calibration_error` are ratios of
sums over users, so their intervals resample users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Label
from nestpipe.errors import DataError
from nestpipe.eval.topk_metrics import Array, Counts, Interval, resamples

_EPS = 1e-12
_NUM_BINS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Ratio:
    """A metric as sums per user: the metric is sum(top) / sum(bottom)."""

    top: Array
    bottom: Array

    @property
    def value(self) -> float:
        total = float(self.bottom.sum())
        return float(self.top.sum()) / total if total else float("nan")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LabelPredictions:
    """Predictions and true values (`answers`) of one label, NaN if unobserved; users are numbered 0 .. U - 1."""

    label: Label
    scores: Array
    answers: Array
    users: Counts
    num_users: int

    def observed(self, mask: NDArray[np.bool_] | None = None) -> LabelPredictions:
        """Only events whose label is observed, and that the mask keeps."""
        keep = ~np.isnan(self.answers) if mask is None else mask & ~np.isnan(self.answers)
        return LabelPredictions(
            label=self.label,
            scores=self.scores[keep].astype(np.float64),
            answers=self.answers[keep].astype(np.float64),
            users=self.users[keep],
            num_users=self.num_users,
        )


def auc(scores: Array, answers: Array) -> float:
    """The share of correctly ordered pairs; NaN if all labels are equal."""
    right, pairs = ordered_pairs(scores, answers, np.zeros(len(scores), dtype=np.int64), 1)
    return float(right[0] / pairs[0]) if pairs[0] else float("nan")


def gauc(scores: Array, answers: Array, users: Counts, num_users: int) -> Ratio:
    """AUC per user, weighted by the user's number of events; users whose labels are all equal do not count."""
    right, pairs = ordered_pairs(scores, answers, users, num_users)
    num_events = np.bincount(users, minlength=num_users).astype(np.float64)
    weight = np.where(pairs > 0, num_events, 0.0)
    return Ratio(np.divide(right, pairs, out=np.zeros_like(right), where=pairs > 0) * weight, weight)


def ordered_pairs(scores: Array, answers: Array, groups: Counts, num_groups: int) -> tuple[Array, Array]:
    """Per group [G]: pairs with different labels that the scores order correctly (ties half), and all such pairs."""
    right, pairs = np.zeros(num_groups), np.zeros(num_groups)
    levels = np.unique(answers)
    if len(levels) > 64:
        raise DataError(
            f"a label has {len(levels)} different values, but AUC is for binary and ordinal labels. Declare it as a regression label."
        )
    for low, high in combinations(levels.tolist(), 2):
        rows = np.flatnonzero((answers == low) | (answers == high))
        ordered, total = _rank_sums(scores[rows], answers[rows] == high, groups[rows], num_groups)
        right += ordered
        pairs += total
    return right, pairs


def _rank_sums(scores: Array, positive: NDArray[np.bool_], groups: Counts, num_groups: int) -> tuple[Array, Array]:
    """Mann-Whitney per group: equal scores share the mean of their ranks."""
    order = np.lexsort((scores, groups))
    scores, positive, groups = scores[order], positive[order], groups[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (scores[1:] != scores[:-1]) | (groups[1:] != groups[:-1])
    first = np.flatnonzero(is_new)
    sizes = np.diff(np.append(first, len(order)))
    mean_rank = np.repeat(
        first + (sizes + 1) / 2, sizes
    )  # over all groups; ranks before the group are subtracted below
    size = np.bincount(groups, minlength=num_groups).astype(np.float64)
    before = np.cumsum(size) - size
    num_positive = _sums(groups, positive.astype(np.float64), num_groups)
    ranks = _sums(groups, (mean_rank - before[groups]) * positive, num_groups)
    return ranks - num_positive * (num_positive + 1) / 2, num_positive * (size - num_positive)


def _sums(groups: Counts, values: Array, num_groups: int) -> Array:
    return np.asarray(np.bincount(groups, weights=values, minlength=num_groups), dtype=np.float64)


def ratios(found: LabelPredictions) -> dict[str, Ratio]:
    """The metrics of one label that are ratios of sums over users; `found` has observed events only."""

    def per_user(values: Array) -> Array:
        return _sums(found.users, values, found.num_users)

    count = per_user(np.ones(len(found.users)))
    metrics: dict[str, Ratio] = {}
    if found.label.kind != "regression":
        metrics["gauc"] = gauc(found.scores, found.answers, found.users, found.num_users)
    if found.label.kind == "binary":
        chance = found.scores.clip(_EPS, 1 - _EPS)
        losses = -(found.answers * np.log(chance) + (1 - found.answers) * np.log1p(-chance))
        metrics["log_loss"] = Ratio(per_user(losses), count)
    else:
        metrics["mse"] = Ratio(per_user((found.scores - found.answers) ** 2), count)
    metrics["calibration"] = Ratio(per_user(found.scores), per_user(found.answers))
    return metrics


def calibration_error(scores: Array, answers: Array) -> float:
    """Mean |prediction - label| over ten bins of equally many events."""
    bins = np.array_split(np.argsort(scores, kind="stable"), min(_NUM_BINS, max(1, len(scores))))
    gaps = [abs(float(scores[rows].mean() - answers[rows].mean())) * len(rows) for rows in bins if len(rows)]
    return sum(gaps) / max(1, len(scores))


def points(found: LabelPredictions) -> dict[str, float]:
    """The metrics of one label that are not ratios of sums over users."""
    if found.label.kind == "regression":
        return {"calibration_error": calibration_error(found.scores, found.answers)}
    return {
        "auc": auc(found.scores, found.answers),
        "calibration_error": calibration_error(found.scores, found.answers),
    }


def intervals(found: Mapping[str, Ratio], *, seed: int, num: int) -> dict[str, Interval]:
    """Each metric with its 95 % bootstrap interval, from the same resamples of users."""
    names = list(found)
    tops = np.stack([found[name].top for name in names], axis=1)
    bottoms = np.stack([found[name].bottom for name in names], axis=1)
    values = np.empty((num, len(names)))
    with np.errstate(invalid="ignore", divide="ignore"):
        for row, counts in enumerate(resamples(len(tops), seed=seed, num=num)):
            values[row] = (counts @ tops) / (counts @ bottoms)
    lows, highs = np.nanpercentile(values, [2.5, 97.5], axis=0)
    return {
        name: Interval(found[name].value, float(lows[place]), float(highs[place])) for place, name in enumerate(names)
    }


def ratio_difference(a: Ratio, b: Ratio, *, seed: int, num: int = 1000) -> Interval:
    """The paired bootstrap interval of b - a; raises DataError unless both have the same users."""
    if len(a.top) != len(b.top):
        raise DataError(
            f"a paired difference needs the same users in both, but there are {len(a.top)} and {len(b.top)}. Evaluate both runs on the same users."
        )
    values = np.empty(num)
    for row, counts in enumerate(resamples(len(a.top), seed=seed, num=num)):
        values[row] = (counts @ b.top) / (counts @ b.bottom) - (counts @ a.top) / (counts @ a.bottom)
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(b.value - a.value, float(low), float(high))
