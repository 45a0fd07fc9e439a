"""Reads a run folder for the report. What is missing or damaged becomes a `Missing`: one line with the reason and a remedy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from nestpipe.atomic_files import read_jsonl
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.reader import TableFacts, dense_shapes, table_facts
from nestpipe.errors import ConfigError, DataError
from nestpipe.eval.example_lists import EXAMPLES, Examples
from nestpipe.eval.protocol import Protocol
from nestpipe.eval.seed_summary import SEEDS
from nestpipe.profiling import overlap_report, trace_file
from nestpipe.profiling.overlap import StepTimes
from nestpipe.profiling.trace_file import RankTrace
from nestpipe.training.leak_audit import AUDIT
from nestpipe.training.process import is_locked

Found = TypeVar("Found")
TARGETS = ("test", "validation")


@dataclass(frozen=True, slots=True)
class Missing:
    """Why something cannot be shown, in one line."""

    text: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """State of the run, and a sentence about it."""

    word: Literal["finished", "interrupted", "training", "stopped"]
    text: str


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """The traces of all ranks, the steps that all of them recorded completely, and their summary."""

    traces: tuple[RankTrace, ...]
    steps: list[list[StepTimes]]
    report: overlap_report.OverlapReport


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The latest checkpoint: its tables and the number of dense weights."""

    manifest: Manifest
    tables: list[TableFacts]
    num_dense: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything the report shows about a run."""

    name: str
    folder: Path
    settings: dict[str, Any] | Missing  # by dotted name
    about: dict[str, Any]  # run.json; empty if there is none
    records: list[dict[str, Any]]  # of the metrics file, without the summary
    no_records: Missing | None
    summary: dict[str, Any]  # empty before the end
    state: RunStatus
    traced: TracedSteps | Missing
    saved: SavedCheckpoint | Missing
    evaluations: dict[str, Evaluation | Missing]  # test always, validation if there is one
    examples: Examples | Missing

    @property
    def num_ranks(self) -> int | None:
        """Number of processes, if recorded."""
        if isinstance(known := self.about.get("num_ranks"), int):
            return known
        return len(self.traced.traces) if isinstance(self.traced, TracedSteps) else None

    @property
    def num_steps(self) -> int | None:
        known = self.summary.get("steps") or max((record["step"] for record in self.records), default=None)
        return known if isinstance(known, int) else None

    @property
    def seconds(self) -> float | None:
        """Training time over all interruptions, if recorded."""
        known = [record["seconds"] for record in self.records if "seconds" in record]
        saved = self.saved.manifest.progress.get("seconds") if isinstance(self.saved, SavedCheckpoint) else None
        value = self.summary.get("seconds") or (known[-1] if known else saved)
        return float(value) if isinstance(value, int | float) else None


def read_facts(folder: Path) -> RunFacts:
    """Reads whatever is there; raises ConfigError if the folder is not a run."""
    if not (folder / "config.json").exists() and not (folder / "metrics.jsonl").exists():
        reason = "there is no such folder" if not folder.exists() else "it has neither config.json nor metrics.jsonl"
        raise ConfigError(f"{folder} is not a run: {reason}. Give the folder that 'nestpipe train' wrote.")
    lines = attempt("the metrics", lambda: read_jsonl(folder / "metrics.jsonl"))
    records = [] if isinstance(lines, Missing) else [line for line in lines if "step" in line]
    summaries = [line["summary"] for line in lines if "summary" in line] if isinstance(lines, list) else []
    summary: Any = summaries[-1] if summaries else {}
    about = attempt("run.json", lambda: _object(folder / "run.json"))
    evaluations = {
        target: attempt(f"the evaluation of {target} targets", partial(read_evaluation, folder, target))
        for target in TARGETS
        if target == "test" or (folder / "eval" / target).exists()
    }
    return RunFacts(
        name=folder.resolve().name,
        folder=folder,
        settings=attempt("the configuration", lambda: flattened(_object(folder / "config.json"))),
        about={} if isinstance(about, Missing) else about,
        records=records,
        no_records=lines if isinstance(lines, Missing) else None,
        summary=summary if isinstance(summary, dict) else {},
        state=_state(folder, summary, records),
        traced=attempt("the trace", lambda: _traced(folder)),
        saved=attempt("the latest checkpoint", lambda: _saved(folder)),
        evaluations=evaluations,
        examples=attempt("the examples", lambda: _examples(folder)),
    )


def attempt(what: str, read: Callable[[], Found]) -> Found | Missing:
    """The result of `read`, or the reason of its failure."""
    try:
        return read()
    except FileNotFoundError as error:
        return Missing(f"There is no file for {what}: {error.filename}.")
    except Exception as error:  # one damaged file must not hide the others
        return Missing(f"{what[0].upper()}{what[1:]} cannot be shown: {error}")


def flattened(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _examples(folder: Path) -> Examples:
    """Of the evaluation that there is; one of validation targets has the same."""
    return Examples.load(next(path.parent for path in sorted((folder / "eval").glob(f"*/{EXAMPLES}"))))


def _state(folder: Path, summary: Any, records: list[dict[str, Any]]) -> RunStatus:
    reached = f"step {max(record['step'] for record in records):,}" if records else "its first log"
    if isinstance(summary, dict) and "stopped" in summary:
        reason = str(summary["stopped"])
        if reason == "interrupted":
            return RunStatus("interrupted", "Interrupted by a signal; --resume continues it.")
        return RunStatus("finished", f"Finished: {reason}.")
    if attempt("the lock", lambda: is_locked(folder)) is True:
        return RunStatus("training", f"Still training; this report covers it up to {reached}.")
    return RunStatus(
        "stopped",
        f"Ended without a summary after {reached}: killed, crashed, or training on another machine. --resume continues it.",
    )


def _traced(folder: Path) -> TracedSteps:
    traces = trace_file.load(folder)
    steps = overlap_report.choose(traces)
    return TracedSteps(traces, steps, overlap_report.report(traces, steps))


def _saved(folder: Path) -> SavedCheckpoint:
    latest = checkpoint_folders.checkpoint_folder(checkpoint_folders.checkpoints_of(folder))
    manifest = Manifest.read(latest)
    shapes = dense_shapes(latest, manifest)
    return SavedCheckpoint(manifest, table_facts(latest, manifest), _num_weights(shapes))


def _num_weights(shapes: dict[str, list[int]]) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("weights."))


_HEADLINES = ("hr@10", "ndcg@10", "gauc", "hr", "ndcg", "auc")  # the first available one leads the report
_HIGHER_IS_BETTER = ("hr", "ndcg", "mrr", "gauc", "auc")


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A mean, with its 95 % interval where there is one."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class MetricLine:
    """One metric: overall, by slice, and of each baseline."""

    name: str  # hr@10, or gauc/click for the label click
    overall: MetricValue
    slices: dict[str, MetricValue]
    baselines: dict[str, MetricValue]

    @property
    def rises(self) -> bool:
        """Whether it lies between 0 and 1 and higher is better."""
        return self.name.partition("/")[0].partition("@")[0] in _HIGHER_IS_BETTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The metrics of one evaluation."""

    target: str
    protocol: Protocol | None  # None if an earlier version evaluated the run
    about: str  # number of users, items or events
    step: int | None  # of the checkpoint
    slices: dict[str, str]  # name -> its size
    baselines: tuple[str, ...]
    lines: tuple[MetricLine, ...]
    sliced_by: str
    seeds: dict[str, Any] | None = None  # of several runs, if they were evaluated as one result
    audit: dict[str, Any] | None = None

    @property
    def headline(self) -> MetricLine | None:
        """The metric that leads the report."""
        for wanted in _HEADLINES:
            for line in self.lines:
                if line.name == wanted or line.name.startswith((f"{wanted}/", f"{wanted}@")):
                    return line
        return self.lines[0] if self.lines else None

    @property
    def baseline(self) -> str | None:
        """The best one in the headline metric."""
        known = self.headline.baselines if self.headline else {}
        return max(known, key=lambda name: known[name].mean, default=None)


