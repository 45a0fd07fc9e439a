"""The engine with a disk tier: the same scores, no read that cannot be afforded, and nothing left of who was forgotten."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from nestpipe.serve.config import TriggerConfig
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.latency_model import LatencySample, fit, measure_costs
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.prefix_store import PrefixStore
from nestpipe.serve.user_history import of_user, stored
from nestpipe.serve.versioned_worker import ModelVersions
from tests.serve.small_rankers import BEHIND, BLOCK, MAX_LEN, costs, hint, rank, settle
from tests.serve.test_engine import ITEMS, add, answer, asked_of, same


def ranked(engine, user, **fields):
    """The answer, after everything that it leaves behind was written."""
    found = answer(engine, user, **fields)
    engine.tiers.stored.flush()
    return found


def files(engine):
    return sorted(engine.tiers.stored.store.folder.glob("*/*"))


def young(engine):
    """A user whose window does not move for some events."""
    lengths = {user: asked_of(engine, user).num_events for user in range(50)}
    return next(user for user, length in lengths.items() if 12 < length < MAX_LEN - 2 * BEHIND)


def in_full(engine, user):
    """The oracle: no tier has anything of the user."""
    own = engine.histories.of(user)
    inputs = engine.versions.main.prepare(own, asked_of(engine, user).history.query_times.values[-1].item())
    (found,) = engine.versions.main.scores([inputs], [engine.versions.main.candidates(ITEMS, own)])
    return dict(zip(ITEMS, found.tolist(), strict=True))


def equal(found, truth, tolerance=1e-5):
    return max(abs(truth[item] - score) for item, score in zip(found.items, found.scores, strict=True)) <= tolerance


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
def test_every_tier_gives_the_scores_of_full_inference(opened, backbone):
    engine = opened(backbone)
    user = young(engine)
    full = ranked(engine, user)
    assert (full.path, len(files(engine))) == ("full", 1)
    assert ranked(engine, user).path == "hit_host"

    engine = opened(backbone)
    for _ in range(2):
        found = ranked(engine, user)
        assert found.path == "hit_store"
        assert found.prefix_len == asked_of(engine, user).num_events - 1
        assert same(found, full)
        engine.cache.invalidate()
    assert (engine.tiers.stored.store.counts["reads"], engine.cache.device.copies) == (2, 0)

    for number in range(BEHIND - 1):
        add(engine, f"a{number}", user, item=number, click=1, dwell=3.0, device=1)
    writes = engine.tiers.stored.store.counts["writes"]
    longer = ranked(engine, user)
    assert longer.path == "hit_store", "it is extended by what is behind"
    assert equal(longer, in_full(engine, user))
    assert not same(longer, full, 1e-3)
    assert engine.tiers.stored.store.counts["writes"] == writes
    add(engine, "b", user)
    assert ranked(engine, user).path == "extend"
    assert engine.tiers.stored.store.counts["writes"] == writes + 1, "as far behind as is written"
    assert equal(ranked(opened(backbone), user), in_full(engine, user))


def test_a_hint_reads_ahead_and_computes_only_what_is_behind(opened, monkeypatch):
    ranked(opened(), 3)
    engine = opened(trigger=TriggerConfig(mode="always", burst_ms=1e9))
    monkeypatch.setattr(ServedModel, "fill", lambda *_, **__: 1 / 0)
    hint(engine, 3)
    engine._accept()
    (task,) = engine._prefills
    task.reading.result(10)
    settle(engine)
    monkeypatch.undo()
    assert engine.cache.peek_user(3)
    found = ranked(engine, 3, request="r")
    assert found.path == "hit_device"
    assert equal(found, in_full(engine, 3))
    engine.cache.invalidate()
    add(engine, "a", 3)
    lengths, fill = [], ServedModel.fill
    monkeypatch.setattr(
        ServedModel, "fill", lambda self, i, kept, **k: lengths.append(kept) or fill(self, i, kept, **k)
    )
    hint(engine, 3, "s")
    engine._accept()
    next(iter(engine._prefills)).reading.result(10)
    settle(engine)
    assert [one.key.length for one in lengths] == [asked_of(engine, 3).num_events - 2]


def test_a_request_joins_a_read_and_gives_a_slow_one_up(opened, monkeypatch):
    ranked(opened(), 3)
    engine = opened()
    read, going = PrefixStore.read, threading.Event()
    monkeypatch.setattr(PrefixStore, "read", lambda self, *a: going.wait(10) and read(self, *a))
    monkeypatch.setattr(engine, "trigger", TriggerConfig(mode="always", burst_ms=1e9))
    hint(engine, 3)
    engine._accept()
    threading.Timer(0.001, going.set).start()
    found = ranked(engine, 3, request="r")
    assert found.path == "join"
    assert equal(found, in_full(engine, 3))
    engine.cache.invalidate()
    going.clear()
    hint(engine, 3, "s")
    engine._accept()
    late = rank(engine, 3, ITEMS, request="s")
    settle(engine)
    assert late.reply.result(0).path == "join", "a disk that hangs holds up no request: the prefix is computed"
    assert same(late.reply.result(0), found)
    going.set()


def test_no_request_starts_a_read_that_it_cannot_afford(opened):
    ranked(opened(), 3)
    slow = [LatencySample(k, n, n, ms) for n in (1, 9, 30) for k, ms in (("full", 10.0), ("hit", 1.0), ("pre", 8.0))]
    slow += [LatencySample("read", n, 0, 4.0) for n in (1, 9, 30)]
    engine = opened(known=fit(slow))
    store = engine.tiers.stored.store
    assert answer(engine, 3, slack_s=0.0049).path in {"shorter", "fallback"}, "4 ms of reading and 1 ms of a hit"
    assert not store.counts["reads"]
    assert answer(engine, 3, slack_s=0.0051).path == "hit_store"
    assert store.counts["reads"] == 1
    engine.cache.invalidate()
    costly = [one if one.kind != "read" else LatencySample("read", one.length, 0, 9.5) for one in slow]
    engine.versions.main.costs = fit(costly)
    assert answer(engine, 3).path == "full", "reading takes longer than computing"
    assert store.counts["reads"] == 1


def test_the_trigger_counts_reading_and_what_is_left_to_compute(opened):
    ranked(opened(), 3)
    trigger = TriggerConfig(budget_ms=20.0, lead_ms=35.0, burst_ms=60.0, rate_ms_per_s=1e-9)

    def reason(read_ms, user=3):
        known = [LatencySample(k, n, n, ms) for n in (9, 20, 30) for k, ms in (("full", 50.0), ("hit", 5.0))]
        known += [LatencySample("pre", n, n, float(n)) for n in (9, 20, 30)]
        known += [LatencySample("read", n, 0, read_ms) for n in (9, 20, 30)]
        engine = opened(known=fit(known), trigger=trigger)
        job = hint(engine, user)
        engine._accept()
        spent = 60.0 - engine._bucket.level(engine.clock())
        settle(engine)
        assert engine.counts["reason", job.reply.result(0).reason] == 1
        return job.reply.result(0).reason, spent

    assert reason(10.0) == ("admitted", pytest.approx(0.0, abs=0.5)), "nothing is left to compute"
    assert reason(10.0, user=4)[1] > 20.0
    assert reason(60.0)[0] == "too_late", "35 ms of lead and 15 ms of budget do not hide it"


# What would be wrong is not used.


def test_an_edited_history_finds_nothing_in_the_store_and_replaces_it(opened, log):
    engine = opened()
    ranked(engine, 3)
    late = int(log.times[log.offsets[3] : log.offsets[4]][-4] // 1000)
    engine = opened()
    engine.histories.add([{"id": "late", "user": 3, "item": 1, "time": late, "click": 1}], lambda _: None)
    found = ranked(engine, 3)
    assert found.path == "full", "an event in the middle changes every row behind it"
    again = ranked(opened(), 3)
    assert again.path == "hit_store", "what it has now is stored, although it is but one event longer"
    assert same(found, again)


def test_an_edited_action_and_another_user_find_nothing(opened, log):
    first = int(log.offsets[3])

    def history(num_events, *, edited, user=3):
        events = stored(log, np.arange(first, first + num_events))
        if edited:
            events.features["click"].values[5] = 1 - events.features["click"].values[5]
        return of_user(log, user, events)

    ranked(opened(), 3, history=history(20, edited=False))
    for num_events in (20, 21):
        assert answer(opened(), 3, history=history(num_events, edited=True)).path == "full"
    assert answer(opened(), 4, history=history(20, edited=False, user=4)).path == "full"


def test_a_slid_window_finds_nothing(opened):
    engine = opened()
    paths = {}
    for number in range(2 * BLOCK):
        add(engine, f"e{number}", 3, item=number)
        length, before = asked_of(engine, 3).num_events, len(paths)
        found = ranked(engine, 3)
        paths[before] = (length, found.path)
        assert equal(found, in_full(engine, 3))
        engine.cache.invalidate()
    lengths = [length for length, _ in paths.values()]
    slid = [place for place in range(1, len(lengths)) if lengths[place] < lengths[place - 1]]
    assert slid
    assert all(paths[place][1] == "full" for place in slid)
    assert all(paths[place][1] == "hit_store" for place in paths if place and place not in slid)
    assert max(lengths) == MAX_LEN


def test_other_weights_find_nothing_and_their_files_go(opened, clock):
    engine = opened()
    ranked(engine, 3)
    old, main = engine.versions.main.ranker, engine.versions.main
    changed = type(old)(old.model, old._rows, weights="another digest", schema="")
    new = ServedModel(changed, main._builder, main.known, name="new", block=BLOCK)
    new.costs = costs()
    (before,) = files(engine)
    engine.use(ModelVersions(new))
    found = ranked(engine, 3)
    assert (found.path, found.model) == ("full", "new")
    assert len(files(engine)) == 2, "the old model may still serve requests in flight"
    del main
    engine = opened(served=new)
    clock.now += 1
    engine._refresh()
    assert before not in files(engine)
    assert not before.parent.exists()


def test_a_flipped_byte_is_a_miss_and_never_a_wrong_score(opened):
    engine = opened()
    truth = ranked(engine, 3)
    (path,) = files(engine)
    content = path.read_bytes()
    for place in (-1, -200, len(content) // 2, 700):
        engine = opened()
        damaged = bytearray(content)
        damaged[place] ^= 64
        path.write_bytes(damaged)
        found = ranked(engine, 3)
        assert same(found, truth)
        assert (found.path, engine.tiers.stored.store.counts["corrupt"]) == ("full", 1)
        assert path.read_bytes() != bytes(damaged), "what was computed is stored instead"


# Near-line.


def grow(engine, user, count, *, name="n"):
    for number in range(count):
        add(engine, f"{name}{number}", user, item=number)


def test_events_that_arrive_extend_what_is_stored_while_nothing_waits(opened):
    engine = opened(trigger=TriggerConfig(mode="always", burst_ms=1e9))
    engine.nearline.request([3])
    settle(engine)
    engine.tiers.stored.flush()
    user_key = engine.tiers.stored.store.peek(engine.versions.main.ranker.made_by, 3).key
    assert user_key == asked_of(engine, 3).key
    assert not len(engine.cache), "memory is for requests"
    grow(engine, 3, BEHIND - 1)
    grow(engine, 5, BEHIND + 3, name="other")
    engine._refresh()
    assert not len(engine.nearline), "one is not far enough behind, the other is not stored"
    add(engine, "last", 3)
    engine._refresh()
    settle(engine)
    engine.tiers.stored.flush()
    assert engine.nearline.counts["stored"] == 2
    found = answer(engine, 3)
    assert found.path == "hit_store"
    assert equal(found, in_full(engine, 3))


def test_a_rank_goes_before_near_line_work_and_the_rate_is_kept(opened, clock):
    engine = opened(trigger=TriggerConfig(mode="always", burst_ms=1e9, nearline_ms_per_s=1e-3))
    engine.nearline.request(range(20))
    job = rank(engine, 3, ITEMS)
    assert engine.step()
    assert job.reply.done()
    assert len(engine.nearline) == 20
    while engine.step():
        pass
    assert len(engine.nearline) >= 18, "one chunk has used the rate up"
    engine.nearline.limit(1e9)
    settle(engine)
    assert not len(engine.nearline)
    assert engine.nearline.counts["stored"] + engine.nearline.counts["passed_over"] == 20
    engine.nearline.limit(0)
    engine.nearline.request([30])
    assert not engine.step(), "switched off"


def test_a_folder_that_has_grown_extends_what_is_stored(opened):
    engine = opened()
    ranked(engine, 3)
    grow(engine, 3, BEHIND)
    engine = opened()
    engine._refresh()
    assert len(engine.nearline) == 1, "events that came while no process ran"
    settle(engine)
    engine.tiers.stored.flush()
    found = answer(engine, 3)
    assert (found.path, found.prefix_len) == ("hit_store", asked_of(engine, 3).num_events - 1)


def test_short_histories_cause_no_traffic(opened, monkeypatch):
    """Where a hit saves less than half, nothing is written, looked for or extended."""
    engine = opened(known=costs(full=10.0, hit=6.0), trigger=TriggerConfig(mode="always", burst_ms=1e9))
    digests, beginning = [], engine.versions.main.ranker.beginning
    monkeypatch.setattr(engine.versions.main.ranker, "beginning", lambda *a: digests.append(1) or beginning(*a))
    for user in range(4):
        hint(engine, user, f"r{user}")
        settle(engine)
        ranked(engine, user, request=f"r{user}")
    engine.nearline.request(range(4))
    settle(engine)
    assert (files(engine), digests, engine.nearline.counts["passed_over"]) == ([], [], 4)
    few = opened()
    own = few.histories.sequences
    ranked(few, 8, history=of_user(own, 8, stored(own, np.arange(BEHIND)).in_time_order()))
    assert files(few) == [], "three events of a prefix"


# Privacy.


def test_invalidating_leaves_no_byte_on_disk(opened):
    engine = opened()
    ranked(engine, 3)
    ranked(engine, 4)
    assert engine.invalidate(3) == 2, "one on the host, one on disk"
    assert [path.stem for path in files(engine)] == ["4"]
    assert not engine.cache.peek_user(3)


@pytest.mark.parametrize("how", ["log", "service", "meanwhile"])
def test_forgetting_leaves_no_byte_on_disk(opened, tmp_path, how, clock):
    engine = opened()
    grow(engine, 10**6, 12)
    gone = {10**6} if how == "log" else {3, 10**6}
    for user in gone | {4}:
        ranked(engine, user)
    assert len(files(engine)) == len(gone) + 1
    if how == "log":  # as 'nestpipe forget' does; it removes the files of users of the folder itself
        EventLog(tmp_path / "events.log").rewrite(lambda event: event["user"] != 10**6)
    else:
        for user in gone:
            engine.histories.forget(user)
    if how == "meanwhile":
        engine = opened()
    engine._refresh()
    assert [path.stem for path in files(engine)] == ["4"], "what is left is who was not forgotten"


def test_work_in_flight_brings_nothing_back(opened, monkeypatch):
    engine = opened()
    engine.nearline.request([3])
    fill = ServedModel.fill

    def interrupted(self, *arguments, **options):
        engine.invalidate(3)
        return fill(self, *arguments, **options)

    monkeypatch.setattr(ServedModel, "fill", interrupted)
    while engine.nearline.run():
        pass
    engine.tiers.stored.flush()
    assert files(engine) == []


# Many requests.


def test_after_a_restart_the_first_requests_hit_as_often_as_before(opened):
    def share(engine, count):
        paths = [ranked(engine, user % 40).path for user in range(0, 3 * count, 3)]
        return sum(path != "full" for path in paths) / len(paths)

    first = opened()
    assert share(first, 40) == 0.0
    before = share(first, 40)
    assert share(opened(), 100) == before == 1.0


def test_disk_and_memory_stay_bounded(opened, scale):
    """Room for five of a hundred users on disk, two in each memory tier."""
    size = 31 * 136
    engine = opened(cap=10 * 4096, device_bytes=2 * size, host_bytes=2 * size)
    most, count, start = 0, scale(120, 10_000), None
    for number in range(count):
        ranked(engine, number * 7 % 100)
        most = max(most, sum(path.stat().st_size for path in files(engine)))
        if number == count // 3:
            start = private_bytes()
    engine.tiers.stored.store.check()
    engine.cache.check()
    assert 0 < most <= 10 * 4096
    assert engine.tiers.stored.store.counts["evicted"] > count // 10
    assert private_bytes() - start < 8 << 20


def private_bytes():
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def test_measured_costs_have_reads_and_leave_no_file(opened, served):
    engine = opened()
    store = engine.tiers.stored.store
    found = measure_costs(served(), engine.histories, chunk=8, store=store, num_candidates=8, repeats=1)
    assert found.read_ms(30) > 0 == found.read_ms(0)
    assert files(engine) == []
