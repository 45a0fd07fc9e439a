"""How long do ranks wait for the slowest one, with fixed and with balanced shares of a batch?

By the cost model: batches of `lengths-kuai` (log-normal, cut at 2,048), S samples x W ranks, cost a·L + b·L² of an HSTU with two
ratios of a and b. The figure is the waiting time over the time of the slowest rank. `fixed`: the same number of samples each.
`tokens`: greedy by events. `cost`: greedy by cost. `swaps`: greedy by cost, then pairwise swaps, as `data.balance` does.
`bound`: the lower bound, a rank that has only the longest sample. With the larger ratio of narrow models it is nearly reached.

Measured: four real ranks train an HSTU on such lengths (scaled to 512), fixed and balanced in alternating blocks, with
coefficients from `nestpipe tune balance` in the same run. A rank's time is the CPU time of its compute thread, because four
ranks share the cores of a small machine. `wait_share` and `wait_share_fixed` are those of the model at 8 x 8.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import measure
import numpy as np
import polars as pl
import torch
import torch.distributed as dist

from nestpipe import recipes
from nestpipe.cli.tune_balance import tuned
from nestpipe.config import Config
from nestpipe.data.ingest import write_sequences
from nestpipe.data.load_balance import Imbalance, Ints, SampleCost, assign, fixed, loads_of
from nestpipe.data.loader import Loader
from nestpipe.data.schema import Schema
from nestpipe.distributed.process_group import World
from nestpipe.jagged import Cursor
from nestpipe.models.config import HSTUConfig
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.stages import (
    BatchWork,
    Rates,
    TrainState,
    collect,
    compute,
    dense_step,
    dense_sum,
    flag,
    grads,
    keys,
    norm,
    post,
    read,
    retrieve,
    rows,
    update,
    write,
)
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import new_state

SEED, WORLD_SIZE, MAX_LEN = 0, 4, 512
SHAPES = {"8x8": (8, 8, 0.01), "6x16": (6, 16, 0.015)}  # samples of a rank, ranks, and what the wait has to be
# b / a. By its arithmetic (nestpipe.training.mfu), an HSTU of width 512 with 128 negatives has the first: a size that is trained on
# 2,048 events. The second is what `nestpipe tune balance` finds for one of width 50.
RATIOS = (0.0005, 0.002)
ARMS = ("fixed", "balanced")


def lengths_kuai(num: int, seed: int) -> Ints:
    return np.ceil(np.exp(np.random.default_rng(seed).normal(6.0, 1.1, num)).clip(max=2048)).astype(np.int64)


def modelled(ratio: float, samples: int, world_size: int, num_batches: int) -> dict[str, Imbalance]:
    """The imbalance of each way to share batches, averaged over them."""
    cost, found = SampleCost(1.0, ratio), {name: [] for name in ("fixed", "tokens", "cost", "swaps", "bound")}
    for number in range(num_batches):
        lengths = lengths_kuai(samples * world_size, SEED + number)
        costs, ids = cost.of(lengths), np.arange(len(lengths))
        tokens = lengths.astype(np.float64)
        ranks = {
            "fixed": fixed(len(lengths), world_size),
            "tokens": assign(tokens, ids, world_size, swaps=False),
            "cost": assign(costs, ids, world_size, swaps=False),
            "swaps": assign(costs, ids, world_size),
        }
        for name, rank_of in ranks.items():
            loads = (loads_of(costs, rank_of, world_size), loads_of(tokens, rank_of, world_size))
            found[name].append(Imbalance.of(*loads))
        least = max(0.0, 1 - costs.sum() / world_size / costs.max())
        found["bound"].append(Imbalance(least, least, 0.0))
    return {
        name: Imbalance(*(float(np.mean([getattr(one, key) for one in each])) for key in ("wait", "spread", "tokens")))
        for name, each in found.items()
    }


def write_log(out: Path, num_users: int) -> None:
    """Histories of `lengths-kuai` scaled to MAX_LEN; items are random, because only their number matters here."""
    lengths = np.ceil(lengths_kuai(num_users, SEED) * MAX_LEN / 2048).astype(np.int64) + 2
    users = np.repeat(np.arange(num_users), lengths)
    items = np.random.default_rng(SEED).integers(0, 5000, len(users))
    frame = pl.DataFrame({"user": users, "item": items, "time": np.arange(len(users)) * 60})
    write_sequences(out, schema=Schema(), log=frame)


def config_of(path: Path) -> Config:
    recipe = recipes.ml1m_hstu()
    return replace(
        recipe,
        data=replace(recipe.data, path=str(path), max_len=MAX_LEN, batch_size=8 * WORLD_SIZE),
        model=HSTUConfig(num_blocks=4),
        train=replace(recipe.train, num_threads=1),
    )


@dataclass(frozen=True, slots=True)
class Steps:
    """What one rank measured: processor time of its compute in each step, and the wall time of each step."""

    busy_s: list[float]
    step_s: list[float]


def timed_step(state: TrainState, loader: Loader, cursor: Cursor, rates: Rates) -> tuple[float, float]:
    """`sequential.step` that measures the local work of a rank."""
    batch, began = loader.batch(cursor), time.perf_counter()
    work: BatchWork = read(state, batch, rates, state.num_steps)
    for stage in (keys, retrieve, post):
        stage(state, work)
    busy = 0.0
    for micro_batch in range(state.micro_batching.micro_batches):
        rows(state, work, micro_batch)
        work.window.local_rows(micro_batch)  # waits for the rows, so that no waiting is counted below
        start = time.thread_time()
        compute(state, work, micro_batch)
        busy += time.thread_time() - start
        grads(state, work, micro_batch)
        collect(state, work, micro_batch)
    for stage in (flag, dense_sum, norm, dense_step, update, write):
        stage(state, work)
    return busy, time.perf_counter() - began


def _rank(rank: int, store: str, path: Path, cost: SampleCost, num_steps: int, answers: object) -> None:
    torch.set_num_threads(1)
    world = World.from_store(dist.FileStore(store, WORLD_SIZE), rank, WORLD_SIZE, deadline_s=600)
    config, channels = config_of(path), Channels.of(world)
    state = new_state(Run(Path(), config), channels)
    found = {arm: Steps([], []) for arm in ARMS}
    run = Run(Path(), config)
    loaders = {}
    for arm in ARMS:
        data = replace(config.data, balance=arm == "balanced", cost_linear=cost.linear, cost_square=cost.square)
        loaders[arm] = Loader(run.sequences, run.split, data, seed=SEED, rank=rank, world_size=WORLD_SIZE)
    cursor = Cursor(0, 0)
    for number in range(num_steps + 1):
        for arm in ARMS:  # the same global batch in both
            busy, whole = timed_step(state, loaders[arm], cursor, Rates(1e-4, 1e-4))
            if number:  # the first step grows tables and buffers
                found[arm].busy_s.append(busy)
                found[arm].step_s.append(whole)
        cursor = loaders["fixed"].next_cursor(cursor)
    world.close()
    answers.put((rank, found))  # type: ignore[attr-defined]


def measured(path: Path, cost: SampleCost, num_steps: int) -> dict[str, list[Steps]]:
    """What the ranks measured, by arm."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    store = str(path.parent / "store")
    ranks = [
        context.Process(target=_rank, args=(rank, store, path, cost, num_steps, answers)) for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    found = dict(answers.get() for _ in ranks)
    for process in ranks:
        process.join()
    return {arm: [found[rank][arm] for rank in range(WORLD_SIZE)] for arm in ARMS}


def wait_of(ranks: list[Steps]) -> list[float]:
    """For each step the share of the slowest rank's compute that ranks wait for it."""
    busy = np.array([rank.busy_s for rank in ranks])
    return [float(1 - step.mean() / step.max()) for step in busy.T]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer batches and steps; under 50 seconds")
    parser.add_argument("--no-ranks", action="store_true", help="the cost model alone, without real ranks")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    table = []
    for ratio in RATIOS:
        for name, (samples, world_size, most) in SHAPES.items():
            found = modelled(ratio, samples, world_size, 50 if options.quick else 500)
            for way, one in found.items():
                verdict = ("met" if one.wait <= most else "missed") if way == "swaps" else ""
                values = (one.wait, one.spread, one.tokens)
                table.append([f"b/a {ratio:g}: {name} {way}", *(f"{100 * value:.2f} %" for value in values), verdict])
            figures[f"{name}, b/a {ratio:g}"] = {
                way: [round(value, 5) for value in (one.wait, one.spread, one.tokens)] for way, one in found.items()
            }
            if (name, ratio) == ("8x8", RATIOS[0]):
                figures |= {"wait_share": found["swaps"].wait, "wait_share_fixed": found["fixed"].wait}
    print("by the cost model, mean over batches")
    print(measure.table(["samples x ranks", "wait/step", "spread", "of events", ""], table))
    if not options.no_ranks:
        figures["measured"] = real(10 if options.quick else 40)
    settings = {"workload": "lengths-kuai", "ratios": RATIOS, "quick": options.quick}
    measure.append("balance", measure.record(seed=SEED, figures=figures, settings=settings))
    print(json.dumps(figures))


def real(num_steps: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        write_log(path, 8 * WORLD_SIZE * (num_steps + 1))
        fitted = tuned(config_of(path), num_events=2048, num_steps=2)
        found = measured(path, fitted.cost, num_steps)
    waits = {arm: measure.Spread.of(wait_of(ranks)) for arm, ranks in found.items()}
    slowest = {
        arm: [max(step) for step in zip(*(rank.busy_s for rank in ranks), strict=True)] for arm, ranks in found.items()
    }
    faster = measure.ratio(slowest["fixed"], slowest["balanced"])
    cost = fitted.cost
    print(f"\n4 real ranks; a sample of L events takes {cost.linear:.3g}·L + {cost.square:.3g}·L² microseconds")
    print(measure.table(["", "wait/step (10-90 %)"], [[arm, str(one)] for arm, one in waits.items()]))
    print(f"the slowest rank's compute, fixed over balanced: {faster}")
    return {
        "cost_us": [round(cost.linear, 4), round(cost.square, 6)],
        "wait": {arm: [round(one.median, 4), *one.range] for arm, one in waits.items()},
        "slowest_fixed_over_balanced": [round(faster.median, 3), *faster.range],
    }


if __name__ == "__main__":
    main()
