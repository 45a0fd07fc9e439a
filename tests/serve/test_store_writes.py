"""What an engine writes to its store: no more than is worth it, of named users only, and nothing is lost by forgetting others."""

from __future__ import annotations

import numpy as np

from nestpipe.serve.stored_prefixes import StoredPrefixes
from nestpipe.serve.user_history import of_user, stored
from tests.serve.small_rankers import BEHIND, settle
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
