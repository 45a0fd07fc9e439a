"""`nestpipe eval`: metrics of a run on held-out events next to baselines, or two runs compared; also on several ranks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from nestpipe.atomic_files import replace_file
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.cli.arguments import EvalArguments
from nestpipe.errors import ConfigError
from nestpipe.eval.baselines import BASELINES, evaluate_baselines
from nestpipe.eval.compare import Comparison, LabelComparison, compare, compare_labels, signed
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.example_lists import make_examples
from nestpipe.eval.instruction_eval import FILE as INSTRUCTIONS
from nestpipe.eval.instruction_eval import InstructionMetrics, instruction_metrics
from nestpipe.eval.label_report import LabelReport
from nestpipe.eval.list_metrics import with_list_metrics
from nestpipe.eval.predictor import GenerativePredictor
from nestpipe.eval.protocol import Target
from nestpipe.eval.ranking_eval import Predictions, RankingPredictor, baselines, report_of
from nestpipe.eval.scenario_eval import FILE as SCENARIOS
from nestpipe.eval.scenario_eval import ScenarioMetrics, scenario_metrics
from nestpipe.eval.seed_summary import SEEDS, SeedSummary, summarise
from nestpipe.eval.topk_metrics import Interval, list_length
from nestpipe.training.distributed_eval import EvalWorld, eval_world
from nestpipe.training.instructed_logs import instructed_logs
from nestpipe.training.leak_audit import AUDIT, LeakAudit, audit_run
from nestpipe.training.run_folder import Run
from nestpipe.training.sasrec_baseline import SASREC, evaluate_sasrec

Parts = ScenarioMetrics | InstructionMetrics
_VERDICTS = {"no difference shown": "not shown"}  # in a narrow table


def main(arguments: EvalArguments) -> int:
    if arguments.compare is not None and arguments.seeds:
        raise ConfigError("--compare pairs two runs and --seeds joins several into one result; give one of the two.")
    if arguments.audit:
        return _audit(arguments)
    with eval_world() as world:
        run = _opened(arguments.run, arguments)
        others = {str(one): _opened(one, arguments) for one in arguments.seeds}
        _require_seeds(run, others)
        stores = None if arguments.compare is not None or others else arguments.instructions
        evaluated = evaluate_run(run, step=arguments.step, target=arguments.target, world=world, stores=stores)
        if arguments.compare is not None:
            other = evaluate_run(_opened(arguments.compare, arguments), target=arguments.target, world=world)
            compared = _compare(evaluated.report, other.report, run.config.seed)
            if world.leads:
                _print(compared, arguments.json, f"a: {arguments.run}   b: {arguments.compare}")
            return 0
        reports = {str(arguments.run): evaluated.report}
        for name, other_run in others.items():
            reports[name] = evaluate_run(other_run, target=arguments.target, world=world).report
    if not world.leads:
        return 0
    if others:
        summary = summarise(reports)
        replace_file(run.folder / "eval" / arguments.target / SEEDS, summary.to_json().encode())
        _print(summary, arguments.json, f"{arguments.run} and {len(others)} more, {arguments.target} targets")
        return 0
    _print(evaluated.report, arguments.json, f"{arguments.run}, {arguments.target} targets", evaluated.parts)
    if not arguments.json:
        _show_context(run, evaluated, arguments)
    return 0


def _audit(arguments: EvalArguments) -> int:
    """Prints and stores the audit of a run; 1 if it found a leak."""
    if arguments.compare is not None or arguments.seeds:
        raise ConfigError("--audit looks at one run; leave out --compare and --seeds.")
    run = _opened(arguments.run, arguments)
    found = audit_run(run, step=arguments.step, target=arguments.target)
    folder = run.folder / "eval" / arguments.target
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / AUDIT, found.to_json().encode())
    _print(found, arguments.json, f"{arguments.run}, {arguments.target} targets")
    return 1 if found.leaks else 0


def _require_seeds(run: Run, others: Mapping[str, Run]) -> None:
    """Raises ConfigError unless all runs differ in their seeds, and in nothing else."""
    seeds = {run.config.seed: str(run.folder)}
    for name, other in others.items():
        if other.config.seed in seeds:
            raise ConfigError(
                f"{name} has seed {other.config.seed}, as {seeds[other.config.seed]} has: that is one result, not two. Name runs of other seeds."
            )
        seeds[other.config.seed] = name
        mine, theirs = run.settings, other.settings
        changed = [
            f"{key}: {mine.get(key)} and {theirs.get(key)}"
            for key in sorted(mine.keys() | theirs.keys())
            if key != "seed" and mine.get(key) != theirs.get(key)
        ]
        if changed:
            raise ConfigError(
                f"{name} differs from {run.folder} in more than the seed, so their mean would mix two settings:\n"
                + "\n".join(f"  - {line}" for line in changed)
            )


def _opened(folder: Path, arguments: EvalArguments) -> Run:
    """The run with the flags of this evaluation instead of its own settings."""
    run = Run.open(folder)
    own = run.config.eval
    own = replace(
        own,
        max_users=own.max_users if arguments.max_users is None else arguments.max_users,
        ks=arguments.ks or own.ks,
        seen=arguments.seen or own.seen,
        batch_size=own.batch_size if arguments.batch_size is None else arguments.batch_size,
    )
    if problems := [f"eval.{problem}" for problem in own.problems()]:  # the metric of training is not measured here
        raise ConfigError("; ".join(problems))
    return replace(run, config=replace(run.config, eval=own))


def _show_context(run: Run, evaluated: Evaluated, arguments: EvalArguments) -> None:
    """Prints and stores the baselines, and prints the next command."""
    if evaluated.predictions is not None:
        baselines = _label_baselines(run, evaluated.predictions)
        for name, metrics in baselines.items():
            shown = (f"{metric} {mean_of(one):.4f}" for metric, one in metrics.items())
            Console().print(f"{name}: " + "   ".join(shown), highlight=False)
    else:
        baselines = _item_baselines(run, evaluated.report, arguments)
    _write_context(run, arguments.target, step=evaluated.step, baselines=baselines)
    (user,) = run.sequences.vocabulary("user").own_ids(run.sequences.users[:1])
    folder = shlex.quote(str(arguments.run))
    print(f"Next: nestpipe recommend {folder} --user {shlex.quote(str(user))}, or nestpipe serve {folder}")


def _item_baselines(
    run: Run, model: EvalReport | LabelReport, arguments: EvalArguments
) -> dict[str, dict[str, Interval | float]]:
    """Prints the baselines of a retrieval run, in the same protocol, and how much better the model is."""
    assert isinstance(model, EvalReport)
    fitted = [name for name in dict.fromkeys(arguments.baselines) if name != "sasrec"]
    reports = evaluate_baselines(run.sequences, run.split, run.config, arguments.target, names=fitted)
    found = {BASELINES[name]: report for name, report in reports.items()}
    if "sasrec" in arguments.baselines:
        found[SASREC] = evaluate_sasrec(run, arguments.target)
    k = list_length(model.ks)
    shown = (f"hr@{k}", f"ndcg@{k}")
    table = Table(title="baselines, in the same protocol", box=None, pad_edge=False)
    has_cold = _cold(model, shown[0]) is not None
    for header in ("baseline", *shown, *(["cold"] if has_cold else []), f"{shown[0]}, model - it [95 %]", "model is"):
        table.add_column(header, no_wrap=True)
    measured: dict[str, dict[str, Interval | float]] = {}
    for name, report in found.items():
        complete = with_list_metrics(report, run.sequences, run.split, run.config)
        gain = compare(complete, model, run.config.seed).differences[shown[0]]
        figures = [f"{complete.metrics[metric].mean:.4f}" for metric in shown]
        if has_cold:
            figures.append(f"{_cold(complete, shown[0]) or 0.0:.4f}")
        table.add_row(name, *figures, signed(gain.interval), _VERDICTS.get(gain.verdict, gain.verdict))
        measured[name] = {**complete.metrics, **complete.coverage}
    if found:
        Console().print(table)
    return measured


def _cold(report: EvalReport, metric: str) -> float | None:
    """A metric of users whose target has no training event; None if there are none."""
    return next((part.metrics[metric].mean for part in report.slices if part.name == "cold"), None)


def _compare(a: EvalReport | LabelReport, b: EvalReport | LabelReport, seed: int) -> Comparison | LabelComparison:
    if isinstance(a, EvalReport) and isinstance(b, EvalReport):
        return compare(a, b, seed)
    if isinstance(a, LabelReport) and isinstance(b, LabelReport):
        return compare_labels(a, b, seed)
    raise ConfigError("one run retrieves items, the other ranks events by labels; their metrics cannot be compared.")


def _label_baselines(run: Run, predictions: Predictions) -> dict[str, dict[str, Interval | float]]:
    """What any ranker should beat, on the same events: name -> metric -> value, with its interval where there is one."""
    measured: dict[str, dict[str, Interval | float]] = {}
    for name, found in baselines(predictions, run.sequences, run.split).items():
        tasks = report_of(found, run.sequences, run.split, run.config).tasks
        measured[name] = {}
        for label, one in tasks.items():
            if "gauc" in one.intervals:
                measured[name][f"gauc/{label}"] = one.intervals["gauc"]
            elif "auc" in one.points:  # users with one event each have no order to compare
                measured[name][f"auc/{label}"] = one.points["auc"]
    return measured


def mean_of(value: Interval | float) -> float:
    return value.mean if isinstance(value, Interval) else value


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A report, the checkpoint it is of and, for a ranking run, the predictions behind it."""

    report: EvalReport | LabelReport
    step: int
    predictions: Predictions | None = None
    scenarios: ScenarioMetrics | None = None
    instructions: InstructionMetrics | None = None

    @property
    def parts(self) -> dict[str, Parts]:
        """What belongs to the report, by name."""
        found: dict[str, Parts | None] = {"scenarios": self.scenarios, "instructions": self.instructions}
        return {name: one for name, one in found.items() if one is not None}


