"""The generator of relay.py: a schedule that is kept whatever becomes of the requests, and the searches on top of it."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import relay_load
from benchmarks.relay_load import Load


class Cascade:
    """Answers when it is told to; users below 0 fail."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.is_open = asyncio.Event()

    async def recommend(self, request: Any) -> Any:
        self.asked.append(request)
        await self.is_open.wait()
        if request.user < 0:
            raise RuntimeError("it failed")
        rank = SimpleNamespace(ms=float(request.user))
        return SimpleNamespace(stages={"rank": rank}, degraded=request.user > 3, path="full", problem="")


def offered(users: list[int], *, most: int = 512) -> tuple[Cascade, relay_load.Outcome]:
    async def body() -> tuple[Cascade, relay_load.Outcome]:
        cascade, places = Cascade(), np.array(users)
        load = Load(np.arange(len(users)) * 1e-3, places, places + 100)
        work = asyncio.create_task(relay_load.offer(cascade, load, name="n"))  # type: ignore[arg-type]
        while len(cascade.asked) < min(len(users), most):
            await asyncio.sleep(0.001)
        cascade.is_open.set()  # no answer came before the last request was sent: the loop is open
        return cascade, await work

    return asyncio.run(body())


def test_everything_is_sent_while_nothing_is_answered_and_all_is_counted():
    cascade, found = offered([1, 2, 3, 4, -1])
    assert [(one.user, one.query_time, one.request) for one in cascade.asked[:2]] == [(1, 101, "n-0"), (2, 102, "n-1")]
    assert (found.num_requests, found.num_failed, found.num_unsent) == (5, 1, 0)
    assert (found.good(2.0), found.good(9.0)) == (2, 3), "neither the degraded nor the failed one is good"
    assert found.good_share(9.0) == 3 / 5
    assert found.p99_ms() == float("inf")
    assert len(found.lag_ms) == 5


def test_more_than_the_bound_is_not_sent_and_counts_as_bad(monkeypatch):
    monkeypatch.setattr(relay_load, "MAX_UNDER_WAY", 3)
    cascade, found = offered([1] * 8, most=3)
    assert len(cascade.asked) + found.num_unsent == 8
    assert found.good_share(9.0) == len(cascade.asked) / 8


def test_the_cpu_of_a_load_is_not_that_of_void_ones_before_it(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(relay_load.__file__).parent))
    relay_bench = importlib.import_module("relay_bench")
    spent_s, lags_ms = iter([0.0, 5.0, 5.0, 6.0]), iter([9.0, 0.0])

    async def offer(*_: Any, **__: Any) -> Any:
        return relay_bench.relay_load.Outcome(rank_ms=[1.0], lag_ms=[next(lags_ms)])

    monkeypatch.setattr(relay_bench.relay_load, "offer", offer)
    monkeypatch.setattr(relay_bench.Running, "cpu_s", lambda arm: next(spent_s))
    world = SimpleNamespace(items=np.arange(9), users=np.arange(4), num_candidates=3)
    bench = relay_bench.Bench(world, num_requests=1, stack=ExitStack())
    found = bench.offer(relay_bench.Running("full", [], []), lambda: SimpleNamespace(at_s=[0.0]), 10.0)
    assert (found.cpu_s, bench.num_loads, bench.num_void) == (1.0, 2, 0)


def test_a_load_that_is_lost_is_not_sent_to_its_end():
    async def body(most_bad: float) -> relay_load.Outcome:
        cascade, users = Cascade(), np.array([1, 9, 9, *[1] * 300])
        cascade.is_open.set()
        load = Load(np.arange(len(users)) * 1e-3, users, users)
        return await relay_load.offer(cascade, load, name="n", budget_ms=5.0, most_bad=most_bad)  # type: ignore[arg-type]

    lost, kept = asyncio.run(body(1.0)), asyncio.run(body(2.0))
    assert 3 <= lost.num_requests < 200
    assert lost.num_requests - lost.good(5.0) == 2
    assert kept.num_requests == 303


def test_users_are_as_popular_among_some_as_among_all():
    draw = relay_load.Zipf(50, 0.8, 0)
    counts = np.bincount(draw(40_000), minlength=50)
    some = np.argsort(-counts)[:20:2]
    among = np.bincount(draw.among(some)(20_000), minlength=50)
    assert set(np.flatnonzero(among)) == set(some.tolist())
    shares, wanted = among[some] / among.sum(), counts[some] / counts[some].sum()
    assert np.abs(shares - wanted).max() < 0.02  # six deviations of 20,000 draws
    weights = np.sort(counts / counts.sum())[::-1]
    assert weights[0] / weights[9] == pytest.approx(10**0.8, rel=0.15)


def test_a_load_that_cannot_be_lost_any_more_is_not_sent_to_its_end():
    async def body() -> relay_load.Outcome:
        cascade, users = Cascade(), np.array([1] * 300)
        cascade.is_open.set()
        load = Load(np.arange(len(users)) * 2e-3, users, users)
        return await relay_load.offer(cascade, load, name="n", budget_ms=5.0, most_bad=200.0)  # type: ignore[arg-type]

    won = asyncio.run(body())
    assert 100 <= won.num_requests < 300
    assert won.good_share(5.0) == 1.0


def test_cold_users_are_a_share_and_none_comes_twice_in_a_load():
    warm, cold = np.arange(40), np.arange(40, 400)
    draw = relay_load.ColdMix(relay_load.Zipf(400, 0.8, 0), warm=warm, cold=cold, share=0.25, seed=3)
    users = draw(1000)
    of_cold = users[users >= 40]
    assert 0.2 < len(of_cold) / 1000 < 0.3
    assert len(np.unique(of_cold)) == len(of_cold)
    assert set(of_cold.tolist()) == set(draw.drawn.tolist())
    assert len(np.unique(users[users < 40])) < len(users[users < 40]), "warm users come again"
    with pytest.raises(ValueError, match="cold users, but there are 5"):
        relay_load.ColdMix(relay_load.Zipf(400, 0.8, 0), warm=warm, cold=cold[:5], share=1.0, seed=3)(20)


def test_all_users_are_asked_for_once_in_the_warm_up():
    async def body() -> Cascade:
        cascade = Cascade()
        cascade.is_open.set()
        await relay_load.warm_up(cascade, [5, 6, 7], [1, 2, 3], name="n", at_once=2)  # type: ignore[arg-type]
        return cascade

    cascade = asyncio.run(body())
    assert sorted((one.user, one.query_time) for one in cascade.asked) == [(5, 1), (6, 2), (7, 3)]


@pytest.mark.parametrize("limit", [-1, 0, 7, 12, 19])
@pytest.mark.parametrize("near", [0, 8, 19])
def test_steps_from_a_rung_find_the_same(limit, near):
    assert relay_load.last_met(lambda rung: rung <= limit, 20, near=near) == limit


@pytest.mark.parametrize("limit", [-1, 0, 7, 12, 19])
def test_halving_finds_the_last_rung_that_is_met(limit):
    tried: list[int] = []
    assert relay_load.last_met(lambda rung: tried.append(rung) or rung <= limit, 20) == limit
    assert len(tried) <= 5


@pytest.mark.parametrize(("limit", "wanted"), [(0.1, 0.0), (4.0, 4.0), (9.9, 8.0), (100.0, 64.0)])
def test_the_ladder_is_climbed_from_where_it_starts(limit, wanted):
    assert relay_load.highest_rate(lambda rate: rate <= limit, start=8.0, step=2.0) == wanted
