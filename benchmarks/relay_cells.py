"""The cells of relay.py: what is measured in each, how a block of it runs, and what its blocks amount to.

    goodput-B-coldN    highest rate at which 99 % of the answers keep the budget B, with N % cold users; both arms
    share-B-coldN      good answers at a fixed rate, for budgets that full inference misses without any load
    history-B-coldN    the longest history that keeps the budget at the rate at which full inference is half busy
    length-L           goodput if all histories have L events, within twice the time of full inference at L
    overload           three times the capacity of the relay, then half of it
    ml1m               CPU per answer where histories are short

B is a multiple of the time of full inference at the 90th percentile of lengths, or `max1.2`: 1.2x that at the longest history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import relay_load
from relay_bench import GOOD_SHARE, Bench, Reached, Running
from relay_worlds import SEED, World

from nestpipe.serve.requests import HITS

Kind = Literal["goodput", "share", "history", "length", "overload", "ml1m"]
Figures = dict[str, Any]
ARMS = ("full", "everything")
LADDER_STEP, LADDER_START, LADDER_END = 1.15, 1024, 16_384
USERS_PER_RUNG, WARM_PER_RUNG = 190, 60
NUM_WARM = 1500  # users of relay-long with a cached prefix
AFTER_S = 15.0  # of half the capacity, after an overload


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row or point of a figure."""

    name: str
    kind: Kind
    budget: str = "2.0"
    cold: float = 0.1
    blocks: int = 1
    requests: int = 300
    length: int = 0


