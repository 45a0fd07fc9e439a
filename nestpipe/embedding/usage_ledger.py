"""When and how often ids were used, and which of them are evicted first.

Two implementations of one contract that evict the same ids: `NativeLedger` (linked lists in C++,
usage.cpp; time by the ids of a batch) and `TorchLedger` (sorts all ids; the readable reference, and
for machines without a compiler). Slots may differ.

A batch is `touch`, `admit`, `append`, with the ids of a bucket in ascending order. The order of
eviction is a function of each id's last step and frequency, so nothing else is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.id_index import IdIndex, NativeIndex, TorchIndex, UnknownIdError, checked_ids
from nestpipe.ops.device_memory import address
from nestpipe.ops.native_library import Native, library

Order = Literal["lru", "lfu"]
_MOST = 2**31 - 1  # a step or a frequency is stored in 32 bits
_EMPTY = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Evicted:
    """Ids [k] that lost their slots [k], in the order of eviction. The slots may belong to other ids already."""

    ids: Tensor = _EMPTY
    slots: Tensor = _EMPTY


class UsageLedger(Protocol):
    """Distinct ids with a slot, their last step and their frequency."""

    @property
    def index(self) -> IdIndex:
        """The slots; to be read only."""
        ...

    def touch(self, ids: Tensor, step: int) -> Tensor:
        """Counts distinct ids of batch `step`; returns their slots [n], -1 for an unknown id."""
        ...

    def admit(
        self, ids: Tensor, frequency: Tensor, *, step: int, before: int = 0, limits: Tensor | None = None
    ) -> tuple[Tensor, Evicted]:
        """Adds distinct unknown ids one after another; returns their slots, -1 for an id that finds no room.

        `limits` [num_buckets] are the most ids of each bucket. In a full bucket the first id that was last used before step
        `before` is evicted: by (last step, id) for "lru", by (frequency, last step, id) for "lfu".
        """
        ...

    def append(self, slots: Tensor) -> None:
        """Ends a batch: its slots in the order of its ids, -1 for those without one."""
        ...

    def remove(self, ids: Tensor) -> None:
        """Removes distinct known ids. Raises `UnknownIdError`."""
        ...

    def trim(self, ids: Tensor, limits: Tensor) -> Evicted:
        """Evicts the first ids of the buckets of these ids that have more than their limit. Between batches only."""
        ...

    def state(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Last step and frequency [n] of the ids in these slots."""
        ...

    def load(self, content: Mapping[str, Tensor]) -> None:
        """Replaces the content by `ids`, `last_step` and `frequency` in any order; the i-th id gets slot i."""
        ...


def make_ledger(num_buckets: int, order: Order, *, native: bool | None = None) -> UsageLedger:
    """The native ledger if it can be built, else the torch one; `native` forces one of them."""
    functions = library() if native is None or native else None
    if functions is not None:
        return NativeLedger(functions, num_buckets, order)
    if native:
        raise RuntimeError("the native ledger cannot be built; 'nestpipe doctor' explains")
    return TorchLedger(num_buckets, order)


def export_usage(ledger: UsageLedger) -> dict[str, Tensor]:
    """`ids`, ascending, with their `last_step` and `frequency`."""
    ids, slots = ledger.index.export()
    last_step, frequency = ledger.state(slots)
    return {"ids": ids, "last_step": last_step, "frequency": frequency}


class _LedgerFunctions:
    """The functions of usage.cpp."""

    def __init__(self, native: Native):
        handle = ids = slots = values = c_void_p
        number = c_int64
        self.create = native.function("nestpipe_usage_create", handle, handle, number, number)
        self.destroy = native.function("nestpipe_usage_destroy", None, handle)
        self.touch = native.function("nestpipe_usage_touch", None, handle, ids, number, number, slots)
        self.admit = native.function(
            "nestpipe_usage_admit", number, handle, ids, values, number, number, number, values, slots
        )
        self.append = native.function("nestpipe_usage_append", number, handle, slots, number)
        self.remove = native.function("nestpipe_usage_remove", number, handle, ids, number)
        self.trim = native.function("nestpipe_usage_trim", number, handle, ids, number, values)
        self.evicted = native.function("nestpipe_usage_evicted", None, handle, ids, slots)
        self.state = native.function("nestpipe_usage_state", None, handle, slots, number, values, values)
        self.load = native.function("nestpipe_usage_load", number, handle, ids, values, values, slots, number)


