"""The `pipeline` section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nestpipe.embedding.slices import MOST_SLICES
from nestpipe.pipeline.parts import PartsConfig
from nestpipe.pipeline.schedule import Mode, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(PartsConfig):
    """How a batch is cut, and what runs beside what. Every mode ends with the same bits, given parts and staleness."""

    mode: Literal["sequential", "dual-buffer", "frozen-window", "nested"] = "sequential"
    """dual-buffer hides the lookup of the next batches, frozen-window the messages between parts, nested both."""
    depth: int = 1
    """dual-buffer, nested: batches whose rows are retrieved ahead."""
    staleness: int = 0
    """1 is semi-asynchronous: rows of a batch always miss the update of the batch before. Not exact; sequential and nested."""
    sync_steps: int = 0
    """With staleness 1: so many steps are exact before, while most is learned."""
    rows: Literal["auto", "table", "pool"] = "auto"
    """Where rows of batches in flight are used: in their table, or copied to a pool. auto: a pool for rows in files."""
    split: bool = False
    """nested: of the first rows and last gradients of a batch, what its neighbours do not hold travels apart, hidden."""
    slices: int = 1
    """nested: the last gradients, the update and the next first rows in so many slices, one updated while others travel."""
    groups: int = 1
    """Groups of ranks with all tables each: rows stay in a group, sums of gradients travel between groups. 0: measure, choose."""
    tune: bool = False
    """Choose parts, ramp, depth and the pool's size from a short profile when the run starts; kept in RUN/settings.jsonl."""
    adapt: int = 0
    """Choose them again after so many steps, from what these took, and when batches change; rarely if nothing does. 0: never."""
    follow: str = ""
    """A run that was tuned or adapted: take the settings of each step from there, in whatever mode."""
    trace_steps: int = 0
    """Record what every lane does in the last so many steps, for `nestpipe trace RUN`."""

    def problems(self) -> Iterator[str]:
        yield from PartsConfig.problems(self)
        yield from self._problems_of_groups()
        if not 1 <= self.depth <= 8:
            yield f"depth is {self.depth}; it must be in 1 .. 8"
        if self.split and self.mode != "nested":
            yield f"split is for mode nested, but the mode is {self.mode}"
        yield from self._problems_of_slices()
        if self.staleness not in (0, 1):
            yield f"staleness is {self.staleness}; it must be 0 (exact) or 1 (rows one update old)"
        if self.staleness and self.mode not in ("sequential", "nested"):
            yield f"staleness is {self.staleness}, but mode {self.mode} has no stale rows; use nested (or sequential, slowly)"
        if self.staleness and self.mode == "sequential" and self.trace_steps:
            yield "trace_steps records lanes, but there is none in mode sequential with staleness 1; use nested"
        if self.adapt < 0 or 0 < self.adapt < 8:
            yield f"adapt is {self.adapt}; it must be 0 for never, or at least 8 steps, which can be measured"
        if self.adapt and self.mode == "sequential":
            yield "adapt measures what runs beside compute, but mode is sequential; use nested"
        if self.follow and (self.tune or self.adapt):
            yield "follow takes settings from another run, so tune and adapt have nothing to choose; leave them out"
        if self.sync_steps < 0:
            yield f"sync_steps is {self.sync_steps}; it must not be negative"
        if self.sync_steps and not self.staleness:
            yield "sync_steps come before stale ones, but staleness is 0, so that all steps are exact"
        if self.trace_steps < 0:
            yield f"trace_steps is {self.trace_steps}; it must not be negative"

    def _problems_of_groups(self) -> Iterator[str]:
        if self.groups < 0:
            yield f"groups is {self.groups}; it must divide the number of ranks, or be 0 to choose"
        if self.groups != 1 and self.split:
            yield (
                f"groups is {self.groups}, but groups exchange whole sums and split sends halves of them; leave split out, "
                "or use groups 1"
            )

    def _problems_of_slices(self) -> Iterator[str]:
        if not 1 <= self.slices <= MOST_SLICES:
            yield f"slices is {self.slices}; it must be in 1 .. {MOST_SLICES}"
        if self.slices > 1 and self.mode != "nested":
            yield f"slices is {self.slices}, which is for mode nested, but the mode is {self.mode}"
        if self.slices > 1 and self.split:
            yield f"slices is {self.slices}, but split cuts the same messages otherwise; use one of them"
        if self.slices > 1 and self.groups != 1:
            yield f"slices is {self.slices}, but groups is {self.groups}, and groups exchange whole sums; use one of them"

    @property
    def looks_ahead(self) -> bool:
        """Whether rows are retrieved before the batch before is done."""
        return self.mode in ("dual-buffer", "nested")

    @property
    def protect_steps(self) -> int:
        """For how many batches rows must be protected from eviction."""
        return max(self.depth + 1 if self.looks_ahead else 0, 1) + self.staleness

    def is_stale(self, number: int) -> bool:
        """Whether the step of a batch runs as a stale one; the first of them has no update to miss."""
        return self.staleness > 0 and number >= self.sync_steps

    def schedule(self, number: int, *, clip_rows: bool) -> Schedule:
        """When stages run, from a batch on to the next barrier. Stale rows leave a batch earlier, so they are taken earlier."""
        mode: Mode = "serial" if self.mode == "sequential" else self.mode
        stale = self.is_stale(number)
        # A norm over all rows needs all gradients: then none may be late.
        may_be_late = not clip_rows and not stale
        return Schedule.of(
            mode,
            self.parts,
            depth=self.depth + stale,
            clip_rows=clip_rows,
            stale=stale,
            split=self.split and may_be_late,
            groups=self.groups > 1,
            slices=self.slices if may_be_late else 1,
        )

    def steps_to_switch(self, number: int) -> int | None:
        """After how many steps another schedule begins, which takes a barrier; None for never."""
        left = self.sync_steps - number if self.staleness else 0
        return left if left > 0 else None
