"""GRU4Rec as somebody outside the package writes it."""

from dataclasses import dataclass, replace

import torch
from torch import nn

import nestpipe


@dataclass(frozen=True, kw_only=True)
class GRUConfig:
    """A recurrent network over the history."""

    dim: int = 16
    """Width of item vectors."""
    hidden: int = 12
    """Width of the recurrent state."""


@nestpipe.register_backbone(config=GRUConfig)
class GRU(nn.Module):
    def __init__(self, config, *, max_len):
        super().__init__()
        self.cell = nn.GRU(config.dim, config.hidden, batch_first=True)
        self.out = nn.Linear(config.hidden, config.dim)

    def forward(self, vectors, batch):
        histories = vectors.split(batch.items.lengths().tolist())
        return self.out(torch.cat([self.cell(one.unsqueeze(0))[0].squeeze(0) for one in histories]))


def recipe():
    """GRU4Rec on the generated log."""
    base = nestpipe.recipes.tiny()
    return replace(base, model=GRUConfig(), eval=replace(base.eval, ks=(1, 10)))
