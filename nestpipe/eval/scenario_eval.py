"""Metrics by scenario: the users of an evaluation divided by the scenario of their target."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from nestpipe.atomic_files import replace_file
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Ints, Split
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.protocol import Target
from nestpipe.eval.topk_metrics import Interval, bootstrap_all

FILE = "scenarios.json"
_K = 10  # list length that is shown, if it was measured


@dataclass(frozen=True, slots=True)
class ScenarioMetrics:
    """Users and metrics with 95 % intervals, by the scenario's name in the log."""

    num_users: dict[str, int]
    metrics: dict[str, dict[str, Interval]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def save(self, folder: Path) -> None:
        replace_file(folder / FILE, self.to_json().encode())

    def __rich__(self) -> Table:
        known = list(next(iter(self.metrics.values())))
        shown = [f"{kind}@{_K}" if f"{kind}@{_K}" in known else _longest(known, kind) for kind in ("hr", "ndcg")]
        table = Table("scenario", "users", *(f"{name} [95 %]" for name in shown), title="by scenario of the target")
        for name, own in self.metrics.items():
            table.add_row(name, f"{self.num_users[name]:,}", *(str(own[metric]) for metric in shown))
        return table


def _longest(known: list[str], kind: str) -> str:
    return [name for name in known if name.startswith(f"{kind}@")][-1]


def scenario_metrics(
    report: EvalReport, sequences: Sequences, split: Split, target: Target, *, seed: int, num_bootstrap: int
) -> ScenarioMetrics | None:
    """The metrics of a report by scenario; None if the log names no scenarios."""
    names = scenario_masks(sequences, target_events(report, sequences, split, target))
    if not names:
        return None
    per_user = report.user_metrics(report.ks)
    metrics = {
        name: bootstrap_all({metric: one[mask] for metric, one in per_user.items()}, seed=seed, num=num_bootstrap)
        for name, mask in names.items()
    }
    return ScenarioMetrics({name: int(mask.sum()) for name, mask in names.items()}, metrics)


def target_events(report: EvalReport, sequences: Sequences, split: Split, target: Target) -> Ints:
    """The event of the log that each user of a report was evaluated on."""
    rows = np.searchsorted(sequences.users, report.user)
    return np.asarray(sequences.offsets[rows] + (split.test if target == "test" else split.validation)[rows])


def scenario_masks(sequences: Sequences, events: Ints) -> dict[str, NDArray[np.bool_]]:
    """Which events are of which scenario, by its name in the log; empty if the log names no scenarios."""
    stored = sequences.event_features.get("scenario")
    if stored is None or stored.offsets is None:
        return {}
    has = stored.offsets[events + 1] > stored.offsets[events]
    numbers = np.full(len(events), -1)
    numbers[has] = stored.values[stored.offsets[events[has]]]
    own = sequences.vocabulary("scenario").own_ids(np.unique(numbers[has]))
    names = {str(name): numbers == number for name, number in zip(own, np.unique(numbers[has]).tolist(), strict=True)}
    if not has.all():
        names["none"] = ~has
    return names
