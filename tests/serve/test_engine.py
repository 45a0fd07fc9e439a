"""The engine, stepped by hand: every path gives the scores of full inference, and none is taken that cannot be afforded."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import pytest
import torch

from nestpipe.data.sequences import truncate
from nestpipe.errors import DataError, PrefixError
from nestpipe.jagged import Batch, Cursor, Jagged, offsets_of
from nestpipe.models.kv_prefix import InputDigest
from nestpipe.models.ranking import Ranking
from nestpipe.serve.config import TriggerConfig
from nestpipe.serve.engine import Engine
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.kv_cache import EntryState
from nestpipe.serve.latency_model import LatencySample, fit, measure_costs
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.prefill_policy import RankingCosts
from nestpipe.serve.requests import BusyError, FailedError, LateError
from nestpipe.serve.user_history import of_user, stored
from nestpipe.serve.versioned_worker import ModelVersions
from tests.serve.small_rankers import (
    ASKED,
    BLOCK,
    MAX_LEN,
    NUM_ITEMS,
    costs,
    evaluated,
    hint,
    make_engine,
    rank,
    settle,
)

EXACT = 1e-5  # of scores of order one in 32 bits: the contract's tolerance
ITEMS = tuple(range(NUM_ITEMS))


def answer(engine, user, items=ITEMS, **fields):
    job = rank(engine, user, items, **fields)
    settle(engine)
    return job.reply.result(0)


def asked_of(engine, user):
    """What the model is asked about a user."""
    return engine.versions.main.prepare(engine.histories.of(user), ASKED)


def scores(found):
    """By item, so that two orders can be compared."""
    return dict(zip(found.items, found.scores, strict=True))


def same(a, b, tolerance=EXACT):
    a, b = scores(a), scores(b)
    assert a.keys() == b.keys()
    return max(abs(a[item] - b[item]) for item in a) <= tolerance


def add(engine, name, user, item=5, **fields):
    return engine.histories.add(
        [{"id": name, "user": user, "item": item, "time": ASKED - 50, **fields}], lambda _: None
    )


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
def test_every_path_gives_the_scores_of_full_inference(runs, served, tmp_path, clock, backbone):
    engine = make_engine(runs(backbone), tmp_path, clock=clock, served=served(backbone))
    full = answer(engine, 3)
    assert (full.path, full.prefix_len, full.degraded) == ("full", 0, False)
    hint(engine, 3)
    settle(engine)
    for wanted in ("hit_device", "hit_host", "hit_host"):
        found = answer(engine, 3, request="r")
        assert found.path == wanted
        assert found.prefix_len == asked_of(engine, 3).num_events - 1
        assert same(found, full)
    assert engine.cache.device.copies == 2
    assert engine.cache.host.copies == 1, "it stayed on the host meanwhile"

    add(engine, "a", 3, click=1, dwell=3.0, device=1)
    longer = answer(engine, 3)
    assert longer.path == "extend"
    assert not same(longer, full, 1e-3), "the new event must matter"
    assert answer(engine, 3).path == "hit_host"
    engine.cache.invalidate()
    assert same(longer, again := answer(engine, 3))
    assert again.path == "full"

    hint(engine, 4)
    engine._accept()
    assert engine._prefills.run()
    assert engine.cache.peek_state(next(iter(engine._prefills)).inputs.key) == EntryState.COMPUTING
    joined, other = rank(engine, 4, ITEMS), rank(engine, 5, ITEMS, slack_s=50.0)
    engine.step()
    assert other.reply.result(0).path == "full", "a rank that is more urgent does not wait for a whole prefill"
    assert not joined.reply.done()
    settle(engine)
    assert joined.reply.result(0).path == "join"
    engine.cache.invalidate()
    assert same(joined.reply.result(0), answer(engine, 4))


def test_the_served_top_ten_is_that_of_evaluation(runs, served, engine):
    """100 users, the whole catalogue."""
    scorer = runs("hstu").predictor()
    for user in range(100):
        predicted = evaluated(scorer, asked_of(engine, user).history)
        if user % 2:
            hint(engine, user, f"r{user}")
            settle(engine)
        found = answer(engine, user, k=10, request=f"r{user}")
        assert found.path == ("hit_device" if user % 2 else "full")
        assert np.allclose([predicted[item] for item in found.items], found.scores, rtol=0, atol=EXACT)
        best = np.sort(predicted)[::-1][:10]
        assert np.allclose(found.scores, best, rtol=0, atol=EXACT)
        assert found.items == sorted(found.items, key=lambda item: -predicted[item]) or np.diff(best).max() > -EXACT


def test_a_history_is_cut_as_in_training(engine, log):
    for user in log.users[:10].tolist():
        first, last = log.offsets[user : user + 2].tolist()
        start = first + truncate(last - first, MAX_LEN, BLOCK)
        found = asked_of(engine, user).history
        assert found.items.values.tolist() == log.items[start:last].tolist()
        assert found.times.values.tolist() == (log.times[start:last] // 1000).tolist()


def test_test_events_get_the_numbers_of_the_report(runs, engine, log):
    """Held-out events, each asked for with the history that the caller sends, as evaluation predicts them."""
    found = runs("hstu").predictor().predict()
    for place in range(0, len(found.event), 23):
        user = int(log.users[found.user[place]])
        first = int(log.offsets[found.user[place]])
        sent = stored(log, np.arange(first, first + found.num_before[place]))
        start = max(-(-(len(sent) - 32) // 8) * 8, 0)
        history = of_user(log, user, sent.take(np.arange(start, len(sent))))
        event = found.event[place]
        got = answer(engine, user, (int(log.items[event]),), history=history, query_time=int(log.times[event] // 1000))
        assert got.scores[0] == pytest.approx(found.scores[place, 0], abs=EXACT)


# What would be wrong is not used.


def test_an_edited_history_is_never_answered_with_the_old_prefix(engine, log):
    hint(engine, 3)
    settle(engine)
    before = answer(engine, 3, request="r")
    late = int(log.times[log.offsets[3] : log.offsets[4]][-4] // 1000)
    engine.histories.add([{"id": "late", "user": 3, "item": 1, "time": late, "click": 1}], lambda _: None)
    after = answer(engine, 3)
    assert after.path == "full", "an event in the middle changes every row behind it"
    assert not same(before, after, 1e-4)


def test_an_edited_action_is_another_prefix_of_the_same_length_and_not_extended(engine, log, caplog):
    first = int(log.offsets[3])

    def history(num_events, *, edited):
        events = stored(log, np.arange(first, first + num_events))
        if edited:
            events.features["click"].values[5] = 1 - events.features["click"].values[5]
        return of_user(log, 3, events)

    hint(engine, 3, history=history(20, edited=False))
    settle(engine)
    assert answer(engine, 3, request="r", history=history(20, edited=False)).path == "hit_device"
    for num_events in (20, 21):
        found = answer(engine, 3, history=history(num_events, edited=True))
        assert found.path == "full", "the rows behind the edited event are others"
    assert answer(engine, 3, history=history(21, edited=False)).path == "extend"
    assert "in full" not in caplog.text, "it was not tried, only to be refused by the contract"


def test_a_slid_window_is_a_new_prefix(engine):
    """Events are appended until the window moves by a block: then nothing kept fits any more."""
    hint(engine, 3)
    settle(engine)
    answer(engine, 3, request="r")
    lengths, paths = [], []
    for number in range(12):
        add(engine, f"e{number}", 3, item=number)
        lengths.append(asked_of(engine, 3).num_events)
        found = answer(engine, 3)
        paths.append(found.path)
        if found.path == "full":
            hint(engine, 3, f"s{number}")
            settle(engine)
            engine.release(f"s{number}")
        else:
            kept = len(engine.cache)
            assert kept == 1, "the longer prefix takes the place of the shorter one"
    slid = [place for place in range(1, 12) if lengths[place] < lengths[place - 1]]
    assert slid
    assert all(paths[place] == "full" for place in slid)
    assert all(paths[place] == "extend" for place in range(12) if place not in slid)


def test_prefixes_of_other_weights_are_not_found_and_not_accepted(runs, served, engine):
    """The weights' digest is in the key; a cache that ignored it would be stopped by the contract."""
    hint(engine, 3)
    settle(engine)
    asked = asked_of(engine, 3)
    (kept,) = engine.cache.peek_user(3)
    old = engine.versions.main.ranker
    changed = type(old)(old.model, old._rows, weights="another digest", schema="")
    main = engine.versions.main
    engine.use(ModelVersions(ServedModel(changed, main._builder, main.known, name="new", block=BLOCK)))
    found = answer(engine, 3)
    assert (found.path, found.model) == ("full", "new")
    now = asked_of(engine, 3)
    with pytest.raises(PrefixError, match="weights: cached"):
        engine.versions.main.scores([now], [engine.versions.main.candidates(ITEMS, engine.histories.sequences)], [kept])
    assert not engine.versions.main.ranker.begins(kept, asked.prefix)


