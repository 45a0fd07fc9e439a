"""What share of the machine does a training step of HSTU and FuXi use, and where does the rest go?

A step is the whole of training in one process: routing, lookup, forward, loss with 128 negatives per event, backward, row
update, dense update. Lengths are `lengths-kuai` scaled to the model's longest history. `mfu_effective` counts true lengths
and causal pairs (nestpipe.training.mfu) over an sgemm measured in the same block; `mfu_padded` is the published convention,
shown with the fill. The second table is torch's profiler over one more step, by kind of work.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import measure
import torch
from attention import SEED, lengths_kuai, sgemm_step, timed

from nestpipe.config import Config
from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.table import Table
from nestpipe.jagged import Batch, Cursor, Jagged, offsets_of
from nestpipe.models.retrieval import build_retrieval
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState
from nestpipe.recipes import RECIPES
from nestpipe.training.mfu import measure_peak, work_of
from nestpipe.training.process import exact_arithmetic

NUM_ITEMS, AIM = 20_000, 0.4
# Recipe -> sequences per step: enough tokens to be typical, few enough for a laptop.
SHAPES = {"hstu_small": 32, "fuxi_small": 32, "hstu_medium": 16, "fuxi_medium": 16, "hstu_large": 6, "fuxi_large": 6}
QUICK = ("hstu_small", "fuxi_small", "hstu_medium")
# The kind of work is that of the first name found in an event's name.
KINDS = {
    "attention": ("jagged_attention",),
    "linear layers": ("aten::mm", "aten::addmm"),
    "loss": ("SampledSoftmax", "aten::bmm", "aten::gather", "aten::scatter_add"),
    "rows": ("aten::index_select", "aten::index_add", "aten::embedding", "aten::unique", "aten::sort"),
    "dense update": ("Optimizer", "aten::_foreach", "aten::_fused"),
}


def batch_of(config: Config, num_sequences: int) -> Batch:
    lengths = lengths_kuai(num_sequences, config.data.max_len)
    generator = torch.Generator().manual_seed(SEED)
    num_tokens = int(lengths.sum())
    items, targets = torch.randint(0, NUM_ITEMS, (2, num_tokens), generator=generator)
    rows = Jagged(items, offsets_of(lengths), config.data.max_len)
    times = torch.randint(1, 10_000, (num_tokens,), generator=generator).cumsum(0)
    return Batch(
        cursor=Cursor(0, 0),
        sample_ids=torch.arange(num_sequences),
        items=rows,
        times=rows.with_values(times),
        query_times=rows.with_values(times + 60),
        targets=rows.with_values(targets),
    )


def state_of(config: Config) -> TrainState:
    model = build_retrieval(
        config.model, config.loss, catalogue=torch.arange(NUM_ITEMS), max_len=config.data.max_len, seed=SEED
    )
    channels = Channels.of(World.single())
    optimizer = OPTIMIZERS[config.embedding.optimizer](config.embedding)
    tables = {spec.name: Table(spec, optimizer, seed=SEED, config=config.embedding) for spec in model.tables}
    embedding = ShardedTables(tables, channels.keys, channels.rows, Owners(config.embedding.num_buckets, 1))
    dense = DenseParams(model, config.dense, channels.dense)
    return TrainState(
        model=model,
        embedding=embedding,
        dense=dense,
        control=channels.control,
        seed=SEED,
        micro_batching=MicroBatchConfig(micro_batches=1),
    )


def profile(run: Callable[[], object]) -> dict[str, float]:
    """Shares of a step's time by kind of work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    spent: dict[str, float] = dict.fromkeys([*KINDS, "the rest (norms, silu, dropout, copies, Python)"], 0.0)
    total = 0.0
    for event in profiler.key_averages():
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names)), None)
        spent[kind or list(spent)[-1]] += event.self_cpu_time_total
        total += event.self_cpu_time_total
    return {kind: round(time / total, 3) for kind, time in spent.items()}


