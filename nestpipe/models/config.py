"""The `model` and `loss` sections of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nestpipe.models.encdec_config import EncDecConfig
from nestpipe.models.ranking_config import DCNConfig, RankingConfig
from nestpipe.ops.inputs import MAX_BUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class SASRecConfig:
    """Self-attentive sequential recommendation: the baseline that every claim stands beside."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Blocks of attention and feed-forward."""
    num_heads: int = 1
    """Attention heads; must divide dim."""
    hidden_dim: int = 0
    """Width of the feed-forward layer; 0 means dim."""
    dropout: float = 0.2
    """Probability of dropping a value, at the input and in each block."""

    def problems(self) -> Iterator[str]:
        yield from _size_problems(self)
        if self.num_heads > 0 and self.dim % self.num_heads:
            yield f"num_heads {self.num_heads} does not divide dim {self.dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUConfig:
    """Hierarchical sequential transduction units."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of units."""
    num_heads: int = 1
    """Attention heads."""
    qk_dim: int = 50
    """Width of queries and keys in each head."""
    v_dim: int = 50
    """Width of values and gates in each head."""
    dropout: float = 0.2
    """Probability of dropping a value, at the input and in each block."""
    num_time_buckets: int = 128
    """Buckets of the time bias."""

    def problems(self) -> Iterator[str]:
        yield from _size_problems(self)
        yield from _head_problems(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FuXiConfig:
    """FuXi-alpha: a channel of attention each for content, position and time, and a SwiGLU block."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of units."""
    num_heads: int = 1
    """Attention heads."""
    qk_dim: int = 50
    """Width of queries and keys in each head."""
    v_dim: int = 50
    """Width of values in each head; gates have three times as much."""
    hidden_dim: int = 0
    """Width of the SwiGLU block; 0 means dim."""
    dropout: float = 0.2
    """Probability of dropping a value, at the input and twice in each block."""
    time: Literal["buckets", "decay"] = "decay"
    """The time channel. buckets: a table, as in FuXi-alpha. decay: alpha · gamma^(T^beta), as in FuXi-gamma."""
    num_time_buckets: int = 128
    """buckets: how many."""

    def problems(self) -> Iterator[str]:
        yield from _size_problems(self)
        yield from _head_problems(self)


RetrievalConfig = SASRecConfig | HSTUConfig | FuXiConfig
ModelConfig = RetrievalConfig | RankingConfig | DCNConfig | EncDecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """How the next item is learned."""

    kind: Literal["full", "sampled", "in_batch"] = "sampled"
    """Softmax over the catalogue; over the next item and random negatives; over the next items of a group, by popularity."""
    num_negatives: int = 128
    """sampled: negatives per event, per sample or in the pool, uniform over the catalogue."""
    source: Literal["token", "sample", "pool"] = "token"
    """sampled: negatives of its own for each event (as published), for each sample, or one pool for the global batch."""
    share: Literal["none", "sample", "group"] = "none"
    """sampled, token: an event also takes the negatives of other events of its sample, or of its data.group_size samples."""
    share_factor: int = 2
    """share: of so many events, its own included; k times the negatives for the same lookups."""
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    """sampled: what negatives are rounded to; rows that a batch needs as nothing else then travel in half the bytes."""
    normalise: bool = True
    """Compare unit vectors (cosine); the temperature then matters."""
    temperature: float = 0.05
    """Scores are divided by this."""
    segment: int = 256
    """Events scored at a time; bounds memory, does not change the result."""
    max_full_catalogue: int = 200_000
    """full: refuse catalogues above this size; each step scores every event against every item."""

    def problems(self) -> Iterator[str]:
        for name in ("num_negatives", "segment", "max_full_catalogue"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if not self.temperature > 0:
            yield f"temperature is {self.temperature}; it must be above 0"
        if self.share != "none" and (self.kind, self.source) != ("sampled", "token"):
            yield f"share is '{self.share}', but only negatives of events are shared; use kind sampled and source token"
        if self.share_factor < 2:
            yield f"share_factor is {self.share_factor}; it must be at least 2 (share none for no sharing)"

    @property
    def mixes_groups(self) -> bool:
        """Whether the loss of a sample depends on the others of its group."""
        return self.kind == "in_batch" or self.share == "group"


def _head_problems(config: HSTUConfig | FuXiConfig) -> Iterator[str]:
    for name in ("qk_dim", "v_dim"):
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"
    if not 1 <= config.num_time_buckets <= MAX_BUCKETS:
        yield f"num_time_buckets is {config.num_time_buckets}; it must be in 1 .. {MAX_BUCKETS}"


def _size_problems(config: RetrievalConfig) -> Iterator[str]:
    for name in ("dim", "num_blocks", "num_heads"):
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"
    if not 0 <= config.dropout <= 0.99:
        yield f"dropout is {config.dropout}; it must be in [0, 0.99]"
