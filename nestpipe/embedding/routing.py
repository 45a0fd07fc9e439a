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

from nestpipe.embedding.buckets import FINE_CHUNKS, Owners
from nestpipe.embedding.lookup import Lookup, Rows
from nestpipe.embedding.unique_ids import check_memory, dedupe, group
from nestpipe.ops.native_library import library

Counts = list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """The distinct ids of one table in a window. Positions are those in a part's leaf, ascending."""

    ids: Tensor  # [U] by (owner, first part, eighth, id)
    last_use: Tensor  # [U] uint8: the part whose gradients take the id's sum home
    fine_chunks: Tensor  # [U] uint8
    first_counts: Counts  # [owner][part]: ids that travel with the part
    last_counts: Counts  # [owner][part]: ids whose sum goes home with the part
    local_counts: Counts  # [owner][part]: ids of the part
    repeated: tuple[Tensor, ...]  # for each part: positions of rows that an earlier part has
    source: tuple[Tensor, ...]  # and the part that had each last, << 32, with its position there
    ending: tuple[Tensor, ...]  # for each part: positions of rows whose sums go home with it

    @property
    def counts(self) -> list[int]:
        """Ids for each owner."""
        return [sum(counts) for counts in self.first_counts]

    def num_local(self, micro_batch: int) -> int:
        """Distinct ids of a part."""
        return sum(counts[micro_batch] for counts in self.local_counts)

    def fresh(self, micro_batch: int) -> list[slice]:
        """Where the rows that come with a part belong in its leaf, owner by owner."""
        found, end = [], 0
        for sizes, counts in zip(self.local_counts, self.first_counts, strict=True):
            end += sizes[micro_batch]
            found.append(slice(end - counts[micro_batch], end))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class OwnerRequests:
    """What the owner of a table, or of a slice of it, is asked for in a window, asker after asker. Arrivals are counted in (part, asker) order."""

    ids: Tensor  # [K] union over the askers, ascending
    places: Tensor  # [n] of each request in the union
    first_counts: Counts  # [asker][part]: requests for rows that travel with the part
    last_use: Tensor  # [n] uint8: the part with which each sum comes
    arrival_counts: Counts  # [part][asker]: sums that come with the part
    starts: Tensor  # [K + 1]: where the arrivals of each id start in `arrivals`
    arrivals: Tensor  # [n]: the arrivals of one id after the other, ascending: the order of its sum

    def rows_for(self, micro_batch: int) -> list[Tensor]:
        """Places in the union of the rows that each asker gets with a part."""
        found, end = [], 0
        for counts in self.first_counts:
            begin = end + sum(counts[:micro_batch])
            found.append(self.places[begin : begin + counts[micro_batch]])
            end += sum(counts)
        return found

    def ending(self) -> list[Tensor]:
        """Places in the union of the sums that come from each asker with the last part, in the order in which they come."""
        last = (self.last_use == len(self.arrival_counts) - 1).nonzero().flatten()
        return list(self.places.index_select(0, last).split(self.arrival_counts[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The distinct ids of each table, and where each id of each lookup of each part finds its row."""

    tables: Mapping[str, TablePlan]
    lookups: tuple[Mapping[str, Lookup], ...]
    index: tuple[Mapping[str, Tensor], ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.lookups)

    @property
    def num_rows(self) -> int:
        """That the rank asks for."""
        return sum(len(plan.ids) for plan in self.tables.values())

    def rows(self, micro_batch: int, local_rows: Mapping[str, Tensor]) -> dict[str, Rows]:
        """The model's view of a part's rows: one leaf per table."""
        lookups, index = self.lookups[micro_batch], self.index[micro_batch]
        return {name: Rows(local_rows[lookup.table], index[name], lookup) for name, lookup in lookups.items()}


def route(micro_batches: Sequence[Mapping[str, Lookup]], tables: Sequence[str], owners: Owners) -> Plan:
    """Dedupes the ids of all parts, table by table. A table that no lookup names has an empty plan."""
    index: list[dict[str, Tensor]] = [{} for _ in micro_batches]
    plans = {}
    for table in tables:
        names = [[name for name, lookup in lookups.items() if lookup.table == table] for lookups in micro_batches]
        ids = [[lookups[name].ids for name in own] for lookups, own in zip(micro_batches, names, strict=True)]
        sizes = [sum(one.numel() for one in own) for own in ids]
        nothing = torch.empty(0, dtype=torch.int64)
        plans[table], places = plan_table(
            torch.cat([nothing, *(one.flatten() for own in ids for one in own)]), sizes, owners
        )
        pieces = iter(places.split([one.numel() for own in ids for one in own]))
        for found, own_names, own in zip(index, names, ids, strict=True):
            found |= {name: next(pieces).reshape(one.shape) for name, one in zip(own_names, own, strict=True)}
    return Plan(plans, tuple(micro_batches), tuple(index))


def plan_table(
    ids: Tensor, sizes: Sequence[int], owners: Owners, *, native: bool | None = None
) -> tuple[TablePlan, Tensor]:
    """The plan for ids [n] of parts of these sizes, and where each id is in the leaf of its part [n]."""
    functions = _functions() if native is None or native else None
    return _plan_natively(functions, ids, sizes, owners) if functions else _plan_in_torch(ids, sizes, owners)


def own_requests(
    ids: Tensor, last_micro_batch: Tensor, first_counts: Counts, *, native: bool | None = None
) -> OwnerRequests:
    """What an owner knows after the ids of all askers came, back to back, with the last part (uint8) of each."""
    functions = _functions() if native is None or native else None
    if functions is None:
        return _own_in_torch(ids, last_micro_batch, first_counts)
    n, size, micro_batches = len(ids), len(first_counts), len(first_counts[0])
    ends = torch.tensor([sum(counts) for counts in first_counts]).cumsum(0)
    unique, places, arrivals, starts = (torch.empty(n + extra, dtype=torch.int64) for extra in (0, 0, 0, 1))
    counts = torch.zeros(micro_batches, size, dtype=torch.int64)
    requests = _RequestsCall(
        *(ids.data_ptr(), last_micro_batch.data_ptr(), ends.data_ptr(), n, micro_batches, size),
        *(unique.data_ptr(), places.data_ptr(), counts.data_ptr(), starts.data_ptr(), arrivals.data_ptr()),
    )
    num_unique = functions.own(byref(requests))
    check_memory(num_unique, n)
    return OwnerRequests(
        unique[:num_unique], places, first_counts, last_micro_batch, counts.tolist(), starts[: num_unique + 1], arrivals
    )


def _own_in_torch(ids: Tensor, last_micro_batch: Tensor, first_counts: Counts) -> OwnerRequests:
    size, micro_batches = len(first_counts), len(first_counts[0])
    union, places = dedupe(ids)
    requester = torch.arange(size).repeat_interleave(torch.tensor([sum(counts) for counts in first_counts]))
    order, counts = group(last_micro_batch.to(torch.int64) * size + requester, size * micro_batches)
    arrivals, of_id = group(places.index_select(0, order), len(union))
    starts = torch.cat([of_id.new_zeros(1), of_id.cumsum(0)])
    return OwnerRequests(
        union, places, first_counts, last_micro_batch, counts.reshape(micro_batches, size).tolist(), starts, arrivals
    )


def _plan_in_torch(ids: Tensor, sizes: Sequence[int], owners: Owners) -> tuple[TablePlan, Tensor]:
    num_micro_batches, size = len(sizes), owners.world_size
    unique, number = dedupe(ids)
    micro_batch_of = torch.arange(num_micro_batches).repeat_interleave(torch.tensor(sizes))
    first = torch.full_like(unique, num_micro_batches).scatter_reduce_(0, number, micro_batch_of, "amin")
    last = torch.zeros_like(unique).scatter_reduce_(0, number, micro_batch_of, "amax")
    eighths = owners.fine_chunks_of(unique)
    owner, eighths = eighths // FINE_CHUNKS, eighths % FINE_CHUNKS
    order, counts = group(
        (owner * num_micro_batches + first) * FINE_CHUNKS + eighths, size * num_micro_batches * FINE_CHUNKS
    )
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    first, last, owner, eighths = (column.index_select(0, order) for column in (first, last, owner, eighths))
    seen = torch.empty_like(order)  # where each place was last
    index, again, source, leaving, leaf_counts, last_counts = [], [], [], [], [], []
    for micro_batch, own in enumerate(place.index_select(0, number).split(list(sizes))):
        members, positions = dedupe(own)
        index.append(positions)
        again.append((first.index_select(0, members) < micro_batch).nonzero().flatten())
        source.append(seen.index_select(0, members.index_select(0, again[-1])))
        leaving.append((last.index_select(0, members) == micro_batch).nonzero().flatten())
        seen.index_copy_(0, members, torch.arange(len(members)) + (micro_batch << 32))
        owner_of = owner.index_select(0, members)
        leaf_counts.append(torch.bincount(owner_of, minlength=size))
        last_counts.append(torch.bincount(owner_of.index_select(0, leaving[-1]), minlength=size))
    plan = TablePlan(
        ids=unique.index_select(0, order),
        last_use=last.to(torch.uint8),
        fine_chunks=eighths.to(torch.uint8),
        first_counts=counts.reshape(size, num_micro_batches, FINE_CHUNKS).sum(2).tolist(),
        last_counts=torch.stack(last_counts, 1).tolist(),
        local_counts=torch.stack(leaf_counts, 1).tolist(),
        repeated=tuple(again),
        source=tuple(source),
        ending=tuple(leaving),
    )
    return plan, torch.cat(index)


def _plan_natively(
    functions: _RoutingFunctions, ids: Tensor, sizes: Sequence[int], owners: Owners
) -> tuple[TablePlan, Tensor]:
    n, num_micro_batches, size = len(ids), len(sizes), owners.world_size
    ids, ends = ids.contiguous(), torch.tensor(sizes).cumsum(0)
    unique, index, again, source, leaving = (torch.empty_like(ids) for _ in range(5))
    last_micro_batch, eighths = torch.empty(2, n, dtype=torch.uint8)
    counts = torch.zeros(3, size, num_micro_batches, dtype=torch.int64)
    call = _PlanCall(
        *(ids.data_ptr(), ends.data_ptr(), n, num_micro_batches, owners.num_buckets, size),
        *(unique.data_ptr(), last_micro_batch.data_ptr(), eighths.data_ptr(), index.data_ptr()),
        *(again.data_ptr(), source.data_ptr(), leaving.data_ptr()),
        *(one.data_ptr() for one in counts),
    )
    num_unique = functions.plan(byref(call))
    check_memory(num_unique, n)
    first_counts, last_counts, leaf_counts = counts.tolist()
    num_leaving, num_again = counts[1].sum(0).tolist(), (counts[2] - counts[0]).sum(0).tolist()
    plan = TablePlan(
        ids=unique[:num_unique].clone(),  # so that the room of repeated ids is not kept as long as the distinct ones
        last_use=last_micro_batch[:num_unique],
        fine_chunks=eighths[:num_unique],
        first_counts=first_counts,
        last_counts=last_counts,
        local_counts=leaf_counts,
        repeated=again[: sum(num_again)].split(num_again),
        source=source[: sum(num_again)].split(num_again),
        ending=leaving[:num_unique].split(num_leaving),
    )
    return plan, index


class _PlanCall(Structure):
    """nestpipe_plan of plan.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "part_ends")),
        *((name, c_int64) for name in ("n", "num_parts", "num_buckets", "world_size")),
        *((name, c_void_p) for name in ("unique", "last_part", "eighths", "index", "again", "source", "leaving")),
        *((name, c_void_p) for name in ("first_counts", "last_counts", "leaf_counts")),
    )


class _RequestsCall(Structure):
    """nestpipe_requests of plan.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "last_part", "asker_ends")),
        *((name, c_int64) for name in ("n", "num_parts", "world_size")),
        *((name, c_void_p) for name in ("unique", "place", "arrival_counts", "starts", "arrivals")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _RoutingFunctions:
    """What plan.cpp offers; both return the number of distinct ids."""

    plan: Any
    own: Any


@cache
def _functions() -> _RoutingFunctions | None:
    found = library()
    if found is None:
        return None
    plan = found.function("nestpipe_plan_make", c_int64, POINTER(_PlanCall))
    return _RoutingFunctions(plan, found.function("nestpipe_plan_own", c_int64, POINTER(_RequestsCall)))
