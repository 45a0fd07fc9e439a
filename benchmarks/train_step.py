"""How fast is a training step with sharded embeddings? Our exact modes vs. TorchRec, a stale pipeline and the dense part alone.

Workloads zipf-512 and zipf-2048: a table of 1M x 64, 512 or 2,048 samples x 50 Zipf(1.05) ids per rank, exact AdaGrad on rows,
Adam on the dense part (a small MLP on pooled vectors, or two HSTU units). Networks: loopback, 1 Gbit/s, 1 Gbit/s + 2 ms. All
arms train in the same processes on the same batches, one thread per operation, in alternating blocks; the slowest rank
counts. The run checks that nested, frozen-window and dual-buffer end bitwise identical to sequential with the same
micro-batches. "Our sequential" is the faster one of those micro-batches and a single one.

    stale          the nested schedule with rows stale by one step: the price of exactness (its results differ)
    dense-only     the same micro-batches on local rows, with dense gradient sum and dense step

--chunks applies to the nested arm. Headers take a part of the link: the payload of 1 Gbit/s is 956 Mbit/s, with a
delay (longer packets) 999. Lower bounds use the payload rate.

With --dense sleep:MS the dense part is linear and sleeps instead of computing; everything else is real (threads, messages,
tables, schedules, results). So more ranks than cores can be measured: weak_scaling.py.

TorchRec runs in .venv-peers ('make peers'); shaped networks need root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import measure
import netlab

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
NETWORKS = {"loopback": (None, 0.0), "1gbit": ("1gbit", 0.0), "1gbit+2ms": ("1gbit", 2.0)}
EXACT = ("sequential", "dual-buffer", "frozen-window", "nested")
ARMS = ("torchrec-plain", "torchrec", "sequential-1", *EXACT, "stale", "dense-only")
TITLES = {
    "torchrec-plain": "TorchRec, no pipeline",
    "torchrec": "TorchRec SparseDist",
    "sequential-1": "ours, sequential, one micro-batch",
    "sequential": "ours, sequential",
    "dual-buffer": "ours, dual-buffer",
    "frozen-window": "ours, frozen-window",
    "nested": "ours, nested",
    "stale": "stale by one step",
    "dense-only": "dense part only",
}


def dense_kind(name: str) -> str:
    """The value of --dense."""
    kind, _, ms = name.partition(":")
    if not (name in ("mlp", "hstu") or (kind == "sleep" and ms.isdigit() and int(ms))):
        raise argparse.ArgumentTypeError(
            f"unknown dense part '{name}'; use mlp, hstu or sleep:MS, for example sleep:400"
        )
    return name


def chunking(text: str) -> int | str:
    """chunks of the last gradients, the update and the next first rows: a number, or shared"""
    return text if text == "shared" else int(text)


def measured_on(name: str, options: argparse.Namespace) -> dict[str, object]:
    rate, delay_ms = NETWORKS[name]
    settings = {
        key: getattr(options, key) for key in ("samples", "dense", "micro_batches", "depth", "ramp", "chunks", "arms")
    }
    settings |= {"num_blocks": options.blocks, "num_steps": options.steps}
    command = [options.python, str(Path(__file__)), "--as-rank", json.dumps(settings)]
    network = (
        netlab.Lab(options.ranks, rate=rate, delay_ms=delay_ms) if rate else nullcontext(netlab.Loopback(options.ranks))
    )
    with network as lab:
        found: dict[str, object] = json.loads(lab.run(command, timeout_s=3600)[0].splitlines()[-1])
    return found


def figures_of(
    name: str, found: Mapping[str, object], dense: str, num_ranks: int, *, in_chunks: bool = False
) -> dict[str, object]:
    """The keys that benchmarks.md names, each ratio with its range; a speedup is a peer's time over ours."""
    times: Mapping[str, list[float]] = found["times"]  # type: ignore[assignment]
    figures: dict[str, object] = {"bitwise_equal": found["bitwise_equal"], "cpu_ms": found["cpu_ms"]}
    plain = [times[arm] for arm in ("sequential", "sequential-1") if arm in times]
    sequential = min(plain, key=lambda one: measure.Spread.of(one).median, default=[])  # whichever is faster
    bases = {"vs_torchrec": "torchrec", "vs_torchrec_plain": "torchrec-plain", "vs_stale": "stale"}
    for key, base in bases.items():
        if {base, "nested"} <= times.keys():
            figures |= _spread(key, measure.ratio(times[base], times["nested"]))
    if sequential and "nested" in times:
        figures |= _spread("vs_sequential", measure.ratio(sequential, times["nested"]))
    if {"sequential", "nested"} <= times.keys():
        figures |= _spread("vs_same_micro_batches", measure.ratio(times["sequential"], times["nested"]))
    if sequential and "torchrec-plain" in times:
        figures |= _spread("sequential_vs_torchrec_plain", measure.ratio(times["torchrec-plain"], sequential))
    if {"dense-only", "nested"} <= times.keys():
        figures |= _spread("over_dense_only", measure.ratio(times["nested"], times["dense-only"]))
    if "nested" in times:
        step_ms = 1e3 * measure.Spread.of(times["nested"]).median
        cores_ms = found["cpu_ms"]["nested"] * num_ranks / min(os.cpu_count() or 1, num_ranks)  # type: ignore[index]
        emulated_ms = float(dense.partition(":")[2] or 0)
        least_ms = max(cores_ms, found["compute_ms"]["nested"] + emulated_ms)  # type: ignore[index]
        figures |= _overlap(name, found["traces"]["nested"], step_ms, least_ms, in_chunks=in_chunks)  # type: ignore[arg-type]
    return figures


