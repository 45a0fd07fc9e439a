"""Sample clustering: assigns samples to micro-batches so that the first and the last one have few distinct keys.

Each key is sent once per window, so keys shared by micro-batches cost nothing. But compute waits
for the rows of the first micro-batch and for the gradients of the last. Greedy assignment:

1. The first micro-batch takes, one by one, the sample that adds the fewest new keys.
2. Then the last one, from the remaining samples.
3. Then those between, from the second on, which keeps samples with the same keys together.

Keys of the previous batch, if given, count double: their rows cannot be sent before its update.
Ties are broken by place, and a micro-batch keeps its samples in their order. Groups of samples move
as one.

The result is a pure function of the arguments: the budget is counted in operations, not in time.
When it is used up, the remaining samples are taken in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nestpipe.embedding.unique_ids import dedupe, group
from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops.native_library import library

_BUDGET = 1 << 24  # operations; 512 samples with 200 keys in 8 micro-batches need a thirtieth of it


@dataclass(frozen=True, slots=True, eq=False)
class SampleGroups:
    """Samples per micro-batch: places, micro-batch after micro-batch, ascending in each, and their numbers."""

    order: Tensor  # [B]
    sizes: list[int]

    def places(self) -> list[Tensor]:
        """The places of each micro-batch."""
        return list(self.order.split(self.sizes))


def cluster(
    keys: Jagged,
    sizes: Sequence[int],
    *,
    previous: Tensor | None = None,
    groups: Tensor | None = None,
    budget: int = _BUDGET,
    native: bool | None = None,
) -> SampleGroups:
    """Assigns the samples (rows of `keys`, any int64, repeats count once) to micro-batches of the given sizes.

    `previous`: keys of the previous batch, ascending. `groups` [B]: samples with the same number stay together; a micro-batch
    then ends at the group border nearest to its size, and the next one in the middle makes up the difference.
    """
    if sum(sizes) != keys.num_rows or not sizes or min(sizes) < 0:
        raise ValueError(
            f"micro-batches of {list(sizes)} samples do not add up to the {keys.num_rows} samples of the batch"
        )
    unit_of_sample = torch.arange(keys.num_rows) if groups is None else _by_appearance(groups)
    units = _Units.of(keys, unit_of_sample, previous)
    micro_batch_of_unit = _assign(units, sizes, budget, native)
    order, counts = group(micro_batch_of_unit.index_select(0, unit_of_sample), len(sizes))
    return SampleGroups(order, counts.tolist())


def rows_ratio(keys: Jagged, micro_batches: SampleGroups) -> float:
    """Distinct keys per micro-batch, summed, over those of the batch: the traffic without deduplication across them."""
    in_all = len(dedupe(keys.values)[0])
    in_micro_batches = sum(len(dedupe(keys.select(places).values)[0]) for places in micro_batches.places())
    return in_micro_batches / in_all if in_all else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """Units of assignment: samples, or groups of them."""

    keys: Jagged  # of the samples, as places in `ids`
    ids: Tensor  # [K] ascending
    previous: Tensor  # ids of the batch before, ascending
    samples: Jagged  # of each unit

    @staticmethod
    def of(keys: Jagged, unit_of_sample: Tensor, previous: Tensor | None) -> _Units:
        num_units = int(unit_of_sample.max()) + 1 if len(unit_of_sample) else 0
        ids, numbers = dedupe(keys.values)
        samples, counts = group(unit_of_sample, num_units)
        before = ids.new_empty(0) if previous is None else previous.contiguous()
        return _Units(keys.with_values(numbers), ids, before, Jagged(samples, offsets_of(counts), keys.num_rows))


def _by_appearance(groups: Tensor) -> Tensor:
    """Numbers [B] of the groups, in the order of their first samples."""
    distinct, number = dedupe(groups)
    first = torch.full_like(distinct, len(groups)).scatter_reduce_(0, number, torch.arange(len(groups)), "amin")
    return torch.empty_like(first).index_copy_(0, first.argsort(), torch.arange(len(first))).index_select(0, number)


class _Samples(Structure):
    """nestpipe_samples of cluster.cpp."""

    _fields_ = (
        ("offsets", c_void_p),
        ("numbers", c_void_p),
        ("ids", c_void_p),
        ("num_ids", c_int64),
        ("previous", c_void_p),
        ("num_previous", c_int64),
        ("samples", c_void_p),
        ("unit_offsets", c_void_p),
        ("num_units", c_int64),
    )


@cache
def _function() -> Any:
    native = library()
    arguments = POINTER(_Samples), c_void_p, c_int64, c_int64, c_void_p
    return native.function("nestpipe_cluster", c_int64, *arguments) if native else None


def _assign(units: _Units, sizes: Sequence[int], budget: int, native: bool | None) -> Tensor:
    """The micro-batch [U] of each unit."""
    function = _function() if native is None or native else None
    if function is None:
        return torch.tensor(_Greedy(units, budget).assign(sizes), dtype=torch.int64)
    offsets, targets = units.keys.offsets.contiguous(), torch.tensor(sizes, dtype=torch.int64)
    micro_batch_of = torch.empty(units.samples.num_rows, dtype=torch.int64)
    samples = _Samples(
        offsets=offsets.data_ptr(),
        numbers=units.keys.values.data_ptr(),
        ids=units.ids.data_ptr(),
        num_ids=len(units.ids),
        previous=units.previous.data_ptr(),
        num_previous=len(units.previous),
        samples=units.samples.values.data_ptr(),
        unit_offsets=units.samples.offsets.data_ptr(),
        num_units=units.samples.num_rows,
    )
    if function(byref(samples), targets.data_ptr(), len(sizes), budget, micro_batch_of.data_ptr()) < 0:
        raise MemoryError(f"no memory to cluster {units.keys.num_rows:,} samples with {len(units.ids):,} keys")
    return micro_batch_of


class _Greedy:
    """The readable reference of cluster.cpp, used where that cannot be built."""

    def __init__(self, units: _Units, budget: int):
        of_sample = [set(row.tolist()) for row in units.keys.values.split(units.keys.lengths().tolist())]
        members = [row.tolist() for row in units.samples.values.split(units.samples.lengths().tolist())]
        self._sizes = [len(samples) for samples in members]
        self._keys_of = [set[int]().union(*(of_sample[sample] for sample in samples)) for samples in members]
        self._units_of: list[list[int]] = [[] for _ in units.ids]
        for unit, keys in enumerate(self._keys_of):
            for key in keys:
                self._units_of[key].append(unit)
        self._weights = [1 + known for known in torch.isin(units.ids, units.previous).tolist()]
        self._left = list(range(len(members)))
        self._costs: list[int] = []
        self._budget, self._spent = budget, 0

    def assign(self, sizes: Sequence[int]) -> list[int]:
        """The micro-batch of each unit. The first is filled, then the last, then the middle, whose last one gets the rest."""
        last = len(sizes) - 1
        *filled, rest = dict.fromkeys([0, last, *range(1, last)])
        micro_batch_of = [rest] * len(self._sizes)
        missing = 0
        for micro_batch in filled:
            is_middle = 0 < micro_batch < last
            target = sizes[micro_batch] + (missing if is_middle else 0)
            taken = self._fill(target) if target > 0 else []
            for unit in taken:
                micro_batch_of[unit] = micro_batch
            if is_middle:
                missing = target - sum(self._sizes[unit] for unit in taken)
        return micro_batch_of

    def _fill(self, target: int) -> list[int]:
        taken: list[int] = []
        seen: set[int] = set()
        size = 0
        self._costs = [sum(self._weights[key] for key in keys) for keys in self._keys_of]
        while self._left:
            unit = self._cheapest()
            more = self._sizes[unit]
            if size + more - target >= target - size:
                break
            self._left.remove(unit)
            taken.append(unit)
            size += more
            self._take_keys(unit, seen)
        return taken

    def _cheapest(self) -> int:
        if self._spent >= self._budget:
            return self._left[0]
        self._spent += len(self._left)
        return min(self._left, key=lambda unit: (self._costs[unit], unit))

    def _take_keys(self, unit: int, seen: set[int]) -> None:
        if self._spent >= self._budget:
            return
        for key in self._keys_of[unit]:
            if key in seen or len(self._units_of[key]) == 1:
                continue
            seen.add(key)
            self._spent += len(self._units_of[key])
            for other in self._units_of[key]:
                self._costs[other] -= self._weights[key]
