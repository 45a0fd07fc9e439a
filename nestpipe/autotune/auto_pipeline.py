"""`--pipeline.mode auto`: settings from counts alone, chosen once per number of ranks and kept in RUN/run.json.

    ranks                       mode          micro-batches                     why
    one                         sequential    1                                 nothing is exchanged
    one, rows in files          dual-buffer   1                                 rows of the next batch are read ahead
    several on one machine      nested        1                                 stages of neighbouring batches overlap
    on several machines         nested        by the tokens of a rank's batch   the link works while ranks compute

Micro-batches, ramp and balance decide the order of sums, hence the result bitwise. So no clock takes part: the same command and
seed give the same result on another day, and a resumed run with as many ranks reads back what was chosen. The same command with
`--pipeline.mode sequential` replays it bitwise. Mode, depth and chunks decide no bits: a long run on several machines measures
them (overlap_profile.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from nestpipe.config import Config
from nestpipe.data.load_balance import Imbalance, Ints, SampleCost, assign, fixed, loads_of
from nestpipe.embedding.config import MAX_CHUNKS, Chunking
from nestpipe.models.config import RetrievalConfig
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.training.mfu import work_of

# Two micro-batches were fastest for 512 samples of 50 ids per rank, four for 2,048 (1 Gbit/s, with and without 2 ms of delay):
# the cost of a micro-batch is constant, and messages grow with the batch, so the best number grows with its root.
_TOKENS = 6400
_MAX_MICRO_BATCHES = 8
_RAMP, _RAMPED = 0.5, 4  # from so many micro-batches on: with 4 on zipf-2048, 29 % fewer rows in the first and the last
_LESS_WAITING = 0.02  # of a step; below it, samples stay where they are


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCounts:
    """What the choice depends on."""

    num_ranks: int
    num_hosts: int
    num_tokens: int  # of a rank's batch, mean over ranks and batches
    num_samples: int = 1 << 30  # of a rank's batch
    has_row_files: bool = False
    wait: float = 0.0  # share of a step that ranks wait for the slowest one, by cost, without balance
    balanced_wait: float = 0.0  # and with it


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoChoice:
    """The chosen settings and their reason. Micro-batches, ramp and balance decide bits; mode, depth and chunks do not."""

    mode: Literal["sequential", "dual-buffer", "frozen-window", "nested"] = "sequential"
    micro_batches: int = 1
    ramp: float = 1.0
    balance: bool = False
    depth: int = 1
    chunks: Chunking = 1
    why: str = ""
    gain: str = ""  # expected, if it was measured

    @staticmethod
    def of(counts: WorkloadCounts) -> AutoChoice:
        """The settings for these counts: a pure function."""
        if counts.num_ranks == 1 and counts.has_row_files:
            return AutoChoice(mode="dual-buffer", why="rows of the next batch are read from files ahead")
        if counts.num_ranks == 1:
            return AutoChoice(why="one rank exchanges nothing")
        why = f"{counts.num_ranks} ranks on {counts.num_hosts} machine{'s' * (counts.num_hosts > 1)}"
        number = 1
        if counts.num_hosts > 1:
            most = max(min(_MAX_MICRO_BATCHES, counts.num_samples), 1)
            number = min(max(round(math.sqrt(counts.num_tokens / _TOKENS)), 1), most)
            why += f", {counts.num_tokens:,} tokens per rank and step"
        balance = counts.wait - counts.balanced_wait > _LESS_WAITING
        if balance:
            why += f", waiting for the slowest rank {counts.wait:.0%} -> {counts.balanced_wait:.0%} of a step by FLOP"
        return AutoChoice(
            mode="nested",
            micro_batches=number,
            ramp=_RAMP if number >= _RAMPED else 1.0,
            balance=balance,
            chunks=min(number, MAX_CHUNKS),
            why=why,
        )

    def apply(self, asked: Config) -> Config:
        """The configuration with this choice where the user left it open."""
        own, data = asked.pipeline, asked.data
        if not own.micro_batches:  # whoever gives their number decides how batches are divided
            own = own.changed(micro_batches=self.micro_batches, ramp=self.ramp)
            if self.balance and not data.balance:
                cost = flop_cost(asked)
                data = replace(data, balance=True, cost_linear=cost.linear, cost_square=cost.square)
        if own.mode == "auto":
            own = own.changed(mode=self.mode, depth=max(self.depth, own.advanced.depth), chunks=self.chunks)
        return replace(asked, pipeline=own, data=data)

    def line(self, asked: Config) -> str:
        """What the run says about it."""
        chosen = self.apply(asked)
        own, more = chosen.pipeline, chosen.pipeline.advanced
        parts = [own.mode, f"{own.micro_batches} micro-batch{'es' * (own.micro_batches > 1)}"]
        parts += [f"ramp {more.ramp:g}"] * (more.ramp < 1 and own.micro_batches > 1)
        parts += [f"{more.chunks} chunks"] * (more.chunks != 1) + [f"depth {more.depth}"] * (more.depth > 1)
        parts += ["balanced"] * chosen.data.balance
        text = f"{', '.join(parts)} ({self.why})"
        if asked.pipeline.mode != "auto":
            return f"pipeline: {text}"
        gain = f"; {self.gain}" if self.gain else ""
        return f"pipeline auto: {text}{gain}; bitwise the same: --pipeline.mode sequential"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> AutoChoice:
        return AutoChoice(**content)


def is_open(asked: PipelineConfig) -> bool:
    """Whether something is left to choose."""
    return asked.mode == "auto" or not asked.micro_batches


def flop_cost(config: Config) -> SampleCost:
    """FLOP of a training step by the length of a sample, relative to those of one event; by events if they are not counted."""
    if not isinstance(config.model, RetrievalConfig):
        return SampleCost(1.0, 0.0)
    linear, square = work_of(config.model).by_length()
    return SampleCost(1.0, square / linear)


def waits(batches: Sequence[Ints], cost: SampleCost, num_ranks: int) -> tuple[float, float]:
    """The mean share of a step that ranks wait, without and with balance, for global batches of samples of these lengths."""
    plain, balanced = list[float](), list[float]()
    for lengths in batches:
        costs, tokens = cost.of(lengths), lengths.astype(float)
        for found, rank_of in (
            (plain, fixed(len(lengths), num_ranks)),
            (balanced, assign(costs, lengths.argsort().argsort(), num_ranks)),
        ):
            found.append(Imbalance.of(loads_of(costs, rank_of, num_ranks), loads_of(tokens, rank_of, num_ranks)).wait)
    return fmean(plain), fmean(balanced)
