"""One contract for both backends of the state: what is acknowledged is there, once, for every reader, in one order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from nestpipe.errors import ConfigError
from nestpipe.state import postgres
from nestpipe.state.erase_entries import erase_entries, number_in
from nestpipe.state.living_data import LivingData
from nestpipe.state.service_state import StateAwayError, open_state

BACKENDS = ("files", "postgres")
_WRITER = """
import sys
from pathlib import Path
from nestpipe.state.grown_ids import GrownIds
from nestpipe.state.service_state import open_state
state, ids = open_state(sys.argv[1], Path(sys.argv[2]) / "events.log"), GrownIds()
for number in range(10_000):
    with state.writing():
        with state.changes.news() as (_, changes), state.events.news():
            for one in changes:
                ids.add(one)
        text = f"{sys.argv[3]}.{number}"
        taken = state.take_numbers("item", at_least=ids.next_number("item"), count=1)
        state.changes.append([{"of": "item", "number": taken, "text": text}])
        state.events.append([{"id": f"{text}/{part}", "user": 1} for part in range(3)])
    print(number, flush=True)
"""


@pytest.fixture(params=BACKENDS)
def opened(request, tmp_path):
    """Opens the state of a test again and again, as processes do."""
    made = []
    url = "" if request.param == "files" else request.getfixturevalue("server").empty()

    def open_again():
        made.append(open_state(url, tmp_path / "events.log"))
        return made[-1]

    open_again.url, open_again.folder = url, tmp_path
    yield open_again
    for one in made:
        one.close()


def read(log):
    with log.news() as (is_other, entries):
        return is_other, entries


def write(state, events=(), changes=()):
    with state.writing():
        read(state.events), read(state.changes)
        if changes:
            state.changes.append(list(changes))
        if events:
            state.events.append(list(events))


def soon(found, wanted, *, seconds=1.0):
    """Waits at most as long as the contract allows, and returns what it finds then."""
    end = time.monotonic() + seconds
    while (now := found()) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return now


class Reader:
    """Everything that a reader has read."""

    def __init__(self, state):
        self.state, self.events, self.changes = state, [], []

    def all(self):
        for log, found in ((self.state.events, self.events), (self.state.changes, self.changes)):
            if log.has_news():
                is_other, entries = read(log)
                found[:] = entries if is_other else found + entries
        return self.events, self.changes


def test_readers_see_what_was_written_in_one_order_within_a_second(opened):
    writers, reader = [opened(), opened()], Reader(opened())
    for number in range(6):
        write(writers[number % 2], [{"id": f"e{number}"}], [{"item": number, "available": True, "content": {}}])
    events, changes = (
        [{"id": f"e{n}"} for n in range(6)],
        [{"item": n, "available": True, "content": {}} for n in range(6)],
    )
    assert soon(reader.all, (events, changes)) == (events, changes)
    assert Reader(opened()).all() == (events, changes), "a new process reads the same"
    assert read(reader.state.events) == (False, [])
    assert not reader.state.events.has_news()
    with reader.state.writing():
        assert reader.state.events.has_news() == bool(opened.url), "a writer asks the database"


def test_news_that_could_not_be_used_come_again(opened):
    writer, reader = opened(), opened()
    write(writer, [{"id": "a"}])
    soon(lambda: bool(reader.events.arrived) if opened.url else True, True)
    with pytest.raises(OSError), reader.events.news() as (_, entries):
        raise OSError(entries)
    assert read(reader.events) == (False, [{"id": "a"}])


def test_what_fails_inside_writing_leaves_nothing_in_the_database(opened):
    state = opened()

    def fail():
        with state.writing():
            read(state.events)
            if opened.url:  # a file has it at once; then the writer must fail before
                state.events.append([{"id": "a"}])
            raise OSError

    with pytest.raises(OSError):
        fail()
    write(state, [{"id": "b"}])
    assert Reader(opened()).all()[0] == [{"id": "b"}]


def test_removed_entries_are_gone_and_readers_begin_again(opened):
    writer, reader = opened(), Reader(opened())
    write(writer, [{"id": "a", "user": 1}, {"id": "b", "user": 2}], [{"user": 1, "features": {}}])
    assert len(soon(lambda: len(reader.all()[0]) and reader.events, reader.events)) == 2
    assert writer.events.rewrite(lambda one: one["user"] != 1) == 1
    assert soon(lambda: reader.all()[0], [{"id": "b", "user": 2}]) == [{"id": "b", "user": 2}]
    write(writer, [{"id": "c", "user": 3}])
    wanted = [{"id": "b", "user": 2}, {"id": "c", "user": 3}]
    assert soon(lambda: reader.all()[0], wanted) == wanted
    assert reader.changes == [{"user": 1, "features": {}}]


def test_texts_of_any_kind_come_back(opened):
    texts = ["", "a\0b", "\ud800", "é 漢字 🙂", '"\\u0000\\', "x" * 512]
    entries = [{"id": f"{place}{text}", "text": text} for place, text in enumerate(texts)]
    write(opened(), entries)
    assert Reader(opened()).all()[0] == entries


def test_numbers_are_given_out_once(opened):
    states, given = [opened(), opened()], []
    for turn in range(8):
        state = states[turn % 2]
        living = LivingData(state.changes)
        with state.writing():
            living.refresh()
            first = state.take_numbers("item", at_least=max(5, living.ids.next_number("item")), count=1)
            state.changes.append([{"of": "item", "number": first, "text": f"t{turn}"}])
        given.append(first)
    assert given == list(range(5, 13))
    assert LivingData(opened().changes).ids.tables() == {"item": {5 + n: f"t{n}" for n in range(8)}}


@pytest.mark.parametrize("bits", [15, 31, 53])
def test_numbers_do_not_end_where_a_small_integer_does(opened, bits):
    state = opened()
    for least in (2**bits - 40, 2**bits + 30):
        with state.writing():
            assert state.take_numbers("item", at_least=least, count=64) >= least


def test_writers_at_the_same_time_wait_for_each_other(opened, scale):
    """Each gives out the next number and waits a little before it stores it."""
    num_writes = scale(8, 300)

    def write_all(name):
        state = opened()
        living = LivingData(state.changes)
        for number in range(num_writes):
            with state.writing():
                living.refresh()
                first = state.take_numbers("item", at_least=living.ids.next_number("item"), count=1)
                time.sleep(0.002)
                state.changes.append([{"of": "item", "number": first, "text": f"{name}{number}"}])
            with state.writing():
                read(state.events)
                state.events.append([{"id": f"{name}{number}"}])
                time.sleep(0.002)  # with its place in the order, not yet committed

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write_all, "abc"))
    events, changes = Reader(opened()).all()
    assert len({one["id"] for one in events}) == len(events) == 3 * num_writes
    assert [one["number"] for one in changes] == list(range(3 * num_writes)), "in the order of their commits"
    assert len({one["text"] for one in changes}) == 3 * num_writes


def test_a_forgotten_text_is_gone_and_its_number_stays_taken(opened):
    state = opened()
    write(state, changes=[{"of": "user", "number": 7, "text": "anna"}, {"user": 7, "features": {}}])
    write(state, changes=[{"of": "user", "number": 7, "text": None}, {"forgotten": 7, "ids": ["00ff"]}])
    living = LivingData(opened().changes)
    assert (living.ids.number_of("user", "anna"), living.ids.next_number("user")) == (None, 8)
    assert (living.users, living.forgotten, living.forgotten_ids) == ({}, {7}, {b"\0\xff"})


def test_a_user_is_erased_by_a_process_that_does_not_serve(opened):
    state, reader = opened(), Reader(opened())
    numbers = [{"of": "user", "number": 7, "text": "anna"}, {"of": "user", "number": 8, "text": "bo"}]
    write(state, [{"id": "a", "user": 7}, {"id": "b", "user": 8}], [*numbers, {"user": 7, "features": {"city": 1}}])
    assert number_in(opened(), "anna") == 7
    assert erase_entries(opened(), 7) == 1
    events, changes = [{"id": "b", "user": 8}], [numbers[1], {"of": "user", "number": 7, "text": None}]
    assert soon(reader.all, (events, changes)) == (events, changes)
    assert "anna" not in "".join(path.read_text(errors="ignore") for path in opened.folder.glob("*.log"))
    living = LivingData(opened().changes)
    assert (living.users, living.ids.next_number("user"), number_in(opened(), "anna")) == ({}, 9, None)


def test_every_acknowledged_record_survives_kills_of_its_writer_and_none_is_there_twice(opened, scale):
    """Three writers at a time; each is killed in the middle of its work."""
    acknowledged = {}
    for turn in range(scale(2, 20)):
        writers = {
            f"{turn}{name}": subprocess.Popen(
                [sys.executable, "-c", _WRITER, opened.url, str(opened.folder), f"{turn}{name}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in "abc"
        }
        for process in writers.values():
            for _ in range(3 + turn % 3):
                assert process.stdout.readline(), "a writer ended by itself"
        for name, process in writers.items():
            os.kill(process.pid, signal.SIGKILL)
            acknowledged[name] = 3 + turn % 3 + len(process.communicate()[0].splitlines())
    events, changes = Reader(opened()).all()
    ids, numbers = [one["id"] for one in events], [one["number"] for one in changes]
    assert len(set(ids)) == len(ids)
    assert len(set(numbers)) == len(numbers), "no number stands for two texts"
    for name, count in acknowledged.items():
        own = [one for one in ids if one.startswith(f"{name}.")]
        assert len(own) % 3 == 0, "the events of a record are there together"
        assert own[: 3 * count] == [f"{name}.{number}/{part}" for number in range(count) for part in range(3)]
        assert len(own) <= 3 * (count + 1), "at most the one that nobody acknowledged"
        texts = {one["text"] for one in changes}
        assert {one.partition("/")[0] for one in own} <= texts, "a number is there before what uses it"


def test_the_server_is_killed_and_comes_back(own_server, scale):
    """Writers get an error while it is away, readers keep what they know, and everybody recovers without help."""
    url = own_server.empty()
    state, reader = open_state(url, None), Reader(open_state(url, None))
    stored = []
    for turn in range(scale(3, 20)):
        write(state, [{"id": f"{turn}a"}])
        stored.append({"id": f"{turn}a"})
        assert soon(lambda: reader.all()[0], stored) == stored
        own_server.kill()
        with pytest.raises(StateAwayError, match="send the same again"):
            write(state, [{"id": f"{turn}b"}])
        assert soon(lambda: bool(reader.state.problem()), True, seconds=5)
        assert reader.all()[0] == stored
        own_server.start()
        assert soon(lambda: state.problem() + reader.state.problem(), "", seconds=10) == ""
        write(state, [{"id": f"{turn}b"}])
        stored.append({"id": f"{turn}b"})
        assert soon(lambda: reader.all()[0], stored) == stored
    for one in (state, reader.state):
        one.close()


def test_tables_are_migrated_in_steps_and_those_of_a_later_release_are_refused(server, monkeypatch):
    url = server.empty()
    open_state(url, None).close()
    later = (*postgres.MIGRATIONS, "ALTER TABLE nestpipe_entries ADD COLUMN noted text")
    with monkeypatch.context() as patch:
        patch.setattr(postgres, "MIGRATIONS", later)
        for _ in range(2):
            open_state(url, None).close()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT version FROM nestpipe_state").fetchall() == [(len(later),)]
            assert connection.execute("SELECT count(noted) FROM nestpipe_entries").fetchone() == (0,)
    with pytest.raises(ConfigError, match=rf"tables of version {len(later)}.*Install that one"):
        open_state(url, None)


def test_a_database_that_is_not_there_is_refused_by_name(server):
    with pytest.raises(ConfigError, match=r"cannot be used.*nowhere.*Check the address"):
        open_state(server.url("nowhere"), None)
