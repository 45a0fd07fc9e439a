"""How much more can be served inside a tail-latency budget with the relay than with full inference?

Open-loop load (relay_load.py) on one model instance on core 0; generator and gateway on core 1. The budget of the rank stage is
2.0x the median latency of full inference, unloaded, at the 90th percentile of history lengths: measured before any arm runs.
*Goodput* is answers per second, inside the budget and not degraded, at the highest rate of a ladder (steps of 1.25) at which
99 % of all that was asked are. `relay-ml1m` has short histories: there the trigger should stay out, and what is measured is CPU per
answer over that of full inference.

    python benchmarks/relay.py                 # relay-long, all arms; long: 100 requests of each load, few per second
    python benchmarks/relay.py --ml1m FOLDER   # relay-ml1m, on a sequence folder of MovieLens-1M; about 4 minutes
    python benchmarks/relay.py --curve         # goodput over budgets, host tier off and on
    python benchmarks/relay.py --overload      # three times the capacity, then half of it: what is refused, and who recovers when
    python benchmarks/relay.py --quick

Loads in which the generator was late are void and repeated; if some stay void, the figures say so and are not recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import measure
import numpy as np
import relay_load
import relay_worlds
from relay_worlds import ARMS, SEED, World

from nestpipe.serve.cascade import Cascade, Request
from nestpipe.serve.config import Stages
from nestpipe.serve.remote import Asked, Remote, Signal, make_client
from nestpipe.serve.retrieval import Candidates
from nestpipe.serve.router import Instance, Members

Draw = Callable[[int], np.ndarray]
BUDGET = 2.0
CURVE = (1.2, 1.5, 2.0, 3.0, 5.0)
GOOD_SHARE = 0.99
HISTORY_STEP = 1.15
RATE_STEP = 1.25
MIN_REQUESTS = 100  # in a load, however slow; few say nothing about a 99th percentile
SIDE_BLOCKS = 3  # of arms that explain the ratio and are not part of it
TRIES = 3  # of a load that is void
RECOVERY_S = 5.0


class Scattered(Members):
    """No affinity: every call goes to any instance."""

    def __init__(self, instances: Sequence[Instance]):
        super().__init__(instances)
        self._random = np.random.default_rng(SEED)

    def choose(self, *arguments: object, **options: object) -> Instance:
        return self._shuffled()[0]

    def follow(self, *arguments: object, **options: object) -> list[Instance]:
        return self._shuffled()

    def _shuffled(self) -> list[Instance]:
        members = list(self)
        return [members[place] for place in self._random.permutation(len(members))]


class Silent(Remote):
    """Full inference alone: nobody is told ahead."""

    async def signal(self, asked: Asked, instance: Instance, *, timeout_s: float) -> Signal:
        return Signal(instance=instance, reason="off")


@dataclass(slots=True)
class Running:
    """An arm's instances, and what was learned about its rate."""

    name: str
    instances: list[Instance]
    pids: list[int]
    rate: float = 0.0
    is_found: bool = False  # whether the rate is near what the arm can do
    outcomes: list[relay_load.Outcome] = field(default_factory=list)

    def members(self) -> Members:
        return Scattered(self.instances) if self.name == "no affinity" else Members(self.instances)

    def cpu_s(self) -> float:
        return sum(map(relay_worlds.cpu_s, self.pids))


