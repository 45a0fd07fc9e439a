"""Every kind of run, served as one instance, answers the same calls: by HTTP what offline scoring says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from nestpipe import train
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.serve.config import Stages
from nestpipe.training.run_folder import Run
from tests.eval.ranking_ranks import ranking_config
from tests.serve.small_services import KINDS, NOW, serving

HISTORIES = [kind for kind in KINDS if kind != "dcn"]  # whose scores depend on the history


@pytest.fixture(scope="module")
def services(runs_of, tmp_path_factory):
    """Started when they are first asked for."""
    found, opened = {}, []

    def of(kind):
        if kind not in found:
            opened.append(serving(kind, runs_of, tmp_path_factory.mktemp("service")))
            found[kind] = opened[-1].__enter__()
        return found[kind]

    yield of
    for one in opened:
        one.__exit__(None, None, None)


@pytest.fixture(params=KINDS)
def service(request, services):
    return services(request.param)


def user_with(service, num_events):
    """The first user of at least so many events."""
    lengths = np.diff(service.run.sequences.offsets)
    return int(service.run.sequences.users[np.flatnonzero(lengths >= num_events)[0]])


def history_of(service, user):
    own = service.run.sequences
    row = int(np.searchsorted(own.users, user))
    events = slice(*own.offsets[row : row + 2].tolist())
    found = [
        {"item": int(item), "time": int(at // 1000)}
        for item, at in zip(own.items[events], own.times[events], strict=True)
    ]
    if "device" in own.event_features:  # the ranker reads it, so it must stay with its event
        stored, names = own.event_features["device"], own.vocabulary("device")
        for place, event in enumerate(found, start=events.start):
            if len(device := stored.values[stored.offsets[place] : stored.offsets[place + 1]]):
                event["device"] = names.own_ids(device)[0]
    return found


def offline(service, user, k):
    seconds = None if service.kind == "generative" else NOW * 1000  # its encoder knows the order of events alone
    return service.run.predictor().recommend(user, k, request_ms=seconds)


def test_recommendations_are_those_of_offline_scoring(service):
    paths = {"next item": {"model"}, "generative": {"generated"}}.get(service.kind, {"full", "hit_host", "extend"})
    for user in service.run.sequences.users[[0, 7, 21]].tolist():
        wanted = offline(service, user, 6)
        found = service.recommend(user=user, k=6)
        assert found["items"] == wanted.items
        np.testing.assert_allclose(found["scores"], wanted.scores, rtol=1e-4, atol=1e-5)  # another order of sums
        assert found["path"] in paths
        assert (found["degraded"], found["instance"], found["problem"]) == (False, "a", "")
        assert found["model"].startswith(service.run.folder.name)
        got = service.http.get(f"/v1/recommend/{user}", params={"k": 6}).json()
        assert got["items"] == wanted.items
        assert got["request"] != found["request"]
    assert service.recommend(user=user, k=1, request="r7")["request"] == "r7"


def test_a_user_without_history_gets_what_is_popular(service):
    best = service.run.predictor().recommend(10**9, 5)
    found = service.recommend(user=10**9, k=5)
    assert (found["items"], found["scores"], found["path"]) == (best.items, best.scores, "popular")
    fewer = service.recommend(user=10**9, k=4, exclude=[best.items[1]], history=[])
    assert fewer["items"] == [best.items[0], *best.items[2:]]
    if service.kind != "dcn":
        assert service.recommend(user=10**9, k=1, explain=True)["because"] is None


def test_a_history_needs_no_user(service):
    user = user_with(service, 3)
    events = history_of(service, user)
    found = service.recommend(history=events, k=4)
    stored = service.recommend(user=user, k=4)["items"]
    assert service.recommend(user=user, history=events, k=4)["items"] == stored
    if service.kind == "next item":  # the others read the user too
        assert found["items"] == stored
    assert len(found["items"]) == 4
    refused = service.http.post("/v1/recommend", json={"k": 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_user")
    assert "name a user, or send a 'history'" in refused.json()["error"]["message"]


def test_excluded_and_seen_items_are_never_shown(service):
    user = user_with(service, 3)
    every = service.recommend(user=user, k=30)["items"]
    assert every == offline(service, user, 30).items
    assert not set(every) & {event["item"] for event in history_of(service, user)}
    excluded = [*every[:2], "no such item"]
    left = service.recommend(user=user, k=30, exclude=excluded)["items"]
    if service.kind == "generative":  # the search knows what is excluded, so probabilities are others
        assert left == service.run.predictor().recommend(user, 30, rules={"exclude": excluded}).items
    else:
        assert left == every[2:]
    rest = service.recommend(user=user, k=3, exclude=every)["items"]
    assert not set(rest) & set(every)
    assert rest == [] or service.kind == "generative"  # a beam lists some of the catalogue, so others are left


def test_answers_do_not_depend_on_who_else_asks(service):
    users = service.run.sequences.users[10:16].tolist()
    bodies = [{"user": user, "k": 6, "explain": service.kind != "dcn" and user % 3 == 0} for user in users]
    alone = [service.recommend(**body) for body in bodies]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda body: service.recommend(**body), bodies * 4))
    for one, wanted in zip(together, alone * 4, strict=True):
        assert one["items"] == wanted["items"]
        np.testing.assert_allclose(one["scores"], wanted["scores"], rtol=1e-4, atol=1e-5)  # batch mates: order of sums
        assert (one["because"] is None) == (wanted["because"] is None)


def test_an_event_changes_the_next_answer(service):
    user = int(service.run.sequences.users[-1])  # no other test asks for
    best = service.recommend(user=user, k=1)["items"][0]
    event = {"id": f"{service.kind} 1", "user": user, "item": best, "time": NOW - 60}
    assert service.http.post("/v1/events", json={"events": [event]}).json()["accepted"] == 1
    assert best not in service.recommend(user=user, k=30)["items"]


@pytest.mark.parametrize("kind", HISTORIES)
def test_an_explanation_leaves_one_event_out_at_a_time(services, kind):
    service = services(kind)
    user, catalogue = user_with(service, 4), service.run.sequences.catalogue.tolist()
    events = history_of(service, user)[-6:]

    def score(history, item):
        """Of one item, by HTTP: everything else is excluded."""
        others = [one for one in catalogue if one != item]
        return service.recommend(user=user, k=1, history=history, exclude=others)["scores"][0]

    answer = service.recommend(user=user, k=2, history=events, explain=True)
    assert len(answer["because"]) == 2
    for item, because in zip(answer["items"], answer["because"], strict=True):
        falls = [score(events, item) - score([one for one in events if one is not event], item) for event in events]
        order = [place for place in np.argsort(np.negative(falls), kind="stable")[:3] if falls[place] > 1e-6]
        np.testing.assert_allclose([one["weight"] for one in because][: len(order)], np.take(falls, order), atol=1e-5)
        if order and (len(order) == 1 or falls[order[0]] - falls[order[1]] > 1e-4):
            assert because[0]["item"] == events[order[0]]["item"]
            assert because[0]["time"] == events[order[0]]["time"]


def test_explain_is_refused_by_a_model_without_histories(services):
    refused = services("dcn").http.post("/v1/recommend", json={"user": 3, "explain": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_explain")
    assert "this model reads no history" in refused.json()["error"]["message"]


def test_similar_items(service):
    items = service.run.sequences.catalogue.tolist()
    wanted = service.run.predictor().similar(items[5], 4)
    found = service.http.post("/v1/similar", json={"item": items[5], "k": 4}).json()
    assert found["items"] == wanted.items
    np.testing.assert_allclose(found["scores"], wanted.scores, atol=1e-5)
    several = service.http.post("/v1/similar", json={"item": [items[5], items[6], "lamp"], "k": 4}).json()
    assert several["unknown"] == ["lamp"]
    assert not set(items[5:7]) & set(several["items"])
    assert service.http.post("/v1/similar", json={"item": "lamp"}).status_code == 400


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_evaluated_with_seen_items_recommends_them(runs_of, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(Run, "check_settings", lambda *_: None)  # saves the training of another run

    def keeping(name):
        run = runs_of(name)
        return replace(run, config=replace(run.config, eval=replace(run.config.eval, seen="none")))

    with serving(kind, keeping, tmp_path) as service:
        user = user_with(service, 3)
        found, had = service.recommend(user=user, k=30)["items"], {event["item"] for event in history_of(service, user)}
        assert found == offline(service, user, 30).items
        assert had & set(found) if kind == "generative" else had <= set(found)  # its beam does not find everything


def test_a_feature_that_must_not_be_missing_is_no_obstacle_to_a_candidate(runs_of, tmp_path):
    """No candidate has the features of an event that has not happened, whatever the schema says of logged events."""
    rows = [
        (user, (3 * user + step) % 12, 1_000 + step, user + step % 2, step % 3 == 0)
        for user in range(20)
        for step in range(5)
    ]
    log = pl.DataFrame(rows, schema=["user", "item", "time", "price", "click"], orient="row")
    features = tuple(Feature(name=name, kind="number", missing="refuse") for name in ("price", "click"))
    label = Label(name="clicked", kind="binary", feature="click")
    sequences = write_sequences(tmp_path / "log", schema=Schema(features=features, labels=(label,)), log=log)
    config = ranking_config(sequences.path, "dcn")
    config = replace(
        config,
        data=replace(config.data, split_time="1970-01-01T00:16:43"),
        model=replace(config.model, features=("user", "item", "price")),
    )
    run = train(config, tmp_path / "run", quiet=True)
    with serving("dcn", lambda _: run, tmp_path / "service") as service:
        assert service.recommend(user=3, k=6)["items"] == offline(service, 3, 6).items


def candidates(service, user, count):
    """What retrieval should find, by plain products: of the other run, or with the mean of the last events' rows."""
    own, predictor = service.run.sequences, service.run.predictor()
    if service.retrieval is not None:
        return service.retrieval.predictor().recommend(user, count).items
    vectors = predictor.item_vectors.numpy()
    had = [event["item"] for event in history_of(service, user)]
    query = vectors[np.searchsorted(own.catalogue, had[-32:])].mean(0)
    order = np.argsort(-(vectors @ query), kind="stable")
    return [item for item in own.catalogue[order].tolist() if item not in had][:count]


