"""FLOP of a training step, and model FLOP utilisation (MFU).

`effective` counts what the data needs: true lengths, causal pairs, linear layers three times (forward and two products in
backward), attention with recomputed scores. `padded` is the published convention: every sequence at the maximum length, all
pairs, backward = twice forward. It overstates the work of jagged batches, so it is only shown next to the fill ratio.

The peak is a large sgemm measured in the same process with the same number of threads. Lookups, dropout, norms, loss and
optimizer are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.models.config import FuXiConfig, HSTUConfig, ModelConfig, RetrievalConfig, SASRecConfig

# Products per score and per value in a training step: forward, recomputation and gradients.
_SCORE_PASSES, _VALUE_PASSES, _LINEAR_PASSES = 4, 3, 3
_PEAK_SIZE = 1024


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOP of one forward pass (two per multiply-add): per token, and per pair of query and key."""

    per_token: float
    per_score: float
    per_value: float

    def effective(self, lengths: Tensor) -> float:
        """FLOP of a training step on sequences of these lengths."""
        pairs = float((lengths.double() * (lengths.double() + 1) / 2).sum())
        per_pair = _SCORE_PASSES * self.per_score + _VALUE_PASSES * self.per_value
        return _LINEAR_PASSES * self.per_token * float(lengths.sum()) + per_pair * pairs

    def by_length(self) -> tuple[float, float]:
        """FLOP of a training step on a sequence, per event and per squared length."""
        half_pair = (_SCORE_PASSES * self.per_score + _VALUE_PASSES * self.per_value) / 2
        return _LINEAR_PASSES * self.per_token + half_pair, half_pair

    def padded(self, num_sequences: int, max_len: int) -> float:
        """FLOP of the same step by the published convention."""
        pairs = float(num_sequences) * max_len**2
        return 3 * (self.per_token * num_sequences * max_len + (self.per_score + self.per_value) * pairs)


def work_of(config: RetrievalConfig) -> ModelFlops:
    """The FLOP of a backbone."""
    match config:
        case SASRecConfig():
            square, feed = (6, 3) if config.block == "ligr" else (4, 2)
            layer = square * config.dim**2 + feed * config.dim * (config.hidden_dim or config.dim)
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


class Utilisation:
    """MFU of a rank between two calls of `take`."""

    def __init__(self, config: ModelConfig, clock: Callable[[], float] = time.perf_counter):
        """Measures the peak FLOP/s; `clock` returns seconds."""
        self._work = work_of(config) if isinstance(config, RetrievalConfig) else None
        self._peak = measure_peak() if self._work else 0.0
        self._clock = clock
        self._flops, self._since = 0.0, clock()

    def add(self, lengths: Tensor) -> None:
        """Counts a step on sequences of these lengths."""
        if self._work:
            self._flops += self._work.effective(lengths)

    def take(self) -> dict[str, float]:
        """`mfu_effective` since the last call; empty for models whose FLOP are not counted."""
        if not self._work:
            return {}
        now = self._clock()
        share = self._flops / (now - self._since) / self._peak
        self._flops, self._since = 0.0, now
        return {"mfu_effective": share}


def measure_peak(*, seconds: float = 0.2) -> float:
    """FLOP/s of a float32 product of 1024 x 1024 matrices, the best within the given time."""
    left, right = torch.ones(_PEAK_SIZE, _PEAK_SIZE), torch.ones(_PEAK_SIZE, _PEAK_SIZE)
    out = left @ right  # the first product also starts the threads
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline or best == float("inf"):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * _PEAK_SIZE**3 / best
