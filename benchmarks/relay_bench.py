"""The arms of relay.py: instances on a core, loads sent to them through a gateway's cascade, and searches.

A production system is warm. So before the measurement, arms that cache KV prefixes receive requests in a closed loop for the
users of 20,000 draws of the workload, the most frequent first and each once: the state that so many requests would leave in a
cache that is too small for all. The warm-up time is bounded; the number of users and the hit rate of the measured requests are
printed with the result.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypedDict, TypeVar

import httpx
import numpy as np
import relay_load
import relay_worlds
from relay_worlds import ARMS, SEED, World

from nestpipe.gateway.candidates import CandidateItems
from nestpipe.gateway.cascade import Cascade
from nestpipe.gateway.instance_client import InstanceClient, PrefillOutcome, make_client
from nestpipe.gateway.router import InstanceAddress, Members
from nestpipe.serve.config import Stages
from nestpipe.serve.schemas import PrefillRequest, RecommendRequest

T = TypeVar("T")
Draw = Callable[[int], np.ndarray]
GOOD_SHARE = 0.99
HISTORY_STEP = 1.15
RATE_STEP = 1.25
MIN_REQUESTS = 100  # in a load, however slow; few say nothing about a 99th percentile
TRIES = 2  # of a load that is void
BLOCK_TRIES = 4  # of a block in which one stays so
WARM_DRAWS, WARM_AT_ONCE = 20_000, 8
_REASON = re.compile(r'^nestpipe_reason_total\{reason="(\w+)"\} ([\d.e+]+)$', re.MULTILINE)


class Scattered(Members):
    """No affinity: every call goes to any instance."""

    def __init__(self, instances: Sequence[InstanceAddress]):
        super().__init__(instances)
        self._random = np.random.default_rng(SEED)

    def choose(self, *arguments: object, **options: object) -> InstanceAddress:
        return self._shuffled()[0]

    def follow(self, *arguments: object, **options: object) -> list[InstanceAddress]:
        return self._shuffled()

    def _shuffled(self) -> list[InstanceAddress]:
        members = list(self)
        return [members[place] for place in self._random.permutation(len(members))]


class Silent(InstanceClient):
    """Full inference only: no prefill hints are sent."""

    async def prefill(self, hint: PrefillRequest, instance: InstanceAddress, *, timeout_s: float) -> PrefillOutcome:
        return PrefillOutcome(instance=instance, reason="off")


class Reached(TypedDict):
    """Of a block: good answers per second, the rate of the ladder at which they were, paths of all answers and CPU for each."""

    per_s: float
    rate: float
    paths: dict[str, int]
    cpu_ms: float


@dataclass(slots=True)
class Running:
    """An arm's instances, and what was learned about its rate."""

    name: str
    instances: list[InstanceAddress]
    pids: list[int]
    rate: float = 0.0
    is_found: bool = False  # whether the rate is near what the arm can do
    rung: int = -1  # of histories; -1 before one is found
    num_warm: int = 0  # requests of the warm-up
    outcomes: list[relay_load.Outcome] = field(default_factory=list)

    def signals(self) -> dict[str, int]:
        """What became of the signals that its instances got so far, by reason."""
        found: Counter[str] = Counter()
        for one in self.instances:
            text = httpx.get(f"{one.url}/metrics", timeout=5, trust_env=False).text
            found.update({reason: round(float(n)) for reason, n in _REASON.findall(text)})
        return dict(found.most_common())

    def members(self) -> Members:
        return Scattered(self.instances) if self.name == "no affinity" else Members(self.instances)

    def cpu_s(self) -> float:
        return sum(map(relay_worlds.cpu_s, self.pids))


