"""Encodes declared features as vectors: ids by embedding lookup, numbers and vectors by one linear map.

Each id feature has a table, `feature_NAME`, which all its readers share. A `FeatureEncoder` belongs to one use (history,
candidate, user); the name of the use is the prefix of its lookups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from nestpipe.data.schema import Feature
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.jagged import Jagged


def is_looked_up(feature: Feature) -> bool:
    """Whether the feature is an embedding lookup; otherwise it is one or more floats."""
    return feature.kind in {"id", "ids"} or feature.transform == "bucketise"


def feature_tables(features: Iterable[Feature], dim: int) -> tuple[TableSpec, ...]:
    """The tables of those features that are looked up."""
    return tuple(TableSpec(name=_table(feature), dim=dim) for feature in features if is_looked_up(feature))


class FeatureEncoder(nn.Module):
    """Vectors of the features of one use."""

    def __init__(self, use: str, features: Iterable[Feature], *, dim: int):
        super().__init__()
        features = tuple(features)
        self._use = use
        self.looked_up = tuple(feature for feature in features if is_looked_up(feature))
        self.floating = tuple(feature for feature in features if not is_looked_up(feature))
        self.num_floats = sum(feature.dim or 1 for feature in self.floating)
        self.floats = nn.Linear(self.num_floats, dim, bias=False) if self.floating else None

    @property
    def num_vectors(self) -> int:
        return len(self.looked_up) + (self.floats is not None)

    def lookups(self, given: Mapping[str, Jagged]) -> dict[str, Lookup]:
        return {f"{self._use}/{feature.name}": _lookup(feature, given) for feature in self.looked_up}

    def vectors(self, rows: Mapping[str, Rows], given: Mapping[str, Jagged]) -> list[Tensor]:
        """Vectors [n, D]: one for each id feature, and one for all floats together."""
        vectors = [rows[f"{self._use}/{feature.name}"].gather() for feature in self.looked_up]
        if self.floats is not None:
            columns = [given[feature.name].values.reshape(-1, feature.dim or 1) for feature in self.floating]
            vectors.append(self.floats(torch.cat(columns, dim=1).to(self.floats.weight.dtype)))
        return vectors


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
