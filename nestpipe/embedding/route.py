"""Which distinct rows a batch needs: the pure part of a lookup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.spec import Lookup, Rows

_MAX_RANGE = 1 << 24  # a bitmap of this many ids is 16 MiB; beyond that sorting is cheaper


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Distinct ids of each table in ascending order, and where each id of each lookup finds its row."""

    unique: Mapping[str, Tensor]
    index: Mapping[str, Tensor]
    lookups: Mapping[str, Lookup]

    def rows(self, leaves: Mapping[str, Tensor]) -> dict[str, Rows]:
        """The model's view of the fetched rows, one leaf tensor per table."""
        return {name: Rows(leaves[lookup.table], self.index[name], lookup) for name, lookup in self.lookups.items()}


def route(lookups: Mapping[str, Lookup]) -> Plan:
    """Dedupes the ids of all lookups, table by table."""
    unique: dict[str, Tensor] = {}
    index: dict[str, Tensor] = {}
    for table in dict.fromkeys(lookup.table for lookup in lookups.values()):
        names = [name for name, lookup in lookups.items() if lookup.table == table]
        ids = [lookups[name].ids for name in names]
        unique[table], places = dedupe(torch.cat([part.flatten() for part in ids]))
        for name, part, place in zip(names, ids, places.split([part.numel() for part in ids]), strict=True):
            index[name] = place.reshape(part.shape)
    return Plan(unique, index, dict(lookups))


def dedupe(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids in ascending order, and for each id its place among them."""
    if not len(ids):
        return ids, ids
    low, high = int(ids.min()), int(ids.max())
    if high - low >= min(_MAX_RANGE, 16 * len(ids)):
        unique, inverse = torch.unique(ids, return_inverse=True)
        return unique, inverse
    # Ids of a dictionary are dense: marking them is ten times faster than sorting.
    shifted = ids - low
    present = torch.zeros(high - low + 1, dtype=torch.bool).index_fill_(0, shifted, True)
    place = present.cumsum(0).sub_(1)
    return present.nonzero().flatten().add_(low), place.index_select(0, shifted)
