"""Pipeline settings for a recipe, from a few steps in two settings and the cost model: what `nestpipe tune pipeline` prints."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as Shown

from nestpipe.autotune.overlap_profile import ProfiledSteps, StepProfile, predict
from nestpipe.autotune.run_settings import Unsettled, settle
from nestpipe.config import Config
from nestpipe.data.remote_files import absolute_path
from nestpipe.distributed.local_host import usable_cores
from nestpipe.distributed.process_group import World
from nestpipe.jagged import Cursor
from nestpipe.pipeline.channels import Channels
from nestpipe.simulate.advice import PipelineSetting
from nestpipe.training.process import exact_arithmetic, keep_freed_memory
from nestpipe.training.rollouts import training_loader
from nestpipe.training.run_folder import Run
from nestpipe.training.start_line import gather_hosts

PROBES = (2, 8)  # micro-batches: far enough apart to show what one costs
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16)
_MARGIN = 0.02  # relative: a setting that was not measured must be faster by this


@dataclass(frozen=True, slots=True)
class PipelineAdvice:
    """Measured and predicted seconds per step, the recommended setting and why."""

    measured: dict[PipelineSetting, float]
    predicted: dict[PipelineSetting, float]
    best: PipelineSetting
    why: str


def report(config: Config, *, as_json: bool) -> None:
    """Measures on all ranks; rank 0 prints the measurements, the choice and its reason."""
    with contextlib.closing(World.from_environment()) as world:
        found = tuned(config, world)
        if world.rank == 0:
            _print(found, as_json=as_json)


def tuned(config: Config, world: World) -> PipelineAdvice:
    """The recommendation of this rank; only that of rank 0 is shown."""
    config.validate()
    keep_freed_memory()
    config = replace(config, data=replace(config.data, path=absolute_path(config.data.path)))
    run, channels = Run(Path(), config), Channels.of(world)
    loader, hosts = training_loader(run, channels, quiet=True), gather_hosts(channels.control)

    def batches() -> contextlib.closing:  # type: ignore[type-arg]
        return contextlib.closing(loader.iterate(Cursor(0, 0)))

    settled = settle(Unsettled(run, channels, hosts, loader, batches, num_steps=0))
    loader = training_loader(settled.run, channels, quiet=True)
    # Several machines have cores of their own; without exchanges there is no link to fit.
    cores = usable_cores() if len(set(hosts)) == 1 else None
    with exact_arithmetic(config.train.num_threads or torch.get_num_threads()):
        profile = StepProfile.of(settled.run, settled.channels, batches)
        most = max(config.data.batch_size // world.size, 1)
        plain = settled.run.config.pipeline.changed(mode="nested", ramp=1.0, chunks=1)
        steps = [profile.measure(replace(plain, micro_batches=one)) for one in sorted({min(n, most) for n in PROBES})]
        steps.append(profile.measure(replace(plain, mode="sequential", micro_batches=1)))
        predicted = predict(steps, [one for one in NUMBERS if one <= most], cores=cores)
        return _best(steps, predicted)


def _best(steps: list[ProfiledSteps], predicted: dict[PipelineSetting, float]) -> PipelineAdvice:
    measured = {one.setting: one.step_s for one in steps}
    expected = {one: seconds * (1 + _MARGIN) for one, seconds in predicted.items()} | measured
    best = min(expected, key=lambda one: (expected[one], one.micro_batches))
    how = "measured" if best in measured else "expected"
    others = ", ".join(f"{1e3 * seconds:.1f} ms measured with {one.flags}" for one, seconds in measured.items())
    why = f"{best.flags}: {1e3 * expected[best]:.1f} ms {how} ({others})"
    if not predicted:
        why += "; the messages were too few or too small to fit a cost model, so only measured settings are compared"
    return PipelineAdvice(measured, predicted, best, why)


def _print(found: PipelineAdvice, *, as_json: bool) -> None:
    if as_json:
        rows = [
            {**asdict(one), "step_s": seconds, "measured": source is found.measured}
            for source in (found.measured, found.predicted)
            for one, seconds in source.items()
        ]
        print(json.dumps({"steps": rows, "choice": asdict(found.best), "why": found.why}))
        return
    console, shown = Console(highlight=False, markup=False), Shown(title="milliseconds per step; measured: *")
    numbers = sorted({one.micro_batches for one in (*found.measured, *found.predicted)})
    shown.add_column("micro-batches")
    for number in numbers:
        shown.add_column(str(number), justify="right")
    for mode in dict.fromkeys(one.mode for one in (*found.predicted, *found.measured)):
        settings = [PipelineSetting(mode, number) for number in numbers]
        times = [found.measured.get(one, found.predicted.get(one)) for one in settings]
        cells = [f"{1e3 * one:.1f}" if one else "" for one in times]
        shown.add_row(mode, *(cell + "*" * (one in found.measured) for cell, one in zip(cells, settings, strict=True)))
    console.print(shown)
    console.print(found.why, soft_wrap=True)
