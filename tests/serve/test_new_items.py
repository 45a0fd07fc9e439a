"""A next-item run with item features serves items that came later: from their content, and not after they were withdrawn."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from nestpipe import train
from nestpipe.client import Client
from nestpipe.data.item_feature_rows import catalogue_texts
from nestpipe.rules.rule_book import RequestRules
from nestpipe.serve.config import EngineConfig, Limits, Stages
from nestpipe.serve.followed_search import followed_search
from nestpipe.serve.next_item_api import NextItemInstance
from nestpipe.serve.open_service import open_next_item_engine
from nestpipe.serve.recommendation import RecommendationJob
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import FileState
from tests.gateway.fake_instances import Served
from tests.small_content import SmallCatalogue, content_config, content_log
from tests.small_runs import small_config

NEW, NOW = 999, 1_800_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new-items")
    log = content_log(folder / "log", num_users=150)
    return train(content_config(log.path, epochs=4), folder / "run", quiet=True)


@pytest.fixture
def engine(run, tmp_path):
    return open_next_item_engine(run, tmp_path / "events.log", config=EngineConfig())


def content_of(run, item):
    """The content of an item of the folder, as a service stores it."""
    place, stored = int(np.searchsorted(run.sequences.catalogue, item)), run.sequences.item_features

    def ids(name):
        return stored[name].values[stored[name].offsets[place] : stored[name].offsets[place + 1]].tolist()

    price = float(stored["price"].values[place])
    number = int(np.searchsorted(run.sequences.catalogue, item))
    return {
        "brand": ids("brand")[0],
        "category": ids("category")[0],
        "tags": ids("tags"),
        "price": None if np.isnan(price) else price,
        "look": [float(one) for one in stored["look"].values[place]],
        "text": catalogue_texts(run.sequences, "title")[number],
    }


def recommended(engine, user, k=40, history=None):
    job = RecommendationJob(user=user, k=k, deadline=float("inf"), query_time=NOW, history=history)
    engine.submit(job)
    while engine.step():
        pass
    found = job.reply.result().found
    return dict(zip(found.items, found.scores, strict=True))


def cold_items(run):
    """Items without a training event."""
    trained = run.load_model().model.catalogue.numpy()
    return [int(item) for item in run.sequences.catalogue if item not in trained]


def test_a_new_item_is_recommended_as_an_item_with_its_content(run, engine):
    like, live = cold_items(run)[0], SmallCatalogue()
    served, users = engine.versions.main, run.sequences.users[:20].tolist()
    before = [recommended(engine, user) for user in users]
    live.put(NEW, **content_of(run, like))
    assert served.follow(live)
    assert not served.follow(live)  # nothing has changed since
    for user, old in zip(users, before, strict=True):
        found = recommended(engine, user, k=41)
        if like in old:
            assert found[NEW] == pytest.approx(found[like], abs=1e-6)
        assert {item: found[item] for item in old} == pytest.approx(old, abs=1e-6)
        assert NEW in found
    assert served.known.similar(np.array([like]), 1).items == [NEW]

    other = cold_items(run)[-1]
    live.put(NEW, **content_of(run, other))  # another revision
    assert served.follow(live)
    assert recommended(engine, users[0], k=41)[NEW] == pytest.approx(before[0][other], abs=1e-6)

    live.gone |= {NEW, other}
    assert served.follow(live)
    gone = recommended(engine, users[0], k=41)
    assert not {NEW, other} & gone.keys()
    live.gone.clear()
    served.follow(live)
    assert {NEW, other} <= recommended(engine, users[0], k=41).keys()


def test_events_on_new_items_count_by_their_content(run, engine):
    like, live, served = cold_items(run)[0], SmallCatalogue(), engine.versions.main
    live.put(NEW, **content_of(run, like))
    served.follow(live)
    own = engine.histories.of(int(run.sequences.users[3]))

    def after(item):
        items = np.array([*own.items[:-1], item])
        return recommended(engine, -5, history=replace(own, items=items, offsets=np.array([0, len(items)])))

    new, known, unknown = after(NEW), after(like), after(123_456)
    shared = new.keys() & known.keys()
    assert len(shared) > 20
    assert [new[item] for item in shared] == pytest.approx([known[item] for item in shared], abs=1e-6)
    assert unknown.keys()
    assert unknown != pytest.approx(new, abs=1e-4)


def test_an_item_posted_over_http_is_found_by_its_content_its_events_count_and_it_is_withdrawn(run, tmp_path):
    engine = open_next_item_engine(run, tmp_path / "events.log", config=EngineConfig())
    engine.start()
    instance = NextItemInstance(engine, name="a", budget_ms=60_000, limits=Limits(), wall_clock=lambda: NOW)
    server = Served(instance.app())
    like, user = cold_items(run)[0], int(run.sequences.users[0])
    try:
        with Client(server.url, timeout_s=60) as client:

            def scores():
                found = client.recommend(user, 41)
                return dict(zip(found.items, found.scores, strict=True))

            assert like in scores()
            (stored,) = client.put_items([{"id": NEW, **content_of(run, like)}]).results
            assert stored.result == "created"
            end = time.monotonic() + 20
            while NEW not in (found := scores()):
                assert time.monotonic() < end
                time.sleep(0.05)
            assert found[NEW] == pytest.approx(found[like], abs=1e-6)
            event = {"id": "e1", "user": user, "item": NEW, "time": NOW - 60}
            assert client.send_events([event]).accepted == 1
            after = scores()
            assert NEW not in after, "it was had"
            assert after[like] != pytest.approx(found[like], abs=1e-6), "and it changed what comes next"
            other = int(run.sequences.users[5])
            assert NEW in client.recommend(other, 41).items
            client.withdraw_item(NEW)
            assert NEW not in client.recommend(other, 41).items
    finally:
        server.stop()
        engine.stop()


def test_a_model_without_content_reads_them_as_nothing_and_never_shows_them(run, tmp_path):
    plain = train(small_config(run.sequences.path, epochs=1), tmp_path / "plain", quiet=True)
    engine = open_next_item_engine(plain, tmp_path / "events.log", config=EngineConfig())
    live = SmallCatalogue()
    live.put(NEW, **content_of(run, 3))
    assert not engine.versions.main.follow(live)
    own = engine.histories.of(int(run.sequences.users[3]))
    engine.versions.main.prepare(replace(own, items=np.array([NEW]), offsets=np.array([0, 1])), NOW)
    assert NEW not in recommended(engine, int(run.sequences.users[0]))
    live.gone.add(3)
    assert engine.versions.main.follow(live)
    assert 3 not in recommended(engine, int(run.sequences.users[0]))


def test_retrieval_for_a_ranker_finds_new_items_and_not_withdrawn_ones(run):
    ticks = iter(range(1000))
    search = followed_search(run, keeps_seen=True)
    search._clock = lambda: float(next(ticks))
    own, live, like = histories_of(run, 3), SmallCatalogue(), cold_items(run)[0]

    def found():
        search.follow(live)
        return search.find(own, NOW, 60, rules=RequestRules(), stages=Stages()).items

    before = found()
    live.put(NEW, **content_of(run, like))
    assert abs(found().index(NEW) - found().index(like)) == 1
    live.gone |= {NEW, like}
    assert not {NEW, like} & set(found())
    live.gone.discard(like)
    live.records.pop(NEW)
    live.gone.discard(NEW)
    assert found() == before
    live.put(NEW, **content_of(run, like))
    assert set(found()) == {NEW, *before}


def histories_of(run, place):
    state = FileState(run.folder / "serve" / "events.log")
    return replace(UserHistories(run.sequences, state).of(int(run.sequences.users[place])), live=None)
