"""Routing: which rank owns each id of a batch, and in which order ids, rows and gradients are sent. Pure, no communication.

A *window* is the micro-batches between two updates. Each distinct id of a window is sent once in
each direction: its row with the first micro-batch that uses it, its gradient sum with the last. The
ids of a table are sorted by

    (owner, micro-batch of first use, fine chunk, id)

so what owner o sends for micro-batch i is one contiguous range. The local rows of a micro-batch are
in the same order: per owner first those that an earlier micro-batch used, then the fresh ones. So
rows are received where they are used, and the last gradients are sent from where they were
computed. A fine chunk is an eighth of an owner's buckets (chunked_exchange.py). It is part of the
order even without chunks, because what a model computes may depend on the order of its rows.

Native where that can be built (plan.cpp); torch gives identical results.
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
from nestpipe.ops.device_memory import address
from nestpipe.ops.native_library import library

Counts = list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """The distinct ids of one table in a window. Positions are those in a micro-batch's local rows, ascending."""

    ids: Tensor  # [U] by (owner, first use, fine chunk, id)
    last_use: Tensor  # [U] uint8: the last micro-batch that uses the id
    fine_chunks: Tensor  # [U] uint8
    first_counts: Counts  # [owner][micro-batch]: ids first used in it
    last_counts: Counts  # [owner][micro-batch]: ids last used in it
    local_counts: Counts  # [owner][micro-batch]: distinct ids of it
    repeated: tuple[Tensor, ...]  # per micro-batch: positions of rows that an earlier one has
    source: tuple[Tensor, ...]  # and where each was last: micro-batch << 32 | position
    ending: tuple[Tensor, ...]  # per micro-batch: positions of rows last used in it

    @property
    def counts(self) -> list[int]:
        """Distinct ids per owner."""
        return [sum(counts) for counts in self.first_counts]

    def num_local(self, micro_batch: int) -> int:
        """Distinct ids of a micro-batch."""
        return sum(counts[micro_batch] for counts in self.local_counts)

    def fresh(self, micro_batch: int) -> list[slice]:
        """Per owner: where its fresh rows belong in the micro-batch's local rows."""
        fresh, end = [], 0
        for sizes, counts in zip(self.local_counts, self.first_counts, strict=True):
            end += sizes[micro_batch]
            fresh.append(slice(end - counts[micro_batch], end))
        return fresh


