"""Pure operations on ids: distinct ids, grouping, owners, membership.

Native where that can be built (ids.cpp); torch gives identical results.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from nestpipe.ops.device_memory import address
from nestpipe.ops.native_library import Native, library
from nestpipe.rng import mix64_, shift_right

_MAX_RANGE = 1 << 24  # a bitmap of this many ids is 16 MiB; beyond that sorting is cheaper


def dedupe(ids: Tensor, *, native: bool | None = None) -> tuple[Tensor, Tensor]:
    """Distinct ids of int64 [n] in ascending order, and for each id its place among them."""
    functions = _functions() if native is None or native else None
    if functions is None:
        return _dedupe_in_torch(ids)
    ids = ids.contiguous()
    unique, inverse = torch.empty_like(ids), torch.empty_like(ids)
    num_unique = functions.dedupe(address(ids), len(ids), address(unique), address(inverse))
    check_memory(num_unique, len(ids))
    # A copy frees the memory of the repeated ids.
    return unique[:num_unique].clone(), inverse


def group(groups: Tensor, num_groups: int, *, native: bool | None = None) -> tuple[Tensor, Tensor]:
    """Places [n] of group 0, then of group 1, …, ascending in each, and the size [num_groups] of each."""
    functions = _functions() if native is None or native else None
    if functions is None:
        return groups.argsort(stable=True), torch.bincount(groups, minlength=num_groups)
    groups = groups.contiguous()
    order, counts = torch.empty_like(groups), groups.new_empty(num_groups)
    done = functions.group(address(groups), len(groups), num_groups, address(order), address(counts))
    check_memory(done, len(groups))
    if done < len(groups):
        raise IndexError(
            f"group {int(groups[done])} (place {done} of {len(groups):,}) is not among {num_groups:,} groups"
        )
    return order, counts


def owner_of(ids: Tensor, num_buckets: int, world_size: int, *, native: bool | None = None) -> Tensor:
    """The rank [n] that owns the bucket of each id; with as many ranks as buckets, the bucket itself."""
    functions = _functions() if native is None or native else None
    if functions is None:
        # The upper half of the hash: multiplying and shifting spreads it evenly over any number of buckets.
        bucket = shift_right(mix64_(ids.clone()), 32).mul_(num_buckets).bitwise_right_shift_(32)
        return bucket.mul_(world_size).div_(num_buckets, rounding_mode="floor")
    ids = ids.contiguous()
    owner = torch.empty_like(ids)
    functions.owner(address(ids), ids.numel(), num_buckets, world_size, address(owner))
    return owner


def among(ids: Tensor, others: Tensor, *, native: bool | None = None) -> Tensor:
    """Whether (uint8 [n]) each of the ids is among the others; both ascend without repeats."""
    functions = _functions() if native is None or native else None
    if functions is None:
        return torch.isin(ids, others, assume_unique=True).to(torch.uint8)
    ids, others = ids.contiguous(), others.contiguous()
    found = torch.empty(len(ids), dtype=torch.uint8)
    functions.among(address(ids), len(ids), address(others), len(others), address(found))
    return found


class _IdFunctions:
    """The functions of ids.cpp."""

    def __init__(self, native: Native):
        ids = c_void_p
        self.dedupe = native.function("nestpipe_ids_dedupe", c_int64, ids, c_int64, ids, ids)
        self.group = native.function("nestpipe_ids_group", c_int64, ids, c_int64, c_int64, ids, ids)
        self.among = native.function("nestpipe_ids_among", None, ids, c_int64, ids, c_int64, ids)
        self.owner = native.function("nestpipe_ids_owner", None, ids, c_int64, c_int64, c_int64, ids)


@cache
def _functions() -> _IdFunctions | None:
    native = library()
    return _IdFunctions(native) if native else None


def check_memory(result: int, num_ids: int) -> None:
    """Raises MemoryError if a native function has reported that."""
    if result < 0:
        raise MemoryError(f"no memory to sort {num_ids:,} ids")


def _dedupe_in_torch(ids: Tensor) -> tuple[Tensor, Tensor]:
    if not len(ids):
        return ids, ids
    low, high = int(ids.min()), int(ids.max())
    if high - low >= min(_MAX_RANGE, 16 * len(ids)):
        unique, inverse = torch.unique(ids, return_inverse=True)
        return unique, inverse
    # Ids of a dictionary are dense: a bitmap is ten times faster than sorting.
    shifted = ids - low
    present = torch.zeros(high - low + 1, dtype=torch.bool).index_fill_(0, shifted, True)
    place = present.cumsum(0).sub_(1)
    return present.nonzero().flatten().add_(low), place.index_select(0, shifted)