def _spread(key: str, spread: measure.Spread) -> dict[str, object]:
    return {key: round(spread.median, 4), f"{key}_range": spread.range}


def _overlap(
    name: str, ranks: list[dict[str, object]], step_ms: float, least_ms: float, *, in_chunks: bool
) -> dict[str, object]:
    """Overlap of the nested arm, from its traces; exposed = time that compute waits / duration.

    Lower bound of exposed communication: the transfer time of the first rows and the last gradients (with --chunks
    shared, of their shared rows) plus a delay each; or the transfer time of all messages of a step beyond the compute time, if that is
    longer. Lower bound of a step: the transfer time of its bytes with headers, the CPU time of all ranks on their cores, or the
    compute stream itself, CPU and emulated time (`least_ms` is the larger of the last two, means over ranks; `slowest` takes the
    slowest rank of each step). Time in which another rank still computes the batch is not counted as communication. With
    chunks, the link is busy while a chunk is updated, so an update that compute waits for counts as exposed communication.
    """

    def total(key: str, cause: str) -> int:
        return sum(rank[key][cause] for rank in ranks)  # type: ignore[index]

    rate, delay_ms = NETWORKS[name]
    steps = sum(rank["num_steps"] for rank in ranks)  # type: ignore[misc]
    all_ns: int = sum(rank["total_ns"] for rank in ranks)  # type: ignore[misc]
    others_ns: int = sum(rank["others_ns"] for rank in ranks)  # type: ignore[misc]
    rows = {kind: total("num_rows", kind) for kind in ("rows", "grads", "keys")}
    exposed_ns = total("time_ns", "communication") + total("time_ns", "bubble") * in_chunks - others_ns
    exposed_ms = exposed_ns / steps / 1e6
    figures: dict[str, object] = {
        "step_ms": round(step_ms, 2),
        "busy_share": round(total("time_ns", "busy") / all_ns, 4),
        "exposed_lookup": round(total("time_ns", "lookup") / max(total("seen_ns", "lookup"), 1), 4),
        "exposed_comm": round(exposed_ms * 1e6 * steps / max(total("seen_ns", "communication"), 1), 4),
        "busy_ms": round(total("time_ns", "busy") / steps / 1e6, 2),
        "exposed_lookup_ms": round(total("time_ns", "lookup") / steps / 1e6, 2),
        "exposed_comm_ms": round(exposed_ms, 2),
        "slower_rank_ms": round(others_ns / steps / 1e6, 2),
        "bubble_ms": round(total("time_ns", "bubble") / steps / 1e6, 2),
        "rows_sent_ratio": round((rows["rows"] + rows["grads"]) / 2 / max(rows["keys"], 1), 4),
    }
    bound_ms, slowest_ms = least_ms, least_ms + others_ns / steps / 1e6
    if rate:
        ms_per_byte = 8e3 / netlab.bits_per_s(rate) / netlab.payload_share(delay_ms)
        edge_ms = max(rank["edge_bytes"] for rank in ranks) * ms_per_byte + 2 * delay_ms  # type: ignore[type-var,operator]
        wire_ms = max(rank["num_bytes"] / rank["num_steps"] for rank in ranks) * ms_per_byte  # type: ignore[type-var,operator]
        floor_ms = max(edge_ms, wire_ms - total("time_ns", "busy") / steps / 1e6)
        bound_ms, slowest_ms = max(wire_ms, least_ms), max(wire_ms, slowest_ms)
        figures |= {
            "exposed_comm_floor": round(floor_ms * 1e6 * steps / total("seen_ns", "communication"), 4),
            "exposed_comm_floor_ms": round(floor_ms, 2),
            "edge_ms": round(edge_ms, 2),
            "wire_ms": round(wire_ms, 2),
            "exposed_comm_over_floor": round(exposed_ms / floor_ms, 4),
        }
    # Short blocks include the pipeline warm-up, which a run has once between two checkpoints. Traces leave it out.
    steady_ms = all_ns / steps / 1e6
    return figures | {
        "step_over_bound": round(step_ms / bound_ms, 4),
        "steady_over_bound": round(steady_ms / bound_ms, 4),
        "steady_over_slowest": round(steady_ms / slowest_ms, 4),
    }


