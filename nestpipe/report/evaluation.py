"""What `nestpipe eval` left in a run's folder, in one form for models that retrieve and models that rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.errors import DataError

_HEADLINES = ("hr@10", "ndcg@10", "gauc", "hr", "ndcg", "auc")  # the first that there is leads the report
_HIGHER_IS_BETTER = ("hr", "ndcg", "mrr", "gauc", "auc")


@dataclass(frozen=True, slots=True)
class Value:
    """A mean, with its 95 % interval where there is one."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One metric: over everything, in each slice that has it, and of each floor that has it."""

    name: str  # hr@10, or gauc/click for the label click
    overall: Value
    slices: dict[str, Value]
    floors: dict[str, Value]

    @property
    def rises(self) -> bool:
        """Whether it is one of those that lie between 0 and 1, where more is better."""
        return self.name.partition("/")[0].partition("@")[0] in _HIGHER_IS_BETTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All metrics of one evaluation."""

    target: str
    about: str  # how many of what
    step: int | None  # of the checkpoint
    slices: dict[str, str]  # name -> how many of what
    floors: tuple[str, ...]
    lines: tuple[Line, ...]
    sliced_by: str

    @property
    def headline(self) -> Line | None:
        """The metric to name first."""
        for wanted in _HEADLINES:
            for line in self.lines:
                if line.name == wanted or line.name.startswith((f"{wanted}/", f"{wanted}@")):
                    return line
        return self.lines[0] if self.lines else None

    @property
    def floor(self) -> str | None:
        """The one that is hardest to beat in the leading metric."""
        known = self.headline.floors if self.headline else {}
        return max(known, key=lambda name: known[name].mean, default=None)


def read_evaluation(folder: Path, target: str) -> Evaluation:
    """Raises DataError if there is none."""
    path = folder / "eval" / target
    try:
        content = json.loads((path / "report.json").read_text())
    except FileNotFoundError:
        raise DataError(f"the run was not evaluated; 'nestpipe eval {folder}' does it.") from None
    beside = json.loads(found.read_text()) if (found := path / "beside.json").exists() else {}
    floors = {name: _values(metrics) for name, metrics in beside.get("floors", {}).items()}
    read = _of_labels if "tasks" in content else _of_items
    return read(content, target, beside.get("step"), floors)


def _of_items(
    content: dict[str, Any], target: str, step: int | None, floors: dict[str, dict[str, Value]]
) -> Evaluation:
    """A full ranking of the catalogue for each user."""
    slices = {one["name"]: _values(one["metrics"]) for one in content["slices"]}
    overall = _values(content["metrics"]) | {name: Value(mean) for name, mean in content["coverage"].items()}
    about = f"{content['num_users']:,} users, {content['num_items']:,} items; items taken out of the ranking: {content['seen']}"
    if content["targets_seen"]:
        about += f"; {content['targets_seen']:,} targets were seen before and count as misses"
    return Evaluation(
        target=target,
        about=about,
        step=step,
        slices={
            one["name"]: f"{one['low']:,}-{one['high']:,}, {one['num_users']:,} users" for one in content["slices"]
        },
        floors=tuple(floors),
        lines=tuple(_lines(overall, slices, floors)),
        sliced_by="number of events in the history",
    )


def _of_labels(
    content: dict[str, Any], target: str, step: int | None, floors: dict[str, dict[str, Value]]
) -> Evaluation:
    """Predictions of labels for each event."""
    slices = {name: _tasks(part) for name, part in content["slices"].items()}
    sizes = {
        name: max((one["num_events"] for one in part.values()), default=0) for name, part in content["slices"].items()
    }
    return Evaluation(
        target=target,
        about=f"{content['num_events']:,} events of {content['num_users']:,} users",
        step=step,
        slices={name: f"{number:,} events" for name, number in sizes.items()},
        floors=tuple(floors),
        lines=tuple(_lines(_tasks(content["tasks"]), slices, floors)),
        sliced_by="number of events before",
    )


def _lines(
    overall: dict[str, Value], slices: dict[str, dict[str, Value]], floors: dict[str, dict[str, Value]]
) -> Iterator[Line]:
    for name, value in overall.items():
        yield Line(name, value, _having(name, slices.items()), _having(name, floors.items()))


def _having(metric: str, parts: Iterable[tuple[str, dict[str, Value]]]) -> dict[str, Value]:
    return {name: values[metric] for name, values in parts if metric in values}


def _values(metrics: dict[str, dict[str, float]]) -> dict[str, Value]:
    return {name: Value(**one) for name, one in metrics.items()}


def _tasks(tasks: dict[str, Any]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for label, one in tasks.items():
        values = _values(one["intervals"]) | {name: Value(mean) for name, mean in one["points"].items()}
        found |= {f"{metric}/{label}": value for metric, value in values.items()}
    return found
