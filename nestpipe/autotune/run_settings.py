"""What a run's configuration leaves open: chosen before, or chosen now, once per number of ranks, and kept in RUN/run.json.

The division of batches is a function of counts (auto_pipeline.py). Mode, depth and chunks decide no bits; a long run on several
machines measures them (overlap_profile.py). The number of groups (`--pipeline.groups 0`) depends on measured times and does
decide bits, so a resumed run with as many ranks reads it back. Groups multiply memory: otherwise they are only proposed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nestpipe.autotune.auto_pipeline import AutoChoice, WorkloadCounts, flop_cost, is_open, waits
from nestpipe.autotune.group_choice import choose
from nestpipe.autotune.overlap_profile import Batches, StepProfile, choose_overlap
from nestpipe.config import Config
from nestpipe.data.loader import Loader
from nestpipe.distributed.process_group import Channel
from nestpipe.jagged import Cursor
from nestpipe.pipeline.channels import Channels
from nestpipe.training.run_folder import Run, read_facts
from nestpipe.training.run_state import new_state

GROUPS = "groups"  # in RUN/run.json: number of ranks -> number of groups
PIPELINES = "pipelines"  # likewise: number of ranks -> pipeline settings
PROFILED_STEPS = 200  # shorter runs take what the counts predict
_NUM_BATCHES = 8  # whose sizes are counted


@dataclass(frozen=True, slots=True)
class SettledRun:
    """A run with its chosen settings, and its channels, divided into groups."""

    run: Run
    channels: Channels
    chosen: Mapping[str, Any] = field(default_factory=dict)  # for run.json
    why: str = ""  # reasons of the choices


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A run, its ranks and its batches before the first step."""

    run: Run
    channels: Channels
    hosts: Sequence[str]  # of each rank
    loader: Loader
    batches_of: Batches
    num_steps: int | None = None  # None: unknown

    @property
    def is_long(self) -> bool:
        return self.num_steps is None or self.num_steps >= PROFILED_STEPS

    def counts(self) -> WorkloadCounts:
        """The same on every rank, because all know the lengths of all samples."""
        config, num_ranks = self.run.config, len(self.hosts)
        numbers = range(min(self.loader.num_batches(0), _NUM_BATCHES) if num_ranks > 1 else 0)
        batches = [self.loader.batch_lengths(number).numpy() for number in numbers]
        num_batches = max(len(batches), 1) * num_ranks
        plain, balanced = waits(batches, flop_cost(config), num_ranks) if batches else (0.0, 0.0)
        return WorkloadCounts(
            num_ranks=num_ranks,
            num_hosts=len(set(self.hosts)),
            num_tokens=sum(int(one.sum()) for one in batches) // num_batches,
            num_samples=sum(map(len, batches)) // num_batches,
            has_row_files=config.embedding.tier != "memory",
            wait=plain,
            balanced_wait=balanced,
        )


def settle(start: Unsettled) -> SettledRun:
    """Chooses what the configuration leaves open. Collective."""
    known = _known(start.run, start.channels.control)
    run, pipelines, why_pipeline = _with_pipeline(start, known.get(PIPELINES, {}))
    found = _with_groups(replace(start, run=run), known.get(GROUPS, {}))
    why = "\n".join(one for one in (why_pipeline, found.why) if one)
    return replace(found, chosen={**found.chosen, PIPELINES: pipelines}, why=why)


def _with_pipeline(start: Unsettled, known: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any], str]:
    """The run with the pipeline for its number of ranks, all choices, and what to say."""
    asked, size = start.run.config, str(len(start.hosts))
    if not is_open(asked.pipeline):
        return start.run, known, ""
    if size not in known:
        choice = AutoChoice.of(start.counts())
        if len(set(start.hosts)) > 1 and asked.pipeline.mode == "auto" and start.is_long:
            choice = _measured(start, choice)
        known = {**known, size: choice.to_json()}
    choice = AutoChoice.from_json(known[size])
    run = replace(start.run, config=choice.apply(asked), asked=asked)
    return run, known, choice.line(asked) if len(start.hosts) > 1 else ""


def _measured(start: Unsettled, counted: AutoChoice) -> AutoChoice:
    """The choice from counts, with mode, depth and chunks from a profile, and a proposal of groups if they would help."""
    asked, config = start.run.config.pipeline, counted.apply(start.run.config)
    if asked.groups != 1:
        return counted
    run = replace(start.run, config=config)
    profile = StepProfile.of(run, start.channels, start.batches_of)
    chosen = choose_overlap(profile, config.pipeline, counted, start.channels.control)
    if config.embedding.max_rows:  # rows are protected from eviction for a fixed number of steps
        most = config.embedding.protect_steps - 1 - asked.staleness
        chosen = replace(chosen, depth=max(min(chosen.depth, most), 1))
    groups, why = _best_groups(start, config)
    if groups > 1:
        proposal = f"--pipeline.groups {groups} would help, for {groups} times the memory of the tables: {why}"
        chosen = replace(chosen, gain="; ".join(filter(None, (chosen.gain, proposal))))
    return chosen


def _best_groups(start: Unsettled, config: Config) -> tuple[int, str]:
    settings, run = config.pipeline, replace(start.run, config=config)
    # A pipeline hides the messages of all micro-batches but the first rows and the last gradients.
    num_exposed = 1 if settings.mode in ("frozen-window", "nested") else settings.micro_batches
    state, batch = new_state(run, start.channels), start.loader.batch(Cursor(0, 0))
    return choose(state, start.channels, batch, num_micro_batches=num_exposed)


def _with_groups(start: Unsettled, known: Mapping[str, int]) -> SettledRun:
    """The run, divided into its groups."""
    run, channels = start.run, start.channels
    configured, size, why = run.config.pipeline.groups, str(len(start.hosts)), ""
    if configured == 0 and size not in known:
        chosen, why = _best_groups(start, run.config)
        known = {**known, size: chosen}
    number = configured or known[size]
    asked = _in_groups(run.asked, number) if run.asked else None
    found = replace(run, config=_in_groups(run.config, number), asked=asked)
    return SettledRun(found, channels.in_groups(number), {GROUPS: known}, why)


def _in_groups(config: Config, number: int) -> Config:
    return replace(config, pipeline=replace(config.pipeline, groups=number))


def _known(run: Run, control: Channel) -> dict[str, dict[str, Any]]:
    """Earlier choices, read by rank 0."""
    is_reader = control.world.rank == 0 and Run.exists(run.folder)
    facts = read_facts(run.folder) if is_reader else {}
    own = {key: facts.get(key, {}) for key in (GROUPS, PIPELINES)}
    known: dict[str, dict[str, Any]] = json.loads(
        control.broadcast_bytes(json.dumps(own).encode(), 0, name="earlier choices")
    )
    return known
