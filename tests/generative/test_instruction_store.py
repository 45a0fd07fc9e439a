"""The store of instructions: what is written is read, by other processes too; what must not be used is a counted miss."""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import replace

import numpy as np
import pytest

from nestpipe.errors import DataError
from nestpipe.generative.instruction_store import ANY, Instructions, SqliteStore, StoredInstruction

ONE = StoredInstruction(
    user=-7,
    scenario=ANY,
    text="wärmer, please",
    vector=np.array([0.5, -2.0, 3.25], np.float32),
    provenance="template/1",
    version="v/e",
    request="r1",
    written_s=100.0,
    ttl_s=50.0,
)


@pytest.fixture
def store(tmp_path):
    opened = SqliteStore(tmp_path / "deep" / "store.sqlite")
    yield opened
    opened.close()


def reader_of(store, *, version="v/e", dim=3, now=120.0):
    return Instructions(store, version=version, dim=dim, clock=lambda: now)


def test_what_is_put_is_got_to_the_bit(store):
    assert store.put([ONE, replace(ONE, scenario="2", text="home")]) == 2
    found = store.get(-7, ANY)
    assert found.vector.tobytes() == ONE.vector.tobytes()
    assert (found.text, found.provenance, found.version, found.request) == ("wärmer, please", "template/1", "v/e", "r1")
    assert (found.written_s, found.ttl_s, found.user, found.scenario) == (100.0, 50.0, -7, ANY)
    assert store.get(-7, "2").text == "home"
    assert store.get(7, ANY) is None


def test_a_scenario_finds_its_own_then_the_one_for_any_then_none(store):
    store.put([ONE, replace(ONE, scenario="2", text="home")])
    reader = reader_of(store)
    assert reader.of(-7, "2").instruction.text == "home"
    assert reader.of(-7, "3").instruction.text == ONE.text
    assert reader.of(8, "3") == (None, "absent")
    assert dict(reader.counts) == {"found": 2, "absent": 1}


@pytest.mark.parametrize(
    ("reader", "reason"),
    [({"version": "w/e"}, "version"), ({"now": 150.0}, "expired"), ({"dim": 4}, "width")],
)
def test_what_must_not_be_used_is_a_counted_miss(store, reader, reason):
    store.put([ONE])
    found = reader_of(store, **reader)
    assert found.of(-7, ANY) == (None, reason)
    assert found.counts[reason] == 1


def test_the_last_moment_still_counts(store):
    store.put([ONE])
    assert reader_of(store, now=149.9).of(-7, ANY).reason == "found"


def test_a_stale_one_of_the_scenario_does_not_hide_a_good_one_for_any(store):
    store.put([replace(ONE, scenario="2", ttl_s=1.0), ONE])
    assert reader_of(store).of(-7, "2").instruction.scenario == ANY


def test_writes_are_idempotent_and_a_late_one_replaces_nothing(store):
    store.put([ONE])
    before = store.get(-7, ANY)
    store.put([ONE])
    store.put([replace(ONE, text="older", written_s=99.0)])
    assert store.get(-7, ANY).text == before.text
    store.put([replace(ONE, text="newer", written_s=101.0)])
    assert store.get(-7, ANY).text == "newer"


def test_all_are_kept_or_none(store):
    store.put([ONE])
    bad = replace(ONE, scenario="2", vector=np.array([np.nan], np.float32))
    with pytest.raises(DataError, match="finite"):
        store.put([replace(ONE, text="half", written_s=200.0), bad])
    assert store.get(-7, ANY).text == ONE.text


def test_forgetting_leaves_no_trace_in_the_files(store):
    store.put([replace(ONE, text="secret wishes", user=user) for user in range(4)])
    assert store.forget(3) == 1
    assert store.get(3, ANY) is None
    for user in range(4):
        store.forget(user)
    assert all(b"secret wishes" not in path.read_bytes() for path in store.path.parent.iterdir())
    assert store.forget(3) == 0


def test_one_that_was_forgotten_meanwhile_is_not_kept(store):
    assert store.put([ONE, replace(ONE, user=1)], wanted=lambda user: user == 1) == 1
    assert store.get(-7, ANY) is None


def test_a_reader_may_come_first_and_sees_a_file_that_was_replaced(tmp_path):
    path = tmp_path / "store.sqlite"
    reader = SqliteStore(path, read_only=True)
    assert reader.get(-7, ANY) is None
    assert not path.exists()
    for text in ("first", "second"):
        writer = SqliteStore(path)
        writer.put([replace(ONE, text=text)])
        writer.close()
        assert reader.get(-7, ANY).text == text
        path.unlink()
    assert reader.get(-7, ANY) is None


@pytest.mark.parametrize("damage", [b"this is no database" * 100, b""])
def test_a_damaged_file_is_an_error_for_the_job_and_a_miss_for_a_request(tmp_path, damage):
    path = tmp_path / "store.sqlite"
    path.write_bytes(damage)
    reader = reader_of(SqliteStore(path, read_only=True))
    assert reader.of(-7, ANY).reason == "unreadable"
    if damage:
        with pytest.raises(DataError, match="move it away"):
            SqliteStore(path).put([ONE])


@pytest.mark.parametrize(
    ("column", "value"),
    [("written_s", "soon"), ("ttl_s", b"x"), ("vector", np.array([1, np.nan, 2], "<f4").tobytes()), ("text", b"x")],
)
def test_a_damaged_row_is_a_miss_too(store, column, value):
    store.put([ONE, replace(ONE, user=8)])
    with sqlite3.connect(store.path) as connection:
        connection.execute(f"UPDATE instructions SET {column} = ? WHERE user = -7", (value,))
    assert reader_of(store).of(-7, ANY) == (None, "unreadable")
    assert reader_of(store).of(8, ANY).reason == "found"


def test_forgetting_says_so_if_a_reader_keeps_the_old_pages(tmp_path):
    store = SqliteStore(tmp_path / "store.sqlite", timeout_s=0.05)
    store.put([replace(ONE, text="secret wishes")])
    reader = sqlite3.connect(store.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM instructions").fetchall()
    with pytest.raises(DataError, match="Run the command again"):
        store.forget(-7)
    reader.close()
    assert store.forget(-7) == 0
    assert all(b"secret wishes" not in path.read_bytes() for path in tmp_path.iterdir())
    store.close()


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "store.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    with pytest.raises(DataError, match="format 9"):
        SqliteStore(path).put([ONE])


def test_several_processes_read_whole_instructions_while_one_writes(tmp_path, scale):
    """A text and its vector are of one write, whoever looks when."""
    path, rounds = tmp_path / "store.sqlite", scale(15, 2000)
    writer = SqliteStore(path)
    writer.put([replace(ONE, text="0", vector=np.zeros(300, np.float32), written_s=0.0)])
    children = []
    for _ in range(3):
        if (pid := os.fork()) == 0:
            os._exit(_watch(path, rounds))
        children.append(pid)
    for number in range(1, rounds + 1):
        vector = np.full(300, number, np.float32)
        writer.put([replace(ONE, text=str(number), vector=vector, written_s=float(number))])
    writer.close()
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


def _watch(path, last):
    try:
        reader, seen, until = SqliteStore(path, read_only=True), -1, time.monotonic() + 60
        while seen < last:
            found = reader.get(-7, ANY)
            number = int(found.text)
            if number < seen or set(found.vector.tolist()) != {float(number)} or time.monotonic() > until:
                return 1
            seen = number
        return 0
    except BaseException:
        return 2
