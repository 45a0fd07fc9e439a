"""`--pipeline.mode auto`: settings from counts alone, chosen once per number of ranks and kept in RUN/run.json.

    ranks                       mode          micro-batches                                why
    one                         sequential    1                                            nothing is exchanged
    one, rows in files          dual-buffer   1                                            rows of the next batch are read ahead
    several on one machine      sequential    1                                            an exchange is CPU work: nothing to hide
    on several machines         nested        by the tokens of a rank's batch              the link works while ranks compute

The number of micro-batches decides the order of sums, hence the result bitwise. So no clock takes part: the same command and seed
give the same result on another day, and a resumed run with as many ranks reads back what was chosen. `--pipeline.mode sequential`
replays it bitwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from nestpipe.embedding.config import MAX_CHUNKS
from nestpipe.pipeline.config import PipelineConfig

# Two micro-batches were fastest for 512 samples of 50 ids per rank, four for 2,048 (1 Gbit/s, with and without 2 ms of delay):
# the cost of a micro-batch is constant, and messages grow with the batch, so the best number grows with its root.
_TOKENS = 6400
_MAX_MICRO_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCounts:
    """What the choice depends on."""

    num_ranks: int
    num_hosts: int
    num_tokens: int  # of a rank's first batch, mean over ranks
    has_row_files: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoChoice:
    """The chosen settings and their reason. Micro-batches decide bits; mode and chunks do not."""

    mode: Literal["sequential", "dual-buffer", "nested"] = "sequential"
    micro_batches: int = 1
    chunks: int = 1
    why: str = ""

    @staticmethod
    def of(counts: WorkloadCounts) -> AutoChoice:
        """The settings for these counts: a pure function."""
        if counts.num_ranks == 1 and counts.has_row_files:
            return AutoChoice(mode="dual-buffer", why="rows of the next batch are read from files ahead")
        if counts.num_ranks == 1:
            return AutoChoice(why="one rank exchanges nothing")
        ranks = f"{counts.num_ranks} ranks on {counts.num_hosts} machine{'s' * (counts.num_hosts > 1)}"
        if counts.num_hosts == 1:
            return AutoChoice(why=f"{ranks}: exchanges are copies by the CPU, which nothing can hide")
        number = min(max(round(math.sqrt(counts.num_tokens / _TOKENS)), 1), _MAX_MICRO_BATCHES)
        why = f"{ranks}, {counts.num_tokens:,} tokens per rank and step"
        return AutoChoice(mode="nested", micro_batches=number, chunks=min(number, MAX_CHUNKS), why=why)

    def apply(self, asked: PipelineConfig) -> PipelineConfig:
        """The configuration with this choice where the user left it open."""
        found = replace(asked, micro_batches=asked.micro_batches or self.micro_batches)
        if asked.mode != "auto":
            return found
        return replace(found, mode=self.mode, chunks=self.chunks)

    def line(self, asked: PipelineConfig) -> str:
        """What the run says about it."""
        chosen = self.apply(asked)
        number = f"{chosen.micro_batches} micro-batch{'es' * (chosen.micro_batches > 1)}"
        replay = f"--pipeline.mode sequential --pipeline.micro-batches {chosen.micro_batches}"
        return f"pipeline auto: {chosen.mode}, {number} ({self.why}); bitwise the same: {replay}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> AutoChoice:
        return AutoChoice(**content)


def is_open(asked: PipelineConfig) -> bool:
    """Whether something is left to choose."""
    return asked.mode == "auto" or not asked.micro_batches
