"""How fast is one embedding step: lookup, gradient sums, AdaGrad? Vs. TBE (sequence mode) and nn.Embedding(sparse).

Workload zipf-512: a table of 1M x 64, 512 x 50 Zipf(1.05) ids per step, one process, one thread. Every arm gathers one
vector per id, gets the same gradient for each, and applies exact AdaGrad to the rows in use. Ours runs the whole
training path: routing, lookup of raw 64-bit ids in a growing hash index, exchange with itself, sums, update; the peers index
a dense array. The lower bound is the gather of the distinct rows. TBE runs in .venv-peers ('make peers').
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
NUM_ROWS, DIM, NUM_IDS, ZIPF, SEED, LR = 1_000_000, 64, 512 * 50, 1.05, 0, 0.01
NUM_BATCHES = 16


def batches() -> list[torch.Tensor]:
    """Ids in 0 .. NUM_ROWS - 1, spread over the table, so that frequent ids are not neighbours."""
    rng = np.random.default_rng(SEED)
    weights = 1.0 / np.arange(1, NUM_ROWS + 1) ** ZIPF
    edges = np.cumsum(weights / weights.sum())
    place = rng.permutation(NUM_ROWS)
    return [torch.from_numpy(place[np.searchsorted(edges, rng.random(NUM_IDS))]) for _ in range(NUM_BATCHES)]


def gradient() -> torch.Tensor:
    return torch.randn(NUM_IDS, DIM, generator=torch.Generator().manual_seed(SEED))


def timed(step: Callable[[torch.Tensor], None], num_repeats: int) -> Callable[[], float]:
    data = batches()

    def block() -> float:
        start = time.perf_counter()
        for repeat in range(num_repeats):
            step(data[repeat % NUM_BATCHES])
        return (time.perf_counter() - start) / num_repeats

    return block


def our_step() -> Callable[[torch.Tensor], None]:
    from nestpipe.distributed.process_group import World
    from nestpipe.embedding.buckets import Owners
    from nestpipe.embedding.config import EmbeddingConfig
    from nestpipe.embedding.lookup import Lookup, TableSpec
    from nestpipe.embedding.routing import route
    from nestpipe.embedding.row_optimizer import AdaGrad
    from nestpipe.embedding.sharding import ShardedTables
    from nestpipe.embedding.table import Table
    from nestpipe.embedding.window import Window

    config = EmbeddingConfig(optimizer="adagrad", lr=LR, eps=1e-8)
    table = Table(TableSpec(name="item", dim=DIM), AdaGrad(config), seed=SEED)
    table.advance(torch.arange(NUM_ROWS), -1)
    world = World.single()
    embedding = ShardedTables({"item": table}, world.channel("keys"), world.channel("rows"), Owners(64, 1))
    grads = gradient()
    count = iter(range(1 << 40))

    def step(ids: torch.Tensor) -> None:
        plan = route([{"x": Lookup(table="item", ids=ids)}], ["item"], embedding.owners)
        window = Window(embedding, plan, next(count), 1.0)
        window.exchange_ids()
        window.retrieve()
        window.post_receives()
        window.launch_rows(0)
        leaves = window.local_rows(0)
        plan.rows(0, leaves)["x"].gather().backward(grads)
        window.add_grads(0, leaves)
        window.launch_grads(0)
        window.collect(0)
        window.update(LR)
        window.release()

    return step


def torch_sparse_step() -> Callable[[torch.Tensor], None]:
    layer = torch.nn.Embedding(NUM_ROWS, DIM, sparse=True)
    optimizer = torch.optim.Adagrad(layer.parameters(), lr=LR, eps=1e-8)
    grads = gradient()

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(ids).backward(grads)
        optimizer.step()

    return step


def gather_step() -> Callable[[torch.Tensor], None]:
    """The bound: distinct rows, sorted, into room that is already there."""
    rows = torch.randn(NUM_ROWS, DIM)
    distinct = {ids.data_ptr(): ids.unique() for ids in batches()}
    room = torch.empty(NUM_IDS, DIM)
    order = iter(list(distinct.values()) * (1 << 16))

    def step(ids: torch.Tensor) -> None:
        wanted = next(order)
        torch.index_select(rows, 0, wanted, out=room[: len(wanted)])

    return step


def tbe_step() -> Callable[[torch.Tensor], None]:
    """Runs in the peers' environment."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OptimType.EXACT_ADAGRAD,
        learning_rate=LR,
        eps=1e-8,
        pooling_mode=PoolingMode.NONE,
    )
    offsets = torch.arange(NUM_IDS + 1)
    grads = gradient()

    def step(ids: torch.Tensor) -> None:
        layer(ids, offsets).backward(grads)

    return step


