"""The gateway over HTTP as clients meet it: typed answers, refusals that teach, limits, disconnects, administration."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from nestpipe.client import AsyncClient, Client, ServiceError
from nestpipe.gateway import gateway
from nestpipe.gateway.candidates import ExactIndex
from nestpipe.gateway.cascade import Cascade, LocalCandidateStages
from nestpipe.gateway.gateway import Gateway, admin_app
from nestpipe.gateway.instance_client import InstanceClient, make_client
from nestpipe.gateway.router import Members
from nestpipe.serve.config import GatewayLimits, Stages
from nestpipe.serve.schemas import RecommendRequest
from tests.gateway.fake_instances import FakeInstance, Served, true_ranking
from tests.gateway.test_cascade import ITEMS, TLS, retriever

LIMITS = GatewayLimits(max_bytes=20_000, body_s=0.3, max_history=50, max_candidates=300, max_k=100, max_in_flight=4)
STAGES = Stages(
    retrieval_ms=9000, prerank_ms=9000, rank_ms=9000, prefill_hint_ms=1000, num_retrieved=60, num_candidates=20
)
TOKEN = "admin token"


@dataclass
class World:
    """A gateway, its instances, and its administration."""

    fleet: list[FakeInstance]
    url: str
    admin: str
    members: Members
    http: httpx.Client

    def owner(self, user: int) -> FakeInstance:
        name = self.members.order(user)[0].name
        return next(one for one in self.fleet if one.name == name)

    def pins(self) -> int:
        return sum(len(one.pinned) for one in self.fleet)


@pytest.fixture(scope="module")
def served() -> Iterator[World]:
    fleet = [FakeInstance(name) for name in ("a", "b")]
    members = Members(one.member for one in fleet)
    with ThreadPoolExecutor(2) as executor, httpx.Client(verify=TLS, timeout=10) as http:
        cascade = Cascade(
            InstanceClient(members, make_client()),
            LocalCandidateStages(retriever(), executor),
            STAGES,
        )
        servers = [
            Served(Gateway(cascade, LIMITS, probe=lambda: RecommendRequest(user=3)).app()),
            Served(admin_app(cascade.remote, TOKEN)),
        ]
        yield World(fleet, servers[0].url, servers[1].url, members, http)
        for server in servers:
            server.close()
        for one in fleet:
            one.stop()


@pytest.fixture
def world(served: World) -> World:
    for one in served.fleet:
        one.delay_s, one.status, one.garbage, one.calls, one.pinned, one.ready = {}, {}, False, [], {}, True
        one.reason = "admitted"
        served.members.join(one.name, one.url)
    return served


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_both_clients_get_typed_answers(world):
    with Client(world.url) as client:
        assert client.is_ready()
        answer = client.recommend(3, k=4, request="one")
        signal = client.prefill(3, request="two", candidates=30)
        items = [int(item) for item in ITEMS[:30]]
        ranked = client.rank(3, items, request="two", ticket=signal.ticket, k=5)
        assert signal.ticket is not None
        client.release(signal.ticket)
        client.send_events([{"id": "x", "user": 3, "item": 100, "time": 1}])
        client.invalidate(3)
    assert len(answer.pairs()) == 4
    assert (answer.request, answer.path, answer.attempts, answer.prefill_hint) == ("one", "hit_device", 1, "admitted")
    assert set(answer.stages) == {"retrieval", "prerank", "rank"}
    assert (ranked.items, ranked.path) == (true_ranking(3, items, 5), "hit_device")
    assert all(one.paths().count("events") == one.paths().count("invalidate") == 1 for one in world.fleet)
    wait_until(lambda: not world.pins())

    async def again() -> None:
        async with AsyncClient(world.url) as client:
            assert (await client.recommend(3, k=4)).items == answer.items
            signal = await client.prefill(3, request="two", candidates=30)
            assert (await client.rank(3, items, request="two", ticket=signal.ticket, k=5)).items == ranked.items
            assert signal.ticket is not None
            await client.release(signal.ticket)
            await client.send_events([])
            await client.invalidate(3)
            with pytest.raises(ServiceError, match="field 'k' is 0"):
                await client.recommend(3, k=0)

    asyncio.run(again())


@pytest.mark.parametrize(
    ("reason", "admitted"), [("admitted", True), ("probe", True), ("already_live", False), ("not_at_risk", False)]
)
def test_admitted_is_what_is_computed_for_this_signal(world, reason, admitted):
    """A prefix that is live already is held for the request too: it has a ticket, but nothing new is computed."""
    for one in world.fleet:
        one.reason = reason
    with Client(world.url) as client:
        said = client.prefill(3, request="one", candidates=30)
    assert (said.reason, said.admitted) == (reason, admitted)
    assert (said.ticket is not None) == (reason != "not_at_risk")


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("recommend", b"{", 400, "not_json"),
        ("recommend", b"[" * 19_000, 400, "not_json"),
        ("recommend", b'{"user": NaN}', 400, "not_json"),
        ("recommend", b"\xff\xfe", 400, "not_json"),
        ("recommend", b'{"user": 1, "history": [{"item": 1, "dwell": 1e999}]}', 400, "not_json"),
        ("recommend", b'{"user": 1, "history": [{"item": 1, "tag": "\\ud800"}]}', 400, "not_json"),
        ("rank", b'{"user": 1, "request": "r", "candidates": [1], "deadline_ms": 0}', 400, "bad_deadline_ms"),
        ("recommend", b"[]", 400, "not_an_object"),
        ("recommend", b"{}", 400, "bad_user"),
        ("recommend", b'{"user": true}', 400, "bad_user"),
        ("recommend", b'{"user": 9223372036854775808}', 400, "bad_user"),
        ("recommend", b'{"user": 1, "k": 101}', 400, "bad_k"),
        ("recommend", b'{"user": 1, "usr": 1}', 400, "unknown_field"),
        ("recommend", b'{"user": 1, "exclude": [1.5]}', 400, "bad_exclude"),
        ("recommend", b'{"user": 1, "history": [3]}', 400, "bad_history"),
        ("recommend", b'{"user": 1, "history": [{"item": 1.5}]}', 400, "bad_item"),
        ("recommend", b'{"user": 1, "request": ""}', 400, "bad_request"),
        ("recommend", json.dumps({"user": 1, "exclude": [1] * 301}).encode(), 400, "bad_exclude"),
        ("recommend", b'{"user": 1, "history": [' + b'{"item": 1},' * 50 + b'{"item": 1}]}', 400, "bad_history"),
        ("recommend", b" " * 20_001, 413, "too_large"),
        ("rank", b'{"user": 1, "request": "r", "candidates": []}', 400, "bad_candidates"),
        ("rank", b'{"user": 1, "request": "r", "candidates": [1], "ticket": 5}', 400, "bad_ticket"),
        ("rank", b'{"user": 1, "request": "r", "candidates": [1], "deadline_ms": -1}', 400, "bad_deadline_ms"),
        ("prefill", b'{"user": 1, "request": "r"}', 400, "bad_candidates"),
        ("release", b"{}", 400, "bad_ticket"),
        ("events", b'{"events": 5}', 400, "bad_events"),
        ("nowhere", b"{}", 404, "path"),
    ],
)
def test_mistakes_are_refused_by_name(world, path, body, status, code):
    answer = world.http.post(f"{world.url}/v1/{path}", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert len(answer.json()["error"]["message"]) > 20
    assert not any(one.calls for one in world.fleet), "a refused request costs the instances nothing"


def test_a_forged_ticket_is_ranked_in_full(world):
    with Client(world.url) as client:
        for ticket in ("v1.e30.x", "x" * 1000, "v1..", "\u00e9"):
            ranked = client.rank(3, [100, 101], request="r", ticket=ticket)
            assert (ranked.path, ranked.items) == ("full", true_ranking(3, [100, 101], None))


def test_slow_bodies_are_cut_off(world):
    with connection(world) as client:
        client.sendall(b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


@contextmanager
def connection(world: World) -> Iterator[socket.socket]:
    host, port = world.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        yield client


@pytest.mark.parametrize("stage", ["signal", "rank"])
def test_a_client_that_leaves_in_any_stage_leaves_no_pin(world, stage):
    owner, body = world.owner(8), b'{"user": 8}'
    owner.delay_s["prefill" if stage == "signal" else "rank"] = 0.3
    with connection(world) as client:
        head = f"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: ("prefill" if stage == "signal" else "rank") in owner.paths())
    wait_until(lambda: "release" in owner.paths())
    assert not world.pins()


def test_too_many_at_once_are_refused_at_once(world):
    refusals: list[ServiceError] = []
    for one in world.fleet:
        one.holds_ranks = True
    with ThreadPoolExecutor(8) as threads, Client(world.url, timeout_s=60) as client:

        def ask(user: int) -> str:
            try:
                return client.recommend(user).path
            except ServiceError as error:
                refusals.append(error)
                return error.code

        said = [threads.submit(ask, user) for user in range(8)]
        try:
            wait_until(
                lambda: len(refusals) == 4
            )  # while the others cannot be answered: a refusal does not wait for them
        finally:
            for one in world.fleet:
                one.holds_ranks = False
        assert sorted(one.result() for one in said) == ["hit_device"] * 4 + ["overloaded"] * 4
    assert {(error.status, error.retry_after_s) for error in refusals} == {(429, 1.0)}
    assert "4 requests are in flight" in str(refusals[0])


def test_events_that_one_instance_missed_are_to_be_sent_again(world):
    world.fleet[1].status["events"] = 503
    with Client(world.url) as client:
        with pytest.raises(ServiceError, match=r"1 of 2 instances did not take it .* send the same again") as caught:
            client.send_events([{"id": "x", "user": 1, "item": 1, "time": 1}])
        assert caught.value.status == 503
        world.fleet[1].status.clear()
        client.send_events([{"id": "x", "user": 1, "item": 1, "time": 1}])


def test_ready_means_an_instance_and_one_recommendation_through_every_stage(world, monkeypatch):
    monkeypatch.setattr(gateway, "_PROVEN_S", -1.0)  # an earlier recommendation proves nothing

    def readiness() -> tuple[int, dict[str, Any]]:
        answer = world.http.get(f"{world.url}/readyz")
        return answer.status_code, answer.json()

    world.fleet[0].ready = False
    assert readiness() == (200, {"ready": {"a": False, "b": True}, "problem": ""})
    for one in world.fleet:
        one.status["rank"] = 503
    assert readiness() == (503, {"ready": {"a": False, "b": True}, "problem": "ranking failed: injected"})
    for one in world.fleet:
        one.status.clear()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no index")

    with monkeypatch.context() as patch:
        patch.setattr(ExactIndex, "search", broken)
        status, said = readiness()
        assert (status, said["problem"]) == (503, "retrieval failed unexpectedly; the gateway's log has the traceback.")
        answer = world.http.post(f"{world.url}/v1/recommend", json={"user": 3})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "retrieval_failed")
    assert readiness()[0] == 200
    world.fleet[1].ready = False
    assert readiness()[1] == {"ready": {"a": False, "b": False}, "problem": "no instance is ready"}
    assert world.http.get(f"{world.url}/healthz").status_code == 200


def test_the_deadline_of_a_request_is_divided_among_the_stages(world):
    with Client(world.url) as client:
        answer = client.recommend(3, deadline_ms=1500)
        assert {name: round(took.deadline_ms) for name, took in answer.stages.items()} == {
            "retrieval": 500,
            "prerank": 500,
            "rank": 500,
        }
        for one in world.fleet:
            one.delay_s["rank"] = 1.0
        late = client.recommend(3, deadline_ms=300)
        assert (late.path, late.degraded, late.problem) == ("fallback", True, "timeout")
        assert late.stages["rank"].ms < 900


def test_a_user_in_the_address_and_many_items(world):
    found = world.http.get(f"{world.url}/v1/recommend/3", params={"k": 4}).json()
    assert found["items"] == world.http.post(f"{world.url}/v1/recommend", json={"user": 3, "k": 4}).json()["items"]
    for query, code in (("k=0", "bad_k"), ("k=x", "bad_k"), ("n=1", "unknown_field")):
        refused = world.http.get(f"{world.url}/v1/recommend/3?{query}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
    history = [{"item": int(item)} for item in ITEMS[3:13]]
    nobody = world.http.post(f"{world.url}/v1/recommend", json={"history": history, "k": 4}).json()
    assert len(nobody["items"]) == 4, "a history without a user"
    many = world.http.post(f"{world.url}/v1/recommend", json={"user": 3, "k": 50}).json()
    assert len(many["items"]) == 50, "more than the candidates that the stages usually leave"


def test_similar_items_come_from_any_instance_that_answers(world):
    with Client(world.url) as client:
        assert client.similar(7).items == [8]
        world.fleet[0].status["similar"] = 503
        assert client.similar(7).items == [8]
        world.fleet[1].status["similar"] = 400
        with pytest.raises(ServiceError, match="injected") as caught:
            client.similar(7)
        assert caught.value.status == 400


def test_metrics_count_calls_and_never_name_users(world):
    with Client(world.url) as client:
        client.recommend(987654321, request="secret-request")
    text = world.http.get(f"{world.url}/metrics").text
    assert 'nestpipe_gateway_answers_total{call="recommend",status="200"}' in text
    assert 'nestpipe_gateway_stage_seconds_count{stage="rank"}' in text
    assert "987654321" not in text
    assert "secret-request" not in text


def test_administration_needs_the_token_and_changes_the_members(world):
    url = f"{world.admin}/members"
    head = {"authorization": f"Bearer {TOKEN}"}
    for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN[:-1]}):
        assert world.http.post(url, headers=wrong, json={"name": "a", "action": "leave"}).status_code == 401
    assert len(world.http.get(url, headers=head).json()["members"]) == 2
    for body, status in (
        ({"name": "z", "action": "drain"}, 404),
        ({"name": "a", "action": "explode"}, 400),
        ({"name": "a", "action": "join", "url": "file:///"}, 400),
        ({"name": "a", "action": "join", "url": "http://"}, 400),
        ({"name": "a", "action": "join", "url": "http://[::1"}, 400),
        ({"name": "a", "action": "join", "url": "http://h:port"}, 400),
        ({"name": "a"}, 400),
    ):
        assert world.http.post(url, headers=head, json=body).status_code == status
    user = next(user for user in range(100) if world.owner(user).name == "a")
    assert world.http.post(url, headers=head, json={"name": "a", "action": "drain"}).status_code == 200
    with Client(world.url) as client:
        assert client.recommend(user).instance == "b"
        assert world.http.post(
            url, headers=head, json={"name": "a", "action": "join", "url": world.fleet[0].url}
        ).is_success
        assert client.recommend(user).instance == "a"
        for name in ("a", "b"):
            world.http.post(url, headers=head, json={"name": name, "action": "leave"})
        with pytest.raises(ServiceError, match="none of the 0 instances takes requests") as caught:
            client.recommend(user)
    assert (caught.value.status, caught.value.code) == (503, "no_instance")


def mutated(rng: np.random.Generator, body: bytes) -> bytes:
    """A body with some bytes changed, dropped, doubled or put in."""
    data = bytearray(body)
    for _ in range(int(rng.integers(1, 6))):
        place = int(rng.integers(0, len(data) + 1))
        kind = rng.integers(0, 4)
        if kind == 0 and place < len(data):
            data[place] = int(rng.integers(0, 256))
        elif kind == 1:
            del data[place : place + int(rng.integers(1, 8))]
        elif kind == 2:
            data[place:place] = data[: int(rng.integers(0, 30))]
        else:
            data[place:place] = rng.choice(TOKENS)
    return bytes(data)


TOKENS = [b"null", b"-1", b"1e999", b"[[", b'"', b"{}", b"true", b"9" * 40, b"\\u0000", b"\\ud800", b"\x00", b","]
BODIES = {
    "recommend": b'{"user": 3, "k": 5, "request": "r", "query_time": 5, "history": [{"item": 101, "time": 5}], "exclude": [100]}',
    "rank": b'{"user": 3, "request": "r", "candidates": [100, 101], "k": 2, "ticket": "v1.a.b", "deadline_ms": 500.0}',
    "prefill": b'{"user": 3, "request": "r", "candidates": 20, "query_time": null}',
    "release": b'{"ticket": "v1.a.b"}',
    "similar": b'{"item": 101, "k": 3}',
    "events": b'{"events": [{"id": "x", "user": 3, "item": 101, "time": 7}]}',
    "invalidate": b'{"user": 3}',
}


def test_mutated_bodies_never_break_the_gateway(world, scale):
    rng, statuses = np.random.default_rng(5), set[int]()
    for number in range(scale(1000, 10_000)):
        path = list(BODIES)[number % len(BODIES)]
        body = mutated(rng, BODIES[path])
        answer = world.http.post(f"{world.url}/v1/{path}", content=body)
        assert answer.status_code < 500, (path, body, answer.text)
        statuses.add(answer.status_code)
    assert {200, 400} <= statuses
    with Client(world.url) as after:
        assert after.recommend(3).path == "hit_device"
    wait_until(lambda: not [ticket for one in world.fleet for ticket, user in one.pinned.items() if user == 8])


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:9", "nothing answers at .* start it with 'nestpipe serve RUN'")],
)
def test_the_client_says_what_to_do_when_nobody_answers(url, message):
    with Client(url) as client, pytest.raises(ServiceError, match=message) as caught:
        client.recommend(1)
    assert (caught.value.status, caught.value.code) == (0, "unreachable")
    with Client(url) as client:
        assert not client.is_ready()


def test_the_client_says_when_an_answer_was_late_or_strange(world):
    world.owner(8).delay_s["rank"] = 1.0
    with Client(world.url, timeout_s=0.1) as client, pytest.raises(ServiceError, match="raise timeout_s"):
        client.recommend(8)
    with Client(world.admin) as client, pytest.raises(ServiceError, match="is this a nestpipe service"):
        client.recommend(8)
    wait_until(lambda: not world.pins())


def test_a_ranking_that_went_elsewhere_leaves_no_pin(world):
    """The caller got its answer and has no reason to give its ticket back."""
    user = 7
    with Client(world.url) as client:
        ticket = client.prefill(user, request="r", candidates=3, query_time=1).ticket
        assert world.pins() == 1
        world.owner(user).status["rank"] = 429
        assert client.rank(user, [1, 2, 3], request="r", ticket=ticket, k=3, query_time=1).items
    wait_until(lambda: not world.pins())
