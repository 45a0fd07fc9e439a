"""Events and requests of a service name users, items and values as the log does."""

from __future__ import annotations

import re

import pytest

from nestpipe.cli import main
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.rng import hash_text
from nestpipe.serve.new_ids import NewIds
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.state.living_data import LivingData
from nestpipe.state.service_state import FileState


@pytest.fixture
def ids(tmp_path):
    rows = ["anna,lamp,1,home,,red|blue", "anna,rug,2,cart,lamp,red", "bo,bed,3,home,rug,"]
    (tmp_path / "log.csv").write_text("user,item,time,page,looked_at,colours\n" + "\n".join(rows) + "\n")
    features = ("scenario:id:event:column=page:encoding=dictionary", "trigger:id:event:column=looked_at:encoding=item")
    features += ("colours:ids:event:encoding=hash",)
    flags = [word for one in features for word in ("--feature", one)]
    encodings = ["--user-encoding", "dictionary", "--item-encoding", "dictionary"]
    assert main(["data", "ingest", str(tmp_path / "log.csv"), *encodings, *flags, "--out", str(tmp_path / "data")]) == 0
    sequences = Sequences.open(tmp_path / "data")
    return ServiceIds(lambda: sequences)


def test_new_ids_get_lasting_numbers_and_only_those_that_are_used_are_stored(ids, tmp_path):
    state = FileState(tmp_path / "state" / "events.log")
    living = LivingData(state.changes)
    own = ServiceIds(ids._sequences, living)
    with state.writing():
        living.refresh()
        new = NewIds(own, state)
        events = [
            new.event(place, {"user": user, "item": "sofa", "time": 9, "colours": ["green", "red"], "scenario": page})
            for place, (user, page) in enumerate([("bo", "cart"), ("cleo", "search"), ("dan", "start")])
        ]
        new.store([0, 1])  # the third was refused
    assert [(one["user"], one["item"], one["scenario"]) for one in events[:2]] == [(1, 3, 0), (2, 3, 2)]
    assert events[0]["colours"] == [hash_text("green"), hash_text("red")]
    living.refresh()
    tables = {
        "item": {3: "sofa"},
        "colours": {hash_text("green"): "green"},
        "user": {2: "cleo"},
        "scenario": {2: "search"},
    }
    assert living.ids.tables() == tables
    assert own.own_users([2, 0]) == ["cleo", "anna"]
    assert (own.user("dan") < 0, own.next_number("user"), own.next_number("item")) == (True, 3, 4)
    assert own.event({"user": "cleo", "item": "sofa", "time": 9, "scenario": "search"})["scenario"] == 2
    living.ids.add({"of": "item", "number": 1, "text": "not a lamp"})
    with pytest.raises(ConfigError, match=r"number 1 of 'item' is 'lamp'.*'not a lamp' in the state"):
        ServiceIds(ids._sequences, living)


def test_an_event_is_read_as_ingest_reads_it(ids):
    event = {"user": "bo", "item": "rug", "time": 9, "scenario": " cart ", "trigger": "lamp", "colours": ["blue"]}
    found = ids.event(event)
    assert (found["user"], found["item"], found["scenario"], found["trigger"]) == (1, 2, 0, 1)
    assert found["colours"] == [hash_text("blue")]
    assert ids.event({**event, "trigger": "", "scenario": None})["trigger"] is None
    assert ids.own_items([1, 2]) == ["lamp", "rug"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenario": "search"}, "scenario 'search' is not among the 2 values of the log: cart, home."),
        ({"trigger": 2.5}, "trigger is '2.5'; it must be a whole number or a text, as in the log."),
    ],
)
def test_a_value_that_the_log_does_not_have_is_refused_by_name(ids, change, message):
    with pytest.raises(DataError, match=re.escape(message)):
        ids.event({"user": "bo", "item": "rug", "time": 9, **change})


def test_items_and_users_that_nobody_knows_pass_with_numbers_of_their_own(ids):
    """Of a request: nothing is stored, so they must not meet anything of the log, and names come back in explanations."""
    event = ids.event({"user": "cleo", "item": "sofa", "time": 9, "trigger": "pouffe"})
    assert all(event[name] < 0 for name in ("user", "item", "trigger"))
    assert event["user"] == ids.user("cleo")
    assert ids.own_items([event["item"], 1, event["trigger"]]) == ["sofa", "lamp", "pouffe"]
    assert ids.items(["sofa", "lamp"])[1] == ["sofa"], "the catalogue does not have it"