def test_a_prefix_that_the_contract_refuses_is_ranked_in_full(engine, monkeypatch, caplog):
    """Even if the cache gave out the wrong prefix, the answer would be right."""
    full = answer(engine, 3)
    hint(engine, 4)
    settle(engine)
    (wrong,) = engine.cache.peek_user(4)
    monkeypatch.setattr(engine.cache, "peek_state", lambda key: EntryState.READY)
    monkeypatch.setattr(engine.cache, "knows_user", lambda user: True)
    monkeypatch.setattr(engine.cache, "pin", lambda key, holder, **_: wrong)
    found = answer(engine, 3)
    assert (found.path, found.prefix_len) == ("full", 0)
    assert same(found, full)
    assert "ranked one by one" in caplog.text


class Reverse(Ranking):
    """Places count from the end: every row knows the request."""

    anchored = True

    def place_of(self, event, num_events):
        return num_events - event

    def anchor(self, num_events):
        return f"{num_events} events"


def test_an_anchored_model_is_filled_at_once_and_never_extended(runs, tmp_path, clock):
    engine = make_engine(runs("hstu"), tmp_path, clock=clock)
    engine.versions.main.ranker.model.__class__ = Reverse
    full = answer(engine, 3)
    hint(engine, 3)
    engine._accept()
    engine._prefills.run()
    found = answer(engine, 3, request="r")
    assert found.path == "hit_device"
    assert same(found, full)
    add(engine, "a", 3)
    assert answer(engine, 3).path == "full"