def read_evaluation(folder: Path, target: str) -> Evaluation:
    """Metrics of an evaluation and its baselines; raises DataError if there is none."""
    path = folder / "eval" / target
    try:
        content = json.loads((path / "report.json").read_text())
    except FileNotFoundError:
        raise DataError(f"the run was not evaluated; run 'nestpipe eval {folder}'.") from None
    context = json.loads(file.read_text()) if (file := path / "context.json").exists() else {}
    baselines = {name: _values(metrics) for name, metrics in context.get("baselines", {}).items()}
    read = _of_labels if "tasks" in content else _of_items
    found = read(content, target, context.get("step"), baselines)
    return replace(found, seeds=_optional(path / SEEDS), audit=_optional(path / AUDIT))


def _optional(path: Path) -> dict[str, Any] | None:
    return _object(path) if path.exists() else None


def _of_items(
    content: dict[str, Any], target: str, step: int | None, baselines: dict[str, dict[str, MetricValue]]
) -> Evaluation:
    """Of a full ranking of the catalogue per user."""
    slices = {one["name"]: _values(one["metrics"]) for one in content["slices"]}
    overall = _values(content["metrics"]) | {name: MetricValue(mean) for name, mean in content["coverage"].items()}
    about = f"{content['num_users']:,} users, {content['num_items']:,} items; items excluded from the ranking: {content['seen']}"
    if content["targets_seen"]:
        about += f"; {content['targets_seen']:,} targets are excluded too and count as misses"
    return Evaluation(
        target=target,
        protocol=Protocol.from_json(content.get("protocol")),
        about=about,
        step=step,
        slices={
            one["name"]: f"{one['low']:,}-{one['high']:,}, {one['num_users']:,} users" for one in content["slices"]
        },
        baselines=tuple(baselines),
        lines=tuple(_lines(overall, slices, baselines)),
        sliced_by="number of events in the history; cold and warm: training events of the target",
    )


