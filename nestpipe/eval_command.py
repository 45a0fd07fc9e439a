"""`nestpipe eval`: full ranking of a run's held-out targets, the popularity floor beside it, or two runs compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from nestpipe.compare import Comparison, compare
from nestpipe.evaluate import Report
from nestpipe.run import Run
from nestpipe.scoring import popularity


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    compare: Path | None = None
    """Another run on the same data: each metric with the paired 95 % interval of its difference."""
    step: int | None = None
    """Checkpoint of RUN to evaluate [default: the best one if the run validated, else the latest]."""
    target: Literal["test", "validation"] = "test"
    """Which held-out events to rank."""
    json: bool = False
    """Print JSON instead of tables."""


def main(argv: list[str]) -> int:
    example = "Example: nestpipe eval runs/tiny   or   nestpipe eval runs/a --compare runs/b"
    arguments = tyro.cli(_Arguments, prog="nestpipe eval", description=f"Evaluates a run.\n\n{example}", args=argv)
    run = Run.open(arguments.run)
    report = evaluate_run(run, step=arguments.step, target=arguments.target)
    if arguments.compare is not None:
        other = evaluate_run(Run.open(arguments.compare), target=arguments.target)
        _print(compare(report, other, run.config.seed), arguments.json, f"a: {arguments.run}   b: {arguments.compare}")
        return 0
    _print(report, arguments.json, f"{arguments.run}, {arguments.target} targets")
    if not arguments.json:
        floor = popularity(run.sequences, run.split, run.config, arguments.target).scalars()
        shown = "   ".join(f"{name} {floor[name]:.4f}" for name in report.metrics)
        Console().print(f"popularity floor: {shown}")
    return 0


def evaluate_run(run: Run, *, step: int | None = None, target: Literal["test", "validation"] = "test") -> Report:
    """Evaluates a run and keeps the report in its folder."""
    report = run.scorer(step).evaluate(target)
    report.save(run.folder / "eval" / target)
    return report


def _print(result: Report | Comparison, as_json: bool, title: str) -> None:
    if as_json:
        print(json.dumps(json.loads(result.to_json())))
    else:
        Console().print(title, markup=False)
        Console().print(result)