@pytest.mark.parametrize("chunk", [2, 3, 5, 8, 64])
def test_the_last_chunk_takes_a_small_rest(runs, served, tmp_path, chunk):
    """Each call has a cost of its own; none is longer than one and a half chunks."""
    engine = make_engine(runs("hstu"), tmp_path, served=served())
    inputs, lengths, kept = asked_of(engine, 3), [0], None
    while lengths[-1] < inputs.key.length:
        kept = engine.versions.main.fill(inputs, kept, chunk=chunk)
        lengths.append(kept.key.length)
    sizes = np.diff(lengths)
    assert all(sizes[:-1] == chunk)
    assert sizes[-1] <= chunk + chunk // 2
    assert len(sizes) == 1 or sizes[-1] > chunk // 2, "no call for a small rest"


# Deadlines.


def test_what_cannot_be_afforded_is_degraded_and_says_so(runs, served, tmp_path, clock):
    known = measure_costs(
        served(), make_engine(runs("hstu"), tmp_path / "a", served=served()).histories, chunk=8, num_candidates=40
    )
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=known)
    num = asked_of(engine, 3).num_events
    full_ms, short_ms = (known.expected("full", n, NUM_ITEMS) for n in (num, num - 8))
    if short_ms < full_ms:
        found = answer(engine, 3, slack_s=(full_ms + short_ms) / 2000)
        assert (found.path, found.degraded) == ("shorter", True)
        assert set(found.items) == set(ITEMS)
    found = answer(engine, 3, items=(9, 2, 5, 7), slack_s=1e-6, k=3)
    assert (found.path, found.degraded, found.items) == ("fallback", True, [9, 2, 5])
    late = rank(engine, 3, slack_s=-0.001)
    settle(engine)
    with pytest.raises(LateError, match="deadline passed"):
        late.reply.result(0)


