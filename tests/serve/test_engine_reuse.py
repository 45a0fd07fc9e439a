"""What an engine does about waiting and reuse: ranks that join, prefixes that full inference made, risk by the queue."""

from __future__ import annotations

from functools import partial

import pytest

from nestpipe.errors import DataError
from nestpipe.serve.config import TriggerConfig
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.latency_model import LatencySample, fit
from nestpipe.serve.prefill import ServedModel
from tests.serve.small_rankers import costs, hint, make_engine, rank, settle
from tests.serve.test_engine import ITEMS, add, answer, asked_of, same


def test_a_joiner_waits_as_long_as_waiting_is_in_time(runs, served, tmp_path, clock, monkeypatch):
    """And not until full inference does not fit any more, to get a shorter history then."""
    sized = [LatencySample(k, n, 1, float(n)) for n in (8, 16, 32) for k in ("full", "pre")]
    known = fit([*sized, *(LatencySample("hit", n, 1, 1.0) for n in (8, 16, 32))])
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=known)
    fill = ServedModel.fill

    def slow(self, *arguments, **options):
        clock.now += 0.007
        return fill(self, *arguments, **options)

    monkeypatch.setattr(ServedModel, "fill", slow)
    user = next(one for one in range(50) if asked_of(engine, one).num_events >= 24)
    hint(engine, user)
    engine._accept()
    engine._prefills.run()
    job = rank(engine, user, (1,), slack_s=(asked_of(engine, user).num_events + 5.0) / 1000)
    settle(engine)
    assert job.reply.result(0).path == "join"


def test_a_prefix_that_a_rank_waits_for_goes_before_less_urgent_ranks(engine):
    hint(engine, 3)
    engine._accept()
    engine._prefills.run()
    urgent, other = rank(engine, 3, ITEMS, slack_s=1.0), rank(engine, 5, ITEMS, slack_s=2.0)
    while not urgent.reply.done():
        assert engine.step()
        assert not (other.reply.done() and not urgent.reply.done())
    assert urgent.reply.result(0).path == "join"


def test_what_a_rank_waits_for_is_ended_in_one_go(engine, monkeypatch):
    """Chunk by chunk it would take longer than full inference, and what is there of it would be thrown away."""
    user = next(one for one in range(50) if asked_of(engine, one).num_events >= 26)
    hint(engine, user)
    engine._accept()
    engine._prefills.run()
    chunks, fill = [], ServedModel.fill
    monkeypatch.setattr(ServedModel, "fill", lambda self, *a, **k: chunks.append(k["chunk"]) or fill(self, *a, **k))
    assert answer(engine, user).path == "join"
    assert len(chunks) == 1


def test_what_full_inference_made_is_kept_if_it_pays(runs, served, tmp_path, clock):
    def opened(name, full=10.0, **options):
        own = TriggerConfig(budget_ms=1e6, **options)
        return make_engine(
            runs("hstu"), tmp_path / name, clock=clock, served=served(), known=costs(full=full), trigger=own
        )

    engine = opened("on")
    first, second = answer(engine, 3), answer(engine, 3)
    assert (first.path, second.path) == ("full", "hit_host")
    assert same(first, second)
    assert engine.cache.host.copies == 1
    add(engine, "a", 3, click=1, dwell=3.0, device=1)
    longer = answer(engine, 3)
    assert longer.path == "extend", "it can be gone on from"
    engine.cache.invalidate(3)
    assert same(longer, answer(engine, 3))

    jobs = [rank(engine, user, ITEMS) for user in (4, 5, 6)]
    settle(engine)
    again = [answer(engine, user) for user in (4, 5, 6)]
    assert {one.path for one in again} == {"hit_host"}
    assert all(same(job.reply.result(0), one) for job, one in zip(jobs, again, strict=True)), (
        "mates have their own rows"
    )

    for useless in (opened("cheap", full=1.5), opened("off", mode="off"), opened("shadow", mode="shadow")):
        assert answer(useless, 3).path == "full"
        assert not len(useless.cache)


def test_full_inference_ends_a_prefill_that_came_too_late(runs, served, tmp_path, clock):
    trigger = TriggerConfig(budget_ms=9.0, lead_ms=35.0, burst_ms=1e9)
    engine = make_engine(
        runs("hstu"), tmp_path, clock=clock, served=served(), known=costs(full=10, hit=1, pre=12), trigger=trigger
    )
    hint(engine, 3)
    engine._accept()
    assert len(engine._prefills) == 1
    job = rank(engine, 3, ITEMS, slack_s=0.011)
    assert engine.step()
    assert job.reply.result(0).path == "full"
    assert not engine._prefills, "nothing is computed twice"
    found = answer(engine, 3)
    assert found.path == "hit_device"
    assert same(found, job.reply.result(0))


