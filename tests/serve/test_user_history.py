"""Histories: what was ingested, what came since, what a caller sends; nothing twice, nothing lost, nothing after forgetting."""

from __future__ import annotations

import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nestpipe.data.batch_builder import BatchBuilder, ModelInputs
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError
from nestpipe.serve import event_log
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.user_history import UserHistories, without_event
from nestpipe.state.service_state import FileState
from tests.serve.small_rankers import ASKED


@pytest.fixture
def histories(log, tmp_path):
    return open_histories(log, tmp_path)


def open_histories(log, folder):
    return UserHistories(log, FileState(folder / "events.log"))


def event(name, user=3, item=5, time=ASKED, **features):
    return {"id": str(name), "user": user, "item": item, "time": time, **features}


def fine(_):
    pass


def add(histories, events, check=fine):
    """How many are stored, and how many were known; raises the first error."""
    results = histories.add(events, check)
    for one in results:
        if isinstance(one, DataError):
            raise one
    return results.count("stored"), results.count("duplicate")


def whole(log, user):
    place = int(np.searchsorted(log.users, user))
    return slice(*log.offsets[place : place + 2].tolist())


def test_a_history_is_what_the_folder_has(log, histories):
    for user in log.users[:10]:
        mine = whole(log, user)
        found = histories.of(int(user))
        assert (found.items == log.items[mine]).all()
        assert (found.times == log.times[mine]).all()
        assert found.users.tolist() == [user]
        device, own = log.event_features["device"], found.event_features["device"]
        assert own.offsets[-1] == len(own.values)
        assert (own.values == device.values[device.offsets[mine.start] : device.offsets[mine.stop]]).all()


def test_a_user_that_nobody_knows_has_an_empty_history(histories):
    found = histories.of(10**12)
    assert len(found.items) == 0
    assert found.user_features["segment"].offsets.tolist() == [0, 0]


def test_an_event_is_left_out_with_its_features(histories):
    """As if it had never been sent: an explanation scores what is left."""
    sent = [{"item": 3, "time": 5, "device": 2}, {"item": 4, "time": 6}, {"item": 5, "time": 7, "device": 1}]
    for place in range(3):
        found = without_event(histories.given(3, sent), place)
        wanted = histories.given(3, sent[:place] + sent[place + 1 :])
        assert found.offsets.tolist() == wanted.offsets.tolist() == [0, 2]
        assert (found.items.tolist(), found.times.tolist()) == (wanted.items.tolist(), wanted.times.tolist())
        for name, own in wanted.event_features.items():
            assert found.event_features[name].values.tolist() == pytest.approx(own.values.tolist(), nan_ok=True)
            if own.offsets is not None:
                assert found.event_features[name].offsets.tolist() == own.offsets.tolist()


def test_new_events_are_seen_at_once_and_each_id_once(log, histories, tmp_path):
    before = len(log.items[whole(log, 3)])
    assert add(histories, [event("a", click=1, dwell=2.5, device=1), event("b", item=7), event("a", item=9)]) == (
        2,
        1,
    )
    assert add(histories, [event("b", item=8), event("c", user=10**12)]) == (1, 1)
    found = histories.of(3)
    assert len(found.items) == before + 2
    assert found.items[-2:].tolist() == [5, 7]
    assert found.times[-1] == ASKED * 1000
    assert found.event_features["dwell"].values[-2] == 2.5
    assert np.isnan(found.event_features["dwell"].values[-1])
    assert found.event_features["device"].offsets[-3:].tolist() == [len(found.items) - 2] + [len(found.items) - 1] * 2
    assert histories.of(10**12).items.tolist() == [5]
    again = open_histories(log, tmp_path)
    assert again.of(3).items.tolist() == found.items.tolist(), "a new process reads the same"
    assert add(again, [event("c")]) == (0, 1)