def evaluate_run(
    run: Run,
    *,
    step: int | None = None,
    target: Target = "test",
    world: EvalWorld,
    stores: Sequence[Path] | None = None,
) -> Evaluated:
    """Evaluates a run and keeps the report in its folder; with `stores`, also what instructions are worth. Collective."""
    step = _step(run, step)
    predictor = world.predictor(run, step)
    if isinstance(predictor, RankingPredictor):
        found = predictor.predict(target, ranks=world.ranks)
        evaluated = Evaluated(predictor.report(found, target), step, found)
    else:
        report = predictor.evaluate(target, ranks=world.ranks)
        settings = {"seed": run.config.seed, "num_bootstrap": run.config.eval.num_bootstrap}
        scenarios = scenario_metrics(report, run.sequences, run.split, target, **settings)
        instructions = None
        if stores is not None and (logs := instructed_logs(run, report, target, stores)):
            instructions = instruction_metrics(
                cast(GenerativePredictor, predictor), report, logs, run.split, target, ranks=world.ranks, **settings
            )
        report = with_list_metrics(report, run.sequences, run.split, run.config)
        evaluated = Evaluated(report, step, scenarios=scenarios, instructions=instructions)
    if world.leads:
        folder = run.folder / "eval" / target
        for name in ("context.json", SEEDS, SCENARIOS, INSTRUCTIONS):  # they belong to the previous report
            (folder / name).unlink(missing_ok=True)
        evaluated.report.save(folder)
        for part in evaluated.parts.values():
            part.save(folder)
        if (
            world.ranks.size == 1
        ):  # several ranks hold a part of the rows each, and a few lists are not worth an exchange
            make_examples(predictor, run.sequences, run.split).save(folder)
        _write_context(run, target, step=step, baselines={})
    return evaluated


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


def _print(
    result: EvalReport | LabelReport | Comparison | LabelComparison | SeedSummary | LeakAudit,
    as_json: bool,
    title: str,
    parts: Mapping[str, Parts] | None = None,
) -> None:
    parts = parts or {}
    if as_json:
        print(
            json.dumps(json.loads(result.to_json()) | {name: json.loads(one.to_json()) for name, one in parts.items()})
        )
        return
    Console().print(title, markup=False)
    if isinstance(result, EvalReport | LabelReport | SeedSummary | LeakAudit):
        Console().print(f"protocol: {result.protocol}", markup=False, highlight=False)
    Console().print(result)
    for part in parts.values():
        Console().print(part)
