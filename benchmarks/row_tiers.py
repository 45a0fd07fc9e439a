"""What does a row in files cost over a row in memory? CPU of the row path per distinct row of a batch.

A table of 4M x 64 rows with lazy Adam state (3.1 GB), 25,600 Zipf(1.05) ids per batch, one process, one thread. A batch takes its
rows, gathers their weights, updates and releases them. The buffer of the table in files has a tenth of the bytes of the rows.
Both tables do the same batches in turn, and end with the same bits. Before the measurement every row is written once
more, so that half of the file's records are dead and compaction runs all the time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import measure
import numpy as np
import torch

from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.prefetch_buffer import rows_where_they_are
from nestpipe.embedding.row_adam import LazyAdam
from nestpipe.embedding.table import Table
from nestpipe.training.process import keep_freed_memory

DIM, NUM_IDS, ZIPF, SEED, LR = 64, 512 * 50, 1.05, 0, 0.01
ROW_BYTES = 3 * DIM * 4 + 4  # weights, mean, square, step
LOADED_ROWS = 100_000  # at a time


def batches(num_rows: int) -> Iterator[torch.Tensor]:
    """Distinct ids in 0 .. num_rows - 1, spread over the table."""
    rng = np.random.default_rng(SEED)
    weights = 1.0 / np.arange(1, num_rows + 1) ** ZIPF
    edges = np.cumsum(weights / weights.sum())
    place = rng.permutation(num_rows)
    while True:
        yield torch.from_numpy(np.unique(place[np.searchsorted(edges, rng.random(NUM_IDS))]))


def filled(num_rows: int, **settings: Any) -> Table:
    """A table with all ids, whose file, if any, has as many dead records as live ones."""
    config = EmbeddingConfig(optimizer="lazy_adam", lr=LR, **settings)
    table = Table(TableSpec(name="item", dim=DIM), LazyAdam(config), seed=SEED, config=config)
    rows = table.new_rows(torch.tensor([0]))
    rng = np.random.default_rng(SEED + 1)
    table.load_index({"ids": torch.from_numpy(rng.permutation(num_rows))})
    for _ in range(2 if config.tier == "files" else 1):
        for ids in torch.from_numpy(rng.permutation(num_rows)).split(LOADED_ROWS):
            table.load_rows({"ids": ids, **{name: one.expand(len(ids), -1).contiguous() for name, one in rows.items()}})
    return table


class Arm:
    """One table and the CPU seconds of its row path, per distinct row."""

    def __init__(self, table: Table):
        self.access, self.table = rows_where_they_are(table), table
        self.step = self.num_missing = self.num_rows = self.most_bytes = 0
        self._grads = torch.randn(NUM_IDS, DIM, generator=torch.Generator().manual_seed(SEED))
        if table.buffer is not None:
            self._count_reads(table.buffer._below)

    def _count_reads(self, store: Any) -> None:
        exchange = store.exchange

        def counted(leaving: torch.Tensor, arriving: torch.Tensor, *arguments: Any) -> None:
            self.num_missing += len(arriving)
            exchange(leaving, arriving, *arguments)

        store.exchange = counted

    def run(self, own: list[torch.Tensor]) -> float:
        num_rows = sum(map(len, own))
        start = time.process_time()
        for ids in own:
            refs = self.access.take(ids, self.step)
            self.access.gather(refs)
            self.access.update(refs, self._grads[: len(ids)], LR)
            self.access.release(refs)
            self.step += 1
        spent = time.process_time() - start
        self.num_rows += num_rows
        if self.table.buffer is not None:
            self.most_bytes = max(self.most_bytes, self.table.buffer.memory_bytes)
        return spent / num_rows

    def forget_counts(self) -> None:
        self.num_missing = self.num_rows = 0


def same_rows(first: Table, second: Table) -> bool:
    """Whether all rows and their state are bitwise equal."""
    ids = first._index.export()[0]
    return all(
        torch.equal(a, b)
        for own in ids.split(LOADED_ROWS)
        for a, b in zip(*(one.read(one._index.find(own)).values() for one in (first, second)), strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows and fewer batches; under a minute")
    parser.add_argument("--folder", help="of the file, on a local disk with 7 GB [default: the temporary one]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    num_rows, num_warm, num_blocks, per_block = (400_000, 100, 9, 10) if options.quick else (4_000_000, 1500, 15, 40)
    buffer_bytes = num_rows * ROW_BYTES // 10
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        memory = Arm(filled(num_rows))
        files = Arm(filled(num_rows, tier="files", files_folder=folder, buffer_bytes=buffer_bytes))
        source = batches(num_rows)
        for _ in range(num_warm):
            own = [next(source)]
            memory.run(own), files.run(own)
        files.forget_counts()
        block: list[torch.Tensor] = []

        def memory_block() -> float:
            block[:] = [next(source) for _ in range(per_block)]
            return memory.run(block)

        arms: dict[str, Callable[[], float]] = {"memory": memory_block, "files": lambda: files.run(block)}
        times = measure.alternate(arms, num_blocks=num_blocks)
        miss_share = files.num_missing / files.num_rows
        is_equal = same_rows(memory.table, files.table)
    report(
        times, files, miss_share, is_equal=is_equal, num_rows=num_rows, buffer_bytes=buffer_bytes, quick=options.quick
    )


def report(
    times: dict[str, list[float]],
    files: Arm,
    miss_share: float,
    *,
    is_equal: bool,
    num_rows: int,
    buffer_bytes: int,
    quick: bool,
) -> None:
    over = measure.ratio(times["files"], times["memory"])
    median = {name: measure.Spread.of(own).median * 1e9 for name, own in times.items()}
    figures = {
        "files_over_memory": round(over.median, 4),
        "files_over_memory_range": over.range,
        "memory_ns": round(median["memory"]),
        "files_ns": round(median["files"]),
        "miss_share": round(miss_share, 4),
        "buffer_bytes": files.most_bytes,
        "bound_bytes": buffer_bytes,
        "bitwise_equal": is_equal,
        "at_most_3x": measure.verdict(over, at_most=3.0),
        "at_most_2x": measure.verdict(over, at_most=2.0),
    }
    settings = {"num_rows": num_rows, "dim": DIM, "num_ids": NUM_IDS, "zipf": ZIPF, "threads": 1, "quick": quick}
    measure.append("row_tiers", measure.record(seed=SEED, figures=figures, settings=settings))
    rows = [[name, f"{median[name]:.0f} ns"] for name in times]
    print(f"{num_rows:,} x {DIM} Adam rows, CPU per distinct row; {miss_share:.0%} are not in the buffer")
    print(measure.table(["rows in", "per row"], rows))
    print(f"files over memory: {over}; at most 3x: {figures['at_most_3x']}; at most 2x: {figures['at_most_2x']}")
    print(json.dumps(figures))
    if not is_equal or files.most_bytes > buffer_bytes:
        raise SystemExit("the tiers differ, or the buffer is above its bound: see the figures.")


if __name__ == "__main__":
    main()
