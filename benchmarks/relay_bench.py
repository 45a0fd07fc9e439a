"""The arms of relay.py: instances on a core, loads sent to them through a gateway's cascade, and searches.

A production system is warm. So before the measurement, arms that cache KV prefixes receive one request of each warm user. A
stated share of the measured requests is of cold users, whose prefix nobody has cached; after a load their prefixes are
invalidated, so that they are cold again in the next one.
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
GOOD_SHARE = 0.99
RATE_STEP = 1.2
COARSE_STEP, COARSE_REQUESTS, COARSE_SHARE = 1.5, 60, 0.95  # of the first search, which one slow answer must not end
TRIES = 2  # of a load that is void
BLOCK_TRIES = 4  # of a block in which one stays so
WARM_AT_ONCE = 8
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
    """Of a search: good answers per second, the rate of the ladder at which they were, paths of all answers and CPU for each."""

    per_s: float
    rate: float
    paths: dict[str, int]
    cpu_ms: float
    num_requests: int


@dataclass(slots=True)
class Running:
    """An arm's instances, and what was learned about its rate."""

    name: str
    instances: list[InstanceAddress]
    pids: list[int]
    rate: float = 0.0
    is_found: bool = False  # whether the rate is near what the arm can do
    warm: set[int] = field(default_factory=set)  # places of users that were asked for
    outcomes: list[relay_load.Outcome] = field(default_factory=list)

    @property
    def is_cached(self) -> bool:
        return self.name != "full"

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
    """Starts arms and offers loads of `num_requests` to them."""

    def __init__(self, world: World, *, num_requests: int, stack: ExitStack, dry: bool = False):
        self.world, self.num_requests, self._stack, self._dry = world, num_requests, stack, dry
        self._seed = SEED
        self.num_loads = self.num_void = self.num_dropped = 0
        random = np.random.default_rng(SEED)
        chosen = random.choice(world.items, min(world.num_candidates, len(world.items)), replace=False)
        self._candidates = CandidateItems(chosen.tolist(), [0.0] * len(chosen))
        self.zipf = relay_load.Zipf(len(world.users), 0.8, SEED)

    def cold_mix(self, warm: np.ndarray, cold: np.ndarray, share: float) -> relay_load.ColdMix:
        """Draws of warm and cold users (places in the world); no two loads are the same."""
        self._seed += 1
        return relay_load.ColdMix(self.zipf, warm=warm, cold=cold, share=share, seed=self._seed)

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

    def warm_up(self, arm: Running, places: np.ndarray) -> None:
        """One request for each of some users that had none, if the arm caches prefixes."""
        new = np.array([place for place in places.tolist() if place not in arm.warm], np.int64)
        if not arm.is_cached or not len(new):
            return
        users, times = self.world.users[new].tolist(), (self.world.last_s[new] + 60).tolist()
        name = str(len(arm.warm))
        self.with_cascade(
            arm,
            60_000,
            lambda cascade: relay_load.warm_up(cascade, users, times, name=name, at_once=WARM_AT_ONCE),
        )
        arm.warm.update(new.tolist())
        print(f"  {arm.name:<13} warm: {len(arm.warm)} users", flush=True)

    def make_cold(self, arm: Running, places: np.ndarray) -> None:
        """Drops the prefixes of users, which a load has left in the cache."""
        for one in arm.instances if arm.is_cached else ():
            with httpx.Client(base_url=one.url, timeout=10, trust_env=False) as client:
                for user in self.world.users[places].tolist():
                    client.post("/v1/invalidate", json={"user": user}).raise_for_status()

    def unloaded_ms(self, arm: Running, length: int, *, repeats: int) -> float:
        """The median latency of the rank stage, one request at a time, for users with about this many events."""
        near = np.argsort(np.abs(self.world.lengths - length), kind="stable")[:repeats]
        found: list[float] = []

        async def act(cascade: Cascade) -> None:
            for warm in (True, False):
                for place in near[:3] if warm else near:
                    request = RecommendRequest(
                        user=int(self.world.users[place]),
                        request=f"unloaded-{length}-{warm}-{place}",
                        query_time=int(self.world.last_s[place]) + 60,
                    )
                    answer = await cascade.recommend(request)
                    if answer.path != "full":
                        raise RuntimeError(f"full inference was to be measured, but the path was '{answer.path}'")
                    found.extend([] if warm else [answer.stages["rank"].ms])

        self.with_cascade(arm, 60_000, act)
        return float(np.median(found))

    def poisson(self, rate: float, draw: relay_load.ColdMix, *, count: int) -> relay_load.Load:
        """A load of its own: no two are the same."""
        self._seed += 1
        found = relay_load.poisson(rate, count, draw, self.world.last_s + 60, self._seed)
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
        self, arm: Running, make: Callable[[], relay_load.Load], budget_ms: float, *, good_share: float | None = None
    ) -> relay_load.Outcome:
        """One load; a void one is repeated, and counted if it stays so. It ends once it is decided whether a share is good."""
        for attempt in range(TRIES):
            load, outcomes, before_s = make(), list[relay_load.Outcome](), arm.cpu_s()
            self.num_loads += 1

            async def act(
                cascade: Cascade,
                load: relay_load.Load = load,
                outcomes: list[relay_load.Outcome] = outcomes,
                name: str = f"{arm.name}-{self.num_loads}",
            ) -> None:
                most_bad = None if good_share is None else (1 - good_share) * len(load.at_s)
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

    def mixed(
        self,
        arm: Running,
        rate: float,
        draw: relay_load.ColdMix,
        budget_ms: float,
        *,
        count: int,
        good_share: float | None = GOOD_SHARE,
    ) -> relay_load.Outcome:
        """A load of warm and cold users; the cold ones are cold again after it. It ends once it is decided (`offer`)."""
        drawn = list[np.ndarray]()

        def make() -> relay_load.Load:
            found = self.poisson(rate, draw, count=count)
            drawn.append(draw.drawn)
            return found

        found = self.offer(arm, make, budget_ms, good_share=good_share)
        self.make_cold(arm, np.unique(np.concatenate(drawn)))
        print(
            f"  {arm.name:<13} {rate:7.1f}/s  good {found.good_share(budget_ms):6.1%} of {found.num_requests}"
            f"  p99 {found.p99_ms():7.1f} ms  lag {found.lag_p99_ms:.1f} ms{' VOID' if found.is_void else ''}"
            f"  {dict(found.paths.most_common(4))} {dict(found.problems)}",
            flush=True,
        )
        return found

    def goodput(self, arm: Running, draw: relay_load.ColdMix, budget_ms: float) -> Reached:
        """Good answers per second at the highest rate of the ladder that keeps the budget."""
        best: dict[float, float] = {}

        def share_at(rate: float, count: int, good_share: float) -> float:
            return self.mixed(arm, rate, draw, budget_ms, count=count, good_share=good_share).good_share(budget_ms)

        def is_met(rate: float) -> bool:
            share = share_at(rate, self.num_requests, GOOD_SHARE)
            best[rate] = rate * share if share >= GOOD_SHARE else 0.0
            return share >= GOOD_SHARE

        def is_near(rate: float) -> bool:
            return share_at(rate, COARSE_REQUESTS, COARSE_SHARE) >= COARSE_SHARE

        if not arm.is_found:  # first in large steps and short loads
            coarse = relay_load.highest_rate(is_near, start=arm.rate, step=COARSE_STEP)
            arm.rate, arm.is_found = coarse or arm.rate, True
        before = len(arm.outcomes)
        met = relay_load.highest_rate(is_met, start=arm.rate, step=RATE_STEP)
        arm.rate = met or arm.rate / RATE_STEP
        own = arm.outcomes[before:]
        cpu_ms = 1e3 * sum(one.cpu_s for one in own) / max(sum(len(one.rank_ms) for one in own), 1)
        return {
            "per_s": round(max(best.values()), 3),
            "rate": arm.rate,
            "paths": relay_load.summary(own),
            "cpu_ms": round(cpu_ms, 3),
            "num_requests": self.num_requests,
        }
