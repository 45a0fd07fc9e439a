"""Index from raw int64 ids to slots 0, 1, 2, …

Two implementations of one contract, equal slot for slot: `NativeIndex` (a hash table in C++) and
`TorchIndex` (sorted ids; the readable reference, and for machines without a compiler).

Slots are assigned in the order in which new ids first appear: freed slots first, the most recently
freed before the others, then new numbers. At all times len(index) + free slots == num_slots.

Ids are int64 [n] on the CPU; any value is legal. `find` may run concurrently; a change must run
alone.
"""

from __future__ import annotations

import weakref
from ctypes import c_int64, c_void_p
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.ops.device_memory import address
from nestpipe.ops.native_library import Native, library


class UnknownIdError(KeyError):
    """An id that should be in the index is not."""

    def __str__(self) -> str:
        return str(self.args[0])


class IdIndex(Protocol):
    """Ids -> slots."""

    def __len__(self) -> int:
        """Number of ids with a slot."""
        ...

    @property
    def num_slots(self) -> int:
        """One more than the highest slot assigned since the last `load` or `clear`."""
        ...

    def find(self, ids: Tensor) -> Tensor:
        """The slot of each id [n], -1 for an unknown one; ids may repeat."""
        ...

    def find_or_add(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The slot of each id [n], and the places [k], ascending, of the first occurrences of unknown ids."""
        ...

    def remove(self, ids: Tensor) -> Tensor:
        """Frees the slots [n] of distinct known ids and returns them. Raises `UnknownIdError` without any change."""
        ...

    def export(self) -> tuple[Tensor, Tensor]:
        """All ids, ascending, and their slots."""
        ...

    def load(self, ids: Tensor, slots: Tensor) -> None:
        """Replaces the content. Gaps between the slots are free; the lowest is used first."""
        ...

    def reserve(self, num_ids: int) -> None:
        """Allocates for this many ids in total."""
        ...

    def clear(self) -> None:
        """Removes all ids and slots."""
        ...


def make_index(*, native: bool | None = None, num_threads: int = 1) -> IdIndex:
    """The native index if it can be built, else the torch one; `native` forces one of them.

    `num_threads` is for `find` of the native index.
    """
    functions = library() if native is None or native else None
    if functions is not None:
        return NativeIndex(functions, num_threads=num_threads)
    if native:
        raise RuntimeError("the native index cannot be built; 'nestpipe doctor' explains")
    return TorchIndex()


class _IndexFunctions:
    """The functions of index.cpp."""

    def __init__(self, native: Native):
        handle = ids = slots = places = c_void_p
        number = c_int64
        self.create = native.function("nestpipe_index_create", handle)
        self.destroy = native.function("nestpipe_index_destroy", None, handle)
        self.size = native.function("nestpipe_index_size", number, handle)
        self.num_slots = native.function("nestpipe_index_num_slots", number, handle)
        self.find = native.function("nestpipe_index_find", None, handle, ids, number, slots, number)
        self.find_or_add = native.function("nestpipe_index_find_or_add", number, handle, ids, number, slots, places)
        self.remove = native.function("nestpipe_index_remove", number, handle, ids, number, slots)
        self.export = native.function("nestpipe_index_export", None, handle, ids, slots)
        self.load = native.function("nestpipe_index_load", number, handle, ids, slots, number, slots, number)
        self.reserve = native.function("nestpipe_index_reserve", number, handle, number)
        self.clear = native.function("nestpipe_index_clear", number, handle)


class NativeIndex:
    """A hash table in C++; calls release the GIL."""

    def __init__(self, native: Native, *, num_threads: int = 1):
        self._functions = _IndexFunctions(native)
        self._num_threads = num_threads
        self.handle = self._functions.create()  # of the index, for other native functions
        if self.handle is None:
            raise MemoryError("no memory for an index")
        weakref.finalize(self, self._functions.destroy, self.handle)

    def __len__(self) -> int:
        return int(self._functions.size(self.handle))

    @property
    def num_slots(self) -> int:
        return int(self._functions.num_slots(self.handle))

    def find(self, ids: Tensor) -> Tensor:
        ids = checked_ids(ids)
        slots = torch.empty_like(ids)
        self._functions.find(self.handle, address(ids), len(ids), address(slots), self._num_threads)
        return slots

    def find_or_add(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = checked_ids(ids)
        slots, added = torch.empty_like(ids), torch.empty_like(ids)
        num_added = self._functions.find_or_add(self.handle, address(ids), len(ids), address(slots), address(added))
        self._check_memory(num_added, len(ids))
        return slots, added[:num_added]

    def remove(self, ids: Tensor) -> Tensor:
        ids = checked_ids(ids)
        slots = torch.empty_like(ids)
        num_removed = self._functions.remove(self.handle, address(ids), len(ids), address(slots))
        self._check_memory(num_removed, 0)
        if num_removed < len(ids):
            raise _cannot_remove(self, ids, num_removed)
        return slots

    def export(self) -> tuple[Tensor, Tensor]:
        ids, slots = torch.empty(2, len(self), dtype=torch.int64)
        self._functions.export(self.handle, address(ids), address(slots))
        ids, order = ids.sort()
        return ids, slots.index_select(0, order)

    def load(self, ids: Tensor, slots: Tensor) -> None:
        ids, slots = checked_ids(ids), checked_ids(slots)
        free = _free_slots(ids.sort().values, slots)
        pointers = address(ids), address(slots), len(ids), address(free), len(free)
        self._check_memory(self._functions.load(self.handle, *pointers), len(ids))

    def reserve(self, num_ids: int) -> None:
        self._check_memory(self._functions.reserve(self.handle, num_ids), num_ids)

    def clear(self) -> None:
        self._check_memory(self._functions.clear(self.handle), 0)

    def _check_memory(self, result: int, num_more: int) -> None:
        if result < 0:
            raise MemoryError(f"no memory for {num_more:,} ids more in an index of {len(self):,}")


class TorchIndex:
    """Ids in ascending order, searched by bisection; adding or removing copies them all."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)  # ascending
        self._slots = torch.empty(0, dtype=torch.int64)  # of each of them
        self._free = torch.empty(0, dtype=torch.int64)  # the most recently freed is last

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_slots(self) -> int:
        return len(self._ids) + len(self._free)

    def find(self, ids: Tensor) -> Tensor:
        ids = checked_ids(ids)
        if not len(self):
            return torch.full_like(ids, -1)
        place = self._place(ids)
        return torch.where(self._ids.index_select(0, place) == ids, self._slots.index_select(0, place), -1)

    def find_or_add(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = checked_ids(ids)
        known = self.find(ids)
        unknown = (known < 0).nonzero().flatten()
        if not len(unknown):
            return known, unknown
        new, inverse = ids.index_select(0, unknown).unique(return_inverse=True)
        first = torch.full_like(new, len(ids)).scatter_reduce_(0, inverse, unknown, "amin")
        added, order = first.sort()
        num_freed = min(len(added), len(self._free))
        freed = self._free[len(self._free) - num_freed :].flip(0)
        fresh = torch.arange(len(added) - num_freed) + self.num_slots
        slots = torch.empty_like(new).index_copy_(0, order, torch.cat([freed, fresh]))
        self._free = self._free[: len(self._free) - num_freed]
        self._merge(new, slots)
        return self.find(ids), added

    def remove(self, ids: Tensor) -> Tensor:
        ids = checked_ids(ids)
        slots = self.find(ids)
        ascending, order = ids.sort(stable=True)
        repeated = order[1:][ascending.diff() == 0]
        wrong = torch.cat([(slots < 0).nonzero().flatten(), repeated])
        if len(wrong):
            raise _cannot_remove(self, ids, int(wrong.min()))
        if len(ids):
            keep = torch.ones(len(self), dtype=torch.bool).index_fill_(0, self._place(ids), False)
            self._ids, self._slots = self._ids[keep], self._slots[keep]
            self._free = torch.cat([self._free, slots])
        return slots

    def export(self) -> tuple[Tensor, Tensor]:
        return self._ids.clone(), self._slots.clone()

    def load(self, ids: Tensor, slots: Tensor) -> None:
        ids, slots = checked_ids(ids), checked_ids(slots)
        ascending, order = ids.sort()
        self._free = _free_slots(ascending, slots)
        self._ids, self._slots = ascending, slots.index_select(0, order)

    def reserve(self, num_ids: int) -> None:
        """No effect: every change makes new tensors."""

    def clear(self) -> None:
        self._ids = self._slots = self._free = self._ids.new_empty(0)

    def _place(self, ids: Tensor) -> Tensor:
        """The place of each known id in the sorted ids; the index must not be empty."""
        return torch.searchsorted(self._ids, ids).clamp_(max=len(self) - 1)

    def _merge(self, ids: Tensor, slots: Tensor) -> None:
        """Inserts distinct ascending new ids."""
        place = torch.searchsorted(self._ids, ids) + torch.arange(len(ids))
        old = torch.ones(len(self) + len(ids), dtype=torch.bool).index_fill_(0, place, False)
        merged = torch.empty(2, len(old), dtype=torch.int64)
        for row, before, new in zip(merged, (self._ids, self._slots), (ids, slots), strict=True):
            row.masked_scatter_(old, before).index_copy_(0, place, new)
        self._ids, self._slots = merged[0], merged[1]


def checked_ids(ids: Tensor) -> Tensor:
    """Ids or slots as native functions take them. Raises ValueError."""
    if ids.dtype != torch.int64 or ids.ndim != 1 or ids.device.type != "cpu":
        raise ValueError(
            f"an index takes int64 values in one dimension on the CPU, but got {ids.dtype} {list(ids.shape)} on {ids.device}"
        )
    return ids.contiguous()


def _free_slots(ascending_ids: Tensor, slots: Tensor) -> Tensor:
    """The gaps between the slots, descending because they are used from the end. Raises ValueError."""
    if len(ascending_ids) != len(slots):
        raise ValueError(f"{len(ascending_ids):,} ids but {len(slots):,} slots; each id has one")
    if not len(slots):
        return slots
    repeated = ascending_ids[1:][ascending_ids.diff() == 0]
    if len(repeated):
        raise ValueError(f"id {int(repeated[0])} appears twice; an id has one slot")
    if int(slots.min()) < 0:
        raise ValueError(f"slot {int(slots.min())} is negative; slots count from 0")
    counts = slots.bincount()
    if int(counts.max()) > 1:
        raise ValueError(f"slot {int(counts.argmax())} belongs to {int(counts.max())} ids; it can hold one")
    return (counts == 0).nonzero().flatten().flip(0)


def _cannot_remove(index: IdIndex, ids: Tensor, place: int) -> UnknownIdError:
    """Explains why `ids[place]` cannot be removed; the index is unchanged."""
    wrong = int(ids[place])
    if int(index.find(ids[place : place + 1])) < 0:
        reason = f"it is not among the {len(index):,} ids of the index"
    else:
        reason = "it appears twice in the call"
    return UnknownIdError(f"cannot remove id {wrong} (place {place} of {len(ids):,}): {reason}; nothing was removed")
