"""Counter-based randomness: a number is a pure function of (seed, step, sample, position, site).

No generator has state, so a draw does not depend on who else is in the batch, on the number of ranks or parts, or on
what was drawn before: a resumed, a balanced and a pipelined run see the same numbers as the plain one.

    keys = draw.keys("negatives", sample, position)      # one key per token
    ids  = integers(keys, width=128, high=num_items)     # 128 numbers per token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.hashing import GOLDEN, hash_text, mix64, mix64_, shift_right, signed

_LANES = 4  # 16-bit numbers in one 64-bit hash


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers of one training step."""

    seed: int
    step: int

    def keys(self, site: str, sample: Tensor, position: Tensor | None = None) -> Tensor:
        """Keys [n] for the draws made at `site`, one for each (sample, position); position 0 if not given."""
        base = mix64(mix64(mix64(self.seed) ^ hash_text(site)) + self.step * GOLDEN)
        keys = mix64_(sample * signed(GOLDEN) + signed(base))
        return mix64_(keys + 1 if position is None else keys + position * signed(GOLDEN) + 1)


def bits(keys: Tensor, width: int) -> Tensor:
    """64 random bits [n, width] for each key."""
    counter = torch.arange(1, width + 1, dtype=torch.int64, device=keys.device).mul_(signed(GOLDEN))
    return mix64_(keys.unsqueeze(1) + counter)


def integers(keys: Tensor, *, width: int, high: int) -> Tensor:
    """Integers [n, width] uniform in [0, high), high < 2**31 (the bias is below high / 2**32)."""
    if not 0 < high < 2**31:
        raise ValueError(f"high must be in 1 .. 2**31 - 1, got {high}")
    return shift_right(bits(keys, width), 32).mul_(high).bitwise_right_shift_(32)


def lanes16(keys: Tensor, width: int) -> Tensor:
    """Signed 16-bit numbers [n, width], uniform over the whole range; four for the price of one hash."""
    return bits(keys, -(-width // _LANES)).view(torch.int16)[:, :width]


def dropout(values: Tensor, probability: float, keys: Tensor) -> Tensor:
    """Dropout on values [n, width] with one key per row; the probability is rounded to 1/65536."""
    threshold = round(probability * 65536)
    if threshold == 0:
        return values
    keep = lanes16(keys, values.shape[1]) >= threshold - 32768
    return values * (keep * (65536 / (65536 - threshold))).to(values.dtype)


def bell(keys: Tensor, width: int) -> Tensor:
    """Numbers [n, width] near the unit normal, cut at 3.47 sigma: the scaled sum of four 16-bit uniforms.

    Made of integer sums and one exact conversion, so that a row's bits never depend on the rows beside it (the
    vectorised log and cos of a Box-Muller transform differ between the body and the tail of a tensor).
    """
    total = lanes16(keys, width * _LANES).reshape(len(keys), width, _LANES).sum(2, dtype=torch.int64)
    # Each lane has mean -1/2 and variance (2**32 - 1) / 12, so 2 * total + 4 is centred with the deviation below.
    deviation = 2.0 * (4 * (2.0**32 - 1) / 12) ** 0.5
    return (total * 2 + 4).to(torch.float64).div_(deviation)


def permutation(size: int, *, seed: int, epoch: int) -> Tensor:
    """The order [size] of an epoch: samples sorted by their hash, ties by sample."""
    return torch.argsort(Draw(seed, epoch).keys("shuffle", torch.arange(size)), stable=True)
