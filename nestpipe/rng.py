"""Counter-based randomness: a number is a pure function of (seed, step, sample, position, site).

Generators have no state, so a draw does not depend on the other samples of the batch, on the number
of ranks or micro-batches, or on earlier draws: resumed, balanced and pipelined runs get the same
numbers as the sequential one.

    keys = draw.keys("negatives", sample, position)      # one key per token
    ids  = integers(keys, width=128, high=num_items)     # 128 numbers per token
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_MASK = (1 << 64) - 1

GOLDEN = 0x9E3779B97F4A7C15

_GLOBAL_GENERATOR = threading.RLock()  # torch has one per process

_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix64(value: int) -> int:
    """A bijective 64-bit hash; every input bit changes about half of the output bits."""
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
    """Logical right shift; int64 tensors only have the arithmetic one."""
    return (values >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


@lru_cache(maxsize=4096)
def hash_text(text: str) -> int:
    """A stable signed 64-bit hash of a string (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@contextmanager
def seeded_generator(seed: int) -> Iterator[None]:
    """Code that can only draw from torch's global generator draws as a function of the seed; the generator is unchanged.

    One thread at a time: two that build models at once would draw from each other's stream.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


_PART = 1 << 16  # positions computed at a time
_LANES = 4  # 16-bit numbers in one 64-bit hash


@dataclass(frozen=True, slots=True)
class Rng:
    """The random numbers of one training step."""

    seed: int
    step: int

    def keys(self, site: str, sample: Tensor, position: Tensor | None = None) -> Tensor:
        """Keys [n] for the draws at `site`, one per (sample, position) [default: position 0]."""
        base = mix64(mix64(mix64(self.seed) ^ hash_text(site)) + self.step * GOLDEN)
        keys = mix64_(sample * signed(GOLDEN) + signed(base))
        return mix64_(keys + 1 if position is None else keys + position * signed(GOLDEN) + 1)


def bits(keys: Tensor, width: int) -> Tensor:
    """64 random bits [n, width] per key."""
    counter = torch.arange(1, width + 1, dtype=torch.int64, device=keys.device).mul_(signed(GOLDEN))
    return mix64_(keys.unsqueeze(1) + counter)


def integers(keys: Tensor, *, width: int, high: int) -> Tensor:
    """Integers [n, width] uniform in [0, high), high < 2**31 (the bias is below high / 2**32)."""
    if not 0 < high < 2**31:
        raise ValueError(f"high must be in 1 .. 2**31 - 1, got {high}")
    return shift_right(bits(keys, width), 32).mul_(high).bitwise_right_shift_(32)


def lanes16(keys: Tensor, width: int) -> Tensor:
    """Signed 16-bit numbers [n, width], uniform over the whole range; four per hash."""
    # Flat first: torch cannot view an empty [0, 1] tensor as narrower numbers.
    num_hashes = -(-width // _LANES)
    return bits(keys, num_hashes).flatten().view(torch.int16).view(len(keys), num_hashes * _LANES)[:, :width]


def dropout(values: Tensor, probability: float, keys: Tensor) -> Tensor:
    """Dropout on values [n, width] with one key per row; the probability is rounded to 1/65536."""
    threshold = round(probability * 65536)
    if threshold == 0:
        return values
    keep = lanes16(keys, values.shape[1]) >= threshold - 32768
    return values * (keep * (65536 / (65536 - threshold))).to(values.dtype)


def bell(keys: Tensor, width: int) -> Tensor:
    """Approximately unit normal numbers [n, width], bounded by 3.47 sigma: the scaled sum of four 16-bit uniforms.

    Integer sums and one exact conversion, so that a row is bitwise independent of its neighbours (vectorised log and cos of a
    Box-Muller transform round the body and the tail of a tensor differently).
    """
    total = lanes16(keys, width * _LANES).reshape(len(keys), width, _LANES).sum(2, dtype=torch.int64)
    # Each lane has mean -1/2 and variance (2**32 - 1) / 12, so 2 * total + 4 is centred with the deviation below.
    deviation = 2.0 * (4 * (2.0**32 - 1) / 12) ** 0.5
    return (total * 2 + 4).to(torch.float64).div_(deviation)


class EpochOrder:
    """The order of an epoch's samples: a keyed bijection, so that any position is computed by itself.

    A position below `size` is a pair (left, right) of about sqrt(size) values each. Every round of the Feistel network adds a
    hash of one half to the other, which can be undone, so the network is a bijection of the pairs. A pair that is no position
    (fewer than one in sqrt(size)) goes through the network again until it is one.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        self.size = size
        self._width = max(math.isqrt(max(size - 1, 0)) + 1, 1)
        self._height = -(-size // self._width)
        base = mix64(mix64(mix64(seed) ^ hash_text("epoch order")) + epoch * GOLDEN)
        # Few samples have few hashes per round: with 8 rounds, the orders of 5 samples fail a chi-square test.
        num_rounds = 8 if size >= 1024 else 24
        self._keys = [signed(mix64(base + number * GOLDEN)) for number in range(1, num_rounds + 1)]

    def at(self, positions: Tensor) -> Tensor:
        """The samples [n] at some positions [n] of the epoch."""
        samples = self._network(positions)
        while len(beyond := (samples >= self.size).nonzero().flatten()):
            samples[beyond] = self._network(samples[beyond])
        return samples

    def _network(self, pairs: Tensor) -> Tensor:
        left, right = pairs // self._height, pairs % self._height
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + self._hash(left, key)) % self._height
            else:
                left = (left + self._hash(right, key)) % self._width
        return left * self._height + right

    @staticmethod
    def _hash(half: Tensor, key: int) -> Tensor:
        """31 random bits of each value."""
        return shift_right(mix64_(half * signed(GOLDEN) + key), 33)


def permutation(size: int, *, seed: int, epoch: int) -> Tensor:
    """The whole order [size] of an epoch; costs much more than the few positions of a batch."""
    order = EpochOrder(size, seed=seed, epoch=epoch)
    return torch.cat([torch.empty(0, dtype=torch.int64), *(order.at(part) for part in torch.arange(size).split(_PART))])
