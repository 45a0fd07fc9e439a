"""What do negatives cost: time, memory and lookups for 64 and 128 per event, and for 64 that 2 or 4 events share?

The work is everything that a training step does for its negatives on one rank: draw ids, deduplicate, fetch rows, normalise,
score with a running logsumexp, differentiate. Arms alternate; figures are CPU time, so other load matters little. `loss ms` is the scoring alone. `gemm` scores all distinct rows, without the native kernel.

`shared4_over_plain_time`: 64 negatives shared by 4 events over 64 of their own, for the catalogue of a million.
`peak_memory_ratio`: what a loss with 128 negatives adds to a process, over that of its definition with a vector per pair.

--quality trains instead and compares HR@10 over seeds: 64 own, 64 shared by 2 (equal lookups), 128 own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import measure
import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe import recipes
from nestpipe.data.synthetic_sequences import SyntheticConfig, ingest_synthetic
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.lookup import Lookup
from nestpipe.embedding.routing import route
from nestpipe.embedding.row_ops import gather_rows
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import HSTUConfig, LossConfig
from nestpipe.models.negative_sampling import blocks_of, draw_negatives
from nestpipe.ops.negatives import plain_sampled_softmax, sampled_softmax
from nestpipe.rng import Rng
from nestpipe.training.loop import train
from nestpipe.training.process import keep_freed_memory

SEED, LENGTH = 0, 160
AIM = 1.3
ARMS = {
    "R = 64": LossConfig(num_negatives=64),
    "R = 128": LossConfig(num_negatives=128),
    "R = 64, k = 2": LossConfig(num_negatives=64, share="sample", share_factor=2),
    "R = 64, k = 4": LossConfig(num_negatives=64, share="sample", share_factor=4),
    "R = 256": LossConfig(num_negatives=256),
}
GEMM = "R = 128, gemm"
WORLDS = {"ml1m": (3_706, 50, 128), "million": (1_000_000, 64, 128)}  # items, width, samples


@dataclass(frozen=True, slots=True)
class World:
    """A catalogue, and one batch of histories of equal length."""

    table: Tensor
    queries: Tensor
    batch: Batch

    @staticmethod
    def of(num_items: int, width: int, num_samples: int) -> World:
        generator = torch.Generator().manual_seed(SEED)
        num_tokens = num_samples * LENGTH
        items, targets = torch.randint(num_items, (2, num_tokens), generator=generator)
        history = Jagged(items, torch.arange(0, num_tokens + 1, LENGTH), LENGTH)
        batch = Batch(
            cursor=Cursor(0, 0),
            sample_ids=torch.arange(num_samples),
            items=history,
            targets=history.with_values(targets),
        )
        queries = F.normalize(torch.randn(num_tokens, width, generator=generator)) / 0.05
        return World(torch.randn(num_items, width, generator=generator), queries.requires_grad_(), batch)

    def lookups(self, loss: LossConfig, rng: Rng) -> dict[str, Lookup]:
        negatives = draw_negatives(loss, self.batch, rng, len(self.table))
        return {
            "negatives": Lookup(table="item", ids=negatives),
            "targets": Lookup(table="item", ids=self.batch.targets.values),
        }


@dataclass(slots=True)
class Arm:
    """One kind of negatives; records the lookups and the scoring time of its last block."""

    world: World
    loss: LossConfig
    backend: str | None = None
    step: int = 0
    num_rows: int = 0
    loss_s: float = 0.0

    def block(self) -> float:
        start, rng = time.process_time(), Rng(SEED, self.step)
        self.step += 1
        plan = route([self.world.lookups(self.loss, rng)], ["item"], Owners(1, 1))
        leaf = gather_rows(self.world.table, plan.tables["item"].ids).requires_grad_()
        rows = plan.rows(0, {"item": leaf})
        items = F.normalize(leaf, dim=1)
        before = time.process_time()
        loss = sampled_softmax(
            self.world.queries,
            items,
            rows["targets"].index,
            rows["negatives"].index,
            segment=self.loss.segment,
            blocks=blocks_of(self.loss, self.world.batch, rng),
            backend=self.backend,
        )
        _, d_items = torch.autograd.grad(loss, (self.world.queries, items))
        self.loss_s = time.process_time() - before
        torch.autograd.grad(items, leaf, d_items)
        self.num_rows = len(leaf)
        return time.process_time() - start


def measure_world(name: str, *, quick: bool) -> dict[str, dict[str, object]]:
    num_items, width, num_samples = WORLDS[name]
    world = World.of(num_items, width, num_samples // 8 if quick else num_samples)
    arms = {key: Arm(world, loss) for key, loss in ARMS.items()}
    if name == "ml1m":
        arms[GEMM] = Arm(world, ARMS["R = 128"], "gemm")
    losses: dict[str, list[float]] = {key: [] for key in arms}

    def noting(key: str) -> Callable[[], float]:
        def block() -> float:
            seconds = arms[key].block()
            losses[key].append(arms[key].loss_s)
            return seconds

        return block

    times = measure.alternate({key: noting(key) for key in arms})
    base = "R = 64"
    found: dict[str, dict[str, object]] = {}
    for key, arm in arms.items():
        own = losses[key][1:]  # the first block is the warm-up
        over, loss_over = measure.ratio(times[key], times[base]), measure.ratio(own, losses[base][1:])
        found[key] = {
            "ms": round(1e3 * statistics.median(times[key]), 1),
            "over R = 64": round(over.median, 3),
            "range": over.range,
            "loss ms": round(1e3 * statistics.median(own), 1),
            "loss over R = 64": round(loss_over.median, 3),
            "lookups": world.batch.num_tokens * arm.loss.num_negatives,
            "rows": arm.num_rows,
        }
        if key == "R = 64, k = 4":
            found[key]["verdict"] = measure.verdict(over, at_most=AIM)
    return found


def peak_memory(way: str) -> float:
    """MiB that a loss with 128 negatives adds to the high-water mark of a fresh process."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_measure_memory, args=(way, answers))
    process.start()
    found: float = answers.get()
    process.join()
    return found


