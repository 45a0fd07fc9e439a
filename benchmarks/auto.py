"""Is `--pipeline.mode auto` as fast as the best mode a person could have named? Every network with every dense part.

A cell is a network (loopback, 1 Gbit/s, 1 Gbit/s + 2 ms) and a dense part (the MLP or the HSTU units of train_step.py) on the
workload zipf-512: 512 samples x 50 Zipf(1.05) ids per rank, a table of 1M x 64, two ranks. Arms: what auto chooses, and fixed
modes, among them plain sequential (one micro-batch). Blocks of all arms alternate on one state, and each round begins with
another arm; the slowest rank counts. Start-up is not measured. Each cell also checks that auto is bitwise identical to
sequential with the same micro-batches.

    auto_over_best_fixed    speed of auto over that of the fixed arm with the shortest median     limit: median >= 0.90
    auto_over_sequential    over plain sequential     limits: 0.90 everywhere; MLP: 1.3 at 1 Gbit/s, 1.6 with 2 ms

Finished cells are kept in build/auto.jsonl: the same command resumes after them, and `--cell` runs one. Shaped networks need root.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import measure
import netlab
from train_step import NETWORKS

KEPT = measure.ROOT / "build" / "auto.jsonl"
STEPS = {"mlp": 20, "hstu": 6}  # of a block: about half a second and two seconds
CELLS = [f"{network} {dense}" for dense in STEPS for network in NETWORKS]
FIXED: dict[str, dict[str, object]] = {
    "sequential": {"mode": "sequential", "micro_batches": 1},
    "dual-buffer": {"mode": "dual-buffer", "micro_batches": 1},
    "frozen-window 2": {"mode": "frozen-window", "micro_batches": 2},
    "nested 1": {"mode": "nested", "micro_batches": 1},
    "nested 2": {"mode": "nested", "micro_batches": 2},
    "nested 2, 2 chunks": {"mode": "nested", "micro_batches": 2, "chunks": 2},
    "nested 4, 4 chunks": {"mode": "nested", "micro_batches": 4, "chunks": 4},
}
LIMIT = 0.9
OVER_SEQUENTIAL = {"1gbit mlp": 1.3, "1gbit+2ms mlp": 1.6}


def measured(cell: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step by arm and round, what auto chose, and whether it is exact."""
    network, dense = cell.split()
    rate, delay_ms = NETWORKS[network]
    arguments = {
        "dense": dense,
        "samples": options.samples,
        "num_hosts": 2 if rate else 1,
        "rounds": options.rounds,
        "steps": 3 if options.quick else STEPS[dense],
    }
    command = [sys.executable, str(Path(__file__)), "--as-rank", json.dumps(arguments)]
    lab = netlab.Lab(2, rate=rate, delay_ms=delay_ms) if rate else nullcontext(netlab.Loopback(2))
    with lab as ranks:
        found: dict[str, Any] = json.loads(ranks.run(command, timeout_s=900)[0].splitlines()[-1])
    return found


def figures_of(cell: str, found: dict[str, Any]) -> dict[str, object]:
    """Both ratios with their 10-90 % ranges, the limits, and the arms they come from."""
    times: dict[str, list[float]] = found["times"]
    best = min(FIXED, key=lambda name: median(times[name]))
    figures: dict[str, object] = {
        "best_fixed": best,
        "chosen": found["chosen"],
        "bitwise_equal": found["bitwise_equal"],
    }
    limits = {"auto_over_best_fixed": LIMIT, "auto_over_sequential": OVER_SEQUENTIAL.get(cell, LIMIT)}
    for key, base in (("auto_over_best_fixed", best), ("auto_over_sequential", "sequential")):
        ratio = measure.ratio(times[base], times["auto"])
        own = {key: round(ratio.median, 4), f"{key}_range": ratio.range, f"{key}_limit": limits[key]}
        figures |= own | {f"{key}_met": ratio.median >= limits[key]}
    for key, values in (("step_ms", times), ("cpu_ms", found["cpu"])):
        figures[key] = {name: round(1e3 * median(own), 2) for name, own in values.items()}
    return figures


def report(cell: str, times: dict[str, list[float]], figures: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"{figures['step_ms'][name]:.1f} ms",
            f"{figures['cpu_ms'][name]:.1f} ms",
            str(measure.ratio(own, times["auto"])),
        ]
        for name, own in times.items()
    ]
    chosen = figures["chosen"]
    says = ", ".join(f"{name} {chosen[name]}" for name in ("micro_batches", "ramp", "chunks", "depth"))
    print(f"\n{cell}: auto is {chosen['mode']}, {says} ({chosen['why']}); {chosen['gain']}")
    print(measure.table(["", "step", "CPU of a rank", "over auto (10-90 %)"], rows))
    for key in ("auto_over_best_fixed", "auto_over_sequential"):
        low, high = figures[f"{key}_range"]
        met = "met" if figures[f"{key}_met"] else "MISSED"
        print(f"{key} {figures[key]:.3f} ({low:.3f}-{high:.3f}), limit {figures[f'{key}_limit']}: {met}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one cell, few steps; under 50 seconds")
    parser.add_argument(
        "--cell", choices=CELLS, action="append", help="measure only this one, and keep it for the record"
    )
    parser.add_argument("--samples", type=int, default=512, help="per rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-record", action="store_true", help="neither keep cells nor append to results/auto.jsonl")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        from auto_arms import rank_program  # needs torch

        rank_program(FIXED, **json.loads(options.as_rank))
        return
    netlab.end_on_sigterm()
    settings = {name: getattr(options, name) for name in ("samples", "rounds", "quick")}
    kept = None if options.no_record or options.quick else measure.Kept(KEPT, settings)
    figures: dict[str, object] = {}
    for cell in options.cell or (["1gbit mlp"] if options.quick else CELLS):
        found = kept.once(cell, lambda cell=cell: measured(cell, options)) if kept else measured(cell, options)  # type: ignore[misc]
        figures[cell] = figures_of(cell, found)
        report(cell, found["times"], figures[cell])  # type: ignore[arg-type]
        if not found["bitwise_equal"]:
            raise SystemExit(f"{cell}: auto is not bitwise identical to sequential; this run is not recorded.")
    if kept and set(figures) == set(CELLS):
        measure.append("auto", measure.record(seed=0, figures=figures, settings=settings))
        kept.clear()
    print(json.dumps(figures))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
