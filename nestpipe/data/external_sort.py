"""Sorts events that do not fit in memory: runs on disk, then ranges of users.

    chunks -> runs of `budget_rows`, as read -> (filter, final ids, sort by user, time, order) -> sorted runs
           -> for each range of users with about `budget_rows` events: its slice of every run, sorted together

The result is the events in the order (user, time, order of the log), whatever the budget. What fits into one run is
never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.quarantine import ORDER

Bools = NDArray[np.bool_]


class Spool:
    """Events on their way from the log to the sequences."""

    def __init__(self, folder: Path, *, budget_rows: int) -> None:
        self._folder = folder
        self._budget_rows = budget_rows
        self._buffer: list[pl.DataFrame] = []
        self._num_buffered = 0
        self._paths: list[Path] = []

    def add(self, chunk: pl.DataFrame) -> None:
        """Takes a typed chunk, in the order of the log."""
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

    def runs(self) -> Iterator[pl.DataFrame]:
        """All events, one run at a time; may be read again and again."""
        if not self._paths:
            yield pl.concat(self._buffer)
            return
        self._flush()
        for path in self._paths:
            yield pl.read_ipc(path)

    def ranges(
        self, prepare: Callable[[pl.DataFrame], pl.DataFrame], masks: list[Bools] | None
    ) -> Iterator[pl.DataFrame]:
        """All events that the masks keep, prepared and in their final order, some users at a time."""
        if not self._paths:
            [only] = self.runs()
            yield _in_order(prepare(only if masks is None else only.filter(masks[0])))
            return
        users = [self._sort_run(index, run, prepare, masks) for index, run in enumerate(self.runs())]
        for low, high in self._limits(pl.concat(users)):
            slices = []
            for path, known in zip(self._paths, users, strict=True):
                first = known["user"].search_sorted(low, side="left")
                last = known["user"].search_sorted(high, side="right")
                before = int(known["len"][:first].sum())
                slices.append(pl.scan_ipc(path).slice(before, int(known["len"][first:last].sum())).collect())
            yield _in_order(pl.concat(slices))

    def _sort_run(
        self, index: int, run: pl.DataFrame, prepare: Callable[[pl.DataFrame], pl.DataFrame], masks: list[Bools] | None
    ) -> pl.DataFrame:
        """Replaces a run by its sorted version; returns its users, ascending, with their number of events."""
        run = _in_order(prepare(run if masks is None else run.filter(masks[index])))
        self._paths[index].unlink()
        self._paths[index] = self._folder / f"sorted-{index}.ipc"
        run.write_ipc(self._paths[index])
        return run.group_by("user", maintain_order=True).len()

    def _limits(self, users: pl.DataFrame) -> list[tuple[int, int]]:
        """The first and last user of each range."""
        total = users.group_by("user").agg(pl.col("len").sum()).sort("user")
        part = (total["len"].cum_sum() - 1) // self._budget_rows
        limits = total.with_columns(part.alias("part")).group_by("part", maintain_order=True)
        return limits.agg(low=pl.col("user").first(), high=pl.col("user").last()).select("low", "high").rows()


def _in_order(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort(["user", *(["time"] if "time" in frame.columns else []), ORDER])
