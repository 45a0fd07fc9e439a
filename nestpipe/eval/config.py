"""The `eval` section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """How a model is evaluated."""

    ks: tuple[int, ...] = (1, 10, 50, 200)
    """List lengths of HR, NDCG and coverage, in increasing order."""
    seen: Literal["all", "input", "none"] = "all"
    """Items removed from the ranking: all that the user has seen, those of the input history, or none."""
    max_bytes: int = 256 * 2**20
    """Memory for scores, where the native kernel, which keeps none, cannot run."""
    batch_size: int = 256
    """Users encoded at once."""
    num_bootstrap: int = 1000
    """Bootstrap resamples of the users for each interval."""
    max_users: int = 0
    """Evaluate only this many users, a fixed random sample; 0 means all."""

    def problems(self) -> Iterator[str]:
        if not self.ks or min(self.ks) < 1 or list(self.ks) != sorted(set(self.ks)):
            yield f"ks is {self.ks}; list lengths must increase and be at least 1"
        if self.max_bytes < 2**16:
            yield f"max_bytes is {self.max_bytes:,}; it must be at least 65,536 for one useful block of scores"
        if self.batch_size < 1:
            yield f"batch_size is {self.batch_size}; it must be at least 1"
        if self.num_bootstrap < 100:
            yield f"num_bootstrap is {self.num_bootstrap}; a 95 % interval needs at least 100 resamplings"
        if self.max_users < 0:
            yield f"max_users is {self.max_users}; it must be 0 (all) or more"