def test_a_shorter_history_is_scored_as_that_history(runs, served, tmp_path, clock):
    sized = [LatencySample(k, n, c, float(n + c)) for n in (1, 8, 32) for c in (1, 40) for k in ("full", "hit", "pre")]
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=fit(sized))
    num = asked_of(engine, 3).num_events
    found = answer(engine, 3, slack_s=(num + NUM_ITEMS - 5) / 1000)
    assert (found.path, found.degraded) == ("shorter", True)
    kept = num - 4 * ((5 + 3) // 4)
    own = engine.histories.sequences
    events = stored(own, np.arange(len(own.items)))
    rows = np.arange(int(engine.histories.sequences.offsets[4]) - kept, int(engine.histories.sequences.offsets[4]))
    alone = answer(engine, 3, history=of_user(own, 3, events.take(rows)))
    assert same(found, alone)


def test_a_shorter_history_stays_one_if_its_batch_fails(runs, served, tmp_path, clock, monkeypatch):
    sized = [LatencySample(k, n, c, float(n + c)) for n in (1, 8, 32) for c in (1, 40) for k in ("full", "hit", "pre")]
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=fit(sized))
    call, failures = engine._call, [RuntimeError("no memory for so many")]

    def once(plans):
        if failures:
            raise failures.pop()
        return call(plans)

    monkeypatch.setattr(engine, "_call", once)
    found = answer(engine, 3, slack_s=(asked_of(engine, 3).num_events + NUM_ITEMS - 5) / 1000)
    assert (found.path, found.degraded) == ("shorter", True)


def test_where_full_never_fits_a_joiner_waits_as_long_as_a_hit_does(runs, served, tmp_path, clock):
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=costs(full=50, hit=1, pre=8))
    hint(engine, 3)
    engine._accept()
    engine._prefills.run()
    job = rank(engine, 3, ITEMS, slack_s=0.020)
    settle(engine)
    assert job.reply.result(0).path == "join"


def test_cancelled_joiners_do_not_cancel_the_work(engine):
    hint(engine, 3)
    engine._accept()
    engine._prefills.run()
    gone, stays = (rank(engine, 3, ITEMS) for _ in range(2))
    engine._accept()
    engine._next_batch()
    gone.reply.cancel()
    settle(engine)
    assert stays.reply.result(0).path == "join"
    assert engine.cache.peek_user(3)


def test_ranks_are_batched_by_deadline_and_mates_change_nothing(engine, monkeypatch):
    engine.versions.main.costs = costs(full=5)
    alone = {user: answer(engine, user) for user in (3, 4, 5, 6)}
    for user in (4, 6):
        hint(engine, user, f"r{user}")
    settle(engine)
    calls = []
    call = engine._call
    monkeypatch.setattr(engine, "_call", lambda plans: calls.append([p.request.user for p in plans]) or call(plans))
    jobs = {
        user: rank(engine, user, ITEMS, slack_s=slack, request=f"r{user}")
        for user, slack in ((3, 9.0), (4, 2.0), (5, 1.0), (6, 4.0))
    }
    assert engine.step()
    assert calls == [[4, 6], [5, 3]], "one call with prefixes, one without, the most urgent first"
    assert all(same(job.reply.result(0), alone[user]) for user, job in jobs.items())


def test_a_batch_ends_before_its_first_deadline(runs, served, tmp_path, clock):
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=costs(full=5))
    jobs = [rank(engine, user, slack_s=slack_s) for user, slack_s in enumerate((0.0125, 0.1, 0.2))]
    engine.step()
    assert [job.reply.done() for job in jobs] == [True, True, False], "a third would make the first one late"


