"""What does a checkpoint cost: memory while it is written, and bytes of a delta?

One rank with an Adam table (width 64, 776 bytes per row), filled, then updated in batches of 20,000 Zipf ids. Each arm is a process
of its own, so that its peak of resident memory is its own:

    training     the steps, without a save
    background   the same steps, a save in flight all the time
    copy         the same steps after a copy of all rows, as saves made it before format 4

`peak_over_training`: peak of `background` over that of `training`, whole processes. `added_over_shard`: what the save adds, over the
bytes of the table. `delta_share`: table bytes of a delta after 1 % of the rows were touched, over those of the full checkpoint.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import measure
import torch
from torch import Tensor

from nestpipe.checkpoint.async_writer import CheckpointSaver
from nestpipe.checkpoint.folders import checkpoint_folder
from nestpipe.checkpoint.manifest import Link, Manifest
from nestpipe.checkpoint.writer import SaveContent
from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.row_snapshot import TableSnapshot
from nestpipe.embedding.table import Table
from nestpipe.jagged import Cursor
from nestpipe.training.process import keep_freed_memory

SEED, WIDTH, BATCH, NUM_STEPS = 0, 64, 20_000, 60
AIM_PEAK, AIM_DELTA = 1.1, 0.05


@dataclass(slots=True)
class TableState:
    """A table without a model, of which the saver takes snapshots."""

    table: Table
    owners: Owners
    taken: TableSnapshot | None = None

    def changed_bytes(self) -> int:
        return self.table.changed_bytes()

    @property
    def is_tight(self) -> bool:
        return self.taken is not None and self.taken.rows.is_tight

    def snapshot(self, *, concurrent: bool, delta: bool) -> TableState:
        buckets = self.owners.buckets_of(0)
        self.taken = self.table.snapshot(self.owners, buckets, extra={}, delta=delta, concurrent=concurrent)
        return self

    def content(self, chain: tuple[Link, ...]) -> SaveContent:
        assert self.taken is not None
        return SaveContent(
            {"weights.w": torch.zeros(1)}, {"item": self.taken.read()}, {"item": self.owners.num_buckets}, chain
        )

    def close(self) -> None:
        self.table.end_snapshot()
        self.taken = None


def filled(num_rows: int) -> TableState:
    """A table of so many rows, filled in batches."""
    config = EmbeddingConfig(optimizer="lazy_adam")
    table = Table(TableSpec(name="item", dim=WIDTH), OPTIMIZERS["lazy_adam"](config), seed=SEED, config=config)
    for ids in torch.arange(num_rows).split(BATCH):
        table.advance(ids, 0)
    table.track_changes()
    return TableState(table, Owners(config.num_buckets, 1))


def batches(num_rows: int) -> Iterator[Tensor]:
    """Distinct ids, Zipf(1.05) over ranks that are spread over the table."""
    generator = torch.Generator().manual_seed(SEED)
    spread = torch.randperm(num_rows, generator=generator)
    weights = torch.arange(1, num_rows + 1, dtype=torch.float64).pow(-1.05).cumsum(0)
    while True:
        drawn = torch.rand(2 * BATCH, dtype=torch.float64, generator=generator) * weights[-1]
        yield spread[torch.searchsorted(weights, drawn).unique().clamp_(max=num_rows - 1)].sort().values


def run_arm(arm: str, num_rows: int, pipe: Connection) -> None:
    """Trains with or without saves; sends peak bytes, CPU seconds, finished saves and waits."""
    torch.set_num_threads(1)
    keep_freed_memory()
    state, ids = filled(num_rows), batches(num_rows)
    num_saves, num_waits = 0, 0
    copy = state.table.export() if arm == "copy" else {}
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        saver = CheckpointSaver(Path(folder), World.single().channel("saves"), keep_last=1, background=True)
        for step in range(1, NUM_STEPS + 1):
            if arm == "background" and not saver.is_saving:
                saver.save(step, Cursor(0, step), {}, state)
                num_saves += 1
            if saver.is_tight:
                num_waits += 1
                saver.wait()
            own = next(ids)
            slots = state.table.advance(own, step)
            state.table.update(slots, torch.full((len(own), WIDTH), 1e-3), 1e-3)
        saver.wait()
    seconds = time.process_time() - start
    copy.clear()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send((peak, seconds, num_saves, num_waits))


def measured(arm: str, num_rows: int) -> tuple[int, float, int, int]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_arm, args=(arm, num_rows, theirs))
    process.start()
    found: tuple[int, float, int, int] = ours.recv()
    process.join()
    return found


def delta_bytes(num_rows: int) -> tuple[int, int]:
    """Table bytes of a full checkpoint, and of a delta after one batch of 1 % of the rows."""
    state = filled(num_rows)
    with tempfile.TemporaryDirectory() as folder:
        saver = CheckpointSaver(
            Path(folder), World.single().channel("saves"), keep_last=9, background=False, max_deltas=8
        )
        saver.save(1, Cursor(0, 1), {}, state)
        own = torch.randperm(num_rows, generator=torch.Generator().manual_seed(SEED))[: num_rows // 100].sort().values
        state.table.update(state.table.advance(own, 2), torch.full((len(own), WIDTH), 1e-3), 1e-3)
        saver.save(2, Cursor(0, 2), {}, state)
        full, delta = Manifest.read(checkpoint_folder(Path(folder), 2)).links
    return full.num_bytes, delta.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--quick", action="store_true", help="200,000 rows; under a minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_rows = 200_000 if options.quick else options.rows
    found = {arm: measured(arm, num_rows) for arm in ("training", "background", "copy")}
    full, delta = delta_bytes(num_rows)
    peaks = {arm: peak for arm, (peak, *_) in found.items()}
    figures = {
        "shard_mib": round(full / 2**20, 1),
        "peak_mib": {arm: round(peak / 2**20, 1) for arm, peak in peaks.items()},
        "peak_over_training": round(peaks["background"] / peaks["training"], 4),
        "copy_over_training": round(peaks["copy"] / peaks["training"], 4),
        "added_over_shard": round((peaks["background"] - peaks["training"]) / full, 4),
        "cpu_s": {arm: round(seconds, 2) for arm, (_, seconds, *_) in found.items()},
        "saves": found["background"][2],
        "waits": found["background"][3],
        "delta_share": round(delta / full, 4),
    }
    figures["verdicts"] = {
        "peak_over_training": "met" if figures["peak_over_training"] <= AIM_PEAK else "missed",
        "delta_share": "met" if figures["delta_share"] <= AIM_DELTA else "missed",
    }
    rows = [[arm, f"{peak / 2**20:,.0f}", f"{peak / peaks['training']:.3f}"] for arm, peak in peaks.items()]
    print(measure.table(["arm", "peak MiB", "over training"], rows))
    measure.append("checkpoint_size", measure.record(seed=SEED, figures=figures, settings={"rows": num_rows}))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
