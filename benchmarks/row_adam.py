"""What does exact Adam on rows cost? A training step of zipf-512 with it over one with lazy Adam, in CPU time.

Workload zipf-512: a table of 1M x 64, 512 samples x 50 Zipf(1.05) ids per step, one process, one thread, the sequential step, with
the memory and arithmetic settings of training. About 1 % of the rows are looked up in a step, so most rows that are read have missed
many steps. Arms alternate in one process every 8 steps, and a block is one pass over all batches: blocks and arms do the same work.
The first two passes, in which rows walk step by step (embedding/skipped_steps.py), are reported on their own.

`--quality` instead trains a small SASRec with either on a generated log, most rows of which no batch looks up: NDCG@10 of the
validation items over seeds, the difference paired by seed, and the CPU time of the trainings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import measure
import torch
import train_arms
from quality import spread

from nestpipe import recipes
from nestpipe.config import Config
from nestpipe.data.config import SyntheticConfig
from nestpipe.data.loader import Loader
from nestpipe.data.synthetic_sequences import ingest_synthetic
from nestpipe.distributed.process_group import World
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import Table
from nestpipe.eval.eval_report import EvalReport
from nestpipe.jagged import Batch, Cursor
from nestpipe.models.config import LossConfig, SASRecConfig
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState
from nestpipe.rng import Rng
from nestpipe.training.loop import train_to_end
from nestpipe.training.process import exact_arithmetic, keep_freed_memory

LIMIT = 1.25
RATES = Rates(dense=1e-3, rows=1e-3)
QUALITY_LOG = SyntheticConfig(num_users=1500, num_items=8000, mean_len=16, max_len=40, zipf=0.6)
QUALITY_EPOCHS, QUALITY_RATES = 10, (0.004, 0.016, 0.064)
PAGE = Path(__file__).resolve().parent.parent / "docs" / "concepts" / "embeddings.md"
BEGIN, END = "<!-- row_adam -->", "<!-- end of row_adam -->"
TURN = 8  # steps of an arm before it is the other's turn
WARM_PASSES = 2  # every row in use has then been updated since batch 75, from which the series holds


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


def timed(state: TrainState, data: list[Batch]) -> Callable[[], float]:
    """A turn of an arm: its CPU seconds per step."""
    numbers = count()

    def turn() -> float:
        start = time.process_time()
        for _ in range(TURN):
            step(state, data[next(numbers) % len(data)], RATES)
        return (time.process_time() - start) / TURN

    return turn


def passes(arms: Mapping[str, Callable[[], float]], num_passes: int, num_batches: int) -> dict[str, list[float]]:
    """CPU seconds per step of each arm and pass over the batches, in turns."""
    turns = num_batches // TURN
    times = measure.alternate(arms, num_blocks=num_passes * turns, warm_up=0)
    return {
        name: [statistics.mean(own[begin : begin + turns]) for begin in range(0, len(own), turns)]
        for name, own in times.items()
    }


def quality_config(data: Path, optimizer: str, lr: float, seed: int) -> Config:
    base = recipes.tiny()
    return replace(
        base,
        seed=seed,
        data=replace(base.data, path=str(data), max_len=20, batch_size=32, validation=True),
        model=SASRecConfig(dim=32, num_blocks=1, num_heads=2, hidden_dim=64, dropout=0.1),
        loss=LossConfig(num_negatives=32, source="sample"),
        embedding=EmbeddingConfig(optimizer=optimizer, lr=lr),  # type: ignore[arg-type]
        train=replace(base.train, epochs=QUALITY_EPOCHS, eval_epochs=1000, num_threads=1),
    )


def trained(config: Config, folder: Path) -> dict[str, float]:
    """NDCG@10 of the validation items, the share of rows that a batch leaves untouched, and CPU seconds of the training."""
    start = time.process_time()
    run = train_to_end(config, folder, quiet=True).run
    seconds = time.process_time() - start
    report = run.predictor().evaluate("validation")
    assert isinstance(report, EvalReport)
    loader = Loader(run.sequences, run.split, config.data, seed=config.seed)
    model, rng = run.load_model().model, Rng(config.seed, 0)
    batches = (loader.batch(Cursor(0, number)) for number in range(20))
    looked_up = [
        len(torch.cat([one.ids.flatten() for one in model.lookups(batch, rng).values()]).unique()) for batch in batches
    ]
    untouched = 1 - statistics.mean(looked_up) / len(run.sequences.catalogue)
    return {"ndcg@10": report.metrics["ndcg@10"].mean, "cpu_s": seconds, "untouched": untouched}


def quality(num_seeds: int, rates: Sequence[float]) -> None:
    """At several learning rates of the rows: at a low one the optimizer that makes longer steps learns faster."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "log"
        ingest_synthetic(data, QUALITY_LOG)
        figures = {f"lr {lr}": quality_at(lr, num_seeds, data, Path(folder) / f"{lr}") for lr in rates}
    facts = {"workload": "generated log", "num_seeds": num_seeds, "num_epochs": QUALITY_EPOCHS, **asdict(QUALITY_LOG)}
    measure.append("row_adam", measure.record(seed=0, figures=figures, settings=facts))
    print(json.dumps(figures))


