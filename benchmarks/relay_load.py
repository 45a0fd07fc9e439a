"""Open-loop load on a cascade: requests start at the times of a Poisson process, whether or not earlier ones are done.

A closed loop would wait for slow responses and so hide the queue. One thread sends by a schedule made in advance; the gateway's
event loop has its own. The lateness of the generator is measured: a run in which its P99 is above 2 ms is void, because it
measured the generator. Requests in flight are bounded; a request above the bound is not sent and counts as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nestpipe.gateway.candidates import CandidateItems, Ints
from nestpipe.gateway.cascade import Cascade
from nestpipe.serve.schemas import RecommendRequest
from nestpipe.serve.server import freeze_loaded_objects

MAX_LAG_MS = 2.0
MAX_UNDER_WAY = 512
SWITCH_S = 1e-4  # how long the gateway may keep Python's lock while the generator waits for it


@dataclass(frozen=True, slots=True)
class Load:
    """Requests: start times (seconds), users, and query times of the log."""

    at_s: np.ndarray
    users: Ints
    query_times: Ints


def poisson(rate: float, count: int, draw_user: Callable[[int], Ints], times: Ints, seed: int) -> Load:
    """A number of Poisson arrivals; `times` are the query times by user."""
    at_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    users = draw_user(len(at_s))
    return Load(at_s, users, times[users])


class Zipf:
    """Draws users; who is popular is a permutation, so that popularity and length of history are independent."""

    def __init__(self, num_users: int, exponent: float, seed: int):
        self._random = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, num_users + 1) ** exponent
        self._weights = np.empty(num_users)
        self._weights[self._random.permutation(num_users)] = weights
        self._all = self.among(np.arange(num_users))

    def __call__(self, count: int) -> Ints:
        return self._all(count)

    def among(self, users: Ints) -> Callable[[int], Ints]:
        """Draws of these users alone, each as popular as among all."""
        ends = np.cumsum(self._weights[users])
        return lambda count: users[
            np.minimum(np.searchsorted(ends, ends[-1] * self._random.random(count)), len(users) - 1)
        ]


class ColdMix:
    """Draws a share of users whose prefix nobody has cached, each once per load, and the others among warm ones."""

    def __init__(self, zipf: Zipf, *, warm: Ints, cold: Ints, share: float, seed: int):
        self._warm, self._cold, self._share = zipf.among(warm), cold, share
        self._random = np.random.default_rng(seed)
        self.drawn: Ints = cold[:0]  # cold users of the last load, to be made cold again

    def __call__(self, count: int) -> Ints:
        is_cold = self._random.random(count) < self._share
        num_cold = int(is_cold.sum())
        if num_cold > len(self._cold):
            raise ValueError(f"a load of {count} requests wants {num_cold} cold users, but there are {len(self._cold)}")
        self.drawn = self._random.choice(self._cold, num_cold, replace=False)
        users = self._warm(count)
        users[is_cold] = self.drawn
        return users


@dataclass(frozen=True, slots=True)
class Waiting:
    """Retrieval and pre-rank that take their time and no CPU: the candidates are given."""

    candidates: CandidateItems
    retrieval_s: float = 0.030
    prerank_s: float = 0.005

    async def retrieve(self, request: RecommendRequest, count: int) -> CandidateItems:
        await asyncio.sleep(self.retrieval_s)
        return self.candidates

    async def prerank(self, request: RecommendRequest, found: CandidateItems, count: int) -> CandidateItems:
        await asyncio.sleep(self.prerank_s)
        return found

    async def listed(
        self, request: RecommendRequest, found: CandidateItems, items: Sequence[object], scores: Sequence[float]
    ) -> CandidateItems:
        return found  # candidates are final, so nobody asks


@dataclass(slots=True)
class Outcome:
    """What became of a load: milliseconds of the rank stage, who was degraded, and how late the generator was."""

    rank_ms: list[float] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)  # start time of each
    problems: Counter[str] = field(default_factory=Counter)  # why some have no ranking
    degraded: list[bool] = field(default_factory=list)
    lag_ms: list[float] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    num_unsent: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the instances, if measured

    @property
    def num_requests(self) -> int:
        return len(self.rank_ms) + self.num_unsent + self.num_failed

    @property
    def lag_p99_ms(self) -> float:
        return float(np.percentile(self.lag_ms, 99)) if self.lag_ms else 0.0

    @property
    def is_void(self) -> bool:
        return self.lag_p99_ms > MAX_LAG_MS

    def good(self, budget_ms: float) -> int:
        """Answers inside the budget that were not degraded."""
        return sum(ms <= budget_ms and not bad for ms, bad in zip(self.rank_ms, self.degraded, strict=False))

    def good_share(self, budget_ms: float) -> float:
        return self.good(budget_ms) / max(self.num_requests, 1)

    def p99_ms(self) -> float:
        """P99 over all requests; failed ones have infinite latency."""
        worst = [float("inf")] * (self.num_unsent + self.num_failed)
        return float(np.percentile([*self.rank_ms, *worst], 99, method="higher")) if self.num_requests else 0.0


class _OpenLoop:
    """Sends a load by its schedule, from a thread of its own, to tasks of the event loop."""

    def __init__(self, cascade: Cascade, load: Load, *, name: str, budget_ms: float, most_bad: float | None):
        self.outcome, self.under_way = Outcome(), set[asyncio.Task[None]]()
        self._cascade, self._load, self._loop = cascade, load, asyncio.get_running_loop()
        self._budget_ms, self._most_bad = budget_ms, most_bad
        self._requests = [
            RecommendRequest(user=int(user), request=f"{name}-{number}", k=10, query_time=int(query_time))
            for number, (user, query_time) in enumerate(zip(load.users, load.query_times, strict=True))
        ]

    async def _one(self, number: int) -> None:
        outcome = self.outcome
        try:
            answer = await self._cascade.recommend(self._requests[number])
        except Exception:
            outcome.num_failed += 1
            raise
        outcome.degraded.append(answer.degraded)  # first: the sender counts what has both
        outcome.rank_ms.append(answer.stages["rank"].ms)
        outcome.at_s.append(float(self._load.at_s[number]))
        outcome.paths[answer.path] += 1
        outcome.problems.update([answer.problem] if answer.problem else [])

    def _start_one(self, number: int) -> None:
        if len(self.under_way) >= MAX_UNDER_WAY:
            self.outcome.num_unsent += 1
            return
        task = asyncio.create_task(self._one(number))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    def _is_decided(self) -> bool:
        """Whether the load is lost, or would be won if all that remains were bad."""
        if self._most_bad is None:
            return False
        good = self.outcome.good(self._budget_ms)
        num_bad = self.outcome.num_requests - good
        return num_bad > self._most_bad or len(self._requests) - good <= self._most_bad

    def send(self) -> None:
        """The schedule; ends when the load is decided."""
        # Otherwise it waits for a time slice of the gateway's thread, about 3 ms.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # of this thread alone
        start = time.monotonic()
        for number, at_s in enumerate(self._load.at_s):
            if self._is_decided():
                break
            wait_s = start + at_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            self.outcome.lag_ms.append(max(time.monotonic() - start - at_s, 0.0) * 1e3)
            self._loop.call_soon_threadsafe(self._start_one, number)


async def offer(
    cascade: Cascade, load: Load, *, name: str, budget_ms: float = math.inf, most_bad: float | None = None
) -> Outcome:
    """Sends a load and waits for the last answer; with a number of bad answers allowed, sends no more once it is decided."""
    loop = _OpenLoop(cascade, load, name=name, budget_ms=budget_ms, most_bad=most_bad)
    freeze_loaded_objects()
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    start = time.monotonic()
    sender = threading.Thread(target=loop.send, name="generator", daemon=True)
    sender.start()
    try:
        while sender.is_alive():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0)  # what the sender handed over last is started
        answers = await asyncio.gather(*loop.under_way, return_exceptions=True)
    finally:
        sys.setswitchinterval(before)
    loop.outcome.seconds = time.monotonic() - start
    for problem in [one for one in answers if one is not None][:3]:
        print(f"  a request failed: {problem!r}")
    return loop.outcome


def highest_rate(
    is_met: Callable[[float], bool], *, start: float, step: float = 1.25, least: float = 0.5, most: float = 2000.0
) -> float:
    """The highest rate on the ladder start * step ** n that is met; 0 if not even the least is. Searches from `start` on."""
    rate = start
    if is_met(rate):
        while rate * step <= most and is_met(rate * step):
            rate *= step
        return rate
    while rate / step >= least:
        rate /= step
        if is_met(rate):
            return rate
    return 0.0


def last_met(is_met: Callable[[int], bool], num_rungs: int, *, near: int = -1) -> int:
    """The last of some rungs, of which the first ones are met; -1 if none is. By halving, or step by step from a rung."""
    if near >= 0:
        if is_met(near):
            while near + 1 < num_rungs and is_met(near + 1):
                near += 1
            return near
        while near > 0 and not is_met(near - 1):
            near -= 1
        return near - 1
    low, high = -1, num_rungs
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def summary(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How often each path was taken."""
    total: Counter[str] = Counter()
    for one in outcomes:
        total.update(one.paths)
    return dict(total.most_common())


async def warm_up(cascade: Cascade, users: Sequence[int], times: Sequence[int], *, name: str, at_once: int) -> None:
    """Asks for users one after the other, so many at once and as fast as answers come."""
    remaining = iter(list(zip(users, times, strict=True)))

    async def worker(number: int) -> None:
        for user, query_time in remaining:
            request = f"warm-{name}-{number}-{user}"
            await cascade.recommend(RecommendRequest(user=user, request=request, query_time=query_time))

    await asyncio.gather(*(worker(number) for number in range(at_once)))