@pytest.mark.parametrize(("full", "num_done"), [(4.0, 4), (9.0, 2), (50.0, 1)])
def test_a_batch_ends_before_it_is_long(runs, served, tmp_path, clock, full, num_done):
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=costs(full=full))
    jobs = [rank(engine, user) for user in range(4)]
    engine.step()
    assert sum(job.reply.done() for job in jobs) == num_done


# The trigger at work.


def test_requests_that_are_slow_by_their_own_work_do_not_stop_prefills(runs, served, tmp_path, clock, monkeypatch):
    """A prefill would have spared them that work: to refuse it would make more of them."""
    engine = make_engine(
        runs("hstu"),
        tmp_path,
        clock=clock,
        served=served(),
        known=costs(full=50, hit=5, pre=30),
        trigger=TriggerConfig(budget_ms=20.0, lead_ms=35.0, burst_ms=1000.0),
    )
    scored = engine._call

    def slow(plans):
        clock.now += 0.05
        return scored(plans)

    monkeypatch.setattr(engine, "_call", slow)
    monkeypatch.setattr(RankingCosts, "observe", lambda *_: None)  # the call itself takes no 50 ms
    for _ in range(40):
        one = rank(engine, 8, slack_s=0.1)
        settle(engine)
        assert one.reply.result(0).path == "full"
        engine.cache.invalidate()
    assert engine.latencies.p99() > 20
    asked = hint(engine, 9, "x")
    settle(engine)
    assert asked.reply.result(0).reason == "admitted"


def test_reasons_and_what_is_held(runs, served, tmp_path, clock):
    engine = make_engine(
        runs("hstu"),
        tmp_path,
        clock=clock,
        served=served(),
        known=costs(full=50, hit=5, pre=30),
        trigger=TriggerConfig(budget_ms=20.0, lead_ms=35.0, burst_ms=70.0, rate_ms_per_s=10.0),
    )
    first, again = hint(engine, 3, "a"), hint(engine, 3, "b")
    late = hint(engine, 4, "c")
    engine._accept()
    assert first.reply.result(0).reason == "admitted"
    assert again.reply.result(0).reason == "already_live"
    assert again.reply.result(0).held == first.reply.result(0).held != ""
    assert late.reply.result(0).reason == "too_late", "another prefill stands before it"
    settle(engine)
    more = [hint(engine, user, f"u{user}") for user in (5, 6)]
    settle(engine)
    assert [job.reply.result(0).reason for job in more] == ["admitted", "too_late"]
    settle(engine)
    dear = hint(engine, 7, "d")
    settle(engine)
    assert dear.reply.result(0).reason == "over_rate"
    clock.now += 100
    settle(engine)
    for _ in range(40):
        late = rank(engine, 8, slack_s=0.025)
        clock.now += 0.025
        settle(engine)
        with pytest.raises(LateError):
            late.reply.result(0)
    slow = [hint(engine, 8, f"e{n}") for n in range(16)]
    settle(engine)
    said = [job.reply.result(0).reason for job in slow]
    assert said == ["breaker"] * 15 + ["probe"], "one is let through, to see whether it is still so"
    assert (engine.counts["reason", "breaker"], engine.counts["reason", "probe"]) == (15, 1)
    clock.now += 5
    engine.cache.invalidate()
    again = hint(engine, 8, "f")
    settle(engine)
    assert again.reply.result(0).reason == "admitted", "what was long ago does not count"
    assert engine.counts["reason", "admitted"] == 3


def test_shadow_computes_nothing(runs, served, tmp_path, clock):
    engine = make_engine(
        runs("hstu"), tmp_path, clock=clock, served=served(), trigger=TriggerConfig(mode="shadow", budget_ms=5.0)
    )
    job = hint(engine, 3)
    settle(engine)
    assert (job.reply.result(0).reason, job.reply.result(0).held) == ("shadow", "")
    assert not len(engine.cache)