@dataclass(frozen=True, slots=True, eq=False)
class OwnerRequests:
    """Requests to the owner of a table, or of a chunk of it, in a window, requester after requester.

    Arrivals of gradient sums are numbered in (micro-batch, requester) order.
    """

    ids: Tensor  # [K] union over the requesters, ascending
    places: Tensor  # [n] place of each request in the union
    first_counts: Counts  # [requester][micro-batch]: rows first used in it
    last_use: Tensor  # [n] uint8: the micro-batch with which each sum arrives
    arrival_counts: Counts  # [micro-batch][requester]: sums that arrive with it
    starts: Tensor  # [K + 1]: where each id starts in `arrivals`
    arrivals: Tensor  # [n]: numbers of the arrivals of each id, ascending: the order of its sum

    def rows_for(self, micro_batch: int) -> list[Tensor]:
        """Per requester: places in the union of the rows that it gets with a micro-batch."""
        rows, end = [], 0
        for counts in self.first_counts:
            begin = end + sum(counts[:micro_batch])
            rows.append(self.places[begin : begin + counts[micro_batch]])
            end += sum(counts)
        return rows

    def ending(self) -> list[Tensor]:
        """Per requester: places in the union of the sums that arrive with the last micro-batch, in order of arrival."""
        last = (self.last_use == len(self.arrival_counts) - 1).nonzero().flatten()
        return list(self.places.index_select(0, last).split(self.arrival_counts[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The distinct ids of each table and, per micro-batch and lookup, the position of each id's row."""

    tables: Mapping[str, TablePlan]
    lookups: tuple[Mapping[str, Lookup], ...]
    index: tuple[Mapping[str, Tensor], ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.lookups)

    @property
    def num_rows(self) -> int:
        """Rows that this rank requests."""
        return sum(len(plan.ids) for plan in self.tables.values())

    def rows(self, micro_batch: int, local_rows: Mapping[str, Tensor]) -> dict[str, Rows]:
        """The model's view of a micro-batch's rows; lookups of one table share a tensor."""
        lookups, index = self.lookups[micro_batch], self.index[micro_batch]
        return {name: Rows(local_rows[lookup.table], index[name], lookup) for name, lookup in lookups.items()}


def route(micro_batches: Sequence[Mapping[str, Lookup]], tables: Sequence[str], owners: Owners) -> Plan:
    """Plans the lookups of all micro-batches. A table without a lookup has an empty plan."""
    index: list[dict[str, Tensor]] = [{} for _ in micro_batches]
    plans = {}
    for table in tables:
        names = [[name for name, lookup in lookups.items() if lookup.table == table] for lookups in micro_batches]
        ids = [[lookups[name].ids for name in own] for lookups, own in zip(micro_batches, names, strict=True)]
        sizes = [sum(one.numel() for one in own) for own in ids]
        empty = torch.empty(0, dtype=torch.int64)
        all_ids = torch.cat([empty, *(one.flatten() for own in ids for one in own)])
        plans[table], positions = plan_table(all_ids, sizes, owners)
        by_lookup = iter(positions.split([one.numel() for own in ids for one in own]))
        for index_of, own_names, own in zip(index, names, ids, strict=True):
            index_of |= {name: next(by_lookup).reshape(one.shape) for name, one in zip(own_names, own, strict=True)}
    return Plan(plans, tuple(micro_batches), tuple(index))


def plan_table(
    ids: Tensor, sizes: Sequence[int], owners: Owners, *, native: bool | None = None
) -> tuple[TablePlan, Tensor]:
    """The plan for ids [n] of micro-batches of these sizes, and the position [n] of each id in its local rows."""
    functions = _functions() if native is None or native else None
    return _plan_natively(functions, ids, sizes, owners) if functions else _plan_in_torch(ids, sizes, owners)


def own_requests(ids: Tensor, last_use: Tensor, first_counts: Counts, *, native: bool | None = None) -> OwnerRequests:
    """The owner side, from the ids of all requesters back to back and the micro-batch of last use (uint8) of each."""
    functions = _functions() if native is None or native else None
    if functions is None:
        return _own_in_torch(ids, last_use, first_counts)
    n, size, micro_batches = len(ids), len(first_counts), len(first_counts[0])
    ends = torch.tensor([sum(counts) for counts in first_counts]).cumsum(0)
    unique, places, arrivals, starts = (torch.empty(n + extra, dtype=torch.int64) for extra in (0, 0, 0, 1))
    counts = torch.zeros(micro_batches, size, dtype=torch.int64)
    requests = _RequestsCall(
        *(address(ids), address(last_use), address(ends), n, micro_batches, size),
        *(address(unique), address(places), address(counts), address(starts), address(arrivals)),
    )
    num_unique = functions.own(byref(requests))
    check_memory(num_unique, n)
    return OwnerRequests(
        unique[:num_unique], places, first_counts, last_use, counts.tolist(), starts[: num_unique + 1], arrivals
    )


def _own_in_torch(ids: Tensor, last_use: Tensor, first_counts: Counts) -> OwnerRequests:
    size, micro_batches = len(first_counts), len(first_counts[0])
    union, places = dedupe(ids)
    requester = torch.arange(size).repeat_interleave(torch.tensor([sum(counts) for counts in first_counts]))
    order, counts = group(last_use.to(torch.int64) * size + requester, size * micro_batches)
    arrivals, of_id = group(places.index_select(0, order), len(union))
    starts = torch.cat([of_id.new_zeros(1), of_id.cumsum(0)])
    return OwnerRequests(
        union, places, first_counts, last_use, counts.reshape(micro_batches, size).tolist(), starts, arrivals
    )


def _plan_in_torch(ids: Tensor, sizes: Sequence[int], owners: Owners) -> tuple[TablePlan, Tensor]:
    num_micro_batches, size = len(sizes), owners.world_size
    unique, number = dedupe(ids)
    micro_batch_of = torch.arange(num_micro_batches).repeat_interleave(torch.tensor(sizes))
    first = torch.full_like(unique, num_micro_batches).scatter_reduce_(0, number, micro_batch_of, "amin")
    last = torch.zeros_like(unique).scatter_reduce_(0, number, micro_batch_of, "amax")
    fine_chunks = owners.fine_chunks_of(unique)
    owner, fine_chunks = fine_chunks // FINE_CHUNKS, fine_chunks % FINE_CHUNKS
    order, counts = group(
        (owner * num_micro_batches + first) * FINE_CHUNKS + fine_chunks, size * num_micro_batches * FINE_CHUNKS
    )
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    first, last, owner, fine_chunks = (column.index_select(0, order) for column in (first, last, owner, fine_chunks))
    latest = torch.empty_like(order)  # where each place was last
    index, repeated, source, ending, local_counts, last_counts = [], [], [], [], [], []
    for micro_batch, own in enumerate(place.index_select(0, number).split(list(sizes))):
        members, positions = dedupe(own)
        index.append(positions)
        repeated.append((first.index_select(0, members) < micro_batch).nonzero().flatten())
        source.append(latest.index_select(0, members.index_select(0, repeated[-1])))
        ending.append((last.index_select(0, members) == micro_batch).nonzero().flatten())
        latest.index_copy_(0, members, torch.arange(len(members)) + (micro_batch << 32))
        owner_of = owner.index_select(0, members)
        local_counts.append(torch.bincount(owner_of, minlength=size))
        last_counts.append(torch.bincount(owner_of.index_select(0, ending[-1]), minlength=size))
    plan = TablePlan(
        ids=unique.index_select(0, order),
        last_use=last.to(torch.uint8),
        fine_chunks=fine_chunks.to(torch.uint8),
        first_counts=counts.reshape(size, num_micro_batches, FINE_CHUNKS).sum(2).tolist(),
        last_counts=torch.stack(last_counts, 1).tolist(),
        local_counts=torch.stack(local_counts, 1).tolist(),
        repeated=tuple(repeated),
        source=tuple(source),
        ending=tuple(ending),
    )
    return plan, torch.cat(index)


def _plan_natively(
    functions: _RoutingFunctions, ids: Tensor, sizes: Sequence[int], owners: Owners
) -> tuple[TablePlan, Tensor]:
    n, num_micro_batches, size = len(ids), len(sizes), owners.world_size
    ids, ends = ids.contiguous(), torch.tensor(sizes).cumsum(0)
    unique, index, repeated, source, ending = (torch.empty_like(ids) for _ in range(5))
    last_use, fine_chunks = torch.empty(2, n, dtype=torch.uint8)
    counts = torch.zeros(3, size, num_micro_batches, dtype=torch.int64)
    call = _PlanCall(
        *(address(ids), address(ends), n, num_micro_batches, owners.num_buckets, size),
        *(address(unique), address(last_use), address(fine_chunks), address(index)),
        *(address(repeated), address(source), address(ending)),
        *(address(one) for one in counts),
    )
    num_unique = functions.plan(byref(call))
    check_memory(num_unique, n)
    first_counts, last_counts, local_counts = counts.tolist()
    num_ending, num_repeated = counts[1].sum(0).tolist(), (counts[2] - counts[0]).sum(0).tolist()
    plan = TablePlan(
        ids=unique[:num_unique].clone(),  # frees the memory of the repeated ids
        last_use=last_use[:num_unique],
        fine_chunks=fine_chunks[:num_unique],
        first_counts=first_counts,
        last_counts=last_counts,
        local_counts=local_counts,
        repeated=repeated[: sum(num_repeated)].split(num_repeated),
        source=source[: sum(num_repeated)].split(num_repeated),
        ending=ending[:num_unique].split(num_ending),
    )
    return plan, index


class _PlanCall(Structure):
    """nestpipe_plan of plan.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "micro_batch_ends")),
        *((name, c_int64) for name in ("n", "num_micro_batches", "num_buckets", "world_size")),
        *((name, c_void_p) for name in ("unique", "last_use", "fine_chunks", "index", "repeated", "source", "ending")),
        *((name, c_void_p) for name in ("first_counts", "last_counts", "local_counts")),
    )


class _RequestsCall(Structure):
    """nestpipe_requests of plan.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "last_use", "requester_ends")),
        *((name, c_int64) for name in ("n", "num_micro_batches", "world_size")),
        *((name, c_void_p) for name in ("unique", "place", "arrival_counts", "starts", "arrivals")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _RoutingFunctions:
    """The functions of plan.cpp; both return the number of distinct ids."""

    plan: Any
    own: Any


@cache
def _functions() -> _RoutingFunctions | None:
    native = library()
    if native is None:
        return None
    plan = native.function("nestpipe_plan_make", c_int64, POINTER(_PlanCall))
    return _RoutingFunctions(plan, native.function("nestpipe_plan_own", c_int64, POINTER(_RequestsCall)))
