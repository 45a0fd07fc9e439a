"""`nestpipe eval`: full ranking of a run's held-out targets, the popularity floor beside it, or two runs compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from nestpipe.compare import Comparison, compare
from nestpipe.errors import ConfigError
from nestpipe.evaluate import Report
from nestpipe.rank_eval import RankingScorer, baselines, report_of
from nestpipe.run import Run
from nestpipe.scoring import popularity
from nestpipe.task_report import TaskComparison, TaskReport, compare_tasks


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
        _print(_compare(report, other, run.config.seed), arguments.json, f"a: {arguments.run}   b: {arguments.compare}")
        return 0
    _print(report, arguments.json, f"{arguments.run}, {arguments.target} targets")
    if not arguments.json:
        for line in _floors(run, report, arguments.target):
            Console().print(line, highlight=False)
    return 0


def _compare(a: Report | TaskReport, b: Report | TaskReport, seed: int) -> Comparison | TaskComparison:
    if isinstance(a, Report) and isinstance(b, Report):
        return compare(a, b, seed)
    if isinstance(a, TaskReport) and isinstance(b, TaskReport):
        return compare_tasks(a, b, seed)
    raise ConfigError("one run retrieves items, the other ranks events by labels; their metrics cannot be compared.")


def _floors(run: Run, report: Report | TaskReport, target: Literal["test", "validation"]) -> Iterator[str]:
    """What any model must beat, on the same targets."""
    if isinstance(report, Report):
        floor = popularity(run.sequences, run.split, run.config, target).scalars()
        yield "popularity floor: " + "   ".join(f"{name} {floor[name]:.4f}" for name in report.metrics)
        return
    scorer = run.scorer()
    assert isinstance(scorer, RankingScorer)
    for name, found in baselines(scorer.predict(target), run.sequences, run.split).items():
        scalars = report_of(found, run.sequences, run.split, run.config).scalars()
        shown = (f"{metric} {value:.4f}" for metric, value in scalars.items() if metric.startswith("gauc"))
        yield f"{name}: " + "   ".join(shown)


def evaluate_run(
    run: Run, *, step: int | None = None, target: Literal["test", "validation"] = "test"
) -> Report | TaskReport:
    """Evaluates a run and keeps the report in its folder."""
    report = run.scorer(step).evaluate(target)
    report.save(run.folder / "eval" / target)
    return report


def _print(result: Report | TaskReport | Comparison | TaskComparison, as_json: bool, title: str) -> None:
    if as_json:
        print(json.dumps(json.loads(result.to_json())))
    else:
        Console().print(title, markup=False)
        Console().print(result)