def test_bytes_stay_under_the_cap_and_full_inference_takes_over(runs, served, tmp_path, clock):
    size = 31 * 136  # a prefix of 31 events, at most
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), device_bytes=2 * size, host_bytes=size)
    seen = set()
    for user in range(20):
        job = hint(engine, user, f"r{user}")
        settle(engine)
        seen.add(job.reply.result(0).reason)
        for tier in (engine.cache.device, engine.cache.host):
            assert tier.used + tier.reserved <= tier.cap
    assert seen == {"admitted", "no_room"}, "two are held for their requests, so there is no room for others"
    clock.now += 10
    assert answer(engine, 19).path == "full"
    assert hint(engine, 19, "later").reply is not None
    settle(engine)
    assert answer(engine, 19, request="later").path == "hit_device", "holds have run out"


def test_a_held_prefix_is_released_by_its_request_alone(engine):
    hint(engine, 3, "mine", ttl_s=1000.0)
    settle(engine)
    key = asked_of(engine, 3).key
    assert engine.cache.peek_state(key) == EntryState.PINNED
    assert not engine.release("another")
    assert engine.cache.peek_state(key) == EntryState.PINNED
    assert engine.release("mine")
    assert engine.cache.peek_state(key) == EntryState.READY
    assert not engine.release("mine")


# Privacy, failures, threads.


def test_invalidate_leaves_nothing_of_the_user_in_tiers_or_in_flight(engine):
    hint(engine, 3, "ready")
    settle(engine)
    answer(engine, 3, request="ready")
    own = engine.histories.sequences
    sent = of_user(own, 3, stored(own, np.arange(20)).in_time_order())
    hint(engine, 3, "in work", history=sent)
    hint(engine, 4, "other")
    engine._accept()
    engine._prefills.run()
    joined = rank(engine, 3, ITEMS, history=sent)
    engine._accept()
    assert [plan.choice.path for plan in engine._next_batch()] == ["join"]
    assert engine.cache.host.used > 0
    assert engine.cache.invalidate(3) == 2, "one on the host, one in work"
    assert not engine.cache.peek_user(3)
    settle(engine)
    assert joined.reply.result(0).path == "full"
    assert not engine.cache.peek_user(3), "work in flight brings nothing back"
    assert engine.cache.peek_user(4)


def test_a_failing_prefill_frees_its_room_and_full_inference_answers(engine, monkeypatch, caplog):
    fill = engine.versions.main.fill
    hint(engine, 3)
    engine._accept()
    engine._prefills.run()
    joined = rank(engine, 3)
    monkeypatch.setattr(type(engine.versions.main), "fill", lambda *a, **k: 1 / 0)
    settle(engine)
    monkeypatch.setattr(type(engine.versions.main), "fill", lambda self, *a, **k: fill(*a, **k))
    assert joined.reply.result(0).path == "full"
    assert (engine.cache.device.used, engine.cache.device.reserved, len(engine.cache)) == (0, 0, 0)
    assert "prefill failed" in caplog.text


def test_scores_that_are_not_finite_give_the_order_of_the_caller(engine, monkeypatch):
    monkeypatch.setattr(engine, "_call", lambda plans: [np.full(len(p.request.items), np.nan) for p in plans])
    found = answer(engine, 3, items=(4, 1))
    assert (found.path, found.items, found.degraded) == ("fallback", [4, 1], True)


def test_an_unknown_candidate_is_the_callers_mistake(engine):
    job = rank(engine, 3, (1, 10**9))
    settle(engine)
    with pytest.raises(DataError, match="item number 1000000000"):
        job.reply.result(0)


def test_a_request_that_cannot_be_planned_is_answered_and_holds_up_no_other(engine, monkeypatch):
    hint(engine, 3)
    settle(engine)
    plan = engine._plan

    def planned(request, *arguments):
        return plan(request, *arguments) if request.user != 3 else 1 / 0

    monkeypatch.setattr(engine, "_plan", planned)
    jobs = [rank(engine, 3, ITEMS, request="r"), rank(engine, 4, ITEMS)]
    settle(engine)
    with pytest.raises(FailedError, match="could not be read"):
        jobs[0].reply.result(0)
    assert jobs[1].reply.result(0).path == "full"
    assert engine.cache.peek_state(asked_of(engine, 3).key) != EntryState.PINNED
    assert not engine.release("r")


