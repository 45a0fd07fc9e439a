"""A next-item run over HTTP: own ids in and out, the items of offline scoring, explanations, limits."""

from __future__ import annotations

from urllib.parse import quote

import httpx
import numpy as np
import pytest

from nestpipe import train
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.next_item_api import NextItemInstance
from nestpipe.serve.open_service import open_next_item_engine
from nestpipe.serve.recommendation import RecommendationJob
from nestpipe.serve.requests import BusyError, LateError
from tests.eval.test_catalogue_predictor import named_log
from tests.gateway.fake_instances import Served
from tests.small_runs import small_config

NOW = 2_000_000_000


@pytest.fixture(scope="module", params=["sasrec", "hstu"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return train(small_config(named_log(folder / "log").path, request.param, epochs=1), folder / "run", quiet=True)


@pytest.fixture
def engine(run, tmp_path):
    return open_next_item_engine(run, tmp_path / "events.log", config=EngineConfig(max_batch=4, max_queue=8))


@pytest.fixture
def client(engine):
    instance = NextItemInstance(engine, name="a", budget_ms=5000, wall_clock=lambda: NOW)
    engine.start()
    server = Served(instance.app())
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()
    engine.stop()


def offline(run, user, k, seconds=NOW):
    return run.predictor().recommend(user, k, request_ms=seconds * 1000)


def test_recommendations_are_those_of_offline_scoring(run, client):
    for user in ("Zoë 3", "Zoë 17", "Zoë 39"):
        answer = client.post("/v1/recommend", json={"user": user, "k": 5}).json()
        wanted = offline(run, user, 5)
        assert answer["items"] == wanted.items
        np.testing.assert_allclose(answer["scores"], wanted.scores, atol=1e-5)  # batch mates change the order of sums
        assert (answer["path"], answer["degraded"], answer["instance"]) == ("model", False, "a")
        got = client.get(f"/v1/recommend/{user}", params={"k": 5}).json()
        assert got["items"] == wanted.items
    earlier = client.post("/v1/recommend", json={"user": "Zoë 3", "k": 5, "query_time": 1_000_900}).json()
    np.testing.assert_allclose(earlier["scores"], offline(run, "Zoë 3", 5, 1_000_900).scores, atol=1e-5)


def test_a_user_without_history_gets_what_is_popular(run, client):
    answer = client.post("/v1/recommend", json={"user": "nobody", "k": 4}).json()
    wanted = run.predictor().recommend("nobody", 4)
    assert (answer["items"], answer["scores"], answer["path"]) == (wanted.items, wanted.scores, "popular")
    assert client.post("/v1/recommend", json={"user": 12, "k": 1}).json()["path"] == "popular"  # a number as a name


@pytest.mark.parametrize("user", ["a/b", "two\nlines", "end\n", "?k=0", "..%2f", "Zoë 3/"])
def test_any_text_is_a_user_in_an_address(client, user):
    answer = client.get(f"/v1/recommend/{quote(user, safe='')}?k=2")
    assert (answer.status_code, answer.json()["path"]) == (200, "popular")


def test_what_is_excluded_or_unknown(run, client):
    best = offline(run, "Zoë 3", 3).items
    answer = client.post("/v1/recommend", json={"user": "Zoë 3", "k": 2, "exclude": [best[0], "no such item"]}).json()
    assert answer["items"] == best[1:]


def test_a_history_in_the_request_replaces_the_stored_one(run, client):
    sequences = run.sequences
    names = sequences.vocabulary("item")
    users = sequences.vocabulary("user").own_ids(sequences.users)
    row = users.index("Zoë 20")
    own = slice(*sequences.offsets[row : row + 2].tolist())
    history = [
        {"item": item, "time": int(at // 1000)}
        for item, at in zip(names.own_ids(sequences.items[own]), sequences.times[own], strict=True)
    ]
    given = client.post("/v1/recommend", json={"user": "nobody", "k": 5, "history": history}).json()
    assert given["items"] == offline(run, "Zoë 20", 5).items
    unknown = client.post("/v1/recommend", json={"user": "a", "history": [{"item": "lamp", "time": 1}], "k": 3})
    assert (unknown.json()["path"], len(unknown.json()["items"])) == ("model", 3)


def test_events_change_the_next_answer(run, client):
    before = offline(run, "Zoë 5", 3).items
    event = {"id": "e1", "user": "Zoë 5", "item": before[0], "time": NOW - 60}
    results = client.post("/v1/events", json={"events": [event, event]}).json()["results"]
    assert [one["result"] for one in results] == ["stored", "duplicate"]
    after = client.post("/v1/recommend", json={"user": "Zoë 5", "k": 30}).json()["items"]
    assert before[0] not in after
    stranger = client.post("/v1/events", json={"events": [{**event, "id": "e2", "user": "a stranger"}]})
    assert stranger.json()["accepted"] == 1
    assert client.post("/v1/recommend", json={"user": "a stranger", "k": 3}).json()["path"] == "model"


def test_an_explanation_leaves_events_out_one_at_a_time(run, client):
    answer = client.post("/v1/recommend", json={"user": "Zoë 3", "k": 2, "explain": True}).json()
    items = run.sequences.vocabulary("item")
    row = run.sequences.vocabulary("user").own_ids(run.sequences.users).index("Zoë 3")
    own = slice(*run.sequences.offsets[row : row + 2].tolist())
    events = [
        {"item": item, "time": int(at // 1000)}
        for item, at in zip(items.own_ids(run.sequences.items[own]), run.sequences.times[own], strict=True)
    ]

    def score(history, item):
        """Of one item for a history, by HTTP: everything else is excluded."""
        others = [one for one in items.own_ids(run.sequences.catalogue) if one != item]
        body = {"user": "nobody", "k": 1, "history": history, "exclude": others}
        found = client.post("/v1/recommend", json=body).json()
        return found["scores"][0]

    for item, because in zip(answer["items"], answer["because"], strict=True):
        full = score(events, item)
        falls = {event["item"]: full - score([one for one in events if one is not event], item) for event in events}
        wanted = [fall for fall in sorted(falls.values(), reverse=True)[:3] if fall > 0]
        np.testing.assert_allclose([one["weight"] for one in because], wanted, atol=1e-5)
        assert because[0]["item"] == max(falls, key=falls.__getitem__)
    assert client.post("/v1/recommend", json={"user": "nobody", "explain": True}).json()["because"] is None


def test_similar_items(run, client):
    answer = client.post("/v1/similar", json={"item": "p7", "k": 4}).json()
    assert answer["items"] == run.predictor().similar("p7", 4).items
    several = client.post("/v1/similar", json={"item": ["p7", "p8", "lamp"], "k": 4}).json()
    assert several["unknown"] == ["lamp"]
    assert not {"p7", "p8"} & set(several["items"])
    assert client.post("/v1/similar", json={"item": "lamp"}).status_code == 400
    odd = client.post("/v1/similar", json={"item": ["p7", 1.5]})
    assert (odd.status_code, odd.json()["error"]["code"]) == (400, "bad_item")
    assert client.get(f"/v1/recommend/x?k={'1' * 5000}").status_code == 400


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "bad_user"),
        ({"user": None}, "bad_user"),
        ({"user": ""}, "bad_user"),
        ({"user": [1]}, "bad_user"),
        ({"user": "a", "k": 0}, "bad_k"),
        ({"user": "a", "k": 1001}, "bad_k"),
        ({"user": "a", "colour": "red"}, "unknown_field"),
        ({"user": "a", "history": [{"time": 1}]}, "bad_item"),
        ({"user": "a", "deadline_ms": 0}, "bad_deadline_ms"),
        ({"user": "a", "exclude": ["p1", 1.5]}, "bad_exclude"),
    ],
)
def test_bad_requests_name_the_field(client, body, code):
    answer = client.post("/v1/recommend", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_ready_means_that_a_recommendation_goes_through(engine):
    instance = NextItemInstance(engine, name="a", budget_ms=1000)
    server = Served(instance.app())
    with httpx.Client(base_url=server.url, timeout=60) as client:
        engine.start()
        assert client.get("/readyz").status_code == 200
        assert client.get("/healthz").json() == {"alive": True}
        assert "nestpipe_recommended" in client.get("/metrics").text
        assert "/v1/similar" in client.get("/openapi.json").json()["paths"]

        def broken(*_):
            raise RuntimeError("no model")

        engine.versions.main.recommend = broken
        assert client.get("/readyz").status_code == 503
        answer = client.post("/v1/recommend", json={"user": "Zoë 3"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "failed")
        engine.stop()
        assert client.get("/readyz").status_code == 503
    server.stop()


def test_full_queues_and_late_requests_are_refused(engine):
    def job(deadline):
        return RecommendationJob(user=0, k=1, deadline=deadline, query_time=NOW)

    late = job(engine.clock() - 1)
    engine.submit(late)
    jobs = [job(engine.clock() + 100 + number) for number in range(7)]
    for one in reversed(jobs):
        engine.submit(one)
    with pytest.raises(BusyError, match="8 requests wait already"):
        engine.submit(job(engine.clock() + 1))
    assert engine.step()
    with pytest.raises(LateError, match="the deadline passed"):
        late.reply.result(0)
    assert [one.reply.done() for one in jobs] == [True] * 4 + [False] * 3  # the most urgent ones first
    assert engine.step()
    assert not engine.step()


def test_answers_do_not_depend_on_who_else_asks(run, engine):
    users = list(range(6))
    alone = {}
    for user in users:
        one = RecommendationJob(user=user, k=5, deadline=engine.clock() + 100, query_time=NOW)
        engine.submit(one)
        engine.step()
        alone[user] = one.reply.result(0).found
    jobs = [RecommendationJob(user=user, k=5, deadline=engine.clock() + 100, query_time=NOW) for user in users]
    for one in jobs:
        engine.submit(one)
    while engine.step():
        pass
    for one in jobs:
        assert one.reply.result(0).found.items == alone[one.user].items
