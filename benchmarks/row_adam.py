"""What does exact Adam on rows cost? A training step of zipf-512 with it over one with lazy Adam, in CPU time.

Workload zipf-512: a table of 1M x 64, 512 samples x 50 Zipf(1.05) ids per step, one process, one thread, the sequential step. Arms
alternate in one process. About 0.8 % of the rows are looked up in a step, so most rows that are read have missed many steps. The
first steps, in which rows walk step by step (embedding/skipped_steps.py), are reported on their own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import measure
import torch
import train_arms

from nestpipe.distributed.process_group import World
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import Table
from nestpipe.jagged import Batch
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState

LIMIT = 1.25
RATES = Rates(dense=1e-3, rows=1e-3)
WARM_STEPS = 208  # every row in use has then been updated since batch 75, from which the series holds


def new_state(optimizer: str, dense: str) -> TrainState:
    channels = Channels.of(World.single())
    state = train_arms.our_state(train_arms.Settings(samples=512, dense=dense, micro_batches=1), channels)
    config = EmbeddingConfig(optimizer=optimizer, lr=RATES.rows)  # type: ignore[arg-type]
    table = Table(state.model.tables[0], OPTIMIZERS[optimizer](config), seed=0, config=config)
    state.embedding.tables["item"] = table
    embedding = type(state.embedding)(
        {"item": table}, channels.keys, channels.rows, state.embedding.owners, channels.replicas
    )
    state = replace(state, embedding=embedding)
    train_arms.create_rows(state, torch.arange(train_arms.NUM_ROWS))
    return state


def timed(state: TrainState, data: list[Batch], num_steps: int) -> Callable[[], float]:
    numbers = count()

    def block() -> float:
        start = time.process_time()
        for _ in range(num_steps):
            step(state, data[next(numbers) % len(data)], RATES)
        return (time.process_time() - start) / num_steps

    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--dense", default="mlp", choices=("mlp", "hstu"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_blocks, num_steps = (9, 8) if options.quick else (21, 16)
    settings = train_arms.Settings(samples=512, dense=options.dense, micro_batches=1)
    data = [batch for rank in range(4) for batch in train_arms.batches(settings, rank)]
    arms = {name: timed(new_state(name, options.dense), data, num_steps) for name in ("lazy_adam", "adam")}
    early = measure.alternate(arms, num_blocks=max(WARM_STEPS // num_steps, measure.MIN_BLOCKS), warm_up=0)
    times = measure.alternate(arms, num_blocks=num_blocks)
    over, at_start = (measure.ratio(one["adam"], one["lazy_adam"]) for one in (times, early))
    figures = {
        "adam_over_lazy_adam": round(over.median, 4),
        "adam_over_lazy_adam_range": over.range,
        "at_most_1.25": measure.verdict(over, at_most=LIMIT),
        "first_steps": round(at_start.median, 4),
        "first_steps_range": at_start.range,
    }
    facts = {"workload": "zipf-512", "dense": options.dense, "num_blocks": num_blocks, "num_steps": num_steps}
    measure.append("row_adam", measure.record(seed=train_arms.SEED, figures=figures, settings={**facts, "threads": 1}))
    rows = [[name, f"{1e3 * measure.Spread.of(times[name]).median:.2f} ms"] for name in arms]
    print(measure.table(["rows", "CPU per step"], rows))
    print(f"adam over lazy_adam: {over}; at most {LIMIT}: {figures['at_most_1.25']}; first steps: {at_start}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
