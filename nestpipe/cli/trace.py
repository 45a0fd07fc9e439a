"""`nestpipe trace`: where the time of training steps went, as tables, a Perfetto trace and a timeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nestpipe.atomic_files import replace_file
from nestpipe.cli.arguments import TraceArguments
from nestpipe.config import Config
from nestpipe.distributed.local_host import usable_cores
from nestpipe.errors import ConfigError, NestPipeError
from nestpipe.profiling.overlap import StepTimes
from nestpipe.profiling.overlap_report import choose, report
from nestpipe.profiling.perfetto import to_perfetto
from nestpipe.profiling.timeline import draw, middle
from nestpipe.profiling.trace_file import RankTrace, load
from nestpipe.simulate.advice import advice, setting_of
from nestpipe.training.run_folder import read_facts

_DRAWN = 3  # steps in the drawing unless --steps says which
_MOST_DRAWN = 12


def main(arguments: TraceArguments) -> int:
    first, last = _range(arguments.steps)
    traces = load(arguments.run)
    if arguments.rank is not None and not 0 <= arguments.rank < len(traces):
        raise ConfigError(f"there is no rank {arguments.rank}; {arguments.run} ran on {len(traces)}, from 0.")
    steps = choose(traces, first, last)
    sequential = choose(load(arguments.sequential)) if arguments.sequential else ()
    result = report(traces, steps, sequential=sequential)
    shown = [trace for trace in traces if arguments.rank in {None, trace.rank}]
    own = [steps[trace.rank] for trace in shown]
    drawn = _drawn(own, chosen=arguments.steps is not None)
    files = {"trace.perfetto.json": to_perfetto(shown, own), "timeline.svg": draw(shown, drawn)}
    for name, content in files.items():
        replace_file(arguments.run / "trace" / name, content.encode())
    if arguments.json:
        print(result.to_json())
        return 0
    console = Console(highlight=False, markup=False)
    console.print(replace(result, ranks={trace.rank: result.ranks[trace.rank] for trace in shown}))
    if not sequential:
        console.print("exposed shares are upper bounds: --sequential RUN gives the times of which nothing is hidden")
    console.print(
        f"{arguments.run / 'trace' / 'timeline.svg'}: batches {drawn[0][0].batch} to {drawn[0][-1].batch}",
        soft_wrap=True,
    )
    console.print(f"{arguments.run / 'trace' / 'trace.perfetto.json'}: open in ui.perfetto.dev", soft_wrap=True)
    console.print(_advice(arguments.run, traces), soft_wrap=True)
    return 0


def _advice(run: Path, traces: Sequence[RankTrace]) -> str:
    """What the run's own record says about its mode and machines decides what is compared."""
    try:
        mode, facts = Config.load(run / "config.json").pipeline.mode, read_facts(run)
    except NestPipeError:  # only the traces were copied here
        return advice(traces, setting_of(traces), cores=None)
    if mode == "auto":
        mode = facts.get("pipelines", {}).get(str(len(traces)), {}).get("mode", "sequential")
    cores = usable_cores() if len(facts.get("hosts", [])) == 1 else None
    return advice(traces, setting_of(traces, mode), cores=cores)


def _range(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if not match:
        raise ConfigError(f"--steps is '{text}'; it must be A:B, for example 10:14, 10: or :14.")
    first, last = (int(number) if number else None for number in match.groups())
    if first is not None and last is not None and first >= last:
        raise ConfigError(f"--steps is '{text}', which holds no step: B is not part of it and must be above A.")
    return first, last


def _drawn(steps: Sequence[Sequence[StepTimes]], *, chosen: bool) -> list[Sequence[StepTimes]]:
    """The steps for the drawing: those asked for as far as they can be read, or some from the middle."""
    return [own[:_MOST_DRAWN] for own in steps] if chosen else middle(steps, _DRAWN)
