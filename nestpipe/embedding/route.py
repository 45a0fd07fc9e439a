"""Where ids go and how they come back: the pure part of a lookup, without tables and without messages.

A *window* is the parts (micro-batches) between two updates. Each distinct id of a window travels once in each
direction: its row with the first part that uses it, its gradient with the last. So the ids of a table are sorted by

    (owner, first part, id)

and what owner o sends for part i is one contiguous range, in the order in which the asker keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.ids import dedupe, group
from nestpipe.embedding.owner import Owners
from nestpipe.embedding.spec import Lookup, Rows


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """The distinct ids of one table in a window."""

    ids: Tensor  # [U] by (owner, first part, id)
    first_counts: list[list[int]]  # [owner][part]: ids that travel with the part
    last_part: Tensor  # [U] uint8: the part whose gradients take the id's sum home
    leaving: Tensor  # [U] places in `ids` by (owner, last part, place): the order in which sums go home
    last_counts: list[list[int]]  # [owner][part]: ids whose sum goes home with the part
    places: tuple[Tensor, ...]  # for each part: where its distinct ids, ascending, stand in `ids`

    @property
    def counts(self) -> list[int]:
        """Ids for each owner."""
        return [sum(counts) for counts in self.first_counts]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The distinct ids of each table, and where each id of each lookup of each part finds its row."""

    tables: Mapping[str, TablePlan]
    lookups: tuple[Mapping[str, Lookup], ...]
    index: tuple[Mapping[str, Tensor], ...]

    @property
    def num_parts(self) -> int:
        return len(self.lookups)

    def rows(self, part: int, leaves: Mapping[str, Tensor]) -> dict[str, Rows]:
        """The model's view of a part's rows: one leaf per table, holding the part's distinct ids in ascending order."""
        lookups, index = self.lookups[part], self.index[part]
        return {name: Rows(leaves[lookup.table], index[name], lookup) for name, lookup in lookups.items()}


def route(parts: Sequence[Mapping[str, Lookup]], tables: Sequence[str], owners: Owners) -> Plan:
    """Dedupes the ids of all parts, table by table. A table that no lookup names has an empty plan."""
    index: list[dict[str, Tensor]] = [{} for _ in parts]
    plans = {}
    for table in tables:
        unique = [_dedupe_part(lookups, table, index[number]) for number, lookups in enumerate(parts)]
        plans[table] = _plan_table(unique, owners)
    return Plan(plans, tuple(parts), tuple(index))


def _dedupe_part(lookups: Mapping[str, Lookup], table: str, index: dict[str, Tensor]) -> Tensor:
    """The distinct ids of one part, ascending; notes where each lookup finds its own."""
    names = [name for name, lookup in lookups.items() if lookup.table == table]
    ids = [lookups[name].ids for name in names]
    unique, places = dedupe(torch.cat([torch.empty(0, dtype=torch.int64), *(part.flatten() for part in ids)]))
    for name, part, place in zip(names, ids, places.split([part.numel() for part in ids]), strict=True):
        index[name] = place.reshape(part.shape)
    return unique


def _plan_table(unique: Sequence[Tensor], owners: Owners) -> TablePlan:
    num_parts = len(unique)
    ids, places = dedupe(torch.cat(list(unique)))
    in_part = places.split([len(part) for part in unique])
    first, last = (torch.empty(len(ids), dtype=torch.int64) for _ in range(2))
    for number in range(num_parts):
        last[in_part[number]] = number
        first[in_part[num_parts - 1 - number]] = num_parts - 1 - number
    owner = owners.owner_of(ids) * num_parts
    order, first_counts = group(owner + first, owners.world_size * num_parts)
    position = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    last = last.index_select(0, order)
    leaving, last_counts = group(owner.index_select(0, order) + last, owners.world_size * num_parts)
    return TablePlan(
        ids=ids.index_select(0, order),
        first_counts=first_counts.reshape(-1, num_parts).tolist(),
        last_part=last.to(torch.uint8),
        leaving=leaving,
        last_counts=last_counts.reshape(-1, num_parts).tolist(),
        places=tuple(position.index_select(0, part) for part in in_part),
    )