def test_an_event_that_comes_late_stands_in_time_order(log, histories):
    mine = log.times[whole(log, 3)]
    middle = int(mine[len(mine) - 3] // 1000) + 1
    add(histories, [event("late", item=1, time=middle), event("new", item=2), event("same", item=3)])
    found = histories.of(3)
    assert (np.diff(found.times) >= 0).all()
    assert found.items[-2:].tolist() == [2, 3], "equal times keep the order in which they came"
    assert found.items[found.times.tolist().index(middle * 1000)] == 1


def test_a_sent_history_is_read_like_a_stored_one(log, histories):
    mine, stored = whole(log, 3), histories.of(3)
    device = log.event_features["device"]
    sent = [
        {
            "item": int(log.items[n]),
            "time": int(log.times[n] // 1000),
            "click": float(log.event_features["click"].values[n]),
            "dwell": None
            if np.isnan(log.event_features["dwell"].values[n])
            else float(log.event_features["dwell"].values[n]),
            "hour": float(log.event_features["hour"].values[n]),
            "device": int(device.values[device.offsets[n]]),
        }
        for n in range(mine.start, mine.stop)
    ]
    found = histories.given(3, sent)
    assert (found.items == stored.items).all()
    for name, one in found.event_features.items():
        assert np.array_equal(one.values, stored.event_features[name].values, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": "x"}, "'item' is 'x'"),
        ({"item": True}, "'item' is True"),
        ({"item": 2**63}, "must be a whole number"),
        ({"time": -1}, "'time' is -1"),
        ({"time": None}, "'time' is None"),
        ({"click": "yes"}, "'click' has 'yes'"),
        ({"click": 1e39}, "finite numbers"),
        ({"device": 1.5}, "'device' is 1.5"),
        ({"device": [1]}, "it takes id as whole numbers"),
        ({"colour": 1}, "has 'colour', which the log does not have"),
    ],
)
def test_an_event_that_cannot_be_read_is_refused_and_spoils_no_other(histories, change, message):
    sent = [event("good"), event("bad", **change), event("bad"), event("after", item=7), event("good", **change)]
    stored, bad, again, after, known = histories.add(sent, fine)
    assert (stored, after, known) == ("stored", "stored", "duplicate")
    assert re.search(message, str(bad))
    assert again is bad, "the id belongs to the event that was refused"
    assert histories.of(3).items[-2:].tolist() == [5, 7]
    assert add(histories, [event("good"), event("bad")]) == (1, 1)


def test_what_a_model_cannot_read_is_refused_before_it_is_kept(histories):
    def check(events):
        if 999 in events.items:
            raise DataError("no model reads item 999")

    assert [str(one) for one in histories.add([event("a", item=999), event("b")], check)] == [
        "no model reads item 999",
        "stored",
    ]
    assert histories.of(3).items[-1] == 5


def test_an_item_that_the_catalogue_does_not_have_is_kept_and_its_features_are_missing(log, histories):
    builder = BatchBuilder(log, None, ModelInputs(features=("tags",), labels=("clicked",)), statistics={})
    check = lambda one: builder.over(one).item_features(one.items)  # noqa: E731
    assert add(histories, [event("unknown", item=999)], check) == (1, 0)
    with pytest.raises(DataError, match=r"item 999 .* is not in the catalogue"):
        builder.item_features(histories.of(3).items)
    found = builder.over(histories.of(3)).item_features(histories.of(3).items)
    assert found["tags"].lengths()[-1] == 0


def test_readers_do_not_wait_for_a_writer(histories, monkeypatch):
    """The disk may take long: ranks look at histories, and take in what others wrote, meanwhile."""
    inside, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(file):
        inside.set()
        assert go_on.wait(30)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(2) as threads:
        written = threads.submit(add, histories, [event("a", item=6)])
        assert inside.wait(30)
        read = threads.submit(lambda: (histories.refresh(), histories.given(3, []), histories.of(3)))
        try:
            read.result(10)
        finally:
            go_on.set()
        assert written.result(30) == (1, 0)
    assert histories.of(3).items[-1] == 6
    assert len(histories._new[3]) == 1, "the event is there once, whoever took it in"


@pytest.mark.parametrize("failing", ["Sequences.open", "parse_events"])
def test_what_could_not_be_taken_in_is_taken_in_later(log, tmp_path, monkeypatch, failing):
    shutil.copytree(log.path, tmp_path / "log")
    one, other = (open_histories(Sequences.open(tmp_path / "log"), tmp_path) for _ in range(2))
    add(other, [event("a", item=6)])
    assert EventLog(tmp_path / "events.log").rewrite(lambda _: True) == 0
    os.utime(tmp_path / "log" / "meta.json", ns=(1, 1))
    monkeypatch.setattr(f"nestpipe.serve.user_history.{failing}", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.refresh()
    monkeypatch.undo()
    assert one.num_removals == 0
    one.refresh()
    assert one.num_removals == 2
    assert one.of(3).items[-1] == 6
    assert add(one, [event("a")]) == (0, 1)


# The file.


def test_a_record_that_was_cut_off_is_taken_away_at_every_length(log, tmp_path):
    first = open_histories(log, tmp_path)
    add(first, [event("a")])
    path = tmp_path / "events.log"
    before = path.read_bytes()
    add(first, [event("b", item=6)])
    after = path.read_bytes()
    for cut in range(len(before) + 1, len(after), 7):
        path.write_bytes(after[:cut])
        again = open_histories(log, tmp_path)
        assert again.of(3).items[-1] == 5
        assert add(again, [event("b", item=6), event("c", item=7)]) == (2, 0)
        assert open_histories(log, tmp_path).of(3).items[-3:].tolist() == [5, 6, 7]
    path.write_bytes(after[:-4] + b"\0\0\0\0")  # the size was written, the last block was not
    assert add(open_histories(log, tmp_path), [event("b")]) == (1, 0)


def test_damage_before_the_end_is_an_error_that_says_where(log, tmp_path):
    histories = open_histories(log, tmp_path)
    for name in "abc":
        add(histories, [event(name)])
    path = tmp_path / "events.log"
    data = bytearray(path.read_bytes())
    second = data.find(b"NPEV", 1)
    for place in (second, second + 5, second + 20):  # its mark, its length, its content
        broken = bytearray(data)
        broken[place] ^= 0xFF
        path.write_bytes(broken)
        with pytest.raises(DataError, match=rf"damaged at byte {second}.*whole records follow"):
            open_histories(log, tmp_path)
        with pytest.raises(DataError, match=rf"damaged at byte {second}"):
            EventLog(path).rewrite(lambda one: one["user"] != 3)
        assert path.read_bytes() == broken, "what stands behind the damage is not thrown away"


def test_damage_is_found_in_a_log_that_was_rewritten_too(log, tmp_path):
    """In one record it would look like an end that was cut off, and the next writer would take all of it away."""
    histories, path = open_histories(log, tmp_path), tmp_path / "events.log"
    for name in "abc":
        add(histories, [event(name), event(f"{name}2", user=5)])
    assert EventLog(path).rewrite(lambda one: one["user"] != 5) == 3
    data = bytearray(path.read_bytes())
    data[data.find(b"NPEV", 1) + 20] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged at byte"):
        open_histories(log, tmp_path)


def test_a_read_that_brings_less_than_was_asked_for_goes_on(log, tmp_path, monkeypatch):
    one, other = (open_histories(log, tmp_path) for _ in range(2))
    for name in "abc":
        add(one, [event(name)])
    pread = os.pread
    monkeypatch.setattr(event_log.os, "pread", lambda file, size, begin: pread(file, min(size, 100), begin))
    add(other, [event("d")])
    assert (tmp_path / "events.log").read_bytes().count(b"NPEV") == 4


def test_instances_of_a_run_see_each_others_events(log, tmp_path):
    one, other = (open_histories(log, tmp_path) for _ in range(2))
    add(one, [event("a", item=6)])
    other.refresh()
    assert other.of(3).items[-1] == 6
    assert add(other, [event("a", item=7)]) == (0, 1)
    add(other, [event("b", item=8)])
    one.refresh()
    assert one.of(3).items[-2:].tolist() == [6, 8]


def test_a_log_without_times_takes_events_in_their_order(tmp_path):
    from tests.small_runs import write_log

    log = write_log(tmp_path / "log", {1: [4, 5, 6], 2: [4]}, times=False)
    histories = open_histories(log, tmp_path)
    add(histories, [{"id": "a", "user": 1, "item": 9}])
    assert histories.of(1).items.tolist() == [4, 5, 6, 9]
    with pytest.raises(DataError, match="has 'time', which the log does not have"):
        add(histories, [event("b")])


def test_after_a_rewrite_readers_start_again(log, tmp_path):
    reader, writer = open_histories(log, tmp_path), EventLog(tmp_path / "events.log")
    add(reader, [event("a", user=3, item=6), event("b", user=4, item=7)])
    before = reader.num_removals
    assert writer.rewrite(lambda one: one["user"] != 3) == 1
    reader.refresh()
    assert reader.num_removals == before + 1
    assert reader.of(3).items[-1] != 6 or len(reader.of(3).items) == len(open_histories(log, tmp_path).of(3).items)
    assert reader.of(4).items[-1] == 7
    assert add(reader, [event("b", user=4)]) == (0, 1)
    assert b'"user":3' not in (tmp_path / "events.log").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.log", "events.log.lock", "state.log"]


def test_a_sequence_folder_that_is_replaced_is_read_again(log, tmp_path):
    shutil.copytree(log.path, tmp_path / "log")
    own = Sequences.open(tmp_path / "log")
    histories = open_histories(own, tmp_path)
    shutil.copytree(log.path, tmp_path / "other")
    (tmp_path / "log").rename(tmp_path / "away")
    histories.refresh()
    (tmp_path / "other").rename(tmp_path / "log")
    histories.refresh()
    assert histories.num_removals == 1
