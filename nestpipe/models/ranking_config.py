"""The `model` section of runs that rank: histories with candidates, and crossed features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingConfig:
    """Predicts the labels of candidates from the history; see docs/ranking.md."""

    backbone: Literal["hstu", "fuxi"] = "hstu"
    """What turns history and candidates into states."""
    dim: int = 64
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of blocks."""
    num_heads: int = 2
    """Attention heads."""
    qk_dim: int = 32
    """Width of queries and keys in each head."""
    v_dim: int = 32
    """Width of values in each head."""
    ffn_dim: int = 128
    """fuxi: width of the feed-forward layer."""
    head_dim: int = 64
    """Width of the layer between a candidate's state and its labels."""
    dropout: float = 0.2
    """Probability of dropping a value, at the input and in each block."""
    num_time_buckets: int = 128
    """Buckets of the time bias."""
    features: tuple[str, ...] = ()
    """Features to read: of events and items in the history, of items and users for candidates."""
    labels: tuple[str, ...] = ()
    """Labels to predict; all that the log declares if none is named. They are also the actions of the history."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, ("dim", "num_blocks", "num_heads", "qk_dim", "v_dim", "ffn_dim", "head_dim"))
        yield from _positive(self, ("num_time_buckets",))
        yield from _names(self)
        if not 0 <= self.dropout <= 0.99:
            yield f"dropout is {self.dropout}; it must be in [0, 0.99]"


@dataclass(frozen=True, slots=True, kw_only=True)
class DCNConfig:
    """Deep and cross network, version 2: explicit products of features, and a plain network over them."""

    dim: int = 16
    """Width of the vector of each id feature."""
    num_cross: int = 3
    """Cross layers; the first makes products of two features, each further one adds a factor."""
    rank: int = 0
    """Rank of the cross matrices; 0 means full."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the deep network."""
    features: tuple[str, ...] = ("user", "item")
    """Features to read; 'user' and 'item' are the ids themselves."""
    labels: tuple[str, ...] = ()
    """Labels to predict; all that the log declares if none is named."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, ("dim", "num_cross"))
        yield from _names(self)
        if self.rank < 0:
            yield f"rank is {self.rank}; it must be 0 (full) or more"
        if not self.hidden or min(self.hidden) < 1:
            yield f"hidden is {self.hidden}; it must be one or more widths of at least 1"
        if not self.features:
            yield "features is empty; there would be nothing to cross"


def _positive(config: RankingConfig | DCNConfig, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"


def _names(config: RankingConfig | DCNConfig) -> Iterator[str]:
    for name in ("features", "labels"):
        given = getattr(config, name)
        if len(set(given)) < len(given):
            yield f"{name} is {given}; each may be named once"