class NativeLedger:
    """Linked lists in C++; calls release the GIL."""

    def __init__(self, native: Native, num_buckets: int, order: Order):
        self._functions = _LedgerFunctions(native)
        self._index = NativeIndex(native)
        self._owners, self._order = Owners(num_buckets, 1), order
        self._handle = self._functions.create(self._index.handle, num_buckets, order == "lfu")
        if self._handle is None:
            raise MemoryError(f"no memory for the usage of {num_buckets:,} buckets")
        weakref.finalize(self, self._functions.destroy, self._handle)

    @property
    def index(self) -> IdIndex:
        return self._index

    def touch(self, ids: Tensor, step: int) -> Tensor:
        _check_step(step)
        ids = checked_ids(ids)
        slots = torch.empty_like(ids)
        self._functions.touch(self._handle, address(ids), len(ids), step, address(slots))
        return slots

    def admit(
        self, ids: Tensor, frequency: Tensor, *, step: int, before: int = 0, limits: Tensor | None = None
    ) -> tuple[Tensor, Evicted]:
        _check_step(step)
        ids, frequency = checked_ids(ids), checked_ids(frequency)
        slots = torch.empty_like(ids)
        pointers = address(ids), address(frequency), len(ids), step, before
        most = None if limits is None else address(limits)
        num_evicted = self._functions.admit(self._handle, *pointers, most, address(slots))
        self._check_memory(num_evicted, len(ids))
        return slots, self._evicted(num_evicted)

    def append(self, slots: Tensor) -> None:
        slots = checked_ids(slots)
        self._check_memory(self._functions.append(self._handle, address(slots), len(slots)), 0)

    def remove(self, ids: Tensor) -> None:
        ids = checked_ids(ids)
        num_removed = self._functions.remove(self._handle, address(ids), len(ids))
        self._check_memory(num_removed, 0)
        if num_removed < len(ids):
            raise UnknownIdError(
                f"cannot remove id {int(ids[num_removed])} (place {num_removed} of {len(ids):,}): it is not among the "
                f"{len(self._index):,} ids of the ledger"
            )

    def trim(self, ids: Tensor, limits: Tensor) -> Evicted:
        ids = checked_ids(ids)
        num_evicted = self._functions.trim(self._handle, address(ids), len(ids), address(limits))
        self._check_memory(num_evicted, 0)
        return self._evicted(num_evicted)

    def state(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = checked_ids(slots)
        last_step, frequency = torch.empty_like(slots), torch.empty_like(slots)
        self._functions.state(self._handle, address(slots), len(slots), address(last_step), address(frequency))
        return last_step, frequency

    def load(self, content: Mapping[str, Tensor]) -> None:
        ids, last_step, frequency = (checked_ids(content[name]) for name in ("ids", "last_step", "frequency"))
        _check_state(ids, last_step, frequency)
        self._index.load(ids, torch.arange(len(ids)))
        order = _sorted_by(ids, last_step, *([frequency] if self._order == "lfu" else []), self._owners.bucket_of(ids))
        pointers = (address(one) for one in (ids, last_step, frequency, order))
        self._check_memory(self._functions.load(self._handle, *pointers, len(ids)), len(ids))

    def _evicted(self, num: int) -> Evicted:
        if not num:
            return Evicted()
        ids, slots = torch.empty(2, num, dtype=torch.int64)
        self._functions.evicted(self._handle, address(ids), address(slots))
        return Evicted(ids, slots)

    def _check_memory(self, result: int, num_more: int) -> None:
        if result < 0:
            raise MemoryError(f"no memory for the usage of {num_more:,} ids more than {len(self._index):,}")


class TorchLedger:
    """Columns by slot; every eviction sorts all ids that could go."""

    def __init__(self, num_buckets: int, order: Order):
        self._index = TorchIndex()
        self._owners, self._order = Owners(num_buckets, 1), order
        self._last_step = self._frequency = _EMPTY

    @property
    def index(self) -> IdIndex:
        return self._index

    def touch(self, ids: Tensor, step: int) -> Tensor:
        _check_step(step)
        slots = self._index.find(ids)
        known = slots[slots >= 0]
        self._last_step[known] = step
        self._frequency[known] += 1
        return slots

    def admit(
        self, ids: Tensor, frequency: Tensor, *, step: int, before: int = 0, limits: Tensor | None = None
    ) -> tuple[Tensor, Evicted]:
        _check_step(step)
        admitted, evicted = torch.ones_like(ids, dtype=torch.bool), Evicted()
        if limits is not None:
            bucket = self._owners.bucket_of(ids)
            num_new = bucket.bincount(minlength=len(limits))
            evicted = self._evict(torch.where(num_new > 0, self._sizes() + num_new - limits, 0), before=before)
            room = limits - self._sizes()
            order = bucket.argsort(stable=True)
            has_room = _rank_in_bucket(bucket[order], len(limits)) < room[bucket[order]]
            admitted = torch.empty_like(admitted).index_copy_(0, order, has_room)
        slots = torch.full_like(ids, -1)
        slots[admitted] = self._add(ids[admitted], torch.full_like(ids[admitted], step), frequency[admitted])
        return slots, evicted

    def append(self, slots: Tensor) -> None:
        """No effect: the order is that of a sort."""

    def remove(self, ids: Tensor) -> None:
        self._index.remove(ids)

    def trim(self, ids: Tensor, limits: Tensor) -> Evicted:
        num = self._owners.bucket_of(ids).bincount(minlength=len(limits))
        return self._evict(torch.where(num > 0, self._sizes() - limits, 0), before=_MOST + 1)

    def state(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._last_step[slots], self._frequency[slots]

    def load(self, content: Mapping[str, Tensor]) -> None:
        ids, last_step, frequency = (content[name] for name in ("ids", "last_step", "frequency"))
        _check_state(ids, last_step, frequency)
        self._index.clear()
        self._add(ids, last_step, frequency)

    def _add(self, ids: Tensor, last_step: Tensor, frequency: Tensor) -> Tensor:
        slots, _ = self._index.find_or_add(ids)
        more = torch.zeros(max(0, self._index.num_slots - len(self._last_step)), dtype=torch.int64)
        self._last_step, self._frequency = torch.cat([self._last_step, more]), torch.cat([self._frequency, more])
        self._last_step[slots], self._frequency[slots] = last_step, frequency
        return slots

    def _sizes(self) -> Tensor:
        """The number of ids of each bucket."""
        ids, _ = self._index.export()
        return self._owners.bucket_of(ids).bincount(minlength=self._owners.num_buckets)

    def _evict(self, counts: Tensor, *, before: int) -> Evicted:
        """Removes the first counts[b] ids of each bucket b among those last used before a step."""
        ids, slots = self._index.export()
        bucket = self._owners.bucket_of(ids)
        may_go = (counts[bucket] > 0) & (self._last_step[slots] < before)
        ids, slots, bucket = ids[may_go], slots[may_go], bucket[may_go]
        keys = [self._last_step[slots], *([self._frequency[slots]] if self._order == "lfu" else [])]
        order = _sorted_by(ids, *keys, bucket)
        first = order[_rank_in_bucket(bucket[order], len(counts)) < counts[bucket[order]]]
        self._index.remove(ids[first])
        return Evicted(ids[first], slots[first])


def _check_step(step: int) -> None:
    if step > _MOST:
        raise ValueError(f"step or frequency {step:,} is above {_MOST:,}; usage of rows is stored in 32 bits")


def _check_state(ids: Tensor, last_step: Tensor, frequency: Tensor) -> None:
    if not len(ids) == len(last_step) == len(frequency):
        raise ValueError(
            f"{len(ids):,} ids but {len(last_step):,} last steps and {len(frequency):,} frequencies; each id has one of both"
        )
    if len(ids):
        _check_step(max(int(last_step.max()), int(frequency.max())))


def _sorted_by(*columns: Tensor) -> Tensor:
    """The permutation that sorts by all columns; the last one is the most significant."""
    order = torch.arange(len(columns[0]))
    for column in columns:
        order = order.index_select(0, column.index_select(0, order).argsort(stable=True))
    return order


def _rank_in_bucket(bucket: Tensor, num_buckets: int) -> Tensor:
    """The number [n] of earlier entries of the same bucket; equal buckets are adjacent."""
    sizes = bucket.bincount(minlength=num_buckets)
    first = sizes.cumsum(0) - sizes
    return torch.arange(len(bucket)) - first.index_select(0, bucket)
