"""The report of a retrieval evaluation: metrics with intervals, in slices, and the rank of every user behind them.

    report.json      protocol, metrics, coverage, slices
    per_user.parquet user, target, rank, length, and the per-user values of further metrics

The per-user values let `compare` pair two runs without ranking again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray
from rich.table import Table

from nestpipe.atomic_files import replace_file
from nestpipe.errors import DataError
from nestpipe.eval.protocol import Protocol
from nestpipe.eval.topk_metrics import Array, Counts, Interval, user_metrics

COLUMNS = ("user", "target", "rank", "length")
_NOT_STORED = (*COLUMNS, "extra", "lists")


@dataclass(frozen=True, slots=True)
class EvalSlice:
    """The metrics of users whose history, or whose target item, has low .. high events; `by` says which."""

    name: str
    low: int
    high: int
    num_users: int
    metrics: dict[str, Interval]
    by: Literal["history", "target"] = "history"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EvalReport:
    """Metrics of one evaluation, and the per-user arrays [num_users] behind them."""

    num_users: int
    num_items: int
    ks: tuple[int, ...]
    seen: str
    targets_seen: int  # targets removed because the user had seen them: misses for any model
    metrics: dict[str, Interval]
    coverage: dict[str, float]
    slices: tuple[EvalSlice, ...]
    user: Counts
    target: Counts
    rank: Counts
    length: Counts
    protocol: Protocol | None = None
    extra: Mapping[str, Array] = field(
        default_factory=dict
    )  # per-user values of further metrics, whose mean is the metric
    lists: NDArray[np.int32] | None = None  # best items of each user [num_users, list_length(ks)]; -1 pads; not stored

    def scalars(self) -> dict[str, float]:
        """Means and coverage by name, for trackers."""
        return {name: interval.mean for name, interval in self.metrics.items()} | self.coverage

    def user_metrics(self, ks: tuple[int, ...]) -> dict[str, Array]:
        """The metrics of each user, by name."""
        return {**user_metrics(self.rank, ks, self.num_items), **self.extra}

    def to_json(self) -> str:
        """All but the per-user arrays."""
        return json.dumps(self._fields(), indent=2, default=asdict)

    def _fields(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NOT_STORED}

    def save(self, folder: Path) -> None:
        """Writes report.json and per_user.parquet; after a crash `load` gets the old report or refuses."""
        folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        columns = {name: getattr(self, name) for name in COLUMNS}
        pl.DataFrame({**columns, **self.extra}).write_parquet(buffer)
        replace_file(folder / "per_user.parquet", buffer.getvalue())
        content = self._fields() | {"per_user_digest": _digest(buffer.getvalue())}
        replace_file(folder / "report.json", json.dumps(content, indent=2, default=asdict).encode())

    @staticmethod
    def load(folder: Path) -> EvalReport:
        """Reads a saved report; raises DataError if a file is missing or the two do not belong together."""
        try:
            content = json.loads((folder / "report.json").read_bytes())
            per_user = (folder / "per_user.parquet").read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"{folder} has no evaluation: {error.filename} is missing. Run 'nestpipe eval'.") from error
        if content.pop("per_user_digest") != _digest(per_user):
            raise DataError(
                f"{folder}: report.json and per_user.parquet are of different evaluations (digests differ), perhaps after a crash. Run 'nestpipe eval' again."
            )
        content["ks"] = tuple(content["ks"])
        content["metrics"] = _intervals(content["metrics"])
        content["slices"] = tuple(
            EvalSlice(**{**one, "metrics": _intervals(one["metrics"])}) for one in content["slices"]
        )
        table = pl.read_parquet(io.BytesIO(per_user))
        content.update({name: table[name].to_numpy() for name in COLUMNS})
        content["extra"] = {name: table[name].to_numpy() for name in table.columns if name not in COLUMNS}
        content["protocol"] = Protocol.from_json(content.get("protocol"))
        return EvalReport(**content)

    def __rich__(self) -> Table:
        """A table of all metrics, overall and by slice, for `rich.print`."""
        title = f"{self.num_users:,} users, {self.num_items:,} items, seen items removed: {self.seen}"
        caption = "slices: events in the history (cold, warm: training events of the target), users"
        if self.targets_seen:
            caption += f"\n{self.targets_seen:,} targets were seen before and count as misses"
        table = Table(title=title, caption=caption, box=None, pad_edge=False)  # five slices fit into 80 columns
        for header in ("metric", "all users [95 %]"):
            table.add_column(header, no_wrap=True)
        for part in self.slices:
            header = f"{part.name}\n{part.low:,}-\n{part.high:,}\n{part.num_users:,}"
            table.add_column(header, justify="right", no_wrap=True)
        for name, interval in self.metrics.items():
            parts = (f"{part.metrics[name].mean:.4f}" if name in part.metrics else "" for part in self.slices)
            table.add_row(name, str(interval), *parts)
        for name, share in self.coverage.items():
            table.add_row(name, f"{share:.4f}")
        return table


def _intervals(metrics: dict[str, dict[str, float]]) -> dict[str, Interval]:
    return {name: Interval(**values) for name, values in metrics.items()}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
