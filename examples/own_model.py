"""Your own model: a backbone in a file of its own. Tables, loss, ranks, checkpoints, evaluation and reports are NestPipe's.

nestpipe check-model examples.own_model:GRU
nestpipe data synthetic --out data/tiny && nestpipe train examples.own_model:recipe --run runs/gru
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import nestpipe


@dataclass(frozen=True, kw_only=True)
class GRUConfig:
    """GRU4Rec: a recurrent network over the history. Every field is a flag: --model.hidden 64."""

    dim: int = 32
    """Width of item vectors."""
    hidden: int = 48
    """Width of the recurrent state."""


@nestpipe.register_backbone(config=GRUConfig)
class GRU(nn.Module):
    """Vectors [T, dim] of all events, sequence after sequence -> hidden states [T, dim]."""

    def __init__(self, config: GRUConfig, *, max_len: int):
        super().__init__()
        self.cell = nn.GRU(config.dim, config.hidden, batch_first=True)
        self.out = nn.Linear(config.hidden, config.dim)

    def forward(self, vectors: Tensor, batch: nestpipe.Batch) -> Tensor:
        lengths = batch.items.lengths().tolist()
        states = [self.cell(one.unsqueeze(0))[0].squeeze(0) for one in vectors.split(lengths) if len(one)]
        return self.out(torch.cat(states)) if states else vectors


def recipe() -> nestpipe.Config:
    """GRU4Rec on the generated log."""
    base = nestpipe.recipes.tiny()
    return replace(base, model=GRUConfig(), train=replace(base.train, epochs=5))
