"""External merge sort of events by (user, time, order of the log).

    chunks -> runs of `budget_rows` on disk -> filter, final ids, sort -> sorted runs
           -> for each range of users with about `budget_rows` events: its rows of every run, sorted together

The result does not depend on the budget. A log that fits into one run is never written to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.quarantine import ORDER

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Spool:
    """Collects events in runs; returns them sorted."""

    def __init__(self, folder: Path, *, budget_rows: int) -> None:
        self._folder = folder
        self._budget_rows = budget_rows
        self._buffer: list[pl.DataFrame] = []
        self._num_buffered = 0
        self._paths: list[Path] = []

    def add(self, chunk: pl.DataFrame) -> None:
        """Adds a typed chunk, in the order of the log."""
        for key in ("user", "item"):
            if chunk.schema[key] != pl.Int64 or chunk[key].null_count():
                raise AssertionError(f"{key}: {chunk.schema[key]} with {chunk[key].null_count()} nulls instead of ids")
        self._buffer.append(chunk)
        self._num_buffered += chunk.height
        if self._num_buffered >= self._budget_rows:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"run-{len(self._paths)}.ipc"
            pl.concat(self._buffer).write_ipc(path)
            self._paths.append(path)
            self._buffer, self._num_buffered = [], 0

    def renumber(self, numbers: Callable[[Ints], Ints]) -> None:
        """Replaces the order of the log among equal times; `numbers` gets all times in the order of the log."""
        order, first = numbers(np.concatenate([run["time"].to_numpy() for run in self.runs()])), 0
        for place, run in enumerate(self.runs()):
            renumbered = run.with_columns(pl.Series(ORDER, order[first : first + run.height]))
            first += run.height
            if self._paths:
                self._paths[place].unlink()  # it is still mapped into memory
                renumbered.write_ipc(self._paths[place])
            else:
                self._buffer = [renumbered]

    def runs(self) -> Iterator[pl.DataFrame]:
        """All events, one run at a time; may be called repeatedly."""
        if not self._paths:
            yield pl.concat(self._buffer)
            return
        self._flush()
        for path in self._paths:
            yield pl.read_ipc(path)

    def ranges(
        self, prepare: Callable[[pl.DataFrame], pl.DataFrame], masks: list[Bools] | None
    ) -> Iterator[pl.DataFrame]:
        """All events that the masks keep, prepared and sorted, one range of users at a time."""
        if not self._paths:
            [only] = self.runs()
            yield _in_order(prepare(only if masks is None else only.filter(masks[0])))
            return
        users = [self._sort_run(index, run, prepare, masks) for index, run in enumerate(self.runs())]
        for low, high in self._limits(pl.concat(users)):
            ranges = []
            for path, known in zip(self._paths, users, strict=True):
                first = known["user"].search_sorted(low, side="left")
                last = known["user"].search_sorted(high, side="right")
                before = int(known["len"][:first].sum())
                ranges.append(pl.scan_ipc(path).slice(before, int(known["len"][first:last].sum())).collect())
            yield _in_order(pl.concat(ranges))

    def _sort_run(
        self, index: int, run: pl.DataFrame, prepare: Callable[[pl.DataFrame], pl.DataFrame], masks: list[Bools] | None
    ) -> pl.DataFrame:
        """Replaces a run by its sorted version; returns its users, ascending, with their event counts."""
        run = _in_order(prepare(run if masks is None else run.filter(masks[index])))
        self._paths[index].unlink()
        self._paths[index] = self._folder / f"sorted-{index}.ipc"
        run.write_ipc(self._paths[index])
        return run.group_by("user", maintain_order=True).len()

    def _limits(self, users: pl.DataFrame) -> list[tuple[int, int]]:
        """The first and last user of each range."""
        total = users.group_by("user").agg(pl.col("len").sum()).sort("user")
        number = (total["len"].cum_sum() - 1) // self._budget_rows
        limits = total.with_columns(number.alias("range")).group_by("range", maintain_order=True)
        return limits.agg(low=pl.col("user").first(), high=pl.col("user").last()).select("low", "high").rows()


def _in_order(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort(["user", *(["time"] if "time" in frame.columns else []), ORDER])
