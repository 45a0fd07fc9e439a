"""Goodput of the relay over full inference, within a tail-latency budget.

Open-loop load (relay_load.py) on one model instance on core 0; generator and gateway on core 1. The budget of the rank stage is
2.0x the median latency of full inference, unloaded, at the 90th percentile of history lengths, measured before any arm runs.
*Goodput* is responses per second, within the budget and not degraded, at the highest rate of a ladder (steps of 1.25) at which
99 % of all requests are. `relay-ml1m` has short histories, where no prefill should be triggered; its figure is CPU per
response over full inference.

    python benchmarks/relay.py                 # relay-long, goodput of all arms; half an hour
    python benchmarks/relay.py --history       # the longest history, at the rate that full inference reaches; 10 minutes
    python benchmarks/relay.py --ml1m FOLDER   # relay-ml1m, on a sequence folder of MovieLens-1M; about 4 minutes
    python benchmarks/relay.py --curve         # goodput over budgets, host tier off and on
    python benchmarks/relay.py --overload      # three times the capacity, then half of it: rejections and recovery
    python benchmarks/relay.py --quick

Arms that cache KV prefixes are warmed up before they are measured (relay_bench.py). The table has the hit rate and the CPU of
the instance per response, which bounds the gain on one core. The longest history is measured at the rate that full inference
reached. A load ends as soon as it cannot meet the budget. Loads in which the generator was late are void and repeated; a block
with a load that stays void is repeated for all arms, and if it stays void again, the run ends. Finished blocks are kept in
--folder, so the same command resumes after the last of them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import measure
import netlab
import numpy as np
import relay_load
import relay_worlds
from relay_bench import Bench, Reached, Running
from relay_worlds import ARMS, SEED

from nestpipe.serve.requests import HITS

BUDGET = 2.0
CURVE = (1.2, 1.5, 2.0, 3.0, 5.0)
MAIN = ("full", "everything")  # the arms of the ratio; others explain it
SIDE_BLOCKS = 3  # of those
HISTORY_BLOCKS = 3
WARM_S = {"always": 40.0, "no affinity": 40.0, "everything": 140.0}
RECOVERY_S = 5.0


def unloaded(bench: Bench, full: Running, kept: measure.Kept, *, repeats: int = 31) -> float:
    """The latency that sets the budget: measured once, before any arm runs."""
    p90 = int(np.percentile(bench.world.lengths, 90))
    found = kept.once("unloaded_ms", lambda: bench.unloaded_ms(full, p90, repeats=repeats))
    print(f"full inference, unloaded, {p90} events: {found:.1f} ms; budget {BUDGET * found:.1f} ms")
    return found


def relay_long(bench: Bench, options: argparse.Namespace, kept: measure.Kept) -> dict[str, object]:
    names = [name for name in ARMS if name in {*MAIN, *options.arms}]
    arms = {"full": bench.start("full", budget_ms=1000.0)}
    unloaded_ms = unloaded(bench, arms["full"], kept, repeats=9 if options.quick else 31)
    budget_ms = BUDGET * unloaded_ms
    for name in names[1:]:
        arms[name] = bench.start(name, budget_ms=budget_ms)
        if warm_s := options.warm * WARM_S.get(name, 0.0):
            bench.warm_up(arms[name], warm_s)

    def search(arm: Running) -> float:
        arm.rate = 1000 / unloaded_ms
        bench.goodput(arm, budget_ms)
        return arm.rate

    for name, arm in arms.items():
        arm.rate, arm.is_found = kept.once(f"rate of {name}", lambda arm=arm: search(arm)), True
    bench.num_void = 0  # rates are found again in every block
    blocks = []
    for number in range(options.blocks):
        measured = [arm for name, arm in arms.items() if number < SIDE_BLOCKS or name in MAIN]
        act = lambda: {arm.name: bench.reached(arm, budget_ms) for arm in measured}  # noqa: B023, E731
        blocks.append(kept.once(f"block {number + 1}", lambda: bench.block(act)))  # noqa: B023
        for arm in measured:
            arm.rate = blocks[-1][arm.name]["rate"]
    return {
        "p90_events": int(np.percentile(bench.world.lengths, 90)),
        "unloaded_ms": round(unloaded_ms, 2),
        "budget_ms": round(budget_ms, 2),
        **goodput_figures(names, blocks),
        **{f"warm_requests {name}": arm.num_warm for name, arm in arms.items() if arm.num_warm},
    }


def goodput_figures(names: Sequence[str], blocks: Sequence[Mapping[str, Reached]]) -> dict[str, object]:
    """Each arm over full inference, block by block; what paths its answers took."""
    figures: dict[str, object] = {}
    rows = []
    for name in names:
        own = [block[name] for block in blocks if name in block]
        full = [block["full"]["per_s"] for block in blocks if name in block]
        if min(full) == 0:
            raise SystemExit(
                "full inference alone missed the budget at every rate: the machine is not quiet; no figures"
            )
        spread = measure.ratio([one["per_s"] for one in own], full)
        key = {"everything": "goodput_ratio", "no host tier": "goodput_ratio_no_reuse"}.get(
            name, f"goodput_ratio {name}"
        )
        paths = sum((Counter(one["paths"]) for one in own), Counter[str]())
        hits = sum(paths[path] for path in HITS) / max(paths.total(), 1)
        cpu_ms = float(np.median([one["cpu_ms"] for one in own]))
        figures |= {
            key: round(spread.median, 3),
            f"{key}_range": spread.range,
            f"goodput_per_s {name}": [round(one["per_s"], 2) for one in own],
            f"paths {name}": dict(paths.most_common()),
            f"hit_share {name}": round(hits, 3),
            f"cpu_ms_per_answer {name}": round(cpu_ms, 2),
        }
        host = f"{ARMS[name].host_bytes * ARMS[name].num_instances / 2**30:.0f} GiB"
        goodput = f"{np.median([one['per_s'] for one in own]):.1f}"
        rows.append(
            [name, goodput, str(spread), measure.verdict(spread, at_least=3.6), f"{hits:.0%}", f"{cpu_ms:.1f} ms", host]
        )
    print(
        measure.table(
            ["arm", "goodput / s", "over full inference", "at least 3.6", "hits", "CPU of an answer", "host tier"], rows
        )
    )
    return figures


def longest(bench: Bench, options: argparse.Namespace, kept: measure.Kept) -> dict[str, object]:
    """The longest history at the rate that full inference reaches on the workload."""
    full = bench.start("full", budget_ms=1000.0)
    unloaded_ms = unloaded(bench, full, kept)
    budget_ms = BUDGET * unloaded_ms
    arms = {"full": full, "everything": bench.start("everything", budget_ms=budget_ms)}
    bench.warm_up(arms["everything"], options.warm * WARM_S["everything"])
    full.rate = 1000 / unloaded_ms
    rate = options.history_load * kept.once("rate of full", lambda: bench.goodput(full, budget_ms))
    bench.num_void = 0  # if that one was, the rate is another one, and the same for both
    act = lambda: {name: bench.longest_history(arms[name], rate, budget_ms) for name in MAIN}  # noqa: E731
    blocks = [kept.once(f"block {number + 1}", lambda: bench.block(act)) for number in range(HISTORY_BLOCKS)]
    lengths = {name: [block[name] for block in blocks] for name in MAIN}
    history = measure.ratio(lengths["everything"], [max(one, 1.0) for one in lengths["full"]])
    print(
        f"longest history at {rate:.1f}/s: {lengths}; ratio {history}, at least 1.5: {measure.verdict(history, at_least=1.5)}"
    )
    return {
        "unloaded_ms": round(unloaded_ms, 2),
        "budget_ms": round(budget_ms, 2),
        "history_ratio": round(history.median, 3),
        "history_ratio_range": history.range,
        "history_rate": round(rate, 2),
        "history_events": lengths,
    }


def curve(bench: Bench, options: argparse.Namespace, kept: measure.Kept) -> dict[str, object]:
    """Goodput over budgets; instances are started for each, because the trigger knows its budget."""
    full = bench.start("full", budget_ms=1000.0)
    unloaded_ms = unloaded(bench, full, kept)

    def at(factor: float) -> dict[str, float]:
        budget_ms = factor * unloaded_ms
        with ExitStack() as stack:
            arms = [
                full,
                *(bench.start(name, budget_ms=budget_ms, stack=stack) for name in ("no host tier", "everything")),
            ]
            bench.warm_up(arms[-1], options.warm * WARM_S["everything"])
            for arm in arms:
                arm.rate, arm.is_found = 300 / unloaded_ms, False
            act = lambda: {arm.name: bench.goodput(arm, budget_ms) for arm in arms}  # noqa: E731
            blocks = [bench.block(act) for _ in range(SIDE_BLOCKS)]
        return {arm.name: round(float(np.median([block[arm.name] for block in blocks])), 2) for arm in arms}

    found = {factor: kept.once(f"{factor}x", lambda factor=factor: at(factor)) for factor in CURVE}
    rows = [
        [f"{factor}x", f"{one['full']:.1f}", *(f"{one[name] / max(one['full'], 1e-9):.2f}x" for name in list(one)[1:])]
        for factor, one in found.items()
    ]
    print(measure.table(["budget", "full / s", "host tier off", "host tier on"], rows))
    return {"unloaded_ms": round(unloaded_ms, 2), **{f"{factor}": one for factor, one in found.items()}}


def relay_ml1m(bench: Bench, options: argparse.Namespace, _: measure.Kept) -> dict[str, object]:
    """CPU per response at a moderate load: real users, with the order and the scaled intervals of the log."""
    arms = {"full": bench.start("full", budget_ms=1000.0)}
    unloaded_ms = bench.unloaded_ms(arms["full"], int(np.percentile(bench.world.lengths, 90)), repeats=31)
    budget_ms, rate = BUDGET * unloaded_ms, 300 / unloaded_ms
    arms["everything"] = bench.start("everything", budget_ms=budget_ms)
    figures: dict[str, object] = {"unloaded_ms": round(unloaded_ms, 2), "budget_ms": round(budget_ms, 2)}
    order = np.argsort(bench.world.last_s, kind="stable")
    per_answer: dict[str, list[float]] = {name: [] for name in arms}
    count = min(int(rate * bench.seconds), len(order) // 2)
    random = np.random.default_rng(SEED)

    def load() -> relay_load.Load:
        """Some hours of the log; never the same again, whose users would be known."""
        start = int(random.integers(0, len(order) - count))
        chosen = order[start : start + count]
        times = bench.world.last_s[chosen]
        at_s = (times - times[0]) / max(times[-1] - times[0], 1) * (count / rate)
        return relay_load.Load(at_s, bench.world.users[chosen], times + 60)

    for block in range(options.blocks + 1):
        spent: dict[str, float] = {}

        def act(spent: dict[str, float] = spent) -> None:
            own = load()
            for name, arm in arms.items():
                outcome = bench.offer(arm, lambda: own, budget_ms)
                spent[name] = 1000 * outcome.cpu_s / max(len(outcome.rank_ms), 1)
                print(
                    f"  {name:<13} {spent[name]:.2f} ms of CPU per answer  lag {outcome.lag_p99_ms:.1f} ms  {dict(outcome.paths)}"
                )

        bench.block(act)
        for name, values in per_answer.items() if block else ():
            values.append(spent[name])
    overhead = measure.ratio(per_answer["everything"], per_answer["full"])
    figures |= {
        "idle_cpu_overhead": round(overhead.median - 1, 4),
        "idle_cpu_overhead_range": [round(one - 1, 4) for one in overhead.range],
        "paths everything": relay_load.summary(arms["everything"].outcomes),
        "signals everything": arms["everything"].signals(),
    }
    print(f"CPU per answer over full inference: {overhead}; at most 1.03: {measure.verdict(overhead, at_most=1.03)}")
    return figures


def overload(bench: Bench, options: argparse.Namespace, _: measure.Kept) -> dict[str, object]:
    """Three times what an instance can do, then half of it: good answers, fast refusals, and the way back.

    Histories up to the 90th percentile, by which the budget is made: longer ones may miss it without any load.
    """
    arm, p90 = bench.start("full", budget_ms=1000.0), int(np.percentile(bench.world.lengths, 90))
    bench.draw = bench.zipf.among(np.flatnonzero(bench.world.lengths <= p90))
    unloaded_ms = bench.unloaded_ms(arm, p90, repeats=9)
    budget_ms = BUDGET * unloaded_ms
    arm.rate = 1000 / unloaded_ms
    capacity = bench.goodput(arm, budget_ms)
    too_much = bench.offer(arm, lambda: bench.poisson(3 * capacity, seconds=2 * bench.seconds), budget_ms)
    after = bench.offer(arm, lambda: bench.poisson(capacity / 2, seconds=3 * RECOVERY_S), budget_ms)
    ranked = [ms for ms, bad in zip(too_much.rank_ms, too_much.degraded, strict=True) if not bad]
    others = [ms for ms, bad in zip(too_much.rank_ms, too_much.degraded, strict=True) if bad]
    late = [at for at, ms, bad in zip(after.at_s, after.rank_ms, after.degraded, strict=True) if bad or ms > budget_ms]
    figures: dict[str, object] = {
        "budget_ms": round(budget_ms, 2),
        "capacity_per_s": round(capacity, 2),
        "overload_good_over_capacity": round(too_much.good(budget_ms) / too_much.seconds / max(capacity, 1e-9), 3),
        "overload_ranked_p99_over_budget": round(float(np.percentile(ranked or [0.0], 99)) / budget_ms, 3),
        "overload_refused_p99_over_budget": round(float(np.percentile(others or [0.0], 99)) / budget_ms, 3),
        "overload_share_refused": round(len(others) / max(too_much.num_requests, 1), 3),
        "overload_failed": too_much.num_failed + too_much.num_unsent,
        "overload_problems": dict(too_much.problems),
        "recovered_after_s": round(_settled(late, len(after.at_s)), 2),
    }
    for name, value in figures.items():
        print(f"{name:<34} {value}")
    return figures


def _settled(late: Sequence[float], count: int) -> float:
    """When the last but 1 % of the answers after an overload missed the budget."""
    kept = sorted(late)[: max(len(late) - count // 100, 0)]
    return kept[-1] if kept else 0.0


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "nestpipe-relay", help="for data and runs"
    )
    parser.add_argument("--ml1m", type=Path, help="a sequence folder of MovieLens-1M: measure relay-ml1m")
    parser.add_argument(
        "--history", action="store_true", help="measure the longest history instead of the highest rate"
    )
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--overload", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="histories sixteen times shorter, fewer users and arms, short loads"
    )
    parser.add_argument("--dry", action="store_true", help="accept void loads and record nothing, to test the script")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), help="arms besides full and everything; default: all")
    parser.add_argument("--seconds", type=float, default=0.0, help="duration of each load")
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument(
        "--history-load", type=float, default=1.0, help="load as a share of the rate that full inference reached"
    )
    parser.add_argument(
        "--warm", type=float, default=0.0, help="share of the usual warm-up; default 1, with --quick 0.05"
    )
    options = parser.parse_args()
    options.seconds = options.seconds or (1.0 if options.quick else 5.0)
    options.warm = options.warm or (0.05 if options.quick else 1.0)
    if options.arms is None:
        options.arms = ["no host tier"] if options.quick else list(ARMS)
    options.blocks = options.blocks or (2 if options.quick else measure.MIN_BLOCKS)
    return options


def main() -> None:
    netlab.end_on_sigterm()  # the instances end then too
    with measure.cores_awake():
        measured()


def measured() -> None:
    options, began = options_of(), time.monotonic()
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {1})
    if options.ml1m:
        world, act, workload = relay_worlds.relay_ml1m(options.folder, options.ml1m), relay_ml1m, "relay-ml1m"
    else:
        world = relay_worlds.relay_long(
            options.folder, 500 if options.quick else 20_000, times=0.125 if options.quick else 2.0
        )
        act = overload if options.overload else curve if options.curve else longest if options.history else relay_long
        workload = "relay-long"
    settings = {
        "workload": workload,
        "quick": options.quick,
        "seconds": options.seconds,
        "blocks": options.blocks,
        "curve": options.curve,
        "history": options.history,
        "overload": options.overload,
        "arms": options.arms,
        "warm_up_s": {name: options.warm * seconds for name, seconds in WARM_S.items()},
        "host_bytes": {name: arm.host_bytes for name, arm in ARMS.items()},
    }
    kept = measure.Kept(options.folder / "kept.jsonl", settings)
    with ExitStack() as stack:
        bench = Bench(world, seconds=options.seconds, stack=stack, dry=options.dry)
        figures = act(bench, options, kept)
    minutes = (time.monotonic() - began) / 60
    figures |= {
        "void_loads": bench.num_void,
        "dropped_blocks": bench.num_dropped,
        "loads": bench.num_loads,
        "minutes": round(minutes, 1),
    }
    figures["void"] = bench.num_void > 0
    if bench.num_void:
        print(f"VOID: in {bench.num_void} of {bench.num_loads} loads the generator was late; nothing is recorded")
    elif not options.dry:
        measure.append("relay", measure.record(seed=SEED, figures=figures, settings=settings))
    kept.clear()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
