"""The `embedding` and `dense` sections of a run's configuration: one kind of optimizer for rows and for dense weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MAX_CHUNKS = 8  # of the first rows and the last gradients of a batch
Chunking = int | Literal["shared"]  # so many ranges of buckets, or rows shared with the neighbouring batch and others


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """An optimizer and its constants."""

    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "lazy_adam"] = "adam"
    """adam on rows equals Adam on the whole table: rows that a batch does not look up make its step with a zero gradient.
    lazy_adam: a row's moments and step count advance only when it is looked up."""
    lr: float = 1e-3
    """Learning rate."""
    beta1: float = 0.9
    """adam: decay of the first moment."""
    beta2: float = 0.98
    """adam: decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator of adam and adagrad."""
    weight_decay: float = 0.0
    """Decoupled; on rows only when they are looked up, but for adam: in every step."""

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
    """How embedding rows are kept and optimised."""

    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "lazy_adam"] = "lazy_adam"
    """adam equals Adam on the whole table: rows that a batch does not look up make its step with a zero gradient.
    lazy_adam: a row's moments and step count advance only when it is looked up."""
    num_buckets: int = 4096
    """Fixed partition of all ids; ranks own ranges of buckets, so it is the largest number of ranks."""
    admit_after: int = 1
    """Number of batches in which an id must occur before it gets a row; until then it reads its initial value."""
    max_rows: int = 0
    """Rows of a table on all ranks together, divided over its buckets; a full bucket evicts rows for new ids. 0: no limit."""
    evict: Literal["lru", "lfu"] = "lru"
    """Rows to evict first: those not used for the longest time, or those used in the fewest batches. Ties: the longest
    unused, then the lowest id."""
    protect_steps: int = 2
    """Rows used in so many batches before this one, or in this one, are not evicted; at least pipeline depth + 1."""

    tier: Literal["memory", "files"] = "memory"
    """Where rows are: in memory, or in files with a buffer in memory. Results are bitwise identical."""
    files_folder: str = "/var/tmp"
    """files: a folder on a fast local disk, with room for twice the rows. The files have no names and vanish with the process."""
    buffer_bytes: int = 1 << 30
    """files: memory for the rows of a table that a rank uses, and used recently. A tenth of the rows is a good size."""

    device_bytes: int = 0
    """On an accelerator: its memory for the rows of a table that a rank uses, and used recently; all rows are in host memory.
    0: an equal share of half the free memory at first, then chosen from the batches seen and the free memory, and said."""

    @property
    def has_limits(self) -> bool:
        """Whether an id can be without a row after a lookup."""
        return self.admit_after > 1 or self.max_rows > 0

    def problems(self) -> Iterator[str]:
        yield from OptimizerConfig.problems(self)
        if self.optimizer == "adam" and self.beta1**2 >= self.beta2:
            yield (
                f"optimizer is adam with beta1 {self.beta1} and beta2 {self.beta2}: without a gradient its steps would grow, because "
                "beta1 ** 2 is not below beta2; lower beta1, or use lazy_adam"
            )
        for name, least in (("admit_after", 1), ("max_rows", 0), ("protect_steps", 2), ("device_bytes", 0)):
            if getattr(self, name) < least:
                yield f"{name} is {getattr(self, name)}; it must be at least {least}"
        if self.tier == "files" and not self.files_folder:
            yield "tier is 'files' but files_folder is empty; name a folder on a fast local disk"
        if self.buffer_bytes < 1 << 20:
            yield f"buffer_bytes is {self.buffer_bytes:,}; it must be at least 1 MiB"
        if not 1 <= self.num_buckets <= 65536:
            yield f"num_buckets is {self.num_buckets}; it must be in 1 .. 65,536"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(OptimizerConfig):
    """How the dense weights are optimised."""

    def problems(self) -> Iterator[str]:
        yield from OptimizerConfig.problems(self)
        if self.optimizer == "lazy_adam":
            yield "optimizer is lazy_adam, which is for rows; dense weights have a gradient in every step: use adam"
