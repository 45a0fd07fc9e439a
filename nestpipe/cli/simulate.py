"""`nestpipe simulate`: predicts the time of a training step on many workers with a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nestpipe.atomic_files import replace_file
from nestpipe.cli.arguments import SimulateArguments
from nestpipe.errors import ConfigError
from nestpipe.profiling.trace_file import load
from nestpipe.report.simulated_cases import draw
from nestpipe.simulate import published
from nestpipe.simulate.calibrate import calibrate
from nestpipe.simulate.cases import CASES, CaseResult, CaseSettings, results
from nestpipe.simulate.constants import Constants

DRAWN = tuple(2**power for power in range(3, 13))  # 8 to 4,096 workers


def main(arguments: SimulateArguments) -> int:
    if arguments.published:
        print(f"{published.table()}\n\nThe size of groups is not published:\n{published.by_group_size()}")
        return 0
    if arguments.workers < 1 or not 1 <= arguments.micro_batches <= 256 or arguments.group_size < 1:
        raise ConfigError(
            f"--workers is {arguments.workers}, --group-size {arguments.group_size} and --micro-batches {arguments.micro_batches}; the "
            "first two must be at least 1, the last from 1 to 256."
        )
    constants = _constants(arguments)
    settings = CaseSettings(micro_batches=arguments.micro_batches, group_size=arguments.group_size)
    if arguments.save:
        constants.save(arguments.save)
    found = [results(case, constants, [arguments.workers, *DRAWN], settings) for case in CASES]
    print(_table([own[0] for own in found], constants, settings))
    title = f"{constants.source}, {settings.micro_batches} micro-batches, groups of {settings.group_size}"
    drawing = draw([own[1:] for own in found], title=title)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(arguments.out, drawing.encode())
    print(f"\n{arguments.out}: {DRAWN[0]} to {DRAWN[-1]:,} workers")
    return 0


def _constants(arguments: SimulateArguments) -> Constants:
    if arguments.run and arguments.constants:
        raise ConfigError("--from and --constants both name constants; give one of them.")
    if arguments.run:
        found = calibrate(load(arguments.run), source=f"trace of {arguments.run}")
    elif arguments.constants:
        found = Constants.load(arguments.constants)
    else:
        found = published.fit()
    if arguments.duplicates is None:
        return found
    if not arguments.duplicates >= 1:
        raise ConfigError(
            f"--duplicates is {arguments.duplicates}; it must be at least 1: a row in a batch is used at least once."
        )
    return replace(found, duplicates=arguments.duplicates)


def _table(found: Sequence[CaseResult], constants: Constants, settings: CaseSettings) -> str:
    """One line per case, times in ms."""
    workers = found[0].workers
    head = ("", "step", "busy", "lookup", "communication", "bubble", "efficiency")
    lines = [
        f"model, not measured: {workers:,} workers, constants of {constants.source}",
        f"{settings.micro_batches} micro-batches, groups of {settings.group_size}; ms per step, and how long compute waits for what; "
        f"efficiency from {constants.base_workers:,} workers",
        "",
        _line(head),
    ]
    for one in found:
        causes = (one.cause_s[cause] for cause in ("busy", "lookup", "communication", "bubble"))
        numbers = [f"{1e3 * seconds:,.1f}" for seconds in (one.step_s, *causes)]
        lines.append(_line((one.case.title, *numbers, f"{one.efficiency:.1%}")))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return (f"{cells[0]:<16}" + "".join(f"{cell:>15}" for cell in cells[1:])).rstrip()
