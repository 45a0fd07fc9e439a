"""Building blocks for backbones: seeded initial weights, dropout per token, and the input layer.

Use `TokenDropout` instead of torch's dropout. Its mask is a function of (seed, step, sample, position), so training gives the
same result for any division into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nestpipe.jagged import Batch
from nestpipe.rng import Rng, dropout, hash_text, mix64, seeded_generator


@contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Modules created inside get initial weights that are a function of the seed; torch's generator is unchanged."""
    with seeded_generator(mix64(seed ^ hash_text("dense")) >> 1):
        yield


class TokenDropout:
    """Dropout on the tokens of one batch; `site` names the place in the network. The identity if `rng` is None (inference)."""

    def __init__(self, probability: float, batch: Batch, rng: Rng | None):
        self._probability = probability
        self._rng = rng if probability > 0 else None
        if self._rng is not None:
            self._sample, self._position = batch.sample_of_token(), batch.items.positions()

    def __call__(self, values: Tensor, site: str) -> Tensor:
        if self._rng is None:
            return values
        return dropout(values, self._probability, self._rng.keys(site, self._sample, self._position))


class InputLayer(nn.Module):
    """Item vectors scaled by sqrt(D), plus a learned vector per position; position 0 is the oldest event that was kept."""

    def __init__(self, dim: int, max_len: int, *, position_std: float = 0.0):
        """Position vectors have the given standard deviation [default: dim ** -0.5]."""
        super().__init__()
        self.position = nn.Parameter(torch.empty(max_len, dim))
        nn.init.trunc_normal_(self.position, std=position_std or dim**-0.5)
        self._scale = dim**0.5

    def forward(self, vectors: Tensor, batch: Batch) -> Tensor:
        position = nn.functional.embedding(batch.items.positions(), self.position)
        return torch.add(vectors * self._scale, position)
