"""Does the cost of a unit of work grow with the table, the log or the catalogue? CPU time from a tenth of the largest size to it.

    step            gather and update 20,000 distinct uniform ids: rows 1.6M to 16M, width 64, row-wise AdaGrad     per id
    eviction        20,000 ids, 2,000 of them new, in a full table: 1.6M to 16M rows                                 per id
    evaluation      256 users, their targets' ranks and the best 200: 0.18M to 1.78M items, width 64                 per score
    ingest          a CSV log with text ids and times: 0.5M to 5M events                                             per event
    epoch start     a loader of the ingested folder, and its first batch of an epoch                                 per user

One process, one thread, sizes of an arm in alternation. `growth`: cost per unit at the largest size over that at a tenth of it;
limit 2x, and above 1.3x the cause is named. Uniform ids are the worst case for caches. Draws docs/images/scale.svg.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import evaluation
import eviction
import measure
import numpy as np
import polars as pl
import torch

from nestpipe.atomic_files import replace_file
from nestpipe.data.batch_builder import ModelInputs
from nestpipe.data.config import DataConfig
from nestpipe.data.ingest import write_sequences
from nestpipe.data.loader import Loader
from nestpipe.data.log_reader import LogSource
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import Table
from nestpipe.eval.eval_ranks import OneRank
from nestpipe.jagged import Cursor
from nestpipe.profiling.svg import LinearScale, Markup, drawing, element, label, pixel, ticks

NAME, AT_MOST, NAMED_ABOVE = "scale", 2.0, 1.3
SHARES = (0.1, 0.25, 0.5, 1.0)
LARGEST = {
    "step": 16_000_000,
    "eviction": 16_000_000,
    "evaluation": 1_780_000,
    "ingest": 5_000_000,
    "epoch start": 5_000_000,
}
UNIT = {"step": "id", "eviction": "id", "evaluation": "score", "ingest": "event", "epoch start": "user"}
NUM_IDS, WIDTH, NUM_USERS, EVENTS_PER_USER, SEED = 20_000, 64, 256, 10, 0
PICTURE = measure.ROOT / "docs" / "images" / "scale.svg"
Arm = Callable[[], float]


def cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def step_arm(num_rows: int) -> Arm:
    """CPU seconds per id of a step on a filled table."""
    config = EmbeddingConfig(optimizer="rowwise_adagrad")
    table = Table(TableSpec(name="item", dim=WIDTH), OPTIMIZERS["rowwise_adagrad"](config), seed=SEED, config=config)
    for number, ids in enumerate(torch.arange(num_rows).split(250_000)):
        table.advance(ids, number)
    generator, grads = torch.Generator().manual_seed(SEED), torch.full((NUM_IDS, WIDTH), 1e-3)
    steps = iter(range(10_000, 1_000_000))

    def one() -> float:
        ids = torch.randperm(num_rows, generator=generator)[:NUM_IDS].sort().values

        def work() -> None:
            slots = table.advance(ids, next(steps))
            table.gather(slots)
            table.update(slots, grads, 1e-3)

        return cpu_s(work) / NUM_IDS

    return lambda: sum(one() for _ in range(4)) / 4


def eviction_arm(num_rows: int) -> Arm:
    table = eviction.FullTable(num_rows, "lru")
    return lambda: sum(table.step() for _ in range(4)) / 4 / eviction.NUM_IDS


def evaluation_arm(num_items: int) -> Arm:
    problem = evaluation.Problem(NUM_USERS, num_items, WIDTH, OneRank())
    return lambda: cpu_s(problem.rank) / NUM_USERS / num_items


def ingest_arm(num_events: int, folder: Path) -> Arm:
    """CPU seconds per event; leaves the folder for `epoch_arm`."""
    log = folder / f"{num_events}.csv"
    random = np.random.default_rng(SEED)
    users = random.integers(0, num_events // EVENTS_PER_USER, num_events)
    frame = pl.DataFrame({"user": users, "item": random.integers(0, 50_000, num_events)})
    times = pl.Series("time", 1_700_000_000 + np.arange(num_events))
    frame.select(
        pl.format("user {}", "user").alias("user"), pl.format("item {}", "item").alias("item"), times
    ).write_csv(log)
    schema = Schema(time_unit="s", user_encoding="dictionary", item_encoding="dictionary")

    def work() -> None:
        out = folder / f"data-{num_events}"
        shutil.rmtree(out, ignore_errors=True)
        write_sequences(out, schema=schema, log=LogSource(paths=(str(log),)))

    return lambda: cpu_s(work) / num_events


def epoch_arm(num_events: int, folder: Path) -> Arm:
    sequences = Sequences.open(folder / f"data-{num_events}")
    config = DataConfig(path=str(sequences.path), batch_size=512, max_len=50)
    split = make_split(sequences, config)

    def work() -> None:
        loader = Loader(sequences, split, config, seed=SEED, rank=0, world_size=1, inputs=ModelInputs())
        loader.batch(Cursor(0, 0))

    return lambda: cpu_s(work) / len(sequences.users)


def draw(growths: dict[str, list[float]]) -> str:
    """Cost per unit over that at a tenth of the size, one line per kind of work."""
    width, height, left, right, top, bottom = 640, 360, 52, 20, 78, 48
    colours = ("#b3402f", "#1f6bb0", "#1f7a45", "#7a4fb3", "#b36b00")
    highest = max(AT_MOST, *(max(one) for one in growths.values())) * 1.05
    across = LinearScale(0, len(SHARES) - 1, left, width - right)
    up = LinearScale(0.0, highest, height - bottom, top)

    def content() -> Iterator[Markup]:
        yield element("rect", width=width, height=height, fill="#ffffff")
        yield label(12, 20, "CPU per unit of work, over that at a tenth of the size", kind="head")
        for number, (name, values) in enumerate(growths.items()):
            x, colour = 12 + 125 * number, colours[number]
            yield element("line", x1=x, x2=x + 22, y1=44, y2=44, stroke=colour, stroke_width=2)
            yield label(x + 28, 48, name)
            points = " ".join(f"{across(place):.1f},{up(value):.1f}" for place, value in enumerate(values))
            yield element("polyline", points=points, fill="none", stroke=colour, stroke_width=2)
        for value in ticks(0.0, highest, most=6):
            y = pixel(up(value))
            yield element("line", x1=left, x2=width - right, y1=y, y2=y, stroke="#dfe2e6")
            yield label(left - 6, up(value) + 4, f"{value:g}x", anchor="end")
        for place, share in enumerate(SHARES):
            yield label(across(place), height - bottom + 18, f"{share:g}", anchor="middle")
        yield label((left + width - right) / 2, height - 12, "share of the largest size", anchor="middle")

    about = "cost per unit of work over size: " + ", ".join(
        f"{name} {values[-1]:.2f}x" for name, values in growths.items()
    )
    return drawing(*content(), kind="scale", width=width, height=height, about=about)


def measured(make: Callable[[int], Arm], sizes: Sequence[int], num_blocks: int) -> dict[int, list[float]]:
    arms = {str(size): make(size) for size in sizes}
    found = measure.alternate(arms, num_blocks=num_blocks, warm_up=1)
    return {int(size): values for size, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of all sizes, result not recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, object] = {}
    growths: dict[str, list[float]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        makers: dict[str, Callable[[int], Arm]] = {
            "step": step_arm,
            "eviction": eviction_arm,
            "evaluation": evaluation_arm,
            "ingest": lambda size: ingest_arm(size, folder),
            "epoch start": lambda size: epoch_arm(size, folder),
        }
        for kind, make in makers.items():
            largest = LARGEST[kind] // 10 if options.quick else LARGEST[kind]
            sizes = [round(share * largest) for share in SHARES]
            times = measured(make, sizes, measure.MIN_BLOCKS)
            growth = measure.ratio(times[sizes[-1]], times[sizes[0]])
            costs = {size: measure.Spread.of([1e9 * one for one in values]).median for size, values in times.items()}
            growths[kind] = [measure.ratio(times[size], times[sizes[0]]).median for size in sizes]
            key = kind.replace(" ", "_")
            figures |= {f"{key}_growth": round(growth.median, 3), f"{key}_growth_range": growth.range}
            figures |= {f"{key}_verdict": measure.verdict(growth, at_most=AT_MOST)}
            figures |= {f"{key}_ns": {str(size): round(cost, 2) for size, cost in costs.items()}}
            shown = "   ".join(f"{size:,}: {cost:,.2f}" for size, cost in costs.items())
            rows.append([kind, f"ns per {UNIT[kind]}", shown, str(growth)])
            print(rows[-1], flush=True)
    print(measure.table(["work", "unit", "at size", "largest over a tenth"], rows))
    if not options.quick:
        replace_file(PICTURE, draw(growths).encode())
        measure.append(
            NAME, measure.record(seed=SEED, figures=figures, settings={"largest": LARGEST, "shares": SHARES})
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
