"""Events of a service join a sequence folder once: whatever is repeated, and wherever the append was cut."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from nestpipe.data.append_events import append_events
from nestpipe.data.event_ids import HeldEvents, event_digest
from nestpipe.data.ingest import SideTable, write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import FileState
from nestpipe.state.stored_events import StoredEvents

SCHEMA = Schema(
    user="who",
    time_unit="ms",
    user_encoding="dictionary",
    item_encoding="dictionary",
    features=(
        Feature(name="device", kind="id", encoding="dictionary"),
        Feature(name="tags", kind="ids", encoding="dictionary", weights="strength", column="labels"),
        Feature(name="seconds", kind="number"),
        Feature(name="place", kind="vector", dim=2),
        Feature(name="brand", kind="id", scope="item", encoding="dictionary"),
    ),
)
RECORDS = [
    {"who": "ann", "item": "a", "time": 1_000_000, "device": "tv", "labels": "x|y", "strength": "1|2", "seconds": 1.5},
    {"who": "ann", "item": "b", "time": 2_000_000, "device": None, "labels": None, "strength": None, "seconds": None},
    {"who": "bob", "item": "b", "time": 1_500_000, "device": "app", "labels": "y", "strength": "3", "seconds": 2.0},
]


class GrownSource(StoredEvents):
    """A log whose service has numbered new texts, and stored content."""

    def texts(self):
        return {"user": {7: "cleo"}, "item": {2: "new"}, "brand": {5: "acme"}}

    def next_numbers(self):
        return {"user": 8, "item": 3, "brand": 6}

    def items(self):
        return {2: {"brand": 5}}


@pytest.fixture
def folder(tmp_path):
    log = pl.DataFrame([{**one, "place": "0.5|1"} for one in RECORDS])
    items = SideTable(source=pl.DataFrame({"item": ["a", "b"], "brand": ["one", "two"]}), key="item")
    return write_sequences(tmp_path / "data", schema=SCHEMA, log=log, items=items).path


@pytest.fixture
def log(tmp_path):
    return EventLog(tmp_path / "serve" / "events.log")


def event(number, user, item, time, **features):
    return {"id": f"e{number}", "user": user, "item": item, "time": time, **features}


def write(log, *events):
    with log.writing(), log.news():
        pass
    with log.writing():
        log.append(list(events))


def history(sequences, user):
    place = int(np.searchsorted(sequences.users, user))
    own = slice(*sequences.offsets[place : place + 2].tolist())
    return sequences.vocabulary("item").own_ids(sequences.items[own])


def test_events_join_with_their_features_new_users_and_items(folder, log):
    old = Sequences.open(folder)
    tags = old.vocabulary("tags")
    first = event(1, 0, 1, 3000, device=1, tags=[tags.number_of("y")], seconds=9.0, place=[1.0, 2.0])
    write(log, {**first, "tags.weights": [0.5]}, event(2, 7, 2, 2500))
    found = append_events(folder, GrownSource(FileState(log.path)))
    new = found.sequences
    assert (found.num_new, found.num_held, found.num_nameless, found.num_removed) == (2, 0, 0, 2)
    assert new.users.tolist() == [0, 1, 7]  # numbers as the service has given them
    assert new.vocabulary("user").own_ids(new.users) == ["ann", "bob", "cleo"]
    assert history(new, 0) == ["a", "b", "b"]
    assert history(new, 7) == ["new"]
    assert new.times[2] == 3_000_000
    stored = new.event_features["tags"]
    last = slice(*stored.offsets[2:4].tolist())
    assert (stored.values[last].tolist(), stored.weights[last].tolist()) == ([tags.number_of("y")], [0.5])
    assert new.event_features["seconds"].values[2] == 9.0
    assert new.event_features["place"].values[2].tolist() == [1.0, 2.0]
    brand = new.item_features["brand"]
    assert new.vocabulary("brand").own_ids(brand.values[brand.offsets[2] : brand.offsets[3]]) == ["acme"]
    assert new.grew_from(old.digest)
    new.verify()


def test_an_event_is_counted_once_also_after_a_crash_and_when_it_comes_again(folder, log, monkeypatch):
    write(log, event(1, 0, 1, 3000), event(2, 1, 0, 3000))

    def full(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(EventLog, "rewrite", full)
        with pytest.raises(OSError, match="full"):
            append_events(folder, StoredEvents(FileState(log.path)))  # published, but not compacted
    served = UserHistories(Sequences.open(folder), FileState(log.path))
    assert [served.num_events(user) for user in (0, 1)] == [3, 2]
    found = append_events(folder, StoredEvents(FileState(log.path)))
    assert (found.num_new, found.num_held, found.num_removed) == (0, 2, 2)
    assert len(found.sequences.items) == 5
    assert served.add([event(1, 0, 1, 3000), event(3, 0, 0, 4000)], lambda events: None) == ["duplicate", "stored"]
    assert append_events(folder, StoredEvents(FileState(log.path))).num_new == 1
    assert len(Sequences.open(folder).items) == 6
    assert event_digest("e3") in HeldEvents.of(folder)


def test_a_running_service_counts_each_event_once_while_the_folder_grows(folder, log):
    served = UserHistories(Sequences.open(folder), FileState(log.path))
    served.add([event(1, 0, 1, 3000), event(2, 9, 0, 3000)], lambda events: None)
    assert [served.num_events(user) for user in (0, 9)] == [3, 1]
    source = StoredEvents(FileState(log.path))
    append_events(folder, source, compact=False)  # user 9 has no text, so their event stays in the log
    served.refresh()
    assert served.of(0).items.tolist() == [0, 1, 1]
    assert [served.num_events(user) for user in (0, 9)] == [3, 1]
    served.add([event(3, 0, 0, 5000)], lambda events: None)
    assert served.of(0).items.tolist() == [0, 1, 1, 0]
    found = append_events(folder, source)
    assert (found.num_nameless, found.num_removed) == (1, 2)
    served.refresh()
    assert [served.num_events(user) for user in (0, 9)] == [4, 1]
    again = UserHistories(Sequences.open(folder), FileState(log.path))
    assert [again.num_events(user) for user in (0, 9)] == [4, 1]
