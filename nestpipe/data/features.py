"""Labels and number features: label values of events, and fitted transforms of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Feature, Label
from nestpipe.data.sequences import StoredFeature
from nestpipe.errors import DataError

Floats = NDArray[np.float32]


def label_values(label: Label, stored: Mapping[str, StoredFeature], events: NDArray[Any] | slice) -> Floats:
    """One value per event: 0 or 1, a level from 0, or a number; NaN if unobserved."""
    numbers = stored[label.feature].values[events].astype(np.float64)
    observed = ~np.isnan(numbers)
    if label.observed is not None:
        observed &= stored[label.observed].values[events] > 0  # a missing one is NaN, which is not above 0
    match label.kind:
        case "binary":
            values = (numbers >= label.threshold).astype(np.float64)
        case "ordinal":
            values = numbers - label.lowest
            _check_levels(label, values[observed])
        case "regression":
            values = np.sign(numbers) * np.log1p(np.abs(numbers)) if label.log else numbers
    return np.where(observed, values, np.nan).astype(np.float32)


def label_weights(label: Label, stored: Mapping[str, StoredFeature], events: NDArray[Any] | slice) -> Floats | None:
    """The weight of each event, or None without weights; raises DataError for a negative one."""
    if label.weights is None:
        return None
    weights: Floats = np.nan_to_num(stored[label.weights].values[events].astype(np.float32))
    if len(weights) and weights.min() < 0:
        place = weights.argmin()
        row = int(events.start + place if isinstance(events, slice) else events[place])
        raise DataError(
            f"label '{label.name}' has the weight {weights.min()} (feature '{label.weights}', event "
            f"{row:,}); a negative weight would reward errors. Correct the log, or use another weights feature."
        )
    return weights


def _check_levels(label: Label, values: NDArray[np.float64]) -> None:
    wrong = (values != np.round(values)) | (values < 0) | (values >= label.num_levels)
    if wrong.any():
        highest = label.lowest + label.num_levels - 1
        raise DataError(
            f"label '{label.name}' has the value {values[wrong][0] + label.lowest:g} (feature '{label.feature}'), but its levels "
            f"are the whole numbers {label.lowest} .. {highest}. Declare other levels, or use a regression label."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberStats:
    """Mean and standard deviation (after the logarithm, if any), quantile boundaries of buckets, and counts."""

    mean: float
    std: float
    boundaries: tuple[float, ...]
    num_values: int
    num_missing: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> NumberStats:
        return NumberStats(**{**data, "boundaries": tuple(data["boundaries"])})


def fit_number(feature: Feature, values: NDArray[Any]) -> NumberStats:
    """Statistics of the given values [n], NaN meaning missing; raises DataError if a missing one is refused."""
    missing = np.isnan(values)
    _refuse_missing(feature, missing)
    present = _log(feature, values[~missing].astype(np.float64))
    boundaries: tuple[float, ...] = ()
    if feature.transform == "bucketise" and len(present):
        shares = np.arange(1, feature.num_buckets) / feature.num_buckets
        boundaries = tuple(float(value) for value in np.unique(np.quantile(present, shares)))
    return NumberStats(
        mean=float(present.mean()) if len(present) else 0.0,
        std=float(present.std()) if len(present) else 0.0,
        boundaries=boundaries,
        num_values=len(present),
        num_missing=int(missing.sum()),
    )


def apply_number(feature: Feature, stats: NumberStats, values: NDArray[Any]) -> NDArray[Any]:
    """The transformed values [n]: float32, or int64 bucket numbers from 0."""
    missing = np.isnan(values)
    _refuse_missing(feature, missing)
    filled = np.where(
        missing, stats.mean if feature.missing == "mean" else 0.0, _log(feature, values.astype(np.float64))
    )
    if feature.transform == "bucketise":
        return np.searchsorted(np.array(stats.boundaries), filled, side="right").astype(np.int64)
    if feature.transform in {"standardise", "log_standardise"}:
        # A constant feature has no deviation to divide by; it becomes zero.
        filled = (filled - stats.mean) / (stats.std or 1.0)
    return filled.astype(np.float32)


def _log(feature: Feature, values: NDArray[np.float64]) -> NDArray[np.float64]:
    if feature.transform not in {"log", "log_standardise"}:
        return values
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)))


def _refuse_missing(feature: Feature, missing: NDArray[np.bool_]) -> None:
    if feature.missing == "refuse" and missing.any():
        raise DataError(
            f"feature '{feature.name}' is missing in {int(missing.sum()):,} of {len(missing):,} rows, first in row "
            f"{int(missing.argmax()):,}, but its missing rule is 'refuse'. Set missing to 'zero' or 'mean', or complete the table."
        )
