"""Where ids go and how they come back: the pure part of a lookup, without tables and without messages.

A *window* is the parts (micro-batches) between two updates. Each distinct id of a window travels once in each
direction: its row with the first part that uses it, its gradient with the last. So the ids of a table are sorted by

    (owner, first part, eighth of the owner's buckets, id)

and what owner o sends for part i is one contiguous range. The rows of a part, its *leaf*, stand in the same order: for each
owner first those that an earlier part has used, then those that come with this one. So rows arrive where they are used, and
gradients of the last part leave from where they arose. Eighths are for messages in slices (slices.py): what a model computes may
depend on the order of a leaf, so it is the same whether there are any.

Native where that can be built (plan.cpp), with the same answers in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nestpipe.embedding.ids import check_memory, dedupe, group
from nestpipe.embedding.owner import EIGHTHS, Owners
from nestpipe.embedding.spec import Lookup, Rows
from nestpipe.native import library

Counts = list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """The distinct ids of one table in a window. Positions are those in a part's leaf, ascending."""

    ids: Tensor  # [U] by (owner, first part, eighth, id)
    last_part: Tensor  # [U] uint8: the part whose gradients take the id's sum home
    eighths: Tensor  # [U] uint8
    first_counts: Counts  # [owner][part]: ids that travel with the part
    last_counts: Counts  # [owner][part]: ids whose sum goes home with the part
    leaf_counts: Counts  # [owner][part]: ids of the part
    again: tuple[Tensor, ...]  # for each part: positions of rows that an earlier part has
    source: tuple[Tensor, ...]  # and the part that had each last, << 32, with its position there
    leaving: tuple[Tensor, ...]  # for each part: positions of rows whose sums go home with it

    @property
    def counts(self) -> list[int]:
        """Ids for each owner."""
        return [sum(counts) for counts in self.first_counts]

    def leaf_size(self, part: int) -> int:
        """Distinct ids of a part."""
        return sum(counts[part] for counts in self.leaf_counts)

    def fresh(self, part: int) -> list[slice]:
        """Where the rows that come with a part belong in its leaf, owner by owner."""
        found, end = [], 0
        for sizes, counts in zip(self.leaf_counts, self.first_counts, strict=True):
            end += sizes[part]
            found.append(slice(end - counts[part], end))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """What the owner of a table, or of a slice of it, is asked for in a window, asker after asker. Arrivals are counted in (part, asker) order."""

    ids: Tensor  # [K] union over the askers, ascending
    places: Tensor  # [n] of each request in the union
    first_counts: Counts  # [asker][part]: requests for rows that travel with the part
    last_part: Tensor  # [n] uint8: the part with which each sum comes
    arrival_counts: Counts  # [part][asker]: sums that come with the part
    starts: Tensor  # [K + 1]: where the arrivals of each id start in `arrivals`
    arrivals: Tensor  # [n]: the arrivals of one id after the other, ascending: the order of its sum

    def wanted(self, part: int) -> list[Tensor]:
        """Places in the union of the rows that each asker gets with a part."""
        found, end = [], 0
        for counts in self.first_counts:
            begin = end + sum(counts[:part])
            found.append(self.places[begin : begin + counts[part]])
            end += sum(counts)
        return found

    def ending(self) -> list[Tensor]:
        """Places in the union of the sums that come from each asker with the last part, in the order in which they come."""
        last = (self.last_part == len(self.arrival_counts) - 1).nonzero().flatten()
        return list(self.places.index_select(0, last).split(self.arrival_counts[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The distinct ids of each table, and where each id of each lookup of each part finds its row."""

    tables: Mapping[str, TablePlan]
    lookups: tuple[Mapping[str, Lookup], ...]
    index: tuple[Mapping[str, Tensor], ...]

    @property
    def num_parts(self) -> int:
        return len(self.lookups)

    @property
    def num_rows(self) -> int:
        """That the rank asks for."""
        return sum(len(plan.ids) for plan in self.tables.values())

    def rows(self, part: int, leaves: Mapping[str, Tensor]) -> dict[str, Rows]:
        """The model's view of a part's rows: one leaf per table."""
        lookups, index = self.lookups[part], self.index[part]
        return {name: Rows(leaves[lookup.table], index[name], lookup) for name, lookup in lookups.items()}


def route(parts: Sequence[Mapping[str, Lookup]], tables: Sequence[str], owners: Owners) -> Plan:
    """Dedupes the ids of all parts, table by table. A table that no lookup names has an empty plan."""
    index: list[dict[str, Tensor]] = [{} for _ in parts]
    plans = {}
    for table in tables:
        names = [[name for name, lookup in lookups.items() if lookup.table == table] for lookups in parts]
        ids = [[lookups[name].ids for name in own] for lookups, own in zip(parts, names, strict=True)]
        sizes = [sum(one.numel() for one in own) for own in ids]
        nothing = torch.empty(0, dtype=torch.int64)
        plans[table], places = plan_table(
            torch.cat([nothing, *(one.flatten() for own in ids for one in own)]), sizes, owners
        )
        pieces = iter(places.split([one.numel() for own in ids for one in own]))
        for found, own_names, own in zip(index, names, ids, strict=True):
            found |= {name: next(pieces).reshape(one.shape) for name, one in zip(own_names, own, strict=True)}
    return Plan(plans, tuple(parts), tuple(index))


def plan_table(
    ids: Tensor, sizes: Sequence[int], owners: Owners, *, native: bool | None = None
) -> tuple[TablePlan, Tensor]:
    """The plan for ids [n] of parts of these sizes, and where each id is in the leaf of its part [n]."""
    functions = _functions() if native is None or native else None
    return _plan_natively(functions, ids, sizes, owners) if functions else _plan_in_torch(ids, sizes, owners)


def own_requests(ids: Tensor, last_part: Tensor, first_counts: Counts, *, native: bool | None = None) -> Requests:
    """What an owner knows after the ids of all askers came, back to back, with the last part (uint8) of each."""
    functions = _functions() if native is None or native else None
    if functions is None:
        return _own_in_torch(ids, last_part, first_counts)
    n, size, parts = len(ids), len(first_counts), len(first_counts[0])
    ends = torch.tensor([sum(counts) for counts in first_counts]).cumsum(0)
    unique, places, arrivals, starts = (torch.empty(n + extra, dtype=torch.int64) for extra in (0, 0, 0, 1))
    counts = torch.zeros(parts, size, dtype=torch.int64)
    requests = _Requests(
        *(ids.data_ptr(), last_part.data_ptr(), ends.data_ptr(), n, parts, size),
        *(unique.data_ptr(), places.data_ptr(), counts.data_ptr(), starts.data_ptr(), arrivals.data_ptr()),
    )
    num_unique = functions.own(byref(requests))
    check_memory(num_unique, n)
    return Requests(
        unique[:num_unique], places, first_counts, last_part, counts.tolist(), starts[: num_unique + 1], arrivals
    )


def _own_in_torch(ids: Tensor, last_part: Tensor, first_counts: Counts) -> Requests:
    size, parts = len(first_counts), len(first_counts[0])
    union, places = dedupe(ids)
    asker = torch.arange(size).repeat_interleave(torch.tensor([sum(counts) for counts in first_counts]))
    order, counts = group(last_part.to(torch.int64) * size + asker, size * parts)
    arrivals, of_id = group(places.index_select(0, order), len(union))
    starts = torch.cat([of_id.new_zeros(1), of_id.cumsum(0)])
    return Requests(union, places, first_counts, last_part, counts.reshape(parts, size).tolist(), starts, arrivals)


def _plan_in_torch(ids: Tensor, sizes: Sequence[int], owners: Owners) -> tuple[TablePlan, Tensor]:
    num_parts, size = len(sizes), owners.world_size
    unique, number = dedupe(ids)
    part_of = torch.arange(num_parts).repeat_interleave(torch.tensor(sizes))
    first = torch.full_like(unique, num_parts).scatter_reduce_(0, number, part_of, "amin")
    last = torch.zeros_like(unique).scatter_reduce_(0, number, part_of, "amax")
    eighths = owners.eighths_of(unique)
    owner, eighths = eighths // EIGHTHS, eighths % EIGHTHS
    order, counts = group((owner * num_parts + first) * EIGHTHS + eighths, size * num_parts * EIGHTHS)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    first, last, owner, eighths = (column.index_select(0, order) for column in (first, last, owner, eighths))
    seen = torch.empty_like(order)  # where each place was last
    index, again, source, leaving, leaf_counts, last_counts = [], [], [], [], [], []
    for part, own in enumerate(place.index_select(0, number).split(list(sizes))):
        members, positions = dedupe(own)
        index.append(positions)
        again.append((first.index_select(0, members) < part).nonzero().flatten())
        source.append(seen.index_select(0, members.index_select(0, again[-1])))
        leaving.append((last.index_select(0, members) == part).nonzero().flatten())
        seen.index_copy_(0, members, torch.arange(len(members)) + (part << 32))
        owner_of = owner.index_select(0, members)
        leaf_counts.append(torch.bincount(owner_of, minlength=size))
        last_counts.append(torch.bincount(owner_of.index_select(0, leaving[-1]), minlength=size))
    plan = TablePlan(
        ids=unique.index_select(0, order),
        last_part=last.to(torch.uint8),
        eighths=eighths.to(torch.uint8),
        first_counts=counts.reshape(size, num_parts, EIGHTHS).sum(2).tolist(),
        last_counts=torch.stack(last_counts, 1).tolist(),
        leaf_counts=torch.stack(leaf_counts, 1).tolist(),
        again=tuple(again),
        source=tuple(source),
        leaving=tuple(leaving),
    )
    return plan, torch.cat(index)


def _plan_natively(
    functions: _Functions, ids: Tensor, sizes: Sequence[int], owners: Owners
) -> tuple[TablePlan, Tensor]:
    n, num_parts, size = len(ids), len(sizes), owners.world_size
    ids, ends = ids.contiguous(), torch.tensor(sizes).cumsum(0)
    unique, index, again, source, leaving = (torch.empty_like(ids) for _ in range(5))
    last_part, eighths = torch.empty(2, n, dtype=torch.uint8)
    counts = torch.zeros(3, size, num_parts, dtype=torch.int64)
    call = _Plan(
        *(ids.data_ptr(), ends.data_ptr(), n, num_parts, owners.num_buckets, size),
        *(unique.data_ptr(), last_part.data_ptr(), eighths.data_ptr(), index.data_ptr()),
        *(again.data_ptr(), source.data_ptr(), leaving.data_ptr()),
        *(one.data_ptr() for one in counts),
    )
    num_unique = functions.plan(byref(call))
    check_memory(num_unique, n)
    first_counts, last_counts, leaf_counts = counts.tolist()
    num_leaving, num_again = counts[1].sum(0).tolist(), (counts[2] - counts[0]).sum(0).tolist()
    plan = TablePlan(
        ids=unique[:num_unique].clone(),  # so that the room of repeated ids is not kept as long as the distinct ones
        last_part=last_part[:num_unique],
        eighths=eighths[:num_unique],
        first_counts=first_counts,
        last_counts=last_counts,
        leaf_counts=leaf_counts,
        again=again[: sum(num_again)].split(num_again),
        source=source[: sum(num_again)].split(num_again),
        leaving=leaving[:num_unique].split(num_leaving),
    )
    return plan, index


class _Plan(Structure):
    """nestpipe_plan of plan.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "part_ends")),
        *((name, c_int64) for name in ("n", "num_parts", "num_buckets", "world_size")),
        *((name, c_void_p) for name in ("unique", "last_part", "eighths", "index", "again", "source", "leaving")),
        *((name, c_void_p) for name in ("first_counts", "last_counts", "leaf_counts")),
    )


class _Requests(Structure):
    """nestpipe_requests of plan.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "last_part", "asker_ends")),
        *((name, c_int64) for name in ("n", "num_parts", "world_size")),
        *((name, c_void_p) for name in ("unique", "place", "arrival_counts", "starts", "arrivals")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Functions:
    """What plan.cpp offers; both return the number of distinct ids."""

    plan: Any
    own: Any


@cache
def _functions() -> _Functions | None:
    found = library()
    if found is None:
        return None
    plan = found.function("nestpipe_plan_make", c_int64, POINTER(_Plan))
    return _Functions(plan, found.function("nestpipe_plan_own", c_int64, POINTER(_Requests)))
