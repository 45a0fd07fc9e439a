"""How much arithmetic a training step is, and what share of the machine it uses.

`effective` counts what the data needs: true lengths, causal pairs, linear layers three times (forward, two products in
backward), attention with its recomputed scores. `padded` is the published convention: every sequence as long as the longest
allowed, all pairs, backward = twice forward; it flatters whoever pads, so it stands beside the fill only.

The peak is the rate of a large sgemm measured in the same process with the same number of threads. Lookups, dropout,
norms, the loss and the optimizer are work too, but none that counts here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.models.config import FuXiConfig, HSTUConfig, ModelConfig, RetrievalConfig, SASRecConfig

# Products per score and per value of a training step: forward, again in backward, and the gradients.
_SCORE_PASSES, _VALUE_PASSES, _LINEAR_PASSES = 4, 3, 3
_PEAK_SIZE = 1024


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Multiply-adds of one forward pass, twice each: per token, and per pair of query and key."""

    per_token: float
    per_score: float
    per_value: float

    def effective(self, lengths: Tensor) -> float:
        """FLOP of a training step on sequences of these lengths."""
        pairs = float((lengths.double() * (lengths.double() + 1) / 2).sum())
        per_pair = _SCORE_PASSES * self.per_score + _VALUE_PASSES * self.per_value
        return _LINEAR_PASSES * self.per_token * float(lengths.sum()) + per_pair * pairs

    def padded(self, num_sequences: int, max_len: int) -> float:
        """FLOP of the same step as it is usually published."""
        pairs = float(num_sequences) * max_len**2
        return 3 * (self.per_token * num_sequences * max_len + (self.per_score + self.per_value) * pairs)


def work_of(config: RetrievalConfig) -> ModelFlops:
    """The arithmetic of a backbone."""
    match config:
        case SASRecConfig():
            layer = 4 * config.dim**2 + 2 * config.dim * (config.hidden_dim or config.dim)
            return ModelFlops(2.0 * config.num_blocks * layer, *[2.0 * config.num_blocks * config.dim] * 2)
        case HSTUConfig():
            keys, values = config.num_heads * config.qk_dim, config.num_heads * config.v_dim
            layer = config.dim * (2 * keys + 3 * values)
            return ModelFlops(
                2.0 * config.num_blocks * layer, 2.0 * config.num_blocks * keys, 2.0 * config.num_blocks * values
            )
        case FuXiConfig():
            keys, values = config.num_heads * config.qk_dim, config.num_heads * config.v_dim
            layer = config.dim * (2 * keys + 7 * values + 3 * (config.hidden_dim or config.dim))
            return ModelFlops(
                2.0 * config.num_blocks * layer, 2.0 * config.num_blocks * keys, 6.0 * config.num_blocks * values
            )


def mfu_effective(config: RetrievalConfig, lengths: Tensor, seconds: float, *, peak: float) -> float:
    """The share of the peak [FLOP/s] that a step of this duration has used."""
    return work_of(config).effective(lengths) / seconds / peak


class Utilisation:
    """How much of what a rank's processor can do its training has used, between two looks."""

    def __init__(self, config: ModelConfig):
        """Measures the peak."""
        self._work = work_of(config) if isinstance(config, RetrievalConfig) else None
        self._peak = measure_peak() if self._work else 0.0
        self._flops, self._since = 0.0, time.perf_counter()

    def add(self, lengths: Tensor) -> None:
        """A step on sequences of these lengths is done."""
        if self._work:
            self._flops += self._work.effective(lengths)

    def take(self) -> dict[str, float]:
        """`mfu_effective` of the steps since the last look; nothing for models whose arithmetic is not counted."""
        if not self._work:
            return {}
        share = self._flops / (time.perf_counter() - self._since) / self._peak
        self._flops, self._since = 0.0, time.perf_counter()
        return {"mfu_effective": share}


def measure_peak(*, seconds: float = 0.2) -> float:
    """FLOP/s of a float32 product of 1024 x 1024 matrices, the best of some tries within the time."""
    left, right = torch.ones(_PEAK_SIZE, _PEAK_SIZE), torch.ones(_PEAK_SIZE, _PEAK_SIZE)
    out = left @ right  # the first product also starts the threads
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline or best == float("inf"):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * _PEAK_SIZE**3 / best
