"""What an engine writes to its store: no more than is worth it, of named users only, and nothing is lost by forgetting others."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nestpipe.serve.config import TriggerConfig
from nestpipe.serve.requests import HintDecision
from nestpipe.serve.stored_prefixes import StoredPrefixes
from nestpipe.serve.user_history import NOBODY, of_user, stored
from tests.serve.small_rankers import ASKED, BEHIND, ON, hint, settle
from tests.serve.stored_examples import made, write
from tests.serve.test_engine import asked_of
from tests.serve.test_engine_store import files, ranked


def test_a_short_history_of_a_request_replaces_no_long_prefix(opened, log):
    """Of a user who sends histories: another is stored only if it is long enough to be worth it."""
    user, first = 10**6, int(log.offsets[3])

    def history(num_events):
        return of_user(log, user, stored(log, np.arange(first, first + num_events)).in_time_order())

    engine = opened()
    ranked(engine, user, history=history(20))
    ((path, content),) = [(one, one.read_bytes()) for one in files(engine)]
    for num_events in (1, 2, BEHIND):
        engine = opened()
        ranked(engine, user, history=history(num_events))
        engine._refresh()
        engine.nearline.request([user])
        settle(engine)
        engine.tiers.stored.flush()
        assert path.read_bytes() == content
        assert dict(engine.nearline.counts) == {"passed_over": 1}
    assert ranked(opened(), user, history=history(20)).path == "hit_store"
    engine = opened()
    ranked(engine, user, history=history(BEHIND + 1))
    assert path.read_bytes() != content, "long enough: the window may have moved"


def test_a_near_line_prefill_counts_only_what_was_offered(opened, monkeypatch):
    engine = opened()
    monkeypatch.setattr(StoredPrefixes, "offer", lambda *_, **__: False)
    engine.nearline.request([3])
    settle(engine)
    assert dict(engine.nearline.counts) == {"passed_over": 1}


def held_writer(stored):
    """The writer thread waits until the event is set."""
    going = threading.Event()
    stored._writes.submit(going.wait, 10)
    return going


def test_forgetting_a_user_loses_no_near_line_write_of_others(opened):
    engine = opened()
    engine.nearline.limit(1e9)
    engine._refresh()
    kept, store = engine.tiers.stored, engine.tiers.stored.store
    going = held_writer(kept)
    engine.nearline.request([3, 4, 5])
    settle(engine)
    assert engine.nearline.counts["stored"] == 3
    engine.invalidate(4)
    going.set()
    kept.flush()
    assert sorted(store.users()) == [3, 5]

    going = held_writer(kept)
    engine.nearline.request([6, 7])
    settle(engine)
    engine.histories.forget(7)
    engine._refresh()  # everything that was being written is dropped
    going.set()
    kept.flush()
    assert sorted(store.users()) == [3, 5]
    settle(engine)
    kept.flush()
    assert sorted(store.users()) == [3, 5, 6], "it was requested again"
    assert engine.nearline.counts["stored"] == 3 + 1


def test_a_removal_restarts_the_near_line_prefill_of_another(opened):
    engine = opened(chunk=1)
    engine.nearline.limit(1e9)
    engine._refresh()
    engine.nearline.request([3])
    engine.nearline.run()
    engine.histories.forget(7)
    engine._refresh()
    settle(engine)
    engine.tiers.stored.flush()
    assert engine.tiers.stored.store.users() == [3]


def test_an_offer_after_the_end_gives_its_bytes_back(opened):
    engine = opened()
    inputs = asked_of(engine, 3)
    prefix = engine.versions.main.fill_all(inputs, chunk=8)
    engine.tiers.stored._writes.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        engine.tiers.stored.offer(inputs, prefix, since=0)
    assert engine.tiers.stored._pending_bytes == 0


def test_nothing_is_kept_of_requests_without_a_user(opened, log):
    engine = opened(trigger=TriggerConfig(mode="always", burst_ms=1e9))
    store = engine.tiers.stored.store
    for user in (3, 4, 3, 4):
        first = int(log.offsets[user])
        history = of_user(log, NOBODY, stored(log, np.arange(first, first + 20)).in_time_order())
        job = hint(engine, NOBODY, "r", history=history)
        found = ranked(engine, NOBODY, history=history, request="r")
        assert job.reply.result(0) == HintDecision("no_room")
        assert (found.path, found.degraded) == ("full", False)
        assert (len(engine.cache), files(engine), store.counts["writes"]) == (0, [], 0)
    engine.trigger = ON  # keeps what full inference computes
    assert ranked(engine, NOBODY, history=history).path == "full"
    engine.nearline.request([NOBODY])
    settle(engine)
    assert (len(engine.cache), files(engine), dict(engine.nearline.counts)) == (0, [], {"passed_over": 1})
    inputs = engine.versions.main.prepare(history, ASKED)
    prefix = engine.versions.main.fill_all(inputs, chunk=8)
    assert not engine.tiers.stored.offer(inputs, prefix, since=store.num_forgets)
    write(store, made(user=NOBODY))  # as earlier versions did
    write(store, made(user=5))
    assert [path.stem for path in files(opened())] == ["5"]