def _cells() -> list[Cell]:
    must = [
        Cell(name="goodput-2.0-cold10", kind="goodput", blocks=5, requests=1000),
        Cell(name="ml1m", kind="ml1m", blocks=9, requests=1000),
        Cell(name="overload", kind="overload", blocks=5, requests=1000),
        Cell(name="history-2.0-cold10", kind="history", blocks=5, requests=1000),
    ]
    goodput = [("max1.2", 10), ("2.0", 33), ("max1.2", 33), ("2.0", 0), ("2.0", 100), ("3.0", 10), ("5.0", 10)]
    others = [Cell(name=f"goodput-{b}-cold{c}", kind="goodput", budget=b, cold=c / 100) for b, c in goodput]
    others += [Cell(name=f"share-{b}-cold10", kind="share", budget=b) for b in ("1.2", "1.5")]
    others += [
        Cell(name=f"length-{length}", kind="length", length=length, requests=max(300 * 2048 // length, 60))
        for length in (1024, 2048, 4096, 8192, 16_384)
    ]
    return [*must, *others]


CELLS = {cell.name: cell for cell in _cells()}
MUST = [cell.name for cell in CELLS.values() if cell.blocks > 1]


def rungs() -> list[int]:
    """Lengths of the ladder; the last one is the longest that the model takes."""
    count = int(np.log(LADDER_END / LADDER_START) / np.log(LADDER_STEP)) + 1
    return [*(round(LADDER_START * LADDER_STEP**n) for n in range(count)), LADDER_END]


class Cells:
    """Runs blocks of cells on a world; the arms of a cell stay up for all of its blocks."""

    def __init__(self, world: World, unloaded: Callable[[Bench, Running, int], float], *, dry: bool, scale: float):
        self._world, self._unloaded, self._dry, self._scale = world, unloaded, dry, scale

    def count(self, number: int) -> int:
        return max(round(self._scale * number), 8)

    def runner(self, cell: Cell, stack: ExitStack, before: Sequence[Figures]) -> Callable[[int], Figures]:
        """A function that measures block `number`; `before` are the blocks of earlier runs."""
        bench = Bench(self._world, num_requests=self.count(cell.requests), stack=stack, dry=self._dry)
        bench._seed += 1000 * (1 + len(before))  # no load of an earlier run again
        full = bench.start("full", budget_ms=1000.0)
        make: Mapping[Kind, Callable[..., Callable[[int], Figures]]] = {
            "goodput": self._goodput,
            "share": self._share,
            "history": self._history,
            "length": self._length,
            "overload": self._overload,
            "ml1m": self._ml1m,
        }
        run = make[cell.kind](cell, bench, full, before)

        def block(number: int) -> Figures:
            found = bench.block(lambda: run(number))
            return found | {"loads": bench.num_loads, "dropped_blocks": bench.num_dropped}

        return block

    def _budget(self, cell: Cell, bench: Bench, full: Running) -> tuple[float, float]:
        """The budget, and full inference at the 90th percentile, in ms."""
        p90 = int(np.percentile(self._world.lengths, 90))
        p90_ms = self._unloaded(bench, full, p90)
        if not cell.budget.startswith("max"):
            return float(cell.budget) * p90_ms, p90_ms
        return float(cell.budget.removeprefix("max")) * self._unloaded(bench, full, self._world.max_len), p90_ms

    def _users(self, bench: Bench) -> tuple[np.ndarray, np.ndarray]:
        """Warm and cold users: popularity and length of history are independent, so any division is fair."""
        order = np.random.default_rng(SEED).permutation(len(self._world.users))
        num_warm = min(self.count(NUM_WARM), len(order) // 3)
        return order[:num_warm], order[num_warm:]

    def _both(self, cell: Cell, bench: Bench, full: Running) -> tuple[dict[str, Running], float, float]:
        budget_ms, p90_ms = self._budget(cell, bench, full)
        return {"full": full, "everything": bench.start("everything", budget_ms=budget_ms)}, budget_ms, p90_ms

    def _goodput(self, cell: Cell, bench: Bench, full: Running, before: Sequence[Figures]) -> Callable[[int], Figures]:
        arms, budget_ms, p90_ms = self._both(cell, bench, full)
        warm, cold = self._users(bench)
        for arm in arms.values():
            bench.warm_up(arm, warm)
            known = [one[arm.name]["rate"] for one in before]
            arm.rate, arm.is_found = (known[-1], True) if known else (400 / p90_ms, False)

        def block(number: int) -> Figures:
            draw = bench.cold_mix(warm, cold, cell.cold)
            order = list(arms.values())[:: 1 if number % 2 else -1]
            found: dict[str, Reached] = {arm.name: bench.goodput(arm, draw, budget_ms) for arm in order}
            return {"budget_ms": round(budget_ms, 2), **found}

        return block

    def _share(self, cell: Cell, bench: Bench, full: Running, before: Sequence[Figures]) -> Callable[[int], Figures]:
        arms, budget_ms, p90_ms = self._both(cell, bench, full)
        warm, cold = self._users(bench)
        rate = 200 / p90_ms

        def block(number: int) -> Figures:
            found: Figures = {"budget_ms": round(budget_ms, 2), "rate": round(rate, 3)}
            for arm in arms.values():
                bench.warm_up(arm, warm)
                draw = bench.cold_mix(warm, cold, cell.cold)
                outcome = bench.mixed(arm, rate, draw, budget_ms, count=bench.num_requests, good_share=None)
                share = outcome.good_share(budget_ms)
                found[arm.name] = {"share": round(share, 4), "per_s": round(rate * share, 3)}
            return found

        return block

    def _rung_users(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        own = np.flatnonzero(self._world.lengths == length)
        num_warm = max(len(own) * WARM_PER_RUNG // USERS_PER_RUNG, 1)
        return own[:num_warm], own[num_warm:]

    def _history(self, cell: Cell, bench: Bench, full: Running, before: Sequence[Figures]) -> Callable[[int], Figures]:
        lengths = sorted(set(self._world.lengths.tolist()))
        p90_ms = self._unloaded(bench, full, min(lengths, key=lambda one: abs(one - 3304)))  # P90 of relay-long
        budget_ms, rate = float(cell.budget) * p90_ms, 500 / p90_ms
        arms = {"full": full, "everything": bench.start("everything", budget_ms=budget_ms)}
        reached = {name: lengths.index(before[-1][name]) if before and before[-1][name] else -1 for name in arms}

        def longest(arm: Running) -> int:
            def is_met(rung: int) -> bool:
                warm, cold = self._rung_users(lengths[rung])
                bench.warm_up(arm, warm)
                draw = bench.cold_mix(warm, cold, cell.cold)
                count = min(bench.num_requests, int(len(cold) * 0.77 / cell.cold))
                print(f"  {lengths[rung]:,} events:", end="")
                return bench.mixed(arm, rate, draw, budget_ms, count=count).good_share(budget_ms) >= GOOD_SHARE

            reached[arm.name] = relay_load.last_met(is_met, len(lengths), near=reached[arm.name])
            return lengths[reached[arm.name]] if reached[arm.name] >= 0 else 0

        return lambda number: {
            "budget_ms": round(budget_ms, 2),
            "rate": round(rate, 3),
            **{name: longest(arm) for name, arm in arms.items()},
        }

    def _length(self, cell: Cell, bench: Bench, full: Running, before: Sequence[Figures]) -> Callable[[int], Figures]:
        length = min(set(self._world.lengths.tolist()), key=lambda one: abs(one - cell.length))
        own_ms = self._unloaded(bench, full, length)
        budget_ms = float(cell.budget) * own_ms
        arms = {"full": full, "everything": bench.start("everything", budget_ms=budget_ms)}
        warm, cold = self._rung_users(length)

        def block(number: int) -> Figures:
            found: Figures = {"budget_ms": round(budget_ms, 2), "events": length}
            for arm in arms.values():
                bench.warm_up(arm, warm)
                arm.rate, arm.is_found = 400 / own_ms, False
                found[arm.name] = bench.goodput(arm, bench.cold_mix(warm, cold, cell.cold), budget_ms)
            return found

        return block

    def _overload(self, cell: Cell, bench: Bench, full: Running, before: Sequence[Figures]) -> Callable[[int], Figures]:
        budget_ms, p90_ms = self._budget(cell, bench, full)
        arm = bench.start("everything", budget_ms=budget_ms)
        warm, cold = self._users(bench)
        bench.warm_up(arm, warm)
        draw = bench.cold_mix(warm, cold, cell.cold)
        if before:
            capacity = float(before[-1]["capacity_per_s"])
        else:
            arm.rate = 800 / p90_ms
            capacity = bench.goodput(arm, draw, budget_ms)["per_s"]

        def block(number: int) -> Figures:
            much = bench.mixed(arm, 3 * capacity, draw, budget_ms, count=3 * bench.num_requests, good_share=None)
            count = max(min(int(AFTER_S * capacity / 2), int(len(cold) * 0.77 / cell.cold)), 8)
            after = bench.mixed(arm, capacity / 2, draw, budget_ms, count=count, good_share=None)
            useful = [ms for ms, bad in zip(much.rank_ms, much.degraded, strict=True) if not bad]
            others = [ms for ms, bad in zip(much.rank_ms, much.degraded, strict=True) if bad]
            bad = zip(after.at_s, after.rank_ms, after.degraded, strict=True)
            late = [at for at, ms, degraded in bad if degraded or ms > budget_ms]
            return {
                "budget_ms": round(budget_ms, 2),
                "capacity_per_s": round(capacity, 3),
                "useful_over_capacity": round(much.good(budget_ms) / much.seconds / max(capacity, 1e-9), 3),
                "useful_p99_over_budget": round(float(np.percentile(useful or [0.0], 99)) / budget_ms, 3),
                "refused_p99_over_budget": round(float(np.percentile(others or [0.0], 99)) / budget_ms, 3),
                "share_refused": round(len(others) / max(much.num_requests, 1), 3),
                "num_failed": much.num_failed + much.num_unsent,
                "problems": dict(much.problems),
                "paths": dict(much.paths),
                "recovered_after_s": round(_settled(late, len(after.at_s)), 2),
            }

        return block

    def _ml1m(self, cell: Cell, bench: Bench, full: Running, before: Sequence[Figures]) -> Callable[[int], Figures]:
        """CPU per answer at a moderate load: real users, with the order and the scaled intervals of the log."""
        budget_ms, p90_ms = self._budget(cell, bench, full)
        arms = {"full": full, "everything": bench.start("everything", budget_ms=budget_ms)}
        order, rate = np.argsort(self._world.last_s, kind="stable"), 300 / p90_ms
        count, random = min(bench.num_requests, len(order) // 2), np.random.default_rng(SEED + len(before))

        def load() -> relay_load.Load:
            """Some hours of the log; never the same again, whose users would be known."""
            start = int(random.integers(0, len(order) - count))
            chosen = order[start : start + count]
            times = self._world.last_s[chosen]
            at_s = (times - times[0]) / max(times[-1] - times[0], 1) * (count / rate)
            return relay_load.Load(at_s, self._world.users[chosen], times + 60)

        def spend() -> Figures:
            own, spent = load(), dict[str, float]()
            for name, arm in arms.items():
                outcome = bench.offer(arm, lambda: own, budget_ms)
                spent[name] = round(1000 * outcome.cpu_s / max(len(outcome.rank_ms), 1), 4)
                print(f"  {name:<13} {spent[name]:.2f} ms of CPU per answer  {dict(outcome.paths)}", flush=True)
            return spent

        spend()  # warm
        return lambda number: {"budget_ms": round(budget_ms, 2), **spend(), "signals": arms["everything"].signals()}


def _settled(late: Sequence[float], count: int) -> float:
    """When the last but 1 % of the answers after an overload missed the budget."""
    kept = sorted(late)[: max(len(late) - count // 100, 0)]
    return kept[-1] if kept else 0.0


def hit_share(blocks: Sequence[Figures], arm: str) -> float:
    """Of all answers of an arm in the blocks of a goodput cell."""
    paths = sum((Counter(block[arm]["paths"]) for block in blocks), Counter[str]())
    return sum(paths[path] for path in HITS) / max(paths.total(), 1)