def measure_recipe(name: str, num_sequences: int) -> dict[str, object]:
    config = RECIPES[name]()
    config = replace(config, data=replace(config.data, batch_size=num_sequences))
    state, batch = state_of(config), batch_of(config, num_sequences)
    rates = Rates(dense=config.dense.lr, rows=config.embedding.lr)

    def run() -> object:
        return step(state, batch, rates)

    times = measure.alternate({"step": timed(run, 1), "sgemm": timed(sgemm_step(), 4)})
    work, lengths = work_of(config.model), batch.items.lengths()
    peaks = [2 * 1024**3 / seconds for seconds in times["sgemm"]]

    def share(flops: float) -> measure.Spread:
        return measure.Spread.of([flops / t / peak for t, peak in zip(times["step"], peaks, strict=True)])

    effective, padded = share(work.effective(lengths)), share(work.padded(num_sequences, config.data.max_len))
    return {
        "mfu_effective": round(effective.median, 3),
        "mfu_effective_range": effective.range,
        "verdict": measure.verdict(effective, at_least=AIM),
        "mfu_padded": round(padded.median, 3),
        "fill": round(batch.num_tokens / (num_sequences * config.data.max_len), 3),
        "tokens": batch.num_tokens,
        "ms": round(1e3 * measure.Spread.of(times["step"]).median, 1),
        "sgemm_gflops": round(measure.Spread.of(peaks).median / 1e9, 1),
        "shares": profile(run),
    }


def run_once(name: str, num_sequences: int) -> dict[str, object]:
    """A single step: its time, the processor time of all threads, and the high-water mark of memory."""
    config = RECIPES[name]()
    state, batch = state_of(config), batch_of(config, num_sequences)
    peak, start, used = measure_peak(), time.perf_counter(), time.process_time()
    logs = step(state, batch, Rates(dense=config.dense.lr, rows=config.embedding.lr))
    seconds, used = time.perf_counter() - start, time.process_time() - used
    return {
        "recipe": name,
        "dense_parameters": sum(one.numel() for one in state.model.parameters()),  # type: ignore[attr-defined]
        "tokens": batch.num_tokens,
        "loss": round(logs["loss"], 3),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "mfu_effective": round(work_of(config.model).effective(batch.items.lengths()) / seconds / peak, 3),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smaller models, fewer sequences; under 50 seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--once", metavar="RECIPE", help="one training step of a recipe, with its memory; no table")
    parser.add_argument("--sequences", type=int, default=2, help="with --once: sequences of the step")
    options = parser.parse_args()
    if options.once:
        with exact_arithmetic(options.threads):
            print(json.dumps(run_once(options.once, options.sequences)))
        return
    figures: dict[str, dict[str, object]] = {}
    with exact_arithmetic(options.threads):
        for name in QUICK if options.quick else SHAPES:
            figures[name] = measure_recipe(name, SHAPES[name] // (4 if options.quick else 1))
    settings = {"workload": "lengths-kuai", "threads": options.threads, "quick": options.quick}
    measure.append("mfu", measure.record(seed=SEED, figures=figures, settings=settings))
    keys = ("mfu_effective", "mfu_effective_range", "verdict", "mfu_padded", "fill", "tokens", "ms", "sgemm_gflops")
    print(
        f"one training step, {options.threads} thread(s); aim {AIM:.0%} effective; lengths: log-normal(6.0, 1.1), scaled"
    )
    print(measure.table(["recipe", *keys], [[name, *(str(one[key]) for key in keys)] for name, one in figures.items()]))
    print("\nwhere the time of a step goes (share of all operations)")
    shares = {name: dict(one["shares"]) for name, one in figures.items()}  # type: ignore[call-overload]
    kinds = list(next(iter(shares.values())))
    print(
        measure.table(["recipe", *kinds], [[name, *(str(one[kind]) for kind in kinds)] for name, one in shares.items()])
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
