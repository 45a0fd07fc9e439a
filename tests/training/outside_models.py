"""Models written as a stranger would, with `import nestpipe` alone: two that keep the contracts and some that break one each."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import nestpipe


@dataclass(frozen=True, kw_only=True)
class MeanConfig:
    """The mean of the events so far."""

    dim: int = 8
    """Width of item vectors."""


def mean_so_far(vectors, batch):
    means = [
        own.cumsum(0) / torch.arange(1, len(own) + 1).unsqueeze(1)
        for own in vectors.split(batch.items.lengths().tolist())
    ]
    return torch.cat(means)


@nestpipe.register_backbone(config=MeanConfig)
class Mean(nn.Module):
    def __init__(self, config, *, max_len):
        super().__init__()
        self.mix = nn.Linear(config.dim, config.dim)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, vectors, batch):
        return self.norm(self.mix(mean_so_far(vectors, batch)))


@dataclass(frozen=True, kw_only=True)
class BatchNormConfig(MeanConfig):
    pass


@nestpipe.register_backbone(config=BatchNormConfig)
class OverTheBatch(Mean):
    """Normalises over all events of the batch."""

    def __init__(self, config, *, max_len):
        super().__init__(config, max_len=max_len)
        self.norm = nn.BatchNorm1d(config.dim, track_running_stats=False)


@dataclass(frozen=True, kw_only=True)
class CentredConfig(MeanConfig):
    pass


@nestpipe.register_backbone(config=CentredConfig)
class CentredOverTheBatch(Mean):
    """Subtracts the mean of all events of the batch."""

    def forward(self, vectors, batch):
        return super().forward(vectors - vectors.mean(0), batch)


@dataclass(frozen=True, kw_only=True)
class DropoutConfig(MeanConfig):
    pass


@nestpipe.register_backbone(config=DropoutConfig)
class GlobalGenerator(Mean):
    """Drops values by torch's generator."""

    def __init__(self, config, *, max_len):
        super().__init__(config, max_len=max_len)
        self.drop = nn.Dropout(0.5)

    def forward(self, vectors, batch):
        return self.drop(super().forward(vectors, batch))


@dataclass(frozen=True, kw_only=True)
class UnsavedConfig(MeanConfig):
    pass


@nestpipe.register_backbone(config=UnsavedConfig)
class UnsavedBuffer(Mean):
    """Shifts by a running count that no checkpoint has."""

    def __init__(self, config, *, max_len):
        super().__init__(config, max_len=max_len)
        self.register_buffer("num_calls", torch.zeros(()), persistent=False)

    def forward(self, vectors, batch):
        hidden = super().forward(vectors * (1 + 0.1 * self.num_calls), batch)
        self.num_calls += 1 if torch.is_grad_enabled() and self.num_calls < 4 else 0
        return hidden


@dataclass(frozen=True, kw_only=True)
class PairsConfig:
    """Next item against one drawn item."""

    dim: int = 8
    """Width of item vectors."""


@nestpipe.register_model(config=PairsConfig)
class Pairs(nn.Module):
    """The whole contract: its own tables, lookups and loss."""

    coupling = "none"

    def __init__(self, config, data):
        super().__init__()
        self.tables = (nestpipe.TableSpec(name="item", dim=config.dim, init_std=0.1),)
        self.catalogue, self.mix = data.catalogue, nn.Parameter(torch.eye(config.dim))

    def lookups(self, batch, rng):
        keys = rng.keys("negatives", batch.sample_of_token(), batch.items.positions())
        drawn = self.catalogue.index_select(0, keys.remainder(len(self.catalogue)))
        ids = {"history": batch.items.values, "next": batch.targets.values, "negative": drawn}
        return {name: nestpipe.Lookup(table="item", ids=one) for name, one in ids.items()}

    def weight(self, batch):
        return float(batch.num_tokens)

    def scores(self, rows, batch):
        query = mean_so_far(rows["history"].gather(), batch) @ self.mix
        return [(query * rows[name].gather()).sum(1) for name in ("next", "negative")]

    def forward(self, rows, batch, rng):
        wins, loses = self.scores(rows, batch)
        return nestpipe.Output(F.softplus(loses - wins).sum(), {"right": (wins > loses).sum()})


@dataclass(frozen=True, kw_only=True)
class IndexedConfig(PairsConfig):
    pass


@nestpipe.register_model(config=IndexedConfig)
class IndexedRows(Pairs):
    """Gathers rows by tensor[index]."""

    def scores(self, rows, batch):
        history = rows["history"].unique[rows["history"].index]
        query = mean_so_far(history, batch) @ self.mix
        return [(query * rows[name].gather()).sum(1) for name in ("next", "negative")]


@dataclass(frozen=True, kw_only=True)
class CoupledConfig(PairsConfig):
    pass


@nestpipe.register_model(config=CoupledConfig)
class UndeclaredCoupling(Pairs):
    """A softmax over the next items of the whole batch."""

    def forward(self, rows, batch, rng):
        query = mean_so_far(rows["history"].gather(), batch) @ self.mix
        logits = query @ rows["next"].gather().T
        return nestpipe.Output(F.cross_entropy(logits, torch.arange(len(query)), reduction="sum"))


@dataclass(frozen=True, kw_only=True)
class WeightConfig(PairsConfig):
    pass


@nestpipe.register_model(config=WeightConfig)
class WrongWeight(Pairs):
    """Counts every batch as one."""

    def weight(self, batch):
        return 1.0


@dataclass(frozen=True, kw_only=True)
class MeanLossConfig(PairsConfig):
    pass


@nestpipe.register_model(config=MeanLossConfig)
class MeanLoss(Pairs):
    """Returns a mean instead of a sum."""

    def forward(self, rows, batch, rng):
        wins, loses = self.scores(rows, batch)
        return nestpipe.Output(F.softplus(loses - wins).mean())