class Bench:
    """Starts arms and offers loads to them."""

    def __init__(self, world: World, *, seconds: float, stack: ExitStack, dry: bool = False):
        self.world, self.seconds, self._stack, self._dry = world, seconds, stack, dry
        self._seed = SEED
        self.num_loads = self.num_void = 0
        random = np.random.default_rng(SEED)
        chosen = random.choice(world.items, min(world.num_candidates, len(world.items)), replace=False)
        self._candidates = Candidates(chosen, np.zeros(len(chosen), dtype=np.float32))
        self.draw = relay_load.zipf(len(world.users), 0.8, SEED)

    def start(self, name: str, *, budget_ms: float) -> Running:
        arm, found = ARMS[name], Running(name, [], [])
        for number in range(arm.num_instances):
            own = f"{name.replace(' ', '-')}-{number}"
            started = relay_worlds.instance(self.world, arm, name=own, budget_ms=budget_ms, core=0)
            one, pid = self._stack.enter_context(started)
            found.instances.append(one)
            found.pids.append(pid)
        return found

    def with_cascade(self, arm: Running, rank_ms: float, act: Callable[[Cascade], Awaitable[object]]) -> None:
        async def body() -> None:
            stages = Stages(
                retrieval_ms=1000, prerank_ms=1000, rank_ms=rank_ms, num_candidates=len(self._candidates.items)
            )
            kind = Silent if arm.name == "full" else Remote
            remote = kind(arm.members(), make_client(), first_share=1.0)
            try:
                await act(Cascade(remote, relay_load.Waiting(self._candidates), stages))
            finally:
                await remote.close()

        asyncio.run(body())

    def unloaded_ms(self, arm: Running, length: int, *, repeats: int) -> float:
        """The median latency of the rank stage, one request at a time, for users with about this many events."""
        near = np.argsort(np.abs(self.world.lengths - length))[:repeats]
        found: list[float] = []

        async def act(cascade: Cascade) -> None:
            for warm in (True, False):
                for place in near[:3] if warm else near:
                    request = Request(
                        user=int(self.world.users[place]),
                        request=f"unloaded-{warm}-{place}",
                        query_time=int(self.world.last_s[place]) + 60,
                    )
                    answer = await cascade.recommend(request)
                    if answer.path != "full":
                        raise RuntimeError(f"full inference was to be measured, but the path was '{answer.path}'")
                    found.extend([] if warm else [answer.stages["rank"].ms])

        self.with_cascade(arm, 60_000, act)
        return float(np.median(found))

    def poisson(self, rate: float, *, seconds: float, draw: Draw | None = None) -> relay_load.Load:
        """A load of its own: no two are the same."""
        self._seed += 1
        found = relay_load.poisson(rate, seconds, draw or self.draw, self.world.last_s + 60, self._seed)
        return relay_load.Load(found.at_s, self.world.users[found.users], found.query_times)

    def offer(self, arm: Running, make: Callable[[], relay_load.Load], budget_ms: float) -> relay_load.Outcome:
        """One load; a void one is repeated, and counted if it stays so."""
        for attempt in range(TRIES):
            load, outcomes, before_s = make(), list[relay_load.Outcome](), arm.cpu_s()
            self.num_loads += 1

            async def act(
                cascade: Cascade,
                load: relay_load.Load = load,
                outcomes: list[relay_load.Outcome] = outcomes,
                name: str = f"{arm.name}-{self.num_loads}",
            ) -> None:
                outcomes.append(await relay_load.offer(cascade, load, name=name))

            self.with_cascade(arm, budget_ms, act)
            outcomes[0].cpu_s = arm.cpu_s() - before_s
            if not outcomes[0].is_void or self._dry or attempt == TRIES - 1:
                break
            print(f"  void: the generator was {outcomes[0].lag_p99_ms:.1f} ms late at its 99th percentile; again")
        self.num_void += outcomes[0].is_void
        arm.outcomes.append(outcomes[0])
        return outcomes[0]

    def is_met(self, arm: Running, rate: float, budget_ms: float, *, seconds: float = 0.0) -> float:
        """Good answers per second at a rate if the budget is kept, else 0."""
        seconds = seconds or max(self.seconds, MIN_REQUESTS / rate)
        outcome = self.offer(arm, lambda: self.poisson(rate, seconds=seconds), budget_ms)
        share = outcome.good_share(budget_ms)
        print(
            f"  {arm.name:<13} {rate:7.1f}/s  good {share:6.1%}  p99 {outcome.p99_ms():7.1f} ms"
            f"  lag {outcome.lag_p99_ms:.1f} ms{' VOID' if outcome.is_void else ''}  {dict(outcome.paths.most_common(4))}",
            flush=True,
        )
        return rate * share if share >= GOOD_SHARE else 0.0

    def goodput(self, arm: Running, budget_ms: float) -> float:
        """Good answers per second at the highest rate of the ladder that keeps the budget."""
        if not arm.is_found:  # first in large steps and short loads, which also fills the caches
            short = self.seconds / 2
            arm.rate = (
                relay_load.highest_rate(
                    lambda rate: self.is_met(arm, rate, budget_ms, seconds=max(short, 20 / rate)) > 0,
                    start=arm.rate,
                    step=RATE_STEP**3,
                )
                or arm.rate
            )
            arm.is_found = True
        best: dict[float, float] = {}

        def is_met(rate: float) -> bool:
            best[rate] = self.is_met(arm, rate, budget_ms)
            return best[rate] > 0

        arm.rate = relay_load.highest_rate(is_met, start=arm.rate, step=RATE_STEP) or arm.rate / RATE_STEP
        return max(best.values())

    def longest_history(self, arm: Running, rate: float, budget_ms: float) -> float:
        """The longest history, the same for all users, that keeps the budget at a rate."""
        shortest = self.world.max_len / 16
        rungs = [shortest * HISTORY_STEP**n for n in range(int(np.log(16) / np.log(HISTORY_STEP)) + 1)]

        def is_met(rung: int) -> bool:
            order = np.argsort(np.abs(self.world.lengths - rungs[rung]), kind="stable")
            near = order[: max(len(order) // 10, 50)]
            draw = relay_load.zipf(len(near), 0.8, SEED)
            seconds = max(self.seconds, MIN_REQUESTS / rate)
            load = lambda: self.poisson(rate, seconds=seconds, draw=lambda count: near[draw(count)])  # noqa: E731
            share = self.offer(arm, load, budget_ms).good_share(budget_ms)
            print(f"  {arm.name:<13} {rungs[rung]:7.0f} events at {rate:.1f}/s  good {share:6.1%}", flush=True)
            return share >= GOOD_SHARE

        found = relay_load.last_met(is_met, len(rungs))
        return rungs[found] if found >= 0 else 0.0


def relay_long(bench: Bench, options: argparse.Namespace) -> dict[str, object]:
    names = ["full", "no host tier", "everything"] if options.quick else list(ARMS)
    arms = {"full": bench.start("full", budget_ms=1000.0)}
    p90 = int(np.percentile(bench.world.lengths, 90))
    unloaded_ms = bench.unloaded_ms(arms["full"], p90, repeats=9 if options.quick else 31)
    budget_ms = BUDGET * unloaded_ms
    print(f"full inference, unloaded, {p90} events: {unloaded_ms:.1f} ms; budget {budget_ms:.1f} ms")
    for name in names[1:]:
        arms[name] = bench.start(name, budget_ms=budget_ms)
    for arm in arms.values():
        arm.rate = 300 / unloaded_ms
    found: dict[str, list[float]] = {name: [] for name in names}
    for block in range(options.blocks + 1):
        for name, arm in arms.items():
            if block > SIDE_BLOCKS and name in {"always", "no affinity"}:
                continue
            goodput = bench.goodput(arm, budget_ms)
            if block:  # the first finds the rates and fills the caches
                found[name].append(goodput)
    if min(found["full"]) == 0:
        raise RuntimeError(
            "full inference alone missed the budget at every rate: the machine is not quiet; nothing is reported"
        )
    figures: dict[str, object] = {
        "p90_events": p90,
        "unloaded_ms": round(unloaded_ms, 2),
        "budget_ms": round(budget_ms, 2),
    }
    rows = []
    for name in names:
        spread = measure.ratio(found[name], found["full"][: len(found[name])])
        key = {"everything": "goodput_ratio", "no host tier": "goodput_ratio_no_reuse"}.get(
            name, f"goodput_ratio {name}"
        )
        figures |= {key: round(spread.median, 3), f"{key}_range": spread.range}
        figures[f"goodput_per_s {name}"] = [round(one, 2) for one in found[name]]
        figures[f"paths {name}"] = relay_load.summary(arms[name].outcomes)
        rows.append([name, f"{np.median(found[name]):.1f}", str(spread), measure.verdict(spread, at_least=3.6)])
    lengths = {}
    rate = options.history_load * arms["full"].rate
    for name in ("full", "everything"):
        lengths[name] = [bench.longest_history(arms[name], rate, budget_ms) for _ in range(2 if options.quick else 3)]
    history = measure.ratio(lengths["everything"], [max(one, 1.0) for one in lengths["full"]])
    figures |= {
        "history_ratio": round(history.median, 3),
        "history_ratio_range": history.range,
        "history_rate": round(rate, 2),
    }
    figures["history_events"] = lengths
    print(measure.table(["arm", "goodput / s", "over full inference", "at least 3.6"], rows))
    print(
        f"longest history at {rate:.1f}/s: {lengths}; ratio {history}, at least 1.5: {measure.verdict(history, at_least=1.5)}"
    )
    return figures


def curve(bench: Bench, options: argparse.Namespace) -> dict[str, object]:
    """Goodput over budgets; instances are started for each, because the trigger knows its budget."""
    full = bench.start("full", budget_ms=1000.0)
    p90 = int(np.percentile(bench.world.lengths, 90))
    unloaded_ms = bench.unloaded_ms(full, p90, repeats=31)
    figures: dict[str, object] = {"unloaded_ms": round(unloaded_ms, 2)}
    rows = []
    for factor in CURVE:
        arms = [full, *(bench.start(name, budget_ms=factor * unloaded_ms) for name in ("no host tier", "everything"))]
        reached = {}
        for arm in arms:
            arm.rate, arm.is_found = 300 / unloaded_ms, False
            reached[arm.name] = float(np.median([bench.goodput(arm, factor * unloaded_ms) for _ in range(3)]))
        figures[f"{factor}"] = {name: round(value, 2) for name, value in reached.items()}
        base = max(reached["full"], 1e-9)
        rows.append(
            [
                f"{factor}x",
                f"{reached['full']:.1f}",
                *(f"{reached[one] / base:.2f}x" for one in ("no host tier", "everything")),
            ]
        )
    print(measure.table(["budget", "full / s", "host tier off", "host tier on"], rows))
    return figures


def relay_ml1m(bench: Bench, options: argparse.Namespace) -> dict[str, object]:
    """CPU per answer at a moderate load: real users, asked in the order and at the distances of the log, scaled."""
    arms = {"full": bench.start("full", budget_ms=1000.0)}
    unloaded_ms = bench.unloaded_ms(arms["full"], int(np.percentile(bench.world.lengths, 90)), repeats=31)
    budget_ms, rate = BUDGET * unloaded_ms, 300 / unloaded_ms
    arms["everything"] = bench.start("everything", budget_ms=budget_ms)
    figures: dict[str, object] = {"unloaded_ms": round(unloaded_ms, 2), "budget_ms": round(budget_ms, 2)}
    order = np.argsort(bench.world.last_s, kind="stable")
    per_answer: dict[str, list[float]] = {name: [] for name in arms}
    count = min(int(rate * bench.seconds), len(order) // 2)
    for block in range(options.blocks + 1):
        start = int(np.random.default_rng(block).integers(0, len(order) - count))
        chosen = order[start : start + count]
        asked = bench.world.last_s[chosen]
        at_s = (asked - asked[0]) / max(asked[-1] - asked[0], 1) * (count / rate)
        load = relay_load.Load(at_s, bench.world.users[chosen], asked + 60)
        for name, arm in arms.items():
            outcome = bench.offer(arm, lambda load=load: load, budget_ms)
            spent_ms = 1000 * outcome.cpu_s / max(len(outcome.rank_ms), 1)
            print(
                f"  {name:<13} {spent_ms:.2f} ms of CPU per answer  lag {outcome.lag_p99_ms:.1f} ms  {dict(outcome.paths)}"
            )
            if block:
                per_answer[name].append(spent_ms)
    overhead = measure.ratio(per_answer["everything"], per_answer["full"])
    figures |= {
        "idle_cpu_overhead": round(overhead.median - 1, 4),
        "idle_cpu_overhead_range": [round(one - 1, 4) for one in overhead.range],
        "paths everything": relay_load.summary(arms["everything"].outcomes),
    }
    print(f"CPU per answer over full inference: {overhead}; at most 1.03: {measure.verdict(overhead, at_most=1.03)}")
    return figures


def overload(bench: Bench, options: argparse.Namespace) -> dict[str, object]:
    """Three times what an instance can do, then half of it: good answers, fast refusals, and the way back."""
    arm = bench.start("full", budget_ms=1000.0)
    unloaded_ms = bench.unloaded_ms(arm, int(np.percentile(bench.world.lengths, 90)), repeats=9)
    budget_ms = BUDGET * unloaded_ms
    arm.rate = 300 / unloaded_ms
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
        "overload_share_refused": round(len(others) / max(too_much.num_asked, 1), 3),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "nestpipe-relay", help="for data and runs"
    )
    parser.add_argument("--ml1m", type=Path, help="a sequence folder of MovieLens-1M: measure relay-ml1m")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--overload", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="histories of a sixteenth, fewer users and arms, short loads"
    )
    parser.add_argument(
        "--dry", action="store_true", help="void loads count too and nothing is recorded: checks the script"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="of each load")
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--history-load", type=float, default=0.5, help="of the rate that full inference reached")
    options = parser.parse_args()
    seconds, began = options.seconds or (1.0 if options.quick else 5.0), time.monotonic()
    options.blocks = options.blocks or (2 if options.quick else measure.MIN_BLOCKS)
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {1})
    if options.ml1m:
        world, act, workload = relay_worlds.relay_ml1m(options.folder, options.ml1m), relay_ml1m, "relay-ml1m"
    else:
        world = relay_worlds.relay_long(
            options.folder, 500 if options.quick else 20_000, times=0.125 if options.quick else 2.0
        )
        act = overload if options.overload else curve if options.curve else relay_long
        workload = "relay-long"
    with ExitStack() as stack:
        bench = Bench(world, seconds=seconds, stack=stack, dry=options.dry)
        figures = act(bench, options)
    minutes = (time.monotonic() - began) / 60
    figures |= {"void_loads": bench.num_void, "loads": bench.num_loads, "minutes": round(minutes, 1)}
    figures["void"] = bench.num_void > 0
    settings = {
        "workload": workload,
        "quick": options.quick,
        "seconds": seconds,
        "blocks": options.blocks,
        "curve": options.curve,
        "overload": options.overload,
    }
    if bench.num_void:
        print(f"VOID: in {bench.num_void} of {bench.num_loads} loads the generator was late; nothing is recorded")
    elif not options.dry:
        measure.append("relay", measure.record(seed=SEED, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
