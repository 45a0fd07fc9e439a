"""Declared features as vectors: ids by their rows, numbers and vectors by a linear map.

A feature has a table of its own, `feature_NAME`; everything that reads the feature shares it. One `Features` module
belongs to one scope of use (history, candidate, user), whose name distinguishes its lookups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from nestpipe.data.schema import Feature
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.jagged import Jagged


def is_looked_up(feature: Feature) -> bool:
    """Whether the feature has rows in a table; else it is one or more floats."""
    return feature.kind in {"id", "ids"} or feature.transform == "bucketise"


def feature_tables(features: Iterable[Feature], dim: int) -> tuple[TableSpec, ...]:
    """The tables of some features."""
    return tuple(TableSpec(name=_table(feature), dim=dim) for feature in features if is_looked_up(feature))


class FeatureEncoder(nn.Module):
    """Vectors of the features of one scope of use."""

    def __init__(self, use: str, features: Iterable[Feature], *, dim: int):
        super().__init__()
        features = tuple(features)
        self._use = use
        self._ids = tuple(feature for feature in features if is_looked_up(feature))
        self._floats = tuple(feature for feature in features if not is_looked_up(feature))
        self.num_floats = sum(feature.dim or 1 for feature in self._floats)
        self.floats = nn.Linear(self.num_floats, dim, bias=False) if self._floats else None

    @property
    def num_parts(self) -> int:
        return len(self._ids) + (self.floats is not None)

    def lookups(self, given: Mapping[str, Jagged]) -> dict[str, Lookup]:
        return {f"{self._use}/{feature.name}": _lookup(feature, given) for feature in self._ids}

    def parts(self, rows: Mapping[str, Rows], given: Mapping[str, Jagged]) -> list[Tensor]:
        """One vector [n, D] per row of the features: one for each id feature, one for all floats together."""
        found = [rows[f"{self._use}/{feature.name}"].gather() for feature in self._ids]
        if self.floats is not None:
            columns = [given[feature.name].values.reshape(-1, feature.dim or 1) for feature in self._floats]
            found.append(self.floats(torch.cat(columns, dim=1).to(self.floats.weight.dtype)))
        return found


def _lookup(feature: Feature, given: Mapping[str, Jagged]) -> Lookup:
    values = given[feature.name]
    if feature.kind == "number":
        return Lookup(table=_table(feature), ids=values.values)
    weights = given.get(f"{feature.name}.weights")
    return Lookup(
        table=_table(feature),
        ids=values.values,
        offsets=values.offsets,
        weights=None if weights is None else weights.values,
        pool="sum" if feature.kind == "id" else feature.pool,
    )


def _table(feature: Feature) -> str:
    return f"feature_{feature.name}"
