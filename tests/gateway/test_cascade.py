"""The cascade against small real servers: what it answers, and what it does when instances are slow, wrong or gone."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest

from nestpipe.errors import NestPipeError
from nestpipe.gateway.candidates import CandidateItems, ExactIndex, PastEvents, Retriever, mean_encoder
from nestpipe.gateway.cascade import Cascade, LocalCandidateStages, StageError
from nestpipe.gateway.instance_client import InstanceClient, InstanceError, make_client
from nestpipe.gateway.router import InstanceAddress, Members, routing_number
from nestpipe.gateway.state_forwarding import StateForwarding
from nestpipe.serve.config import Stages
from nestpipe.serve.schemas import EventsRequest, RecommendedItems, RecommendRequest
from tests.gateway.fake_instances import FakeInstance, true_ranking, true_score

ITEMS = np.arange(100, 400)
VECTORS = np.random.default_rng(0).standard_normal((300, 8), dtype=np.float32)
# Roomy, because machines that run tests are busy; what must be fast has its own numbers below.
STAGES = Stages(
    retrieval_ms=2000, prerank_ms=2000, rank_ms=4000, prefill_hint_ms=1000, num_retrieved=60, num_candidates=20
)
USER = 5
TLS = ssl.create_default_context()  # made once: it reads all certificates


def retriever() -> Retriever:
    return Retriever(
        items=ITEMS,
        vectors=VECTORS,
        index=ExactIndex(VECTORS),
        encode=mean_encoder(ITEMS, VECTORS),
        past_of=past_of,
    )


def past_of(user: int | str) -> PastEvents:
    first = routing_number(user) % 290  # as a number or as its text
    return PastEvents(ITEMS[first : first + 10])


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeInstance]]:
    found = [FakeInstance(name) for name in ("a", "b", "c")]
    yield found
    for one in found:
        one.stop()


@pytest.fixture
def fleet(servers: list[FakeInstance]) -> list[FakeInstance]:
    """The servers without faults, the owner of USER first."""
    for one in servers:
        one.delay_s, one.status, one.garbage, one.calls, one.pinned = {}, {}, False, [], {}
        one.clock = time.time
    order = [one.name for one in Members(one.member for one in servers).order(USER)]
    return sorted(servers, key=lambda one: order.index(one.name))


class Watched:
    """Retrieval and pre-rank of the test's retriever, with something to await in the middle of each."""

    def __init__(self, executor: ThreadPoolExecutor):
        self._local = LocalCandidateStages(retriever(), executor)
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}

    async def retrieve(self, request: RecommendRequest, count: int) -> Any:
        if "retrieval" in self.before:
            await self.before["retrieval"]()
        return await self._local.retrieve(request, count)

    async def prerank(self, request: RecommendRequest, found: Any, count: int) -> CandidateItems:
        if "prerank" in self.before:
            await self.before["prerank"]()
        return await self._local.prerank(request, found, count)

    async def listed(self, request: RecommendRequest, found: Any, items: Any, scores: Any) -> CandidateItems:
        return await self._local.listed(request, found, items, scores)


def run(
    fleet: list[FakeInstance],
    act: Callable[[Cascade, Watched], Awaitable[Any]],
    *,
    stages: Stages = STAGES,
    members: Members | None = None,
    **options: Any,
) -> Any:
    """Runs something with a cascade over the fleet; ends when nothing is left in the background."""

    async def body() -> Any:
        with ThreadPoolExecutor(2) as executor:
            client = make_client()
            remote = InstanceClient(members or Members(one.member for one in fleet), client, **options)
            upstream = Watched(executor)
            try:
                return await act(Cascade(remote, upstream, stages), upstream)
            finally:
                await remote.close()

    return asyncio.run(body())


def ask(fleet: list[FakeInstance], **options: Any) -> RecommendedItems:
    return run(fleet, lambda cascade, upstream: cascade.recommend(RecommendRequest(user=USER, request="r")), **options)


