"""`nestpipe eval`: metrics of a run on held-out events next to baselines, or two runs compared."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

from rich.console import Console

from nestpipe.atomic_files import replace_file
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.cli.arguments import EvalArguments
from nestpipe.errors import ConfigError
from nestpipe.eval.compare import Comparison, LabelComparison, compare, compare_labels
from nestpipe.eval.example_lists import make_examples
from nestpipe.eval.label_report import LabelReport
from nestpipe.eval.predictor import popularity
from nestpipe.eval.ranking_eval import RankingPredictor, baselines, report_of
from nestpipe.eval.retrieval_eval import EvalReport
from nestpipe.eval.topk_metrics import Interval
from nestpipe.training.run_folder import Run


def main(arguments: EvalArguments) -> int:
    run = Run.open(arguments.run)
    report = evaluate_run(run, step=arguments.step, target=arguments.target)
    if arguments.compare is not None:
        other = evaluate_run(Run.open(arguments.compare), target=arguments.target)
        _print(_compare(report, other, run.config.seed), arguments.json, f"a: {arguments.run}   b: {arguments.compare}")
        return 0
    _print(report, arguments.json, f"{arguments.run}, {arguments.target} targets")
    if not arguments.json:
        baselines = _baselines(run, report, arguments.target)
        for name, metrics in baselines.items():
            shown = (f"{metric} {mean_of(one):.4f}" for metric, one in metrics.items())
            Console().print(f"{name}: " + "   ".join(shown), highlight=False)
        _write_context(run, arguments.target, step=_step(run, arguments.step), baselines=baselines)
        (user,) = run.sequences.vocabulary("user").own_ids(run.sequences.users[:1])
        folder = shlex.quote(str(arguments.run))
        print(f"Next: nestpipe recommend {folder} --user {shlex.quote(str(user))}, or nestpipe serve {folder}")
    return 0


def _compare(a: EvalReport | LabelReport, b: EvalReport | LabelReport, seed: int) -> Comparison | LabelComparison:
    if isinstance(a, EvalReport) and isinstance(b, EvalReport):
        return compare(a, b, seed)
    if isinstance(a, LabelReport) and isinstance(b, LabelReport):
        return compare_labels(a, b, seed)
    raise ConfigError("one run retrieves items, the other ranks events by labels; their metrics cannot be compared.")


def _baselines(
    run: Run, report: EvalReport | LabelReport, target: Literal["test", "validation"]
) -> dict[str, dict[str, Interval | float]]:
    """What any model should beat, on the same targets: name -> metric -> value, with its interval where there is one."""
    if isinstance(report, EvalReport):
        return {"popularity baseline": {**popularity(run.sequences, run.split, run.config, target).metrics}}
    predictor = run.predictor()
    assert isinstance(predictor, RankingPredictor)
    measured: dict[str, dict[str, Interval | float]] = {}
    for name, predictions in baselines(predictor.predict(target), run.sequences, run.split).items():
        tasks = report_of(predictions, run.sequences, run.split, run.config).tasks
        measured[name] = {}
        for label, one in tasks.items():
            if "gauc" in one.intervals:
                measured[name][f"gauc/{label}"] = one.intervals["gauc"]
            elif "auc" in one.points:  # users with one event each have no order to compare
                measured[name][f"auc/{label}"] = one.points["auc"]
    return measured


def mean_of(value: Interval | float) -> float:
    return value.mean if isinstance(value, Interval) else value


def evaluate_run(
    run: Run, *, step: int | None = None, target: Literal["test", "validation"] = "test"
) -> EvalReport | LabelReport:
    """Evaluates a run and keeps the report in its folder."""
    chosen = _step(run, step)
    predictor = run.predictor(chosen)
    report = predictor.evaluate(target)
    folder = run.folder / "eval" / target
    (folder / "context.json").unlink(missing_ok=True)  # it belongs to the previous report
    report.save(folder)
    make_examples(predictor, run.sequences, run.split).save(folder)
    _write_context(run, target, step=chosen, baselines={})
    return report


def _write_context(
    run: Run, target: str, *, step: int, baselines: Mapping[str, Mapping[str, Interval | float]]
) -> None:
    """Stores next to a report its checkpoint and, where they were computed, the baselines."""
    content = {
        "step": step,
        "baselines": {
            name: {key: asdict(one) if isinstance(one, Interval) else {"mean": one} for key, one in own.items()}
            for name, own in baselines.items()
        },
    }
    replace_file(run.folder / "eval" / target / "context.json", json.dumps(content, indent=2).encode())


def _step(run: Run, step: int | None) -> int:
    """The given step, else that of the best checkpoint, else of the latest."""
    return Manifest.read(checkpoint_folders.best_checkpoint(run.checkpoints)).step if step is None else step


def _print(result: EvalReport | LabelReport | Comparison | LabelComparison, as_json: bool, title: str) -> None:
    if as_json:
        print(json.dumps(json.loads(result.to_json())))
    else:
        Console().print(title, markup=False)
        Console().print(result)
