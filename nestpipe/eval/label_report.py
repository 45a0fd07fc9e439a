"""Report of a label evaluation: metrics per label and slice, with the sums per user that comparisons need."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from rich.table import Table

from nestpipe.atomic_files import replace_file
from nestpipe.eval.label_metrics import LabelPredictions, Ratio, intervals, points, ratios
from nestpipe.eval.protocol import Protocol
from nestpipe.eval.topk_metrics import Array, Counts, Interval, tertiles

_SHORT = {"calibration_error": "calib. error"}


@dataclass(frozen=True, slots=True)
class LabelMetrics:
    """The metrics of one label: ratios of sums over users with intervals, others as single values."""

    num_events: int
    intervals: dict[str, Interval]
    points: dict[str, float]

    def scalars(self) -> dict[str, float]:
        return {name: one.mean for name, one in self.intervals.items()} | self.points


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LabelReport:
    """Metrics of all labels, over all events and per slice, and the per-user sums of GAUC [num_users]."""

    num_users: int
    num_events: int
    tasks: dict[str, LabelMetrics]
    slices: dict[str, dict[str, LabelMetrics]]
    user: Counts
    per_user: dict[str, Array]
    protocol: Protocol | None = None

    def scalars(self) -> dict[str, float]:
        """'metric/label' -> value, for trackers."""
        return {
            f"{metric}/{label}": value for label, one in self.tasks.items() for metric, value in one.scalars().items()
        }

    def gauc(self, label: str) -> Ratio:
        return Ratio(self.per_user[f"{label}.gauc"], self.per_user[f"{label}.weight"])

    def to_json(self) -> str:
        """All but the sums per user."""
        return json.dumps(self._content(), indent=2)

    def save(self, folder: Path) -> None:
        """Writes report.json and per_user.parquet."""
        folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        pl.DataFrame({"user": self.user, **self.per_user}).write_parquet(buffer)
        replace_file(folder / "per_user.parquet", buffer.getvalue())
        replace_file(folder / "report.json", self.to_json().encode())

    def __rich__(self) -> Table:
        table = Table(
            title=f"{self.num_events:,} events of {self.num_users:,} users",
            caption="slices: number of preceding events, and how many events are in it",
        )
        table.add_column("label", no_wrap=True)
        table.add_column("metric", no_wrap=True)  # one cut to 'calibra…' tells nothing
        table.add_column("all [95 % over users]", no_wrap=True)
        for name, part in self.slices.items():
            num_events = max((one.num_events for one in part.values()), default=0)
            table.add_column(f"{name.replace(' ', chr(10))}\n{num_events:,}", justify="right", no_wrap=True)
        for label, one in self.tasks.items():
            for metric, value in one.scalars().items():
                shown = str(one.intervals.get(metric, f"{value:.4f}"))
                parts = [f"{part[label].scalars()[metric]:.4f}" for part in self.slices.values()]
                table.add_row(label, _SHORT.get(metric, metric), shown, *parts)
        return table

    def _content(self) -> dict[str, Any]:
        return {
            "protocol": asdict(self.protocol) if self.protocol else None,
            "num_users": self.num_users,
            "num_events": self.num_events,
            "tasks": {label: asdict(one) for label, one in self.tasks.items()},
            "slices": {name: {label: asdict(one) for label, one in part.items()} for name, part in self.slices.items()},
        }


def label_report(
    predicted: Sequence[LabelPredictions],
    *,
    num_before: Counts,
    masks: Mapping[str, NDArray[np.bool_]],
    user_ids: Counts,
    seed: int,
    num_bootstrap: int,
) -> LabelReport:
    """Metrics of each label over all its events, in thirds by history length, and under masks."""
    thirds = {f"{part.name} {part.low}-{part.high}": part.mask for part in tertiles(num_before)}
    slices = {**thirds, **masks}
    seen = np.unique(predicted[0].users)
    per_user = {}
    for one in predicted:
        if "gauc" in (own := ratios(one.observed())):
            per_user[f"{one.label.name}.gauc"] = own["gauc"].top[seen]
            per_user[f"{one.label.name}.weight"] = own["gauc"].bottom[seen]

    def metrics(mask: NDArray[np.bool_] | None) -> dict[str, LabelMetrics]:
        return {one.label.name: _metrics(one.observed(mask), seen, seed, num_bootstrap) for one in predicted}

    return LabelReport(
        num_users=len(seen),
        num_events=len(num_before),
        tasks=metrics(None),
        slices={name: metrics(mask) for name, mask in slices.items()},
        user=user_ids[seen],
        per_user=per_user,
    )


def _metrics(found: LabelPredictions, users: Counts, seed: int, num_bootstrap: int) -> LabelMetrics:
    """Intervals resample the evaluated users; a metric without events is left out."""
    own = {name: Ratio(one.top[users], one.bottom[users]) for name, one in ratios(found).items()}
    own = {name: one for name, one in own.items() if one.bottom.any()}
    return LabelMetrics(
        num_events=len(found.users),
        intervals=intervals(own, seed=seed, num=num_bootstrap) if own else {},
        points=points(found),
    )