def test_whatever_becomes_of_a_hit_nothing_stays_pinned(engine, monkeypatch):
    call = engine._call
    ways = {
        "full": lambda plans: call(plans) if plans[0].prefix is None else 1 / 0,
        "fallback": lambda plans: [np.full(len(p.request.items), np.nan) for p in plans],
    }
    for path, way in ways.items():
        hint(engine, 3, path)
        settle(engine)
        monkeypatch.setattr(engine, "_call", way)
        assert answer(engine, 3, request=path).path == path
        key = asked_of(engine, 3).key
        assert engine.cache.peek_state(key) in {EntryState.READY, EntryState.HOST}
        monkeypatch.undo()


def test_two_ranks_of_a_user_in_one_batch_share_what_the_first_brings(engine, caplog):
    hint(engine, 3)
    settle(engine)
    answer(engine, 3, request="r")
    for path in ("hit_host", "extend"):
        if path == "extend":
            add(engine, "a", 3)
        copies = engine.cache.device.copies
        jobs = [rank(engine, 3, ITEMS) for _ in range(2)]
        engine.step()
        first, second = (job.reply.result(0) for job in jobs)
        assert (first.path, second.path) == (path, path)
        assert first.prefix_len == second.prefix_len == asked_of(engine, 3).num_events - 1
        assert same(first, second)
        assert engine.cache.device.copies == copies + (path == "hit_host")
        settle(engine)
    assert not caplog.text


def test_messages_that_reach_a_log_name_no_user(engine):
    user = 7_777_777
    asked = [asked_of(engine, one) for one in (3, user)]
    engine.cache.reserve(asked[1].key, user=user, num_bytes=1)
    with pytest.raises(ValueError, match="reserved already") as live:
        engine.cache.reserve(asked[1].key, user=user, num_bytes=1)
    for one, other in (asked, asked[::-1]):
        with pytest.raises(PrefixError, match="another user") as wrong:
            one.key.require(other.key)
        assert str(user) not in str(wrong.value)
    assert str(user) not in str(live.value)


def test_what_comes_meanwhile_waits_for_the_next_step_and_who_left_costs_nothing(engine, monkeypatch):
    hint(engine, 3, "held")
    settle(engine)
    gone, urgent = rank(engine, 3, request="held"), rank(engine, 4)
    gone.reply.cancel()
    ask, asked = engine.versions.main.prepare, []

    def ask_more(events, query_time, **options):
        asked.append(int(events.users[0]))
        assert len(asked) < 10, "signals that keep coming starve the ranks"
        hint(engine, 5, f"s{len(asked)}")
        return ask(events, query_time, **options)

    monkeypatch.setattr(engine.versions.main, "prepare", ask_more)
    engine.step()
    assert asked == [4]
    assert urgent.reply.result(0).path == "full"
    assert not engine._pinned


def test_a_signal_that_nobody_waits_for_holds_nothing(engine, monkeypatch):
    decide = engine._decide

    def leave(job, asked):
        found = decide(job, asked)
        job.reply.cancel()
        return found

    monkeypatch.setattr(engine, "_decide", leave)
    hint(engine, 3)
    engine.step()
    assert not engine._pinned


def test_the_host_gets_prefixes_also_while_ranks_wait_and_each_key_is_noted_once(runs, served, tmp_path, clock):
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), max_batch=2)
    for user in range(4):
        hint(engine, user, f"r{user}")
    settle(engine)
    for _ in range(3):
        for user in range(4):
            rank(engine, user, request=f"r{user}")
        while engine._inbox or engine._requests:
            engine.step()
        assert len(engine._evictable) <= 4
    assert engine.cache.host.copies
    engine.cache.invalidate()
    clock.now += 1
    engine._refresh()
    assert not engine._evictable


