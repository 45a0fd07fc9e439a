"""The `pipeline` section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nestpipe.pipeline.parts import PartsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(PartsConfig):
    """How a batch is cut, and what runs beside what. Every mode ends with the same bits, given the same parts."""

    mode: Literal["sequential", "dual-buffer", "frozen-window", "nested"] = "sequential"
    """dual-buffer hides the lookup of the next batches, frozen-window the messages between parts, nested both."""
    depth: int = 1
    """dual-buffer, nested: batches whose rows are retrieved ahead."""
    rows: Literal["auto", "table", "pool"] = "auto"
    """Where rows of batches in flight are used: in their table, or copied to a pool. auto: a pool for rows in files."""
    trace_steps: int = 0
    """Record what every lane does in the last so many steps, for `nestpipe trace RUN`."""

    def problems(self) -> Iterator[str]:
        yield from PartsConfig.problems(self)
        if not 1 <= self.depth <= 8:
            yield f"depth is {self.depth}; it must be in 1 .. 8"
        if self.trace_steps < 0:
            yield f"trace_steps is {self.trace_steps}; it must not be negative"

    @property
    def looks_ahead(self) -> bool:
        """Whether rows are retrieved before the batch before is done."""
        return self.mode in ("dual-buffer", "nested")
