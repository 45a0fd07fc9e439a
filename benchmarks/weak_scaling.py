"""Weak scaling: nested vs. sequential and stale steps on 2 to 16 real ranks; dense part emulated.

Every rank trains on its own zipf-512 share, so the work per rank is constant while the share of rows on other ranks grows from
1/2 to 15/16. Ranks are real: processes with their own tables, threads and messages, each with its own link (--rate per
direction, network namespaces). The dense part is emulated: it sleeps --dense-ms instead of computing, so that 16 ranks fit on
a few cores. The cores must not be the bottleneck: the CPU share of all ranks is printed with each figure, and above
--cpu-limit the run is rejected.

    efficiency = step on the fewest ranks / step on n ranks, of the same mode, from medians of blocks

--groups M adds sequential and nested steps in M replica groups, each of which holds all tables: rows stay in a group, gradient
sums travel between groups. Every rank has its own link here, so groups send more bytes and save messages only
(nestpipe/embedding/replica_groups.py); groups.py measures ranks that share a host.

The cores' share of the loss is what a machine per rank would not have: the growth of the step outside communication. The dense
part sleeps equally long everywhere, so whatever is busy, idle or waits for a slower rank for longer had no core.

Sequential and nested, without and with groups, must end bitwise identical, or nothing is recorded. Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import netlab
from train_step import chunking

MODES = {"sequential": "sequential", "nested": "nested", "stale": "stale by one step"}
GROUPED = {"sequential-groups": "sequential, {} groups", "nested-groups": "nested, {} groups"}
RANKS = (2, 4, 8, 16)
Figures = Mapping[str, Any]
PROGRAM = Path(__file__).resolve().with_name("train_step.py")


def settings_of(options: argparse.Namespace, modes: Iterable[str], **more: object) -> str:
    """train_arms.Settings with an emulated dense part, as JSON."""
    settings = {key: getattr(options, key) for key in ("samples", "micro_batches", "depth")}
    settings |= {"dense": f"sleep:{options.dense_ms}", "arms": list(modes), "num_steps": options.steps}
    return json.dumps(settings | more)


def ran(num_ranks: int, command: Sequence[str], *, rate: str, delay_ms: float = 0) -> dict[str, object]:
    """Rank 0's times by mode and block, CPU time and traces; exits unless the exact modes are bitwise identical."""
    with netlab.Lab(num_ranks, rate=rate, delay_ms=delay_ms) as lab:
        said = lab.run([sys.executable, *command], timeout_s=3600)
    found: dict[str, object] = json.loads(said[0].splitlines()[-1])
    if found["bitwise_equal"] is not True:
        raise SystemExit(f"on {num_ranks} ranks the exact modes are not bitwise identical; this run is not recorded.")
    return found


