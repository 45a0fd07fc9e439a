"""The `pipeline` section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from nestpipe.embedding.config import MAX_CHUNKS, Chunking
from nestpipe.errors import ConfigError

_GONE = {"cluster": False, "tune": False, "adapt": 0, "follow": ""}  # of older files, with the value that means nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchConfig:
    """How a batch is divided. This decides the order of sums, hence the result bitwise, in every mode."""

    micro_batches: int = 1
    """Micro-batches per batch. Rows are updated once per batch, after the last micro-batch."""
    ramp: float = 1.0
    """Size of the first and last micro-batch relative to the others: their messages are not hidden, so smaller may be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvancedPipelineConfig:
    """What auto chooses, and what only a study of the pipeline needs."""

    ramp: float = 1.0
    """Size of the first and last micro-batch relative to the others: their messages are not hidden, so smaller may be faster."""
    depth: int = 1
    """dual-buffer, nested: number of batches whose rows are prefetched."""
    sync_steps: int = 0
    """With staleness 1: number of exact steps at the start."""
    rows: Literal["auto", "table", "buffer"] = "auto"
    """Where rows of batches in flight are: in their table or in a prefetch buffer. auto: the table. Rows in files have a row buffer."""
    chunks: Chunking = 1
    """nested: send the last gradients and the next first rows in so many chunks; one is updated while others are in flight.
    shared: in two; rows that neighbouring batches do not share travel while a batch computes."""
    trace_steps: int = 0
    """Record the last so many steps for `nestpipe trace RUN`."""

    def problems(self) -> Iterator[str]:
        if not 0 < self.ramp <= 1:
            yield f"ramp is {self.ramp}; it must be in (0, 1]"
        if not 1 <= self.depth <= 8:
            yield f"depth is {self.depth}; it must be in 1 .. 8"
        if self.sync_steps < 0:
            yield f"sync_steps is {self.sync_steps}; it must not be negative"
        if self.trace_steps < 0:
            yield f"trace_steps is {self.trace_steps}; it must not be negative"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How a batch is divided and which stages overlap. Given micro-batches and staleness, every mode is bitwise identical."""

    mode: Literal["auto", "sequential", "dual-buffer", "frozen-window", "nested"] = "auto"
    """dual-buffer hides the lookup of the next batches, frozen-window the exchanges between micro-batches, nested both.
    auto: nested on several ranks, else sequential; the run says which and why."""
    micro_batches: int = 0
    """Micro-batches per batch. Rows are updated once per batch, after the last one. 0: chosen at the first start, with ramp and
    balance, from the sizes of batches and the number of machines, and kept."""
    staleness: int = 0
    """1 is semi-asynchronous: the rows of a batch always miss the update of the previous batch. Not exact; sequential and nested."""
    groups: int = 1
    """Replica groups: each holds all tables; rows stay inside a group, gradient sums travel between groups. 0: measure and choose."""
    advanced: AdvancedPipelineConfig = field(default_factory=AdvancedPipelineConfig)

    def changed(self, **settings: Any) -> PipelineConfig:
        """A copy with other settings; those of `advanced` by their own names."""
        inner = {one.name: settings.pop(one.name) for one in fields(AdvancedPipelineConfig) if one.name in settings}
        return replace(self, **{"advanced": replace(self.advanced, **inner), **settings})

    @staticmethod
    def moved(section: Mapping[str, Any]) -> dict[str, Any]:
        """This section of an older file: settings are where they are now. Raises ConfigError for one that is gone and was in use."""
        own = dict(section)
        for name, off in _GONE.items():
            if own.pop(name, off) != off:
                raise ConfigError(
                    f"pipeline.{name} was in use in this run, and this version does not have it, so it cannot divide batches in "
                    "the same way. Continue the run with the version that started it, or begin another with --init-from."
                )
        if own.pop("split", False):
            own["chunks"] = "shared"
        inner = {one.name: own.pop(one.name) for one in fields(AdvancedPipelineConfig) if one.name in own}
        return {**own, "advanced": {**inner, **own.get("advanced", {})}} if inner else own

    @property
    def micro_batching(self) -> MicroBatchConfig:
        """How a batch is divided."""
        return MicroBatchConfig(micro_batches=self.micro_batches or 1, ramp=self.advanced.ramp)

    def problems(self) -> Iterator[str]:
        if not 0 <= self.micro_batches <= 256:
            yield f"micro_batches is {self.micro_batches}; it must be in 1 .. 256, or 0 to choose"
        yield from (f"advanced.{problem}" for problem in self.advanced.problems())
        if self.groups < 0:
            yield f"groups is {self.groups}; it must divide the number of ranks, or be 0 to choose"
        has = "may have" if self.mode == "auto" else "has"
        yield from self._chunk_problems()
        if self.staleness not in (0, 1):
            yield f"staleness is {self.staleness}; it must be 0 (exact) or 1 (rows stale by one step)"
        if self.staleness and self.mode not in ("auto", "sequential", "nested"):
            yield f"staleness is {self.staleness}, but mode {self.mode} has no stale rows; use nested (or sequential, slowly)"
        if self.staleness and self.mode in ("auto", "sequential") and self.advanced.trace_steps:
            yield f"advanced.trace_steps records streams, but mode {self.mode} with staleness 1 {has} none; use nested"
        if self.advanced.sync_steps and not self.staleness:
            yield "advanced.sync_steps come before stale steps, but staleness is 0: all steps are exact"

    def _chunk_problems(self) -> Iterator[str]:
        chunks = self.advanced.chunks
        if chunks != "shared" and not 1 <= chunks <= MAX_CHUNKS:
            yield f"advanced.chunks is {chunks}; it must be in 1 .. {MAX_CHUNKS}, or shared"
        if chunks != 1 and self.mode != "nested":
            yield f"advanced.chunks is {chunks}, which is for mode nested, but the mode is {self.mode}"

    @property
    def looks_ahead(self) -> bool:
        """Whether rows of later batches are prefetched; auto may."""
        return self.mode in ("auto", "dual-buffer", "nested")

    @property
    def protect_steps(self) -> int:
        """Number of batches for which rows must be protected from eviction."""
        return max(self.advanced.depth + 1 if self.looks_ahead else 0, 1) + self.staleness

    def on_one_rank(self) -> PipelineConfig:
        """With the settings of a single process where they are left open."""
        mode = "sequential" if self.mode == "auto" else self.mode
        return replace(self, mode=mode, micro_batches=self.micro_batches or 1)

    def is_stale(self, number: int) -> bool:
        """Whether a batch runs as a stale step; the first of these has no update to miss."""
        return self.staleness > 0 and number >= self.advanced.sync_steps

    def steps_to_switch(self, number: int) -> int | None:
        """Steps until another schedule begins, which needs a barrier; None for never."""
        left = self.advanced.sync_steps - number if self.staleness else 0
        return left if left > 0 else None