def expected(k: int = 10) -> list[int]:
    """The right answer, from the parts of the cascade alone."""
    past = PastEvents(ITEMS[USER : USER + 10])
    query = VECTORS[USER : USER + 10].mean(0)
    order = np.argsort(-(VECTORS @ query), kind="stable")
    allowed = [int(ITEMS[place]) for place in order if ITEMS[place] not in past.items]
    return true_ranking(USER, allowed[: STAGES.num_candidates], k)


def assert_right(answer: RecommendedItems) -> None:
    assert answer.items == expected()
    assert answer.scores == [true_score(USER, item) for item in answer.items]
    assert not answer.degraded


def test_all_stages_answer_with_their_times_and_the_prefix_is_used_and_released(fleet):
    answer = ask(fleet)
    assert_right(answer)
    assert (answer.path, answer.prefix_len, answer.model, answer.attempts) == ("hit_device", 7, "m1", 1)
    assert answer.instance == fleet[0].name
    assert [(name, took.count) for name, took in answer.stages.items()] == [
        ("retrieval", 60),
        ("prerank", 20),
        ("rank", 10),
    ]
    assert all(0 < took.ms < took.deadline_ms for took in answer.stages.values())
    assert fleet[0].paths() == ["prefill", "rank"]
    assert not fleet[0].pinned
    assert not fleet[1].calls


def test_the_signal_goes_out_before_retrieval_is_done(fleet):
    async def act(cascade: Cascade, upstream: Watched) -> RecommendedItems:
        async def until_signalled() -> None:
            while "prefill" not in fleet[0].paths():
                await asyncio.sleep(0.002)

        upstream.before["retrieval"] = until_signalled
        return await cascade.recommend(RecommendRequest(user=USER, request="r"))

    assert_right(run(fleet, act))


def test_the_load_counts_requests_in_flight_and_moves_the_next_signal(fleet):
    async def act(cascade: Cascade, upstream: Watched) -> list[RecommendedItems]:
        fleet[0].delay_s["rank"] = 0.2
        many = [cascade.recommend(RecommendRequest(user=USER, request=f"r{n}")) for n in range(6)]
        answers = await asyncio.gather(*many)
        assert not any(cascade.remote.loads.values())
        return answers

    answers = run(fleet, act)
    assert {answer.instance for answer in answers} == {fleet[0].name, fleet[1].name}
    for answer in answers:
        assert_right(answer)
        assert answer.path == "hit_device", "ranking must follow the signal wherever load has moved it"


@pytest.mark.parametrize("fault", ["refused signal", "slow signal", "clock an hour ahead", "clock an hour back"])
def test_without_a_prefix_ranking_is_done_in_full(fleet, fault):
    stages = replace(STAGES, prefill_hint_ms=20.0)
    if fault == "refused signal":
        fleet[0].status["prefill"] = 429
    elif fault == "slow signal":
        fleet[0].delay_s["prefill"] = 0.3
    else:
        jump = 3600 if fault == "clock an hour ahead" else -3600
        fleet[0].clock = chain([1e9], repeat(1e9 + jump)).__next__  # between signing and verifying
    answer = ask(fleet, stages=stages)
    assert_right(answer)
    assert answer.path == "full"
    assert not fleet[0].pinned