def test_a_user_without_history_is_ranked(engine):
    found = answer(engine, 10**15)
    assert (found.path, found.prefix_len) == ("full", 0)
    assert len(set(found.scores)) > 1


def test_a_full_queue_refuses_at_once_and_stopping_answers_what_is_queued(runs, served, tmp_path):
    engine = make_engine(runs("hstu"), tmp_path, served=served(), max_queue=3)
    jobs = [rank(engine, user) for user in range(3)]
    with pytest.raises(BusyError, match="3 requests wait"):
        rank(engine, 9)
    engine.start()
    engine.stop()
    assert all(job.reply.result(0).path == "full" for job in jobs)
    with pytest.raises(BusyError, match="stopping"):
        rank(engine, 9)


def test_many_threads_get_the_scores_of_one(runs, served, tmp_path, scale):
    """The engine in its own thread; users share prefixes, cancel, add events, invalidate and are forgotten meanwhile."""
    engine: Engine = make_engine(runs("hstu"), tmp_path, served=served(), device_bytes=20_000, host_bytes=30_000)
    truth = {user: answer(engine, user) for user in range(8)}
    engine.start()
    wrong, longer, paths = [], [], set()
    log = EventLog(tmp_path / "events.log")

    def ask_longer(seed, turn):
        """A user whom this thread alone gives events: the answer must know the newest."""
        add(engine, f"{seed}.{turn}", 20 + seed, item=turn % NUM_ITEMS)
        add(engine, f"gone.{seed}.{turn}", 30)
        found = rank(engine, 20 + seed, ITEMS).reply.result(60)
        paths.add(found.path)
        longer.append((20 + seed, engine.histories.of(20 + seed), found))

    def ask(seed):
        for turn in range(scale(12, 2000)):
            if turn % 4 == 1:
                ask_longer(seed, turn)
            if turn % 8 == 2 + seed:
                log.rewrite(lambda one: one["user"] != 30)
            user = (seed + turn) % 8
            if turn % 3 == 0:
                hint(engine, user, f"{seed}.{turn}").reply.result(60)
            job = rank(engine, user, ITEMS, request=f"{seed}.{turn}")
            if turn % 7 == 6:
                job.reply.cancel()
                engine.cache.invalidate(user)
                continue
            found = job.reply.result(60)
            paths.add(found.path)
            if not same(found, truth[user]):
                wrong.append((user, found))
            engine.cache.check()

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    engine.stop()
    engine.is_stopping = False
    assert len(longer) >= 12
    for user, history, found in longer[:50]:
        engine.cache.invalidate()
        assert same(found, answer(engine, user, history=history))
    assert not wrong
    assert "full" in paths
    assert paths & {"hit_device", "join"}


def test_a_step_is_one_screen():
    """Which files are read for it, and that they are short: tests/test_tour.py."""
    assert len(inspect.getsource(Engine.step).splitlines()) < 20


def test_batches_of_several_users_are_those_of_each(served):
    parts = [
        Batch(cursor=Cursor(0, 0), sample_ids=torch.tensor([n]), items=Jagged.from_rows([[1] * n])) for n in (2, 0, 3)
    ]
    joined = Batch.concat(parts)
    assert joined.items.offsets.tolist() == offsets_of(torch.tensor([2, 0, 3])).tolist()
    assert joined.times is None
    assert joined.sample_ids.tolist() == [2, 0, 3]


def test_the_digest_of_a_hint_serves_its_request(engine, monkeypatch):
    """A digest reads all events of a history. The request compares its events with those of the hint instead."""
    digested, then = [], InputDigest.then
    monkeypatch.setattr(InputDigest, "then", lambda self, batch, row: digested.append(row) or then(self, batch, row))
    hint(engine, 3, "held")
    settle(engine)
    assert digested
    digested.clear()
    asked = rank(engine, 3, request="held")
    settle(engine)
    assert asked.reply.result(0).path == "hit_device"
    assert digested == []
