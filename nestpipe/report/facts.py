"""What the folder of a run holds. A piece that is missing or damaged is a `Missing`: one line that says so and what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from nestpipe import checkpoint, overlap_report, trace
from nestpipe.checkpoint import Manifest
from nestpipe.checkpoint_facts import TableFacts, table_facts, tensor_shapes
from nestpipe.errors import ConfigError
from nestpipe.metrics import read_jsonl
from nestpipe.overlap import Step
from nestpipe.process import is_taken
from nestpipe.report.evaluation import Evaluation, read_evaluation
from nestpipe.trace import RankTrace

Found = TypeVar("Found")
TARGETS = ("test", "validation")


@dataclass(frozen=True, slots=True)
class Missing:
    """What is not there, in one line."""

    text: str


@dataclass(frozen=True, slots=True)
class State:
    """Whether the run is at its end, and a sentence about it."""

    word: Literal["finished", "interrupted", "training", "stopped"]
    text: str


@dataclass(frozen=True, slots=True)
class Traced:
    """What the ranks recorded, the steps that all of them have whole, and what they say."""

    traces: tuple[RankTrace, ...]
    steps: list[list[Step]]
    report: overlap_report.Report


@dataclass(frozen=True, slots=True)
class Saved:
    """The latest checkpoint: its tables and the number of weights of the dense part."""

    manifest: Manifest
    tables: list[TableFacts]
    num_dense: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A run, as far as its folder tells."""

    name: str
    folder: Path
    settings: dict[str, Any] | Missing  # by dotted name
    about: dict[str, Any]  # run.json; empty if there is none
    records: list[dict[str, Any]]  # of the metrics file, without the summary
    no_records: Missing | None
    summary: dict[str, Any]  # empty before the end
    state: State
    traced: Traced | Missing
    saved: Saved | Missing
    evaluations: dict[str, Evaluation | Missing]  # test always, validation if there is one

    @property
    def num_ranks(self) -> int | None:
        """How many processes trained, if anything says so."""
        if isinstance(known := self.about.get("num_ranks"), int):
            return known
        return len(self.traced.traces) if isinstance(self.traced, Traced) else None

    @property
    def num_steps(self) -> int | None:
        known = self.summary.get("steps") or max((record["step"] for record in self.records), default=None)
        return known if isinstance(known, int) else None

    @property
    def seconds(self) -> float | None:
        """Training time over all interruptions, as far as it was written."""
        known = [record["seconds"] for record in self.records if "seconds" in record]
        saved = self.saved.manifest.progress.get("seconds") if isinstance(self.saved, Saved) else None
        value = self.summary.get("seconds") or (known[-1] if known else saved)
        return float(value) if isinstance(value, int | float) else None


def read_facts(folder: Path) -> Facts:
    """Everything that can be read; raises ConfigError if the folder is no run at all."""
    if not (folder / "config.json").exists() and not (folder / "metrics.jsonl").exists():
        seen = "there is no such folder" if not folder.exists() else "it has neither config.json nor metrics.jsonl"
        raise ConfigError(f"{folder} is no run: {seen}. Name the folder that 'nestpipe train' wrote.")
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
    return Facts(
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
    )


def attempt(what: str, read: Callable[[], Found]) -> Found | Missing:
    """What `read` returns, or the reason why it cannot: a report is made of whatever there is."""
    try:
        return read()
    except FileNotFoundError as error:
        return Missing(f"There is no file for {what}: {error.filename}.")
    except Exception as error:  # whatever is wrong with one file, the others are still worth reading
        return Missing(f"{what[0].upper()}{what[1:]} cannot be shown: {error}")


def flattened(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects by dotted names."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _state(folder: Path, summary: Any, records: list[dict[str, Any]]) -> State:
    reached = f"step {max(record['step'] for record in records):,}" if records else "its first log"
    if isinstance(summary, dict) and "stopped" in summary:
        reason = str(summary["stopped"])
        if reason == "interrupted":
            return State("interrupted", "Interrupted by a signal; --resume goes on with it.")
        return State("finished", f"Finished: {reason}.")
    if attempt("the lock", lambda: is_taken(folder)) is True:
        return State("training", f"Still training; this report shows it up to {reached}. Make it again for more.")
    return State(
        "stopped",
        f"Ended without a summary after {reached}: killed, crashed, or training on another machine. --resume goes on with it.",
    )


def _traced(folder: Path) -> Traced:
    traces = trace.load(folder)
    steps = overlap_report.choose(traces)
    return Traced(traces, steps, overlap_report.report(traces, steps))


def _saved(folder: Path) -> Saved:
    latest = checkpoint.folder_of(folder / "checkpoints")
    manifest = Manifest.read(latest)
    shapes = tensor_shapes(latest / "dense.safetensors")
    return Saved(manifest, table_facts(latest, manifest), _num_weights(shapes))


def _num_weights(shapes: dict[str, list[int]]) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("weights."))