@pytest.mark.parametrize("fault", ["gone", "restarted", "slow", "refuses", "garbage", "left"])
def test_ranking_goes_on_elsewhere_when_the_instance_of_the_ticket_cannot(fleet, fault):
    members = Members(one.member for one in fleet)

    async def act(cascade: Cascade, upstream: Watched) -> RecommendedItems:
        async def break_it() -> None:
            while not fleet[0].pinned:
                await asyncio.sleep(0.002)
            if fault == "gone":
                await asyncio.to_thread(fleet[0].stop)
            elif fault == "restarted":
                await asyncio.to_thread(fleet[0].restart)
            elif fault == "left":
                members.leave(fleet[0].name)
            elif fault == "slow":
                fleet[0].delay_s["rank"] = 5.0
            elif fault == "refuses":
                fleet[0].status["rank"] = 503
            else:
                fleet[0].garbage = True

        upstream.before["prerank"] = break_it
        return await cascade.recommend(RecommendRequest(user=USER, request="r"))

    try:
        answer = run(fleet, act, members=members, first_share=0.05 if fault == "slow" else 0.7)
    finally:
        if fault == "gone":
            fleet[0].start()
    assert_right(answer)
    assert answer.path == "full"
    if fault == "restarted":  # a process without the prefix; a connection of before may be found closed first
        assert answer.instance in {fleet[0].name, fleet[1].name}
    else:
        assert answer.instance == fleet[1].name
        assert answer.attempts == (1 if fault == "left" else 2)
    assert sum(one.paths().count("rank") for one in fleet) <= 2
    if fault in ("refuses", "garbage", "slow"):
        assert not fleet[0].pinned, "the prefix of a ranking that went elsewhere is released too"


def test_one_who_cannot_be_reached_is_asked_last_until_it_is_back(fleet):
    async def act(cascade: Cascade, upstream: Watched) -> list[str | None]:
        await asyncio.to_thread(fleet[0].stop)
        found = [(await cascade.recommend(RecommendRequest(user=USER, request=f"r{n}"))).instance for n in range(2)]
        await asyncio.to_thread(fleet[0].start)
        cascade.remote.members.join(fleet[0].name, fleet[0].url)
        await asyncio.sleep(0.3)
        return [*found, (await cascade.recommend(RecommendRequest(user=USER, request="r3"))).instance]

    names = [one.name for one in fleet]
    assert run(fleet, act, suspect_s=0.2) == [names[1], names[1], names[0]]


def test_a_fleet_that_cannot_rank_answers_in_the_order_of_prerank(fleet):
    for one in fleet:
        one.status["rank"] = 503
    answer = ask(fleet)
    assert (answer.path, answer.degraded, answer.problem, answer.instance) == ("fallback", True, "injected", None)
    assert set(answer.items) <= set(ITEMS.tolist()) - set(ITEMS[USER : USER + 10].tolist())
    assert answer.scores == sorted(answer.scores, reverse=True)
    assert sum(one.paths().count("rank") for one in fleet) == 2, "one retry, no more"


def test_a_request_that_ranking_refuses_is_not_sent_twice(fleet):
    fleet[0].status["rank"] = 422
    with pytest.raises(InstanceError, match=r"answered 422: . refuses"):
        ask(fleet)
    assert not fleet[1].calls
    assert not fleet[0].pinned


@pytest.mark.parametrize("stage", ["retrieval", "prerank"])
@pytest.mark.parametrize("fault", ["late", "fails"])
def test_a_stage_that_fails_or_is_late_ends_the_request_and_releases_the_prefix(fleet, stage, fault):
    async def act(cascade: Cascade, upstream: Watched) -> None:
        async def break_it() -> None:
            if fault == "fails":
                raise NestPipeError("the index is gone")
            await asyncio.sleep(30)

        upstream.before[stage] = break_it
        await cascade.recommend(RecommendRequest(user=USER, request="r"))

    deadlines = {
        "retrieval_ms": 10_000.0,
        "prerank_ms": 10_000.0,
    }  # the other stage is not late, however slow the machine
    stages = Stages(rank_ms=1000, **{**deadlines, f"{stage}_ms": 200.0})
    message = f"{stage} missed its deadline of 200 ms" if fault == "late" else f"{stage}: the index is gone"
    with pytest.raises(StageError, match=message) as caught:
        run(fleet, act, stages=stages)
    assert caught.value.stage == stage
    assert fleet[0].paths() == ["prefill", "release"]
    assert not fleet[0].pinned