def test_waiting_for_a_turn_is_what_makes_risk(runs, served, tmp_path, clock):
    trigger, known = TriggerConfig(budget_ms=20.0, lead_ms=35.0, burst_ms=1e9), costs(full=15, hit=1, pre=12)
    known.observe = lambda *_: None  # what it takes here is nothing to learn from
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=known, trigger=trigger)

    def said():
        job = hint(engine, 3, f"r{clock.now}")
        clock.now += 1
        settle(engine)
        return job.reply.result(0).reason

    assert said() == "not_at_risk"
    for user in range(40):
        late = rank(engine, user, slack_s=1.0)
        clock.now += 0.008
        settle(engine)
        assert late.reply.result(0).path in {"full", "hit_host"}
    engine.cache.invalidate()
    assert said() == "admitted"
    clock.now += 40
    assert said() in {"not_at_risk", "already_live"}, "what was long ago does not count"


def ranked_late(runs, served, tmp_path, clock, monkeypatch, *, signalled, wrap):
    """The engine after a request that comes too late for its prefix, with full inference wrapped."""
    trigger, known = TriggerConfig(budget_ms=9.0, lead_ms=35.0, burst_ms=1e9), costs(full=10, hit=1, pre=12)
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=known, trigger=trigger)
    made = ServedModel.scores_and_prefixes
    monkeypatch.setattr(
        ServedModel, "scores_and_prefixes", lambda self, *asked: wrap(engine, partial(made, self, *asked))
    )
    if signalled:
        hint(engine, 3)
        engine._accept()
    job = rank(engine, 3, ITEMS, slack_s=0.011)
    settle(engine)
    assert job.reply.result(0).path == "full"
    return engine


@pytest.mark.parametrize("signalled", [False, True])
def test_what_cannot_be_kept_leaves_nothing_behind(runs, served, tmp_path, clock, monkeypatch, caplog, signalled):
    def broken(engine, make):
        return make()[0], lambda _: 1 / 0

    engine = ranked_late(runs, served, tmp_path, clock, monkeypatch, signalled=signalled, wrap=broken)
    assert "could not be kept" in caplog.text
    assert (len(engine.cache), engine.cache.device.reserved, engine.cache.host.reserved) == (0, 0, 0)


@pytest.mark.parametrize("signalled", [False, True])
def test_what_was_made_while_its_user_was_invalidated_is_dropped(runs, served, tmp_path, clock, monkeypatch, signalled):
    def interrupted(engine, make):
        engine.cache.invalidate(3)  # by another thread, in the middle of it
        return make()

    engine = ranked_late(runs, served, tmp_path, clock, monkeypatch, signalled=signalled, wrap=interrupted)
    assert not len(engine.cache), "a byte of the user came back"


@pytest.mark.parametrize("how", ["invalidated", "forgotten"])
def test_a_rank_that_waited_while_its_user_went_brings_nothing_back(runs, served, tmp_path, clock, how):
    """Its events were read before; what is made of them afterwards is of a user who is gone."""
    trigger, known = TriggerConfig(budget_ms=9.0, lead_ms=35.0, burst_ms=1e9), costs(full=10, hit=1, pre=12)
    engine = make_engine(runs("hstu"), tmp_path, clock=clock, served=served(), known=known, trigger=trigger)
    add(engine, "a", 3)
    job = rank(engine, 3, ITEMS, slack_s=0.011)
    engine._accept()
    if how == "invalidated":
        engine.cache.invalidate(3)
    else:
        EventLog(tmp_path / "events.log").rewrite(lambda event: event["user"] != 3)
        engine._refresh()
    settle(engine)
    assert job.reply.result(0).path == "full"
    assert not engine.cache.peek_user(3)


def test_a_prefill_whose_user_was_invalidated_is_forgotten(engine, clock):
    hint(engine, 3)
    engine._accept()
    engine._prefills.run()
    assert engine._prefills
    engine.cache.invalidate(3)
    clock.now += 1
    rank(engine, 5, ITEMS)
    engine._accept()
    assert not engine._prefills, "its events and what was made of them would wait until nobody else does"


def test_a_rank_that_is_refused_holds_nothing(engine):
    hint(engine, 3, "r", ttl_s=1000)
    settle(engine)
    assert engine._pinned
    job = rank(engine, 3, (10**9,), request="r")
    settle(engine)
    assert isinstance(job.reply.exception(0), DataError)
    assert not engine._pinned
