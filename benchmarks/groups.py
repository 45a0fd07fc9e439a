"""Which number of replica groups is best, and does `--pipeline.groups 0` find it? A sweep on 8 real ranks; dense part emulated.

Every group holds all tables: rows are exchanged inside a group, gradient sums between groups
(nestpipe/embedding/replica_groups.py). More groups never send less; they pay off where the ranks of a group are close to each
other. Ranks of one host communicate through memory and share one link of --rate to the other hosts (network namespaces).

    2 hosts   four ranks each: groups inside a host keep most traffic off the link
    8 hosts   one rank each: the same link everywhere

Ranks are real: processes with their own tables, threads and messages, each on its own zipf-512 share. The dense part is
emulated: it sleeps --dense-ms instead of computing, so that 8 ranks fit on a few cores. The CPU share of all ranks is printed
with each figure; above --cpu-limit the run is rejected.

Numbers of groups alternate in blocks; a step is the median over blocks with its 10-90 % range. `auto` measures at the start, as
a run does, and must choose a number whose step is within 5 % of the best. Replicas must end bitwise identical, or nothing is
recorded. (Averaging weights over groups instead of summing gradients is another update rule and has no arm here.)

Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import measure
import netlab

if TYPE_CHECKING:
    from nestpipe.distributed.process_group import World

NUM_RANKS = 8
HOSTS = (2, 8)
WITHIN = 1.05


def rank_program(content: dict[str, object]) -> None:
    """Run by each rank; prints its measurements."""
    from nestpipe.distributed.process_group import World
    from nestpipe.training.process import exact_arithmetic, keep_freed_memory

    keep_freed_memory()
    with exact_arithmetic(1):
        world = World.from_environment()
        print(json.dumps(swept(world, content)))
        world.close()


def swept(world: World, content: dict[str, object]) -> dict[str, object]:
    """Seconds per step by number of groups and block, CPU time, and auto's choice; equal on all ranks except CPU time."""
    import time

    import train_arms

    from nestpipe.autotune.group_choice import choose
    from nestpipe.embedding.replica_groups import divisors
    from nestpipe.pipeline.channels import Channels
    from nestpipe.profiling.recorder import Recorder

    num_batches = content.pop("num_batches")
    settings = train_arms.Settings(**content)  # type: ignore[arg-type]
    channels, data = Channels.of(world), train_arms.batches(settings, world.rank)[:num_batches]
    auto, why = choose(train_arms.our_state(settings, channels), channels, data[0], num_micro_batches=1)
    arms = {}
    for groups in divisors(world.size):
        state = train_arms.our_state(settings, channels.in_groups(groups))
        arms[groups] = train_arms.OurArm("nested", settings, state, data, Recorder.off())
    cpu_s: dict[int, list[float]] = {groups: [] for groups in arms}

    def block(groups: int, num_steps: int) -> float:
        channels.control.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        arms[groups].run(num_steps)
        cpu_s[groups].append((time.process_time() - cpu) / num_steps)
        own = (time.perf_counter() - start) / num_steps
        return max(value for (value,) in channels.control.all_gather_floats([own]))

    for groups in arms:
        block(groups, len(data))  # every row exists from here on
    times = measure.alternate(
        {str(groups): lambda groups=groups: block(groups, settings.num_steps) for groups in arms},
        num_blocks=settings.num_blocks,
    )
    digests = {str(groups): train_arms.digest(arm.state) for groups, arm in arms.items()}
    said = [json.loads(one) for one in channels.control.all_gather_bytes(json.dumps(digests).encode())]
    equal = all(
        one[str(groups)] == said[rank % (world.size // groups)][str(groups)]
        for groups in arms
        for rank, one in enumerate(said)
    )
    cpu_ms = {str(groups): 1e3 * statistics.median(own) for groups, own in cpu_s.items()}
    return {"times": times, "cpu_ms": cpu_ms, "replicas_equal": equal, "auto": auto, "why": why}


def measured(num_hosts: int, options: argparse.Namespace) -> dict[str, object]:
    """The measurements of the ranks."""
    settings = {key: getattr(options, key) for key in ("samples", "micro_batches", "depth", "num_batches")}
    settings |= {"dense": f"sleep:{options.dense_ms}", "num_blocks": measure.MIN_BLOCKS, "num_steps": options.steps}
    with netlab.Lab(NUM_RANKS, rate=options.rate, ranks_per_host=NUM_RANKS // num_hosts) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", json.dumps(settings)]
        found: dict[str, object] = json.loads(lab.run(command, timeout_s=3600)[0].splitlines()[-1])
    return found


def figures_of(found: dict[str, object]) -> dict[str, object]:
    """The step of each number of groups, and auto's choice over the best one."""
    times: dict[str, list[float]] = found["times"]  # type: ignore[assignment]
    medians = {groups: measure.Spread.of(own).median for groups, own in times.items()}
    best, auto = min(medians, key=medians.__getitem__), str(found["auto"])
    over_best = measure.ratio(times[auto], times[best])
    cores = os.cpu_count() or 1
    steps = {
        groups: {
            "step_ms": round(1e3 * medians[groups], 1),
            "range_ms": [round(1e3 * edge, 1) for edge in measure.Spread.of(own).range],
            "cpu_share": round(found["cpu_ms"][groups] * NUM_RANKS / cores / 1e3 / medians[groups], 3),  # type: ignore[index]
        }
        for groups, own in times.items()
    }
    return {
        "groups": steps,
        "best": int(best),
        "auto": int(auto),
        "auto_over_best": round(over_best.median, 4),
        "auto_over_best_range": over_best.range,
        "within_5_percent": measure.verdict(over_best, at_most=WITHIN),
        "replicas_equal": found["replicas_equal"],
        "why": found["why"],
    }


def report(num_hosts: int, figures: dict[str, object], options: argparse.Namespace) -> None:
    rows = []
    for groups, one in figures["groups"].items():  # type: ignore[attr-defined]
        low, high = one["range_ms"]
        marks = [mark for mark in ("best", "auto") if figures[mark] == int(groups)]
        shape = f"{groups} x {NUM_RANKS // int(groups)}"
        step = f"{one['step_ms']:.0f} ms ({low:.0f}-{high:.0f})"
        rows.append([shape, step, f"{one['cpu_share']:.0%}", ", ".join(marks)])
    print(
        f"\n{NUM_RANKS} ranks on {num_hosts} hosts, {options.rate} each, dense part emulated ({options.dense_ms} ms), "
        f"zipf-{options.samples} per rank, nested, {options.micro_batches} micro-batches"
    )
    print(measure.table(["groups x shards", "step (10-90 %)", "CPU share", ""], rows))
    ratio = f"{figures['auto_over_best']:.3f}, {figures['within_5_percent']} (at most {WITHIN})"
    print(f"auto over best: {ratio}\n{figures['why']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two hosts, small batches, a short dense part; a minute")
    parser.add_argument("--hosts", nargs="+", type=int, choices=(1, 2, 4, 8))
    parser.add_argument("--dense-ms", type=int, help="duration of the emulated dense part of a batch")
    parser.add_argument("--rate", default="200mbit", help="of each host's link, per direction")
    parser.add_argument("--samples", type=int, help="per rank")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--steps", type=int, help="steps of a block")
    parser.add_argument("--num-batches", type=int, help="number of distinct batches, which then repeat")
    parser.add_argument("--cpu-limit", type=float, default=0.6, help="largest CPU share at which a figure counts")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/groups.jsonl")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank_program(json.loads(options.as_rank))
        return
    options.hosts = sorted(options.hosts or (HOSTS[:1] if options.quick else HOSTS))
    options.samples = options.samples or (128 if options.quick else 512)
    options.dense_ms = options.dense_ms or (150 if options.quick else 1000)
    options.steps = options.steps or (2 if options.quick else 6)
    options.num_batches = options.num_batches or (3 if options.quick else 8)
    netlab.end_on_sigterm()
    everything: dict[str, object] = {}
    busiest = 0.0
    for num_hosts in options.hosts:
        figures = figures_of(measured(num_hosts, options))
        report(num_hosts, figures, options)
        if figures["replicas_equal"] is not True:
            raise SystemExit("the replicas are not bitwise identical; this run is not recorded.")
        busiest = max(busiest, *(one["cpu_share"] for one in figures["groups"].values()))  # type: ignore[attr-defined]
        everything[f"{num_hosts} hosts"] = figures
    if busiest > options.cpu_limit and not options.quick:
        raise SystemExit(
            f"the cores were busy for {busiest:.0%} of a step, so they were the bottleneck. Raise --dense-ms."
        )
    if not options.no_record:
        keys = ("hosts", "dense_ms", "rate", "samples", "micro_batches", "depth", "steps", "num_batches", "quick")
        settings = {**{key: getattr(options, key) for key in keys}, "dense": "emulated"}
        measure.append("groups", measure.record(seed=0, figures=everything, settings=settings))
    print(json.dumps(everything))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