def figures_of(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Per number of ranks: each mode's step, efficiency with its range, and CPU share; of nested ones their time by cause."""
    fewest, figures = min(found), dict[str, Any]()
    for num_ranks, one in found.items():
        own: dict[str, Any] = {"bitwise_equal": one["bitwise_equal"]}
        for mode in one["times"]:
            times, base = one["times"][mode], measure.Spread.of(found[fewest]["times"][mode]).median
            step = measure.Spread.of(times)
            efficiency = measure.Spread.of([base / seconds for seconds in times])
            busy = one["cpu_ms"][mode] * num_ranks / (os.cpu_count() or 1) / 1e3 / step.median
            own[mode] = {
                "step_ms": round(1e3 * step.median, 1),
                "efficiency": round(efficiency.median, 4),
                "efficiency_range": efficiency.range,
                "cpu_share": round(busy, 3),
            }
        for mode, ranks in one["traces"].items():
            base_ms = _divided(found[fewest]["traces"][mode])
            own[f"{mode}_ms"] = causes = _divided(ranks)
            loss_ms = sum(causes.values()) - sum(base_ms.values())
            cores_ms = loss_ms - (causes["communication"] - base_ms["communication"])
            own[mode]["cores_share_of_loss"] = (
                round(cores_ms / loss_ms, 3) if loss_ms > 0.01 * sum(base_ms.values()) else None
            )
        figures[str(num_ranks)] = own
    return figures


def _divided(ranks: Sequence[Figures]) -> dict[str, float]:
    """Milliseconds of a nested step by cause, from the traces of all ranks."""
    steps = sum(rank["num_steps"] for rank in ranks)
    ns = {cause: sum(rank["time_ns"][cause] for rank in ranks) for cause in ranks[0]["time_ns"]}
    ns["slower rank"] = sum(rank["others_ns"] for rank in ranks)
    ns["communication"] -= ns["slower rank"]
    return {cause: round(one / steps / 1e6, 1) for cause, one in ns.items()}


def report(figures: dict[str, Any], options: argparse.Namespace) -> None:
    rows, causes = [], []
    for num_ranks, own in figures.items():
        for mode, title in modes_of(options).items():
            one = own[mode]
            low, high = one["efficiency_range"]
            efficiency, cores = f"{one['efficiency']:.1%} ({low:.1%}-{high:.1%})", one.get("cores_share_of_loss")
            rows.append(
                [
                    *(f"{num_ranks} ranks", title, f"{one['step_ms']:.0f} ms", efficiency, f"{one['cpu_share']:.0%}"),
                    "" if cores is None else f"{cores:.0%}",
                ]
            )
            if f"{mode}_ms" in own:
                causes.append([f"{num_ranks} ranks", title, *(f"{one:.0f} ms" for one in own[f"{mode}_ms"].values())])
    print(
        f"\nweak scaling, dense part emulated ({options.dense_ms} ms), zipf-{options.samples} per rank, {options.rate} per host"
    )
    head = ["", "mode", "step", "efficiency (10-90 %)", "CPU share", "cores' share of the loss"]
    print(measure.table(head, rows))
    names = list(next(iter(figures.values()))["nested_ms"])
    print("\ntime of a nested step, from its traces\n" + measure.table(["", "mode", *names], causes), flush=True)


def modes_of(options: argparse.Namespace) -> dict[str, str]:
    """The arms and their titles."""
    grouped = {mode: title.format(options.groups) for mode, title in GROUPED.items()} if options.groups > 1 else {}
    return MODES | grouped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 and 4 ranks, a short dense part; under 50 seconds")
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--dense-ms", type=int, help="duration of the emulated dense part of a batch")
    parser.add_argument("--rate", default="200mbit", help="of each host's link, per direction")
    parser.add_argument("--samples", type=int, default=512, help="per rank")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--ramp", type=float, default=1.0)
    parser.add_argument("--chunks", type=chunking, default=1, help=f"nested: {chunking.__doc__}")
    parser.add_argument(
        "--groups", type=int, default=2, help="replica groups of the arms with groups; 1: without these arms"
    )
    parser.add_argument("--steps", type=int, help="steps of a block")
    parser.add_argument("--cpu-limit", type=float, default=0.6, help="largest CPU share at which a figure counts")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/weak_scaling.jsonl")
    options = parser.parse_args()
    options.ranks = sorted(options.ranks or (RANKS[:2] if options.quick else RANKS))
    options.dense_ms = options.dense_ms or (150 if options.quick else 1000)
    options.steps = options.steps or (3 if options.quick else 6)
    netlab.end_on_sigterm()
    found: dict[int, dict[str, Any]] = {}
    figures: dict[str, Any] = {}
    shape = {"ramp": options.ramp, "chunks": options.chunks, "groups": options.groups, "num_blocks": measure.MIN_BLOCKS}
    for num_ranks in options.ranks:
        settings = settings_of(options, modes_of(options), **shape)
        found[num_ranks] = ran(num_ranks, [str(PROGRAM), "--as-rank", settings], rate=options.rate)
        figures = figures_of(found)
        report(figures, options)
    busiest = max(own[mode]["cpu_share"] for own in figures.values() for mode in modes_of(options))
    if busiest > options.cpu_limit:
        raise SystemExit(
            f"the cores were busy for {busiest:.0%} of a step, so they were the bottleneck. Raise --dense-ms."
        )
    if not options.no_record:
        keys = (
            "ranks",
            "dense_ms",
            "rate",
            "samples",
            "micro_batches",
            "depth",
            "ramp",
            "chunks",
            "groups",
            "steps",
            "quick",
        )
        used = {**{key: getattr(options, key) for key in keys}, "dense": "emulated"}
        measure.append("weak_scaling", measure.record(seed=0, figures=figures, settings=used))
    print(json.dumps(figures))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
