"""Label values of events, from the stored numbers that the schema makes them of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Label
from nestpipe.data.sequences import StoredFeature
from nestpipe.errors import DataError

Floats = NDArray[np.float32]


def label_values(label: Label, stored: Mapping[str, StoredFeature], events: NDArray[Any]) -> Floats:
    """One value per event: 0 or 1, a level from 0, or a number; NaN where unobserved."""
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


def label_weights(label: Label, stored: Mapping[str, StoredFeature], events: NDArray[Any]) -> Floats | None:
    """The weight of each event, or None if all count alike; raises DataError for a negative one."""
    if label.weights is None:
        return None
    weights: Floats = np.nan_to_num(stored[label.weights].values[events].astype(np.float32))
    if len(weights) and weights.min() < 0:
        raise DataError(
            f"label '{label.name}' has the weight {weights.min()} (feature '{label.weights}'); a negative weight would "
            "reward errors. Mend the log."
        )
    return weights


def _check_levels(label: Label, values: NDArray[np.float64]) -> None:
    wrong = (values != np.round(values)) | (values < 0) | (values >= label.num_levels)
    if wrong.any():
        highest = label.lowest + label.num_levels - 1
        raise DataError(
            f"label '{label.name}' has the value {values[wrong][0] + label.lowest:g} (feature '{label.feature}'), but its levels "
            f"are the whole numbers {label.lowest} .. {highest}. Declare other levels, or a regression label."
        )
