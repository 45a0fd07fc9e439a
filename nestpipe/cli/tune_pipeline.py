"""Pipeline settings for a recipe, from a few steps in a few settings: what `nestpipe tune pipeline` prints."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as Shown

from nestpipe.autotune.group_choice import grouped
from nestpipe.autotune.measure import profile
from nestpipe.autotune.search import Measurement, PipelineChoice, choose
from nestpipe.config import Config
from nestpipe.data.loader import Loader
from nestpipe.data.remote_files import absolute_path
from nestpipe.distributed.process_group import World
from nestpipe.jagged import Cursor
from nestpipe.models.build_model import inputs_of
from nestpipe.pipeline.channels import Channels
from nestpipe.training.process import exact_arithmetic, keep_freed_memory
from nestpipe.training.run_folder import Run
from nestpipe.training.start_line import gather_hosts


def report(config: Config, *, as_json: bool) -> None:
    """Measures on all ranks; rank 0 prints the measurements, the choice and its reason."""
    with contextlib.closing(World.from_environment()) as world:
        measurements, choice, why = tuned(config, world)
        if world.rank == 0:
            _print(measurements, choice, why, as_json=as_json)


def tuned(config: Config, world: World) -> tuple[list[Measurement], PipelineChoice, str]:
    """What was measured, the choice, and why; the same on every rank."""
    config.validate()
    keep_freed_memory()
    config = replace(config, data=replace(config.data, path=absolute_path(config.data.path)))
    run, channels = Run(Path(), config), Channels.of(world)
    loader = Loader(
        run.sequences,
        run.split,
        config.data,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        inputs=inputs_of(config, run.sequences),
    )
    hosts = gather_hosts(channels.control)
    groups = grouped(run, channels, hosts, lambda: loader.batch(Cursor(0, 0)))
    clip_rows = config.train.clip == "all" and config.train.clip_norm > 0
    with exact_arithmetic(config.train.num_threads or torch.get_num_threads()):
        found = profile(
            groups.run, groups.channels, lambda: contextlib.closing(loader.iterate(Cursor(0, 0))), clip_rows=clip_rows
        )
    chosen = choose(found)
    return found, chosen.choice, chosen.why


def _print(found: list[Measurement], choice: PipelineChoice, why: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"measured": [asdict(one) for one in found], "choice": asdict(choice), "why": why}))
        return
    console, shown = Console(highlight=False, markup=False), Shown(title="steps measured, medians")
    for title in (
        "",
        "step",
        "busy",
        "exposed communication",
        "exposed lookup",
        "rows",
        "of first and last micro-batch",
    ):
        shown.add_column(title, justify="left" if not title else "right")
    for one in found:
        times = [f"{1e3 * seconds:.1f} ms" for seconds in (one.step_s, one.busy_s, one.comm_s, one.lookup_s)]
        shown.add_row(str(one.choice), *times, f"{one.rows:,.0f}", f"{one.edge_rows:,.0f}")
    console.print(shown)
    console.print(why, soft_wrap=True)
    console.print(
        f"--pipeline.micro-batches {choice.micro_batches} --pipeline.ramp {choice.ramp:g} --pipeline.depth {choice.depth}, or "
        "--pipeline.tune to measure when a run starts",
        soft_wrap=True,
    )
