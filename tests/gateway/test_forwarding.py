"""The gateway of runs that find items themselves: forwarded by user, retried elsewhere, deadlines and explanations passed on."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from nestpipe.client import Client, ServiceError
from nestpipe.gateway.forwarding import Forwarding
from nestpipe.gateway.gateway import Gateway
from nestpipe.gateway.instance_client import InstanceClient, make_client
from nestpipe.gateway.router import Members
from nestpipe.serve.schemas import RecommendRequest
from tests.gateway.fake_instances import CATALOGUE, FakeInstance, Served, true_ranking

USER = 5


@pytest.fixture
def fleet() -> Iterator[list[FakeInstance]]:
    """Two instances, that of USER first."""
    found = [FakeInstance(name) for name in ("a", "b")]
    order = [one.name for one in Members(one.member for one in found).order(USER)]
    yield sorted(found, key=lambda one: order.index(one.name))
    for one in found:
        one.stop()


@pytest.fixture(params=["next_item", "generative"])
def url(request, fleet: list[FakeInstance]) -> Iterator[str]:
    remote = InstanceClient(Members(one.member for one in fleet), make_client())
    recommender = Forwarding(remote, budget_ms=9000)
    probe = RecommendRequest(user=USER, request="probe")
    server = Served(Gateway(recommender, kind=request.param, probe=lambda: probe, shared_log=True).app())
    yield server.url
    server.close()


def kind_of(url: str) -> str:
    return "generative" if "/v1/generate" in httpx.get(f"{url}/openapi.json").json()["paths"] else "next_item"


def test_a_user_is_answered_by_one_instance_with_everything_it_says(url, fleet):
    with Client(url) as client:
        first = client.recommend(USER, k=4, explain=True, request="one")
        assert first.items == true_ranking(USER, CATALOGUE, 4)
        assert (first.request, first.path, first.model, first.attempts) == ("one", "model", "m1", 1)
        assert first.because is not None
        assert [one[0].weight for one in first.because] == [0.5] * 4
        assert set(first.stages) == {"instance"}
        assert {client.recommend(USER).instance for _ in range(5)} == {fleet[0].name}
        assert len({client.recommend(user).instance for user in range(20)}) == 2
        assert httpx.get(f"{url}/v1/recommend/{USER}?k=4").json()["items"] == first.items
        assert client.similar(7).items == [8]
        client.send_events([{"id": "x", "user": 3, "item": 100, "time": 1}])
        client.invalidate(3)
    assert sum(one.paths().count("events") for one in fleet) == 1, "they read one log"
    assert all(one.paths().count("invalidate") == 1 for one in fleet)
    text = httpx.get(f"{url}/metrics").text
    assert 'nestpipe_gateway_stage_seconds_count{stage="instance"}' in text
    assert 'nestpipe_gateway_paths_total{path="model"}' in text


def test_what_a_kind_does_not_have_is_no_path(url):
    absent = {"generate": "generative", "rank": "", "prefill": "", "release": ""}
    for name, owner in absent.items():
        status = httpx.post(f"{url}/v1/{name}", json={"user": USER}).status_code
        assert status == (200 if owner == kind_of(url) else 404), name


def test_an_instance_that_is_gone_slow_or_wrong_is_replaced_in_time(url, fleet):
    first, second = fleet
    with Client(url, timeout_s=30) as client:
        first.status["recommend"] = 429
        found = client.recommend(USER, k=3, deadline_ms=4000)
        assert (found.instance, found.attempts) == (second.name, 2)
        assert first.calls[-1][1]["deadline_ms"] == pytest.approx(2800, abs=300), "most of the time is for the first"
        assert 1000 < second.calls[-1][1]["deadline_ms"] < 4000
        first.status.clear()
        first.garbage = True
        assert client.recommend(USER).instance == second.name
        first.garbage = False
        first.delay_s["recommend"] = 3.0
        assert client.recommend(USER, deadline_ms=1000).instance == second.name
        first.delay_s.clear()
        first.stop()
        assert client.recommend(USER).instance == second.name
        assert [client.recommend(USER).attempts for _ in range(2)] == [1, 1], "it is suspect now"
        assert client.similar(7).items == [8]
        if kind_of(url) == "generative":
            assert client.generate(USER, k=3).items == true_ranking(USER, CATALOGUE, 3)
        second.status["recommend"] = 400
        with pytest.raises(ServiceError, match="injected") as caught:
            client.recommend(USER)
        assert caught.value.status == 400, "the request itself is wrong, so it is not sent again"
        second.status["recommend"] = 500
        with pytest.raises(ServiceError, match=r"no answer inside 9000 ms: .* cannot be reached") as caught:
            client.recommend(USER)
        assert caught.value.status == 503
    first.start()


def test_ready_is_a_gateway_whose_instance_recommends(url, fleet):
    for one in fleet:
        one.status["recommend"] = 503
    refused = httpx.get(f"{url}/readyz")
    assert refused.status_code == 503
    assert "refuses" in refused.json()["problem"]
    fleet[1].status.clear()
    assert httpx.get(f"{url}/readyz").json() == {"ready": {"a": True, "b": True}, "problem": ""}
    fleet[1].status["recommend"] = 503
    assert httpx.get(f"{url}/readyz").status_code == 200, "one went through a moment ago"
