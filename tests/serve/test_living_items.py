"""Items that change, arrive and are withdrawn, for every kind of run: cached equals full, unknown items work, nothing else shows."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from nestpipe.serve.api import Instance
from tests.gateway.fake_instances import Served as Server
from tests.serve.small_rankers import ASKED, make_engine
from tests.serve.small_services import KINDS, NOW, serving

EXACT = 1e-5  # of scores of order one in 32 bits: the contract's tolerance
ITEMS = list(range(20))


@pytest.fixture
def ranker(runs, served, tmp_path):
    engine = make_engine(runs("hstu"), tmp_path, served=served())
    engine.start()
    server = Server(Instance(engine, name="one", secret=b"s" * 32).app())
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield engine, http
    server.close()
    engine.stop()


def call(http, method, path, **body):
    found = http.request(method, path, json=body or None)
    assert found.status_code == 200, found.text
    return found.json()


def rank(http, user, **fields):
    body = {"user": user, "request": "r", "candidates": ITEMS, "query_time": ASKED, "deadline_ms": 60_000, **fields}
    return call(http, "POST", "/v1/rank", **body)


def in_full(engine, user):
    """The scores of all items without any cache, of what is known now."""
    served, histories = engine.versions.main, engine.histories
    inputs, wanted = served.prepare(histories.of(user), ASKED), served.candidates(ITEMS, histories.sequences)
    return served.scores([inputs], [wanted])[0].numpy()


def test_cached_equals_full_while_content_changes(ranker, scale):
    """Upserts between prefill and ranking, to items of the history and to candidates; unknown items in the history."""
    engine, http = ranker
    draw, paths = np.random.default_rng(3), set()
    for turn in range(scale(24, 2000)):
        user = int(draw.integers(4))
        ticket = call(http, "POST", "/v1/prefill", user=user, request="r", candidates=20, query_time=ASKED)["ticket"]
        own = engine.histories.of(user).items
        item = int(draw.choice(own[-6:])) if turn % 4 else int(draw.integers(20))
        if turn % 3 == 0:
            call(http, "PATCH", f"/v1/items/{item}", price=float(draw.normal()), category=int(draw.integers(9)))
        if turn % 5 == 4:
            event = {
                "id": f"e{turn}",
                "user": user,
                "item": 10**6 + turn % 7,
                "time": ASKED - 60 + turn % 50,
                "click": 1,
            }
            assert call(http, "POST", "/v1/events", events=[event])["accepted"] == 1
        if turn % 8 == 7:
            call(http, "PUT", "/v1/items", items=[{"id": 10**6 + turn % 7, "price": 1.5, "category": turn % 3}])
        found = rank(http, user, **({"ticket": ticket} if ticket else {}))
        paths.add(found["path"])
        wanted = in_full(engine, user)
        scores = dict(zip(found["items"], found["scores"], strict=True))
        assert max(abs(scores[one] - wanted[one]) for one in ITEMS) <= EXACT
    assert "full" in paths
    assert paths & {"hit_device", "hit_host", "join", "extend"}


def test_a_change_of_content_changes_scores_and_the_prefix(ranker):
    engine, http = ranker
    first = rank(http, 7)
    last = engine.histories.of(7).items
    key = engine.versions.main.prepare(engine.histories.of(7), ASKED).key
    call(http, "PATCH", f"/v1/items/{last[-3]}", price=9.5)
    assert engine.versions.main.prepare(engine.histories.of(7), ASKED).key != key
    assert dict(zip(*pairs(rank(http, 7)), strict=True)) != dict(zip(*pairs(first), strict=True))


def pairs(found):
    return found["items"], found["scores"]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_items_work_and_withdrawn_items_leave_every_answer(kind, runs_of, tmp_path):
    with serving(kind, runs_of, tmp_path) as service:
        http, own = service.http, service.run.sequences
        row = int(np.flatnonzero(np.diff(own.offsets) >= 3)[0])
        user, times = int(own.users[row]), {} if own.times is None else {"time": NOW - 5}
        fields = {} if kind in ("next item", "generative") else {"click": 1}
        sent = [
            {"id": f"e{n}", "user": user, "item": item, **times, **fields} for n, item in enumerate((10**7, 10**7 + 1))
        ]
        assert [one["result"] for one in call(http, "POST", "/v1/events", events=sent)["results"]] == ["stored"] * 2
        known = service.recommend(user=user, k=5)
        assert (known["degraded"], len(known["items"])) == (False, 5)
        history = [{"item": int(own.items[0]), **times}, {"item": 10**8, **times}]
        assert len(service.recommend(history=history, k=3)["items"]) == 3
        popular, asked = service.recommend(user="nobody", k=3), int(own.catalogue[0])
        similar = call(http, "POST", "/v1/similar", item=asked, k=3)["items"]
        gone = {known["items"][0], popular["items"][0], similar[0]}
        for item in gone:
            assert call(http, "DELETE", f"/v1/items/{item}")["item"]["available"] is False
        assert not gone & set(service.recommend(user=user, k=5)["items"])
        assert not gone & set(service.recommend(user="nobody", k=5)["items"])
        assert not gone & set(call(http, "POST", "/v1/similar", item=asked, k=5)["items"])
        if kind == "generative":
            assert not gone & set(call(http, "POST", "/v1/generate", user=user, k=3)["items"])
        if kind in ("ranker", "dcn"):
            ranked = call(
                http, "POST", "/v1/rank", user=user, request="r", candidates=[*own.catalogue[:9].tolist(), 10**7]
            )
            assert not gone & set(ranked["items"])
            assert ranked["unknown"] == [10**7]
        assert http.get("/readyz").status_code == 200