def _of_labels(
    content: dict[str, Any], target: str, step: int | None, baselines: dict[str, dict[str, MetricValue]]
) -> Evaluation:
    """Of label predictions per event."""
    slices = {name: _tasks(labels) for name, labels in content["slices"].items()}
    sizes = {
        name: max((one["num_events"] for one in labels.values()), default=0)
        for name, labels in content["slices"].items()
    }
    return Evaluation(
        target=target,
        protocol=Protocol.from_json(content.get("protocol")),
        about=f"{content['num_events']:,} events of {content['num_users']:,} users",
        step=step,
        slices={name: f"{number:,} events" for name, number in sizes.items()},
        baselines=tuple(baselines),
        lines=tuple(_lines(_tasks(content["tasks"]), slices, baselines)),
        sliced_by="number of preceding events",
    )


def _lines(
    overall: dict[str, MetricValue],
    slices: dict[str, dict[str, MetricValue]],
    baselines: dict[str, dict[str, MetricValue]],
) -> Iterator[MetricLine]:
    for name, value in overall.items():
        yield MetricLine(name, value, _having(name, slices.items()), _having(name, baselines.items()))


def _having(metric: str, groups: Iterable[tuple[str, dict[str, MetricValue]]]) -> dict[str, MetricValue]:
    return {name: values[metric] for name, values in groups if metric in values}


def _values(metrics: dict[str, dict[str, float]]) -> dict[str, MetricValue]:
    return {name: MetricValue(**one) for name, one in metrics.items()}


def _tasks(tasks: dict[str, Any]) -> dict[str, MetricValue]:
    metrics: dict[str, MetricValue] = {}
    for label, one in tasks.items():
        values = _values(one["intervals"]) | {name: MetricValue(mean) for name, mean in one["points"].items()}
        metrics |= {f"{metric}/{label}": value for metric, value in values.items()}
    return metrics
