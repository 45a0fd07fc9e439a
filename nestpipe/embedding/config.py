"""The `embedding` and `dense` sections of a run's configuration: one kind of optimizer for rows and for dense weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """An optimizer and its constants."""

    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "adam"
    """Adam on rows is lazy: a row's moments and step count advance only when it is looked up."""
    lr: float = 1e-3
    """Learning rate."""
    beta1: float = 0.9
    """adam: decay of the first moment."""
    beta2: float = 0.98
    """adam: decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator of adam and adagrad."""
    weight_decay: float = 0.0
    """Decoupled; on rows only when they are looked up."""

    def problems(self) -> Iterator[str]:
        if not 0 < self.lr < math.inf:
            yield f"lr is {self.lr}; it must be above 0 and finite"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be in [0, 1)"
        for name in ("eps", "weight_decay"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; it must not be negative"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig(OptimizerConfig):
    """How embedding rows are kept and optimised. A row is updated only in steps that look it up."""

    num_buckets: int = 64
    """Fixed partition of all ids; ranks own ranges of buckets, so it is the largest number of ranks."""

    def problems(self) -> Iterator[str]:
        yield from OptimizerConfig.problems(self)
        if not 1 <= self.num_buckets <= 65536:
            yield f"num_buckets is {self.num_buckets}; it must be in 1 .. 65,536"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(OptimizerConfig):
    """How the dense weights are optimised."""
