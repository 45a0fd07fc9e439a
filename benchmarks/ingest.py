"""What does reading a log cost over Polars, CSV over Parquet, and an append over a new ingest? CPU time, one process.

    plain, quoted    a clean CSV log of three int64 columns, file to typed chunks, over `polars.read_csv` of the same file
    csv              a whole ingest from CSV, over one of the same events from Parquet
    append           appending 1 % of the events, over one ingest of all of them

Arms alternate. Polars may use several threads; the CPU time of all of them counts. With --events the log is larger.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from io import StringIO
from pathlib import Path

import measure
import numpy as np
import polars as pl

from nestpipe.data.append import append_log
from nestpipe.data.id_encoding import make_encoders
from nestpipe.data.ingest import write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.quarantine import Quarantine, TypedReader
from nestpipe.data.schema import Schema

NAME, SEED = "ingest", 0
LIMITS = {"plain": 4.0, "quoted": 4.0, "csv_over_parquet": 1.3, "append": 0.1}


def cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def read_typed(path: Path) -> int:
    reader = TypedReader(Schema(), make_encoders(Schema()), Quarantine(StringIO(), 0.01))
    return sum(chunk.height for chunk in reader.log(LogSource(paths=(str(path),))))


def write_logs(folder: Path, num_events: int, pairs: Collection[str]) -> None:
    """The files that the ratios need."""
    random = np.random.default_rng(SEED)
    columns = {
        "user": random.integers(0, num_events // 30, num_events),
        "item": random.integers(0, 50_000, num_events),
        "time": random.integers(10**12, 2 * 10**12, num_events),
    }
    log, cut = pl.DataFrame(columns), num_events - num_events // 100
    log.write_csv(folder / "plain.csv")
    log.write_parquet(folder / "log.parquet")
    if "quoted" in pairs:
        log.write_csv(folder / "quoted.csv", quote_style="always")
    if "append" in pairs:
        log[:cut].write_csv(folder / "old.csv")
        log[cut:].write_csv(folder / "new.csv")


def ingest(folder: Path, log: str, out: str) -> float:
    shutil.rmtree(folder / out, ignore_errors=True)
    return cpu_s(lambda: write_sequences(folder / out, schema=Schema(), log=LogSource(paths=(str(folder / log),))))


def append(folder: Path) -> float:
    shutil.rmtree(folder / "grown", ignore_errors=True)
    shutil.copytree(folder / "old", folder / "grown")
    return cpu_s(lambda: append_log(folder / "grown", log=LogSource(paths=(str(folder / "new.csv"),))))


PAIRS = {
    "plain": ("typed plain", "polars plain"),
    "quoted": ("typed quoted", "polars quoted"),
    "csv_over_parquet": ("ingest csv", "ingest parquet"),
    "append": ("append", "ingest csv"),
}


def arms_of(folder: Path) -> dict[str, Callable[[], float]]:
    """What is measured, by name."""
    arms: dict[str, Callable[[], float]] = {}
    for kind in ("plain", "quoted"):
        path = folder / f"{kind}.csv"
        arms[f"polars {kind}"] = lambda path=path: cpu_s(lambda: pl.read_csv(path))  # type: ignore[misc]
        arms[f"typed {kind}"] = lambda path=path: cpu_s(lambda: read_typed(path))  # type: ignore[misc]
    arms["ingest csv"] = lambda: ingest(folder, "plain.csv", "whole")
    arms["ingest parquet"] = lambda: ingest(folder, "log.parquet", "whole")
    arms["append"] = lambda: append(folder)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=3_000_000)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS), help="ratios to measure")
    options = parser.parse_args()
    pairs = {key: PAIRS[key] for key in options.pairs}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        write_logs(folder, options.events, pairs)
        if "append" in pairs:
            ingest(folder, "old.csv", "old")
        used = {arm for pair in pairs.values() for arm in pair}
        arms = {arm: run for arm, run in arms_of(folder).items() if arm in used}
        times = measure.alternate(arms)
    figures: dict[str, object] = {}
    rows = []
    for key, (ours, theirs) in pairs.items():
        ratio = measure.ratio(times[ours], times[theirs])
        figures |= {key: round(ratio.median, 3), f"{key}_range": ratio.range}
        figures[f"{key}_verdict"] = measure.verdict(ratio, at_most=LIMITS[key])
        seconds = " / ".join(f"{measure.Spread.of(times[one]).median:.2f} s" for one in (ours, theirs))
        rows.append([f"{ours} over {theirs}", seconds, str(ratio), f"{LIMITS[key]:g}x"])
    print(measure.table(["arms", "CPU", "ratio", "limit"], rows))
    measure.append(NAME, measure.record(seed=SEED, figures=figures, settings={"events": options.events}))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