@pytest.mark.parametrize("stage", ["signal", "retrieval", "prerank", "rank"])
def test_a_request_cancelled_in_any_stage_leaves_no_pin(fleet, stage):
    async def act(cascade: Cascade, upstream: Watched) -> None:
        reached = asyncio.Event()

        async def hang() -> None:
            if stage != "signal":
                while not fleet[0].pinned:
                    await asyncio.sleep(0.002)
            reached.set()
            await asyncio.sleep(30)

        if stage == "rank":
            fleet[0].delay_s["rank"] = 3.0
        else:
            fleet[0].delay_s["prefill"] = 0.1 if stage == "signal" else 0.0
            upstream.before["prerank" if stage == "prerank" else "retrieval"] = hang
        task = asyncio.create_task(cascade.recommend(RecommendRequest(user=USER, request="r")))
        while not reached.is_set() and "rank" not in fleet[0].paths():
            await asyncio.sleep(0.002)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert not any(cascade.remote.loads.values())

    run(fleet, act, stages=Stages(retrieval_ms=60_000, prerank_ms=60_000, rank_ms=60_000))
    assert fleet[0].paths()[-1] == "release"
    assert not fleet[0].pinned


def test_a_request_may_bring_its_history_and_name_what_not_to_show(fleet):
    async def act(cascade: Cascade, upstream: Watched) -> RecommendedItems:
        history = [{"item": int(item)} for item in ITEMS[50:55]]
        request = RecommendRequest(user=-9, request="r", k=5, history=history, exclude=tuple(map(int, ITEMS[:50])))
        return await cascade.recommend(request)

    answer = run(fleet, act)
    assert len(answer.items) == 5
    assert min(answer.items) >= ITEMS[55]
    bodies = [body for one in fleet for _, body in one.calls if "history" in body]
    assert [len(body["history"]) for body in bodies] == [5, 5], "the signal and the ranking carry the history"


def test_nothing_to_show_is_an_empty_answer(fleet):
    async def act(cascade: Cascade, upstream: Watched) -> RecommendedItems:
        return await cascade.recommend(RecommendRequest(user=USER, request="r", exclude=tuple(map(int, ITEMS))))

    answer = run(fleet, act)
    assert (answer.items, answer.degraded) == ([], False)
    assert "rank" not in fleet[0].paths()


def test_what_one_instance_is_enough_for_goes_to_the_first_that_takes_it(fleet):
    async def act(cascade: Cascade, upstream: Watched) -> list[list[str]]:
        state, taken = StateForwarding(cascade.remote, shared=True, timeout_s=5.0, max_events=9), []
        for fault in ({}, {"events": 503}, {"events": 422}):
            fleet[0].status = fleet[1].status = fault
            taken.append((await state.events(EventsRequest([]))).instances)
        return taken

    with pytest.raises(InstanceError, match="answered 422"):
        run(fleet, act)
    assert [one.paths().count("events") for one in fleet] == [3, 1, 1]


def test_an_address_that_cannot_be_one_is_an_instance_that_cannot_be_reached(fleet):
    members = Members([replace(fleet[0].member, url="http://[::"), fleet[1].member])
    assert_right(ask(fleet, members=members))


def test_who_is_not_ready_is_asked_last_until_it_is(fleet):
    async def act(cascade: Cascade, upstream: Watched) -> list[str | None]:
        watch = asyncio.create_task(cascade.remote.watch(every_s=0.01, timeout_s=5.0))
        found = []
        for is_ready in (True, False, True):
            fleet[0].ready = is_ready
            await asyncio.sleep(0.5)
            found.append((await cascade.recommend(RecommendRequest(user=USER, request="r"))).instance)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return found

    names = [one.name for one in fleet]
    assert run(fleet, act) == [names[0], names[1], names[0]]


def test_an_address_that_cannot_be_one_is_not_ready_and_ends_nothing():
    async def act() -> None:
        remote = InstanceClient(Members([InstanceAddress(name="x", url="http://h:port")]), make_client())
        assert await remote.ready(timeout_s=1.0) == {"x": False}
        await remote.close()

    asyncio.run(act())
