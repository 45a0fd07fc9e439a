"""Fixed 64-bit hashes: the same on every machine, version and world size.

``mix64`` is the finaliser of splitmix64. Everything that must not depend on order, rank or process (random draws,
initial rows, string ids, owners) goes through it. Tensors are int64 and wrap around; Python integers are masked.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who only hashes numbers, as a router does, need not wait for torch
    from torch import Tensor

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix64(value: int) -> int:
    """One 64-bit integer to another, bijectively; every input bit changes about half of the output bits."""
    value &= _MASK
    for shift, multiplier in _MULTIPLIERS:
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value ^ (value >> 31)


def mix64_(values: Tensor) -> Tensor:
    """`mix64` on an int64 tensor, in place."""
    for shift, multiplier in _MULTIPLIERS:
        values.bitwise_xor_(shift_right(values, shift)).mul_(signed(multiplier))
    return values.bitwise_xor_(shift_right(values, 31))


def shift_right(values: Tensor, num_bits: int) -> Tensor:
    """Logical shift: int64 tensors only have the arithmetic one."""
    return (values >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


@lru_cache(maxsize=4096)
def hash_text(text: str) -> int:
    """A stable signed 64-bit hash of a string (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