def report(name: str, found: Mapping[str, object], figures: Mapping[str, object], options: argparse.Namespace) -> None:
    times: Mapping[str, list[float]] = found["times"]  # type: ignore[assignment]
    base = "nested" if "nested" in times else "sequential"
    rows = [
        [
            TITLES[arm],
            f"{1 / measure.Spread.of(seconds).median:.1f}",
            f"{1e3 * measure.Spread.of(seconds).median:.1f} ms",
            f"{found['cpu_ms'][arm]:.1f} ms",  # type: ignore[index]
            str(measure.ratio(seconds, times[base])),
        ]
        for arm, seconds in times.items()
    ]
    emulated = " (emulated)" if options.dense.startswith("sleep:") else ""
    print(
        f"\n{name}: zipf-{options.samples}, dense part {options.dense}{emulated}, {options.ranks} ranks, {options.micro_batches} micro-batches, depth {options.depth}"
    )
    print(measure.table(["", "steps/s", "per step", "CPU of a rank", f"over {base} (10-90 %)"], rows))
    shown = {key: value for key, value in figures.items() if not key.endswith("_range")}
    print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one network, fewer arms and steps; under 50 seconds")
    parser.add_argument("--mode", choices=[*EXACT, "all"], default="all", help="compare one of our modes with TorchRec")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=None)
    parser.add_argument("--samples", type=int, default=512, help="per rank: 512 and 2048 are the fixed workloads")
    parser.add_argument(
        "--dense", type=dense_kind, default="mlp", help="dense part: mlp, hstu, or sleep:MS, which sleeps instead"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="number of ranks; with --dense sleep:MS also more than cores"
    )
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--ramp", type=float, default=1.0)
    parser.add_argument("--chunks", type=chunking, default=1, help=f"nested: {chunking.__doc__}")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=None)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--steps", type=int, help="steps of a block")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/train_step.jsonl")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        import train_arms

        train_arms.rank_program(train_arms.Settings(**json.loads(options.as_rank)))
        return
    quick = ("torchrec", "sequential-1", "sequential", "nested", "stale")
    one = ("torchrec-plain", "torchrec", "sequential-1", "sequential", options.mode)
    chosen = one if options.mode != "all" else quick if options.quick else ARMS
    options.arms = options.arms or list(dict.fromkeys(chosen))
    options.blocks = options.blocks or measure.MIN_BLOCKS
    options.steps = options.steps or (6 if options.quick else 16)
    networks = options.networks or (["1gbit"] if options.quick else list(NETWORKS))
    needs_peer = any(arm.startswith("torchrec") for arm in options.arms)
    if needs_peer and not PEER_PYTHON.exists():
        raise SystemExit("TorchRec is not installed: run 'make peers' first, or name --arms without it.")
    options.python = str(PEER_PYTHON) if needs_peer else sys.executable
    netlab.end_on_sigterm()
    everything: dict[str, object] = {}
    for name in networks:
        found = measured_on(name, options)
        everything[name] = figures_of(
            name, found, options.dense, options.ranks, in_chunks=options.chunks not in (1, "shared")
        )
        report(name, found, everything[name], options)  # type: ignore[arg-type]
        if found["bitwise_equal"] is False:
            raise SystemExit("the exact modes are not bitwise identical; this run is not recorded.")
    if not options.no_record:
        keys = (
            "samples",
            "dense",
            "micro_batches",
            "depth",
            "ramp",
            "chunks",
            "blocks",
            "steps",
            "quick",
            "ranks",
        )
        settings = {key: getattr(options, key) for key in keys}
        measure.append("train_step", measure.record(seed=0, figures=everything, settings=settings))
    print(json.dumps(everything))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