def memory_kib(name: str) -> int:
    """VmRSS, or VmHWM: its peak (not ru_maxrss, which a process inherits from the one that started it)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _measure_memory(way: str, answers: multiprocessing.SimpleQueue[float]) -> None:
    torch.set_num_threads(1)

    def run(world: World) -> None:
        items = F.normalize(world.table).requires_grad_()
        negatives = draw_negatives(ARMS["R = 128"], world.batch, Rng(SEED, 0), len(items))
        positives = world.batch.targets.values
        nonlocal before
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before = memory_kib("VmRSS")
        if way == "plain":
            loss = plain_sampled_softmax(world.queries, items, positives, negatives)
        else:
            loss = sampled_softmax(world.queries, items, positives, negatives, segment=256)
        torch.autograd.grad(loss, (world.queries, items))

    before = 0
    run(World.of(100, 64, 1))
    run(World.of(3_706, 64, 32))
    answers.put((memory_kib("VmHWM") - before) / 1024)


def quality(data: str | None, *, num_seeds: int, epochs: int) -> dict[str, dict[str, object]]:
    """HR@10 of a short training, by arm and seed."""
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = data or str(Path(folder) / "data")
        if data is None:
            ingest_synthetic(Path(path), SyntheticConfig(num_users=600, num_items=2000))
        recipe = recipes.ml1m_hstu()
        for name in ("R = 64", "R = 64, k = 2", "R = 128"):
            values = []
            for seed in range(num_seeds):
                config = replace(
                    recipe,
                    seed=seed,
                    data=replace(recipe.data, path=path, max_len=200 if data else 64),
                    model=HSTUConfig() if data else HSTUConfig(dim=32, qk_dim=32, v_dim=32),
                    loss=ARMS[name],
                    train=replace(recipe.train, epochs=epochs, num_threads=torch.get_num_threads()),
                )
                run = train(config, Path(folder) / f"{name}-{seed}", quiet=True)
                values.append(run.predictor().evaluate(progress=False).scalars()["hr@10"])
            found[name] = {
                "hr10": [round(one, 4) for one in values],
                "mean": round(statistics.mean(values), 4),
                "deviation": round(statistics.stdev(values), 4) if len(values) > 1 else None,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the batch; under 50 seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quality", action="store_true", help="train and compare HR@10 instead")
    parser.add_argument(
        "--data", help="quality: a sequence folder, say of MovieLens-1M; by default a small generated one"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    settings = {name: value for name, value in vars(options).items() if value is not None}
    if options.quality:
        seeds, epochs = (2, 3) if options.quick else (options.seeds, options.epochs)
        figures = {"quality": quality(options.data, num_seeds=seeds, epochs=epochs)}
        rows = [[name, *(str(value) for value in one.values())] for name, one in figures["quality"].items()]
        print(measure.table(["negatives", "HR@10", "mean", "deviation"], rows))
    else:
        figures = timing(options.quick)
    measure.append("negatives", measure.record(seed=SEED, figures=figures, settings=settings))
    print(json.dumps(figures))


def timing(quick: bool) -> dict[str, object]:
    figures: dict[str, object] = {}
    for name in WORLDS:
        found = measure_world(name, quick=quick)
        header = ["negatives", *(key for key in found["R = 64"])]
        print(f"\n{name}: {WORLDS[name][0]:,} items; CPU time, medians of blocks (10-90 %)")
        print(measure.table(header, [[key, *(str(one[field]) for field in header[1:])] for key, one in found.items()]))
        figures[name] = found
        if name == "million":
            shared = found["R = 64, k = 4"]
            figures["shared4_over_plain_time"], figures["verdict"] = shared["over R = 64"], shared["verdict"]
            figures["shared4_over_plain_loss_time"] = shared["loss over R = 64"]
    ours, plain = peak_memory("ours"), peak_memory("plain")
    figures |= {"peak_mib": round(ours, 1), "plain_peak_mib": round(plain, 1)}
    figures["peak_memory_ratio"] = round(ours / plain, 4)
    print(f"\npeak of a loss with 128 negatives: {ours:.1f} MiB; with a vector for every pair: {plain:.1f} MiB")
    return figures


if __name__ == "__main__":
    main()