def quality_at(lr: float, num_seeds: int, data: Path, folder: Path) -> dict[str, object]:
    found: dict[str, list[dict[str, float]]] = {"lazy_adam": [], "adam": []}
    for seed in range(num_seeds):
        for name, results in found.items():
            results.append(trained(quality_config(data, name, lr, seed), folder / f"{name}-{seed}"))
            print(f"{name}, lr {lr}, seed {seed}: {results[-1]}", flush=True)
    pairs = list(zip(found["adam"], found["lazy_adam"], strict=True))
    means = {name: spread([one["ndcg@10"] for one in results]) for name, results in found.items()}
    means["adam - lazy_adam"] = spread([exact["ndcg@10"] - lazy["ndcg@10"] for exact, lazy in pairs])
    return {
        **{f"ndcg@10, {name}": [round(mean, 5), round(half, 5)] for name, (mean, half) in means.items()},
        "cpu, adam over lazy_adam": round(
            statistics.median(exact["cpu_s"] / lazy["cpu_s"] for exact, lazy in pairs), 3
        ),
        "untouched": round(statistics.mean(one["untouched"] for pair in pairs for one in pair), 3),
    }


def page() -> str:
    """docs/concepts/embeddings.md with the last figures of each learning rate."""
    path = measure.RESULTS / "row_adam.jsonl"
    records = list(map(json.loads, path.read_text().splitlines()))
    found = {
        lr: own
        for one in records
        if one["settings"]["workload"] == "generated log"
        for lr, own in one["figures"].items()
    }
    names = ("lazy_adam", "adam", "adam - lazy_adam")
    lines = [["rows", *names, "CPU time"], ["---"] * 5]
    for lr, own in sorted(found.items(), key=lambda one: float(one[0].split()[1])):
        figures = ["{:.4f} ± {:.4f}".format(*own[f"ndcg@10, {name}"]) for name in names]
        lines.append([lr, *figures, f"{own['cpu, adam over lazy_adam']:.2f}x"])
    table = [f"| {' | '.join(line)} |" for line in lines]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + "\n".join([BEGIN, "", *table, "", END]) + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer passes")
    parser.add_argument("--dense", default="mlp", choices=("mlp", "hstu"))
    parser.add_argument("--quality", action="store_true", help="instead: NDCG@10 with both on a generated log")
    parser.add_argument("--seeds", type=int, default=3, help="of --quality, 2 .. 5")
    parser.add_argument("--rates", type=float, nargs="+", default=QUALITY_RATES, help="learning rates of --quality")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/row_adam.jsonl")
    parser.add_argument("--write", action="store_true", help="put its table into docs/concepts/embeddings.md")
    options = parser.parse_args()
    if options.quality:
        torch.set_num_threads(1)
        quality(options.seeds, options.rates)
    if options.write:
        PAGE.write_text(page())
    if options.quality or options.write:
        return
    keep_freed_memory()
    with exact_arithmetic(1):
        cost(options.dense, measure.MIN_BLOCKS if options.quick else 21, is_recorded=not options.no_record)


def cost(dense: str, num_passes: int, *, is_recorded: bool) -> None:
    settings = train_arms.Settings(samples=512, dense=dense, micro_batches=1)
    data = [batch for rank in range(4) for batch in train_arms.batches(settings, rank)]
    arms = {name: timed(new_state(name, dense), data) for name in ("lazy_adam", "adam")}
    early = passes(arms, WARM_PASSES, len(data))
    times = passes(arms, num_passes, len(data))
    over = measure.ratio(times["adam"], times["lazy_adam"])
    figures = {
        "adam_over_lazy_adam": round(over.median, 4),
        "adam_over_lazy_adam_range": over.range,
        "at_most_1.25": measure.verdict(over, at_most=LIMIT),
        "first_steps": round(sum(early["adam"]) / sum(early["lazy_adam"]), 4),
    }
    facts = {"workload": "zipf-512", "dense": dense, "num_blocks": num_passes, "num_steps": len(data), "turn": TURN}
    if is_recorded:
        record = measure.record(seed=train_arms.SEED, figures=figures, settings={**facts, "threads": 1})
        measure.append("row_adam", record)
    rows = [[name, f"{1e3 * measure.Spread.of(times[name]).median:.2f} ms"] for name in arms]
    print(measure.table(["rows", "CPU per step"], rows))
    print(f"adam over lazy_adam: {over}; at most {LIMIT}: {figures['at_most_1.25']}")
    print(f"in the first {WARM_PASSES * len(data)} steps: {figures['first_steps']}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