@pytest.mark.parametrize("kind", ["ranker", "ranker with retrieval", "dcn"])
def test_a_ranker_orders_what_retrieval_finds(runs_of, tmp_path, kind):
    with serving(kind, runs_of, tmp_path, stages=Stages(num_retrieved=5, num_candidates=5)) as service:
        for user in service.run.sequences.users[[2, 9]].tolist():
            found = candidates(service, user, 5)
            ranked = [item for item in offline(service, user, 24).items if item in found]
            answer = service.recommend(user=user, k=3)
            assert answer["items"] == ranked[:3]
            counts = {name: stage["count"] for name, stage in answer["stages"].items()}
            assert counts == {"retrieval": len(found), "rank": 3}
            body = {"user": user, "request": "r", "candidates": found, "k": 3}
            by_rank = service.http.post("/v1/rank", json=body).json()
            assert by_rank["items"] == answer["items"]
            np.testing.assert_allclose(by_rank["scores"], answer["scores"], rtol=1e-5)  # a cached prefix
        seven = candidates(service, user, 7)
        ranked = [item for item in offline(service, user, 24).items if item in seven[2:]]
        assert service.recommend(user=user, k=5, exclude=seven[:2])["items"] == ranked
        few = history_of(service, user)[:2]
        five = service.recommend(user=user, k=5, history=few)["items"]
        assert len(service.recommend(user=user, k=5, history=few, exclude=five[:4])["items"]) == 5
        assert len(service.recommend(user=user, k=9, history=few)["items"]) == 9  # more than are ranked otherwise


def test_a_ranking_is_explained_like_a_recommendation_of_the_same_items(services):
    service = services("ranker")
    user = user_with(service, 4)
    found = service.recommend(user=user, k=3, explain=True)
    body = {"user": user, "candidates": found["items"], "request": "r", "query_time": NOW, "explain": True}
    ranked = service.http.post("/v1/rank", json=body).json()
    assert ranked["items"] == found["items"]
    assert [[one["item"] for one in shown] for shown in ranked["because"]] == [
        [one["item"] for one in shown] for shown in found["because"]
    ]
    assert service.http.post("/v1/rank", json={**body, "explain": False}).json()["because"] is None
    stranger = service.http.post("/v1/rank", json={**body, "user": 10**9}).json()
    assert (len(stranger["items"]), stranger["because"]) == (3, None), "without a history no event weighs"
    refused = services("dcn").http.post("/v1/rank", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_explain")
