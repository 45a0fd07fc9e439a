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


def poisson(rate: float, seconds: float, draw_user: Callable[[int], Ints], times: Ints, seed: int) -> Load:
    """Poisson arrivals; `times` are the query times by user."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / rate, int(rate * seconds * 2) + 20)
    at_s = np.cumsum(gaps)
    at_s = at_s[at_s < seconds]
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


async def offer(
    cascade: Cascade, load: Load, *, name: str, budget_ms: float = math.inf, most_bad: float = math.inf
) -> Outcome:
    """Sends a load and waits for the last answer; sends no more of it when more answers than `most_bad` were bad."""
    outcome, under_way, loop = Outcome(), set[asyncio.Task[None]](), asyncio.get_running_loop()
    requests = [
        RecommendRequest(user=int(user), request=f"{name}-{number}", k=10, query_time=int(query_time))
        for number, (user, query_time) in enumerate(zip(load.users, load.query_times, strict=True))
    ]

    async def one(number: int) -> None:
        try:
            answer = await cascade.recommend(requests[number])
        except Exception:
            outcome.num_failed += 1
            raise
        outcome.degraded.append(answer.degraded)  # first: the sender counts what has both
        outcome.rank_ms.append(answer.stages["rank"].ms)
        outcome.at_s.append(float(load.at_s[number]))
        outcome.paths[answer.path] += 1
        outcome.problems.update([answer.problem] if answer.problem else [])

    def start_one(number: int) -> None:
        if len(under_way) >= MAX_UNDER_WAY:
            outcome.num_unsent += 1
            return
        task = asyncio.create_task(one(number))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    def is_lost() -> bool:
        return outcome.num_requests - outcome.good(budget_ms) > most_bad

    def send() -> None:
        with contextlib.suppress(
            PermissionError
        ):  # otherwise it waits for a time slice of the gateway's thread, about 3 ms
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # of this thread alone
        for number, at_s in enumerate(load.at_s):
            if is_lost():
                break
            wait_s = start + at_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            outcome.lag_ms.append(max(time.monotonic() - start - at_s, 0.0) * 1e3)
            loop.call_soon_threadsafe(start_one, number)

    freeze_loaded_objects()
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    start = time.monotonic()
    sender = threading.Thread(target=send, name="generator", daemon=True)
    sender.start()
    try:
        while sender.is_alive():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0)  # what the sender handed over last is started
        problems = [one for one in await asyncio.gather(*under_way, return_exceptions=True) if one is not None]
    finally:
        sys.setswitchinterval(before)
    outcome.seconds = time.monotonic() - start
    for problem in problems[:3]:
        print(f"  a request failed: {problem!r}")
    return outcome


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


async def warm_up(cascade: Cascade, users: Sequence[int], times: Sequence[int], *, seconds: float, at_once: int) -> int:
    """Asks for users one after the other, so many at once and as fast as answers come, until the time is up; how many."""
    remaining, until = iter(list(zip(users, times, strict=True))), time.monotonic() + seconds
    num_done = 0

    async def worker(number: int) -> None:
        nonlocal num_done
        for user, query_time in remaining:
            if time.monotonic() > until:
                return
            await cascade.recommend(
                RecommendRequest(user=user, request=f"warm-{number}-{num_done}", query_time=query_time)
            )
            num_done += 1

    await asyncio.gather(*(worker(number) for number in range(at_once)))
    return num_done
