"""Item features of a service: rows of the living catalogue in the place of those of the sequence folder."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.sequences import StoredFeature


def laid_over(
    stored: StoredFeature, places: NDArray[np.int64], own: StoredFeature, rows: NDArray[np.int64]
) -> StoredFeature:
    """A feature of n items: row `rows[i]` of the overlay, or row `places[i]` of the folder; missing where both are -1."""
    is_own, is_stored = rows >= 0, (rows < 0) & (places >= 0)
    if stored.offsets is None or own.offsets is None:
        values = np.full((len(rows), *stored.values.shape[1:]), np.nan, np.float32)
        values[is_stored], values[is_own] = stored.values[places[is_stored]], own.values[rows[is_own]]
        return StoredFeature(values)
    first, lengths = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    first[is_stored], first[is_own] = stored.offsets[places[is_stored]], own.offsets[rows[is_own]]
    lengths[is_stored] = stored.offsets[places[is_stored] + 1] - first[is_stored]
    lengths[is_own] = own.offsets[rows[is_own] + 1] - first[is_own]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places_in = np.repeat(first - offsets[:-1], lengths) + np.arange(offsets[-1])
    from_own = np.repeat(is_own, lengths)

    def picked(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        found = np.empty(len(places_in), old.dtype)
        found[from_own], found[~from_own] = new[places_in[from_own]], old[places_in[~from_own]]
        return found

    has_weights = stored.weights is not None and own.weights is not None
    weights = picked(stored.weights, own.weights) if has_weights else None  # type: ignore[arg-type]
    return StoredFeature(picked(stored.values, own.values), offsets, weights)
