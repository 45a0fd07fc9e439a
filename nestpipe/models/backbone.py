"""What SASRec and HSTU share: the input layer, and dropout whose mask belongs to the token, not to the batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from nestpipe.draw import Draw, dropout
from nestpipe.jagged import Batch


class Backbone(Protocol):
    """Turns item vectors [T, D] into hidden states [T, D]; row i knows events up to i and the time it answers for."""

    def __call__(self, vectors: Tensor, batch: Batch, draw: Draw | None) -> Tensor: ...


class TokenDropout:
    """Dropout for the tokens of one batch; without a `draw` (inference) it does nothing."""

    def __init__(self, probability: float, batch: Batch, draw: Draw | None):
        self._probability = probability
        self._draw = draw if probability > 0 else None
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
