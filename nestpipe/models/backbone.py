"""What SASRec and HSTU share: the input layer, and dropout whose mask belongs to the token, not to the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nestpipe.jagged import Batch
from nestpipe.rng import Rng, dropout, hash_text, mix64


@contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Modules made inside start with weights that are a function of the seed; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mix64(seed ^ hash_text("dense")) >> 1)
        yield


class TokenDropout:
    """Dropout for the tokens of one batch; without a `draw` (inference) it does nothing."""

    def __init__(self, probability: float, batch: Batch, rng: Rng | None):
        self._probability = probability
        self._draw = rng if probability > 0 else None
        if self._draw is not None:
            self._sample, self._position = batch.sample_of_token(), batch.items.positions()

    def __call__(self, values: Tensor, site: str) -> Tensor:
        if self._draw is None:
            return values
        return dropout(values, self._probability, self._draw.keys(site, self._sample, self._position))


class InputLayer(nn.Module):
    """Item vectors scaled by sqrt(D), plus a learned vector for each position, counted forward from the first kept event."""

    def __init__(self, dim: int, max_len: int):
        super().__init__()
        self.position = nn.Parameter(torch.empty(max_len, dim))
        nn.init.trunc_normal_(self.position, std=dim**-0.5)
        self._scale = dim**0.5

    def forward(self, vectors: Tensor, batch: Batch) -> Tensor:
        position = nn.functional.embedding(batch.items.positions(), self.position)
        return torch.add(vectors * self._scale, position)