def serve_peer(num_repeats: int) -> None:
    """One block of TBE for each line read; the seconds of a step are the answer."""
    torch.set_num_threads(1)
    block = timed(tbe_step(), num_repeats)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(block()), flush=True)


def peer_arm(num_repeats: int) -> tuple[Callable[[], float], Callable[[], None]]:
    command = [str(PEER_PYTHON), str(Path(__file__)), "--as-peer", "--repeats", str(num_repeats)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    send, answers = process.stdin, process.stdout
    while (line := answers.readline().strip()) != "ready":
        if process.poll() is not None:
            raise SystemExit(
                f"TBE did not start in {PEER_PYTHON.parent.parent.name} (last line {line!r}); run 'make peers'."
            )

    def block() -> float:
        send.write("go\n")
        send.flush()
        return float(answers.readline())

    def close() -> None:
        send.close()
        process.wait(timeout=30)

    return block, close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks; under 50 seconds")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int)
    options = parser.parse_args()
    num_repeats = options.repeats or (16 if options.quick else 48)
    if options.as_peer:
        serve_peer(num_repeats)
        return
    if not PEER_PYTHON.exists():
        raise SystemExit("TBE is not installed: run 'make peers' first.")
    torch.set_num_threads(1)
    tbe, close = peer_arm(num_repeats)
    arms = {
        "ours": timed(our_step(), num_repeats),
        "tbe": tbe,
        "torch_sparse": timed(torch_sparse_step(), num_repeats),
        "row_gather": timed(gather_step(), num_repeats),
    }
    try:
        report(arms, num_repeats, quick=options.quick)
    finally:
        close()


def report(arms: dict[str, Callable[[], float]], num_repeats: int, *, quick: bool) -> None:
    import measure

    num_blocks = 9 if quick else 25

    times = measure.alternate(arms, num_blocks=num_blocks)
    titles = {
        "ours": "ours, dynamic ids",
        "tbe": "TBE, sequence mode",
        "torch_sparse": "nn.Embedding(sparse) + Adagrad",
    }
    titles["row_gather"] = "bound: gather of the distinct rows"
    over = {name: measure.ratio(times[name], times["ours"]) for name in arms}
    rows = [
        [title, f"{1e3 * measure.Spread.of(times[name]).median:.2f} ms", str(over[name])]
        for name, title in titles.items()
    ]
    better = measure.Spread.of(
        [min(a, b) / c for a, b, c in zip(times["tbe"], times["torch_sparse"], times["ours"], strict=True)]
    )
    figures = {
        "speedup_vs_tbe": round(over["tbe"].median, 4),
        "speedup_vs_tbe_range": over["tbe"].range,
        "speedup_vs_torch_sparse": round(over["torch_sparse"].median, 4),
        "speedup_vs_torch_sparse_range": over["torch_sparse"].range,
        "of_row_gather": round(over["row_gather"].median, 4),
        "not_slower": measure.verdict(better, at_least=1.0),
        "twice": measure.verdict(better, at_least=2.0),
    }
    settings = {
        "workload": "zipf-512",
        "num_blocks": num_blocks,
        "num_repeats": num_repeats,
        "threads": 1,
        "quick": quick,
    }
    measure.append("embedding_step", measure.record(seed=SEED, figures=figures, settings=settings))
    print("zipf-512, one thread; median of blocks, time over ours (10-90 %)")
    print(measure.table(["", "per step", "over ours"], rows))
    print(f"better peer over ours: {better}; not slower: {figures['not_slower']}; twice as fast: {figures['twice']}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