class Bench:
    """Starts arms and offers loads to them."""

    def __init__(self, world: World, *, seconds: float, stack: ExitStack, dry: bool = False):
        self.world, self.seconds, self._stack, self._dry = world, seconds, stack, dry
        self._seed = SEED
        self.num_loads = self.num_void = self.num_dropped = 0
        random = np.random.default_rng(SEED)
        chosen = random.choice(world.items, min(world.num_candidates, len(world.items)), replace=False)
        self._candidates = CandidateItems(chosen, np.zeros(len(chosen), dtype=np.float32))
        self.zipf = relay_load.Zipf(len(world.users), 0.8, SEED)
        self.draw: Draw = self.zipf

    def start(self, name: str, *, budget_ms: float, stack: ExitStack | None = None) -> Running:
        """Starts an arm's instances, which end with the stack or with the bench."""
        arm, found = ARMS[name], Running(name, [], [])
        for number in range(arm.num_instances):
            own = f"{name.replace(' ', '-')}-{number}"
            started = relay_worlds.instance(self.world, arm, name=own, budget_ms=budget_ms, core=0)
            one, pid = (stack or self._stack).enter_context(started)
            found.instances.append(one)
            found.pids.append(pid)
        return found

    def with_cascade(self, arm: Running, rank_ms: float, act: Callable[[Cascade], Awaitable[object]]) -> None:
        async def body() -> None:
            stages = Stages(
                retrieval_ms=1000, prerank_ms=1000, rank_ms=rank_ms, num_candidates=len(self._candidates.items)
            )
            kind = Silent if arm.name == "full" else InstanceClient
            remote = kind(arm.members(), make_client(), first_share=1.0)
            try:
                await act(Cascade(remote, relay_load.Waiting(self._candidates), stages))
            finally:
                await remote.close()

        asyncio.run(body())

    def warm_up(self, arm: Running, seconds: float) -> None:
        """Fills the caches of an arm, see above."""
        users, counts = np.unique(relay_load.Zipf(len(self.world.users), 0.8, SEED)(WARM_DRAWS), return_counts=True)
        order = users[np.argsort(-counts, kind="stable")]
        requests = self.world.users[order].tolist(), (self.world.last_s[order] + 60).tolist()

        async def act(cascade: Cascade) -> None:
            arm.num_warm = await relay_load.warm_up(cascade, *requests, seconds=seconds, at_once=WARM_AT_ONCE)

        self.with_cascade(arm, 60_000, act)
        print(f"  {arm.name:<13} warm after {arm.num_warm} of {len(order)} users", flush=True)

    def unloaded_ms(self, arm: Running, length: int, *, repeats: int) -> float:
        """The median latency of the rank stage, one request at a time, for users with about this many events."""
        near = np.argsort(np.abs(self.world.lengths - length))[:repeats]
        found: list[float] = []

        async def act(cascade: Cascade) -> None:
            for warm in (True, False):
                for place in near[:3] if warm else near:
                    request = RecommendRequest(
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

    def block(self, act: Callable[[], T]) -> T:
        """Something measured on all arms in turn. If a load of it stays void it is dropped as a whole, and done again."""
        for _ in range(BLOCK_TRIES):
            before = self.num_void
            found = act()
            if self.num_void == before or self._dry:
                return found
            self.num_void, self.num_dropped = before, self.num_dropped + 1
            print("  the block is repeated", flush=True)
        raise SystemExit(
            f"VOID: in each of {BLOCK_TRIES} tries the generator was late in a load: the machine is not quiet. What was"
            " measured before is kept; the same command resumes there"
        )

    def offer(
        self, arm: Running, make: Callable[[], relay_load.Load], budget_ms: float, *, good_share: float = 0.0
    ) -> relay_load.Outcome:
        """One load; a void one is repeated, and counted if it stays so. It ends once a share cannot be good any more."""
        for attempt in range(TRIES):
            load, outcomes, before_s = make(), list[relay_load.Outcome](), arm.cpu_s()
            self.num_loads += 1

            async def act(
                cascade: Cascade,
                load: relay_load.Load = load,
                outcomes: list[relay_load.Outcome] = outcomes,
                name: str = f"{arm.name}-{self.num_loads}",
            ) -> None:
                most_bad = (1 - good_share) * len(load.at_s)
                outcomes.append(
                    await relay_load.offer(cascade, load, name=name, budget_ms=budget_ms, most_bad=most_bad)
                )

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
        load = lambda: self.poisson(rate, seconds=seconds)  # noqa: E731
        outcome = self.offer(arm, load, budget_ms, good_share=GOOD_SHARE)
        share = outcome.good_share(budget_ms)
        print(
            f"  {arm.name:<13} {rate:7.1f}/s  good {share:6.1%}  p99 {outcome.p99_ms():7.1f} ms"
            f"  lag {outcome.lag_p99_ms:.1f} ms{' VOID' if outcome.is_void else ''}  {dict(outcome.paths.most_common(4))}",
            flush=True,
        )
        return rate * share if share >= GOOD_SHARE else 0.0

    def goodput(self, arm: Running, budget_ms: float) -> float:
        """Good answers per second at the highest rate of the ladder that keeps the budget."""
        if not arm.is_found:  # first in large steps and short loads
            short = self.seconds / 2
            arm.rate = (
                relay_load.highest_rate(
                    lambda rate: self.is_met(arm, rate, budget_ms, seconds=max(short, 30 / rate)) > 0,
                    start=arm.rate,
                    step=RATE_STEP**2,
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

    def reached(self, arm: Running, budget_ms: float) -> Reached:
        """The same, with its rate and its paths, as a block keeps it."""
        before = len(arm.outcomes)
        per_s = self.goodput(arm, budget_ms)
        own = arm.outcomes[before:]
        cpu_ms = 1e3 * sum(one.cpu_s for one in own) / max(sum(len(one.rank_ms) for one in own), 1)
        return {"per_s": per_s, "rate": arm.rate, "paths": relay_load.summary(own), "cpu_ms": cpu_ms}

    def longest_history(self, arm: Running, rate: float, budget_ms: float) -> float:
        """The longest history, about the same for all users, that keeps the budget at a rate; users stay as popular as they are."""
        shortest = self.world.max_len / 16
        rungs = [shortest * HISTORY_STEP**n for n in range(int(np.log(16) / np.log(HISTORY_STEP)) + 1)]

        def is_met(rung: int) -> bool:
            order = np.argsort(np.abs(self.world.lengths - rungs[rung]), kind="stable")
            draw = self.zipf.among(order[: max(len(order) // 10, 50)])
            seconds = max(self.seconds, MIN_REQUESTS / rate)
            load = lambda: self.poisson(rate, seconds=seconds, draw=draw)  # noqa: E731
            outcome = self.offer(arm, load, budget_ms, good_share=GOOD_SHARE)
            share = outcome.good_share(budget_ms)
            print(
                f"  {arm.name:<13} {rungs[rung]:7.0f} events at {rate:.1f}/s  good {share:6.1%}  p99 {outcome.p99_ms():7.1f} ms"
                f"  {dict(outcome.paths.most_common(4))}",
                flush=True,
            )
            return share >= GOOD_SHARE

        arm.rung = relay_load.last_met(is_met, len(rungs), near=arm.rung)
        return rungs[arm.rung] if arm.rung >= 0 else 0.0
