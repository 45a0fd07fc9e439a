"""The array files of features: typed columns in, values, offsets and weights out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.folder import ArrayFile
from nestpipe.data.schema import Feature


class FeatureFiles:
    """The array files of one feature while they grow."""

    def __init__(self, folder: Path, feature: Feature) -> None:
        stem = f"{feature.scope}.{feature.name}"
        shape = (feature.dim,) if feature.kind == "vector" else ()
        self._feature = feature
        self._values = ArrayFile(
            folder / f"{stem}.values.npy", dtype=np.int64 if feature.kind in {"id", "ids"} else np.float32, shape=shape
        )
        self._offsets = self._weights = None
        if feature.kind in {"id", "ids"}:
            self._offsets = ArrayFile(folder / f"{stem}.offsets.npy", dtype=np.int64)
            self._offsets.append(np.zeros(1, np.int64))
        if feature.weights is not None:
            self._weights = ArrayFile(folder / f"{stem}.weights.npy", dtype=np.float32)

    def append(self, frame: pl.DataFrame) -> None:
        """Adds one row per row of the frame; null stands for missing."""
        column = frame[self._feature.name]
        if self._offsets is None:
            self._values.append(_floats(column, self._feature))
            return
        if self._feature.kind == "id":
            lengths, values = column.is_not_null(), column.drop_nulls()
        else:
            lengths, values = column.list.len().fill_null(0), _flat(column)
        ends = self._values.num_rows + np.cumsum(lengths.to_numpy(), dtype=np.int64)
        self._offsets.append(ends)
        self._values.append(values.to_numpy())
        if self._weights is not None:
            self._weights.append(_flat(frame[f"{self._feature.name}.weights"]).to_numpy())

    def close(self) -> None:
        for file in (self._values, self._offsets, self._weights):
            if file is not None:
                file.close()


def _flat(lists: pl.Series) -> pl.Series:
    return lists.filter(lists.list.len().fill_null(0) > 0).explode()


def _floats(column: pl.Series, feature: Feature) -> NDArray[np.float32]:
    if feature.kind == "number":
        return column.fill_null(float("nan")).to_numpy()
    rows = np.full((len(column), feature.dim), np.nan, np.float32)
    present = column.is_not_null().to_numpy()
    if present.any():
        rows[present] = column.drop_nulls().to_numpy()
    return rows
