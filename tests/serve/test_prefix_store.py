"""The prefix store: what is read is what was written for that key, bytes stay under the cap, and damage is a miss."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule

from nestpipe.errors import ConfigError
from nestpipe.serve.prefix_folder import StoreInUseError, remove_user
from nestpipe.serve.prefix_store import PrefixStore
from nestpipe.serve.service_folder import note_store, store_folders
from nestpipe.serve.stored_prefixes import open_stored
from tests.serve.stored_examples import SIZE, made, read, same, write
from tests.serve.test_kv_cache import KEYS, USERS, Books, user_of


def files(store):
    return sorted(path for path in store.folder.rglob("*") if path.is_file() and path.name != "lock")


@pytest.fixture
def store(tmp_path):
    opened = PrefixStore(tmp_path / "store", cap=20 * SIZE)
    yield opened
    opened.close()


def reopened(store, *, cap=None):
    os.close(store._owned)
    fresh = PrefixStore(store.folder, cap=cap or store.cap)
    store._owned = fresh._owned  # the fixture closes it
    return fresh


@pytest.mark.parametrize("has_times", [True, False])
def test_what_was_written_is_read_also_after_a_restart(store, has_times):
    prefix = made(has_times=has_times)
    assert write(store, prefix)
    assert not write(store, prefix), "it is there"
    for opened in (store, reopened(store)):
        assert same(read(opened, prefix), prefix)
        assert read(opened, made(length=9)) is None
        assert read(opened, made(salt=1)) is None
        assert read(opened, made(user=4)) is None
        assert read(opened, made(weights="others")) is None


@pytest.mark.parametrize("has_times", [True, False])
def test_a_prefix_without_events_is_read_and_extended(store, has_times):
    empty, long = (made(length=one, has_times=has_times) for one in (0, 10))
    if has_times:
        empty = replace(empty, times=torch.from_numpy(np.empty(0, np.int64)))  # of stride 0, as a request brings it
    assert write(store, empty)
    assert same(read(reopened(store), empty), empty)
    assert write(store, long, follows=empty.key)
    assert same(read(reopened(store), long), long)


def test_a_longer_prefix_is_appended_and_another_history_replaces_the_file(store):
    short, long, longest = (made(length=one) for one in (10, 30, 70))
    assert write(store, short)
    (path,) = files(store)
    before = path.read_bytes()
    assert write(store, long, follows=short.key)
    assert path.read_bytes().startswith(before), "old segments stay as they are"
    assert write(store, longest, follows=long.key)
    assert same(read(store, longest), longest)
    assert same(read(reopened(store), longest), longest)
    other = made(length=20, salt=5)
    assert write(store, other, follows=longest.key), "which is longer, so it cannot be followed"
    assert read(store, longest) is None
    assert same(read(store, other), other)
    store.check()


def test_a_write_that_follows_something_else_starts_anew(store):
    assert write(store, made(length=10))
    long = made(length=30)
    assert write(store, long, follows=made(length=20).key)
    (path,) = files(store)
    assert path.read_bytes().count(b"NPKV") == 1
    assert same(read(store, long), long)


def test_every_flipped_byte_is_a_miss_and_never_another_prefix(store, scale):
    short, long = made(length=3), made(length=6)
    write(store, short)
    write(store, long, follows=short.key)
    (path,) = files(store)
    content = path.read_bytes()
    assert len(content) < 3000
    for place in range(0, len(content), scale(11, 1)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        fresh = reopened(store)
        for prefix in (long, short):
            found = read(fresh, prefix)
            assert found is None or same(found, prefix)
        if place >= len(content) // 2:
            assert read(fresh, long) is None
        assert fresh.counts["corrupt"] <= 1
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert same(read(reopened(store), long), long)


def test_damage_is_counted_once_and_removed(store, caplog):
    prefix = made(user=7_654_321)
    write(store, prefix)
    (path,) = files(store)
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)
    assert read(store, prefix) is None
    assert (store.counts["corrupt"], files(store), store.used) == (1, [], 0)
    assert "computed again" in caplog.text
    assert str(prefix.key.user) not in caplog.text
    assert write(store, prefix)
    assert same(read(store, prefix), prefix)


@pytest.mark.parametrize("cut", [1, 20, 200, -1])
def test_a_segment_that_was_cut_off_is_ignored_and_overwritten(store, cut):
    short, long = made(length=10), made(length=30)
    write(store, short)
    (path,) = files(store)
    first = len(path.read_bytes())
    write(store, long, follows=short.key)
    content = path.read_bytes()
    path.write_bytes(content[: first + cut] if cut > 0 else content[:cut])
    fresh = reopened(store)
    assert read(fresh, long) is None
    assert same(read(fresh, short), short)
    assert (fresh.counts["corrupt"], path.stat().st_size) == (0, first)
    assert write(fresh, long, follows=short.key)
    assert same(read(reopened(fresh), long), long)


def test_the_least_recently_used_go_first_also_after_a_restart(store):
    prefixes = [made(user=user) for user in range(20)]
    assert all(write(store, one) for one in prefixes)
    for place, path in enumerate(sorted(files(store), key=lambda one: int(one.stem))):
        os.utime(path, (1000 + place, 1000 + place))
    assert read(store, prefixes[0]) is not None
    fresh = reopened(store, cap=3 * SIZE)
    assert fresh.users() == [18, 19, 0]
    assert fresh.used == 3 * SIZE
    assert write(fresh, made(user=77))
    assert fresh.users() == [19, 0, 77]
    assert fresh.counts["evicted"] == 18
    fresh.check()


def test_what_cannot_fit_is_not_written_and_removes_nothing(tmp_path):
    store = PrefixStore(tmp_path, cap=SIZE)
    assert write(store, made(user=1))
    assert not write(store, made(user=2, length=200))
    assert not write(store, made(user=1, length=200), follows=made(user=1).key)
    assert store.users() == [1]
    store.check()
    store.close()


def test_forgetting_leaves_no_file_and_stops_writes_in_flight(store, monkeypatch):
    write(store, made(user=1))
    write(store, made(user=1, weights="others"))
    write(store, made(user=2))
    assert store.forget(1) == 2
    assert [path.stem for path in files(store)] == ["2"]
    since = store.num_forgets
    store.forget(3)
    assert not store.write(made(user=3), since=since), "its events were read before"
    assert not store.is_dropped_with_others(3, since=since)
    create, append = store._create, store._append

    def forgets(act, user):
        def acted(*arguments):
            done = act(*arguments)
            store.forget(user)
            return done

        return acted

    monkeypatch.setattr(store, "_create", forgets(create, 4))
    assert not write(store, made(user=4))
    monkeypatch.setattr(store, "_append", forgets(append, 2))
    assert not write(store, made(user=2, length=30), follows=made(user=2).key)
    assert files(store) == []
    assert store.used == store.reserved == 0


def test_forgetting_a_user_stops_no_write_of_another(store, monkeypatch):
    since = store.num_forgets
    store.forget(9)
    assert store.write(made(user=3), since=since)
    store.retain(lambda user, length: True)
    assert not store.write(made(user=4), since=since), "its events may have been removed"
    assert [store.is_dropped_with_others(user, since=since) for user in (4, 9)] == [True, False]
    assert store.write(made(user=4), since=store.num_forgets)
    monkeypatch.setattr("nestpipe.serve.prefix_store._MAX_FORGOTTEN", 2)
    since = store.num_forgets
    for user in (10, 11, 12):
        store.forget(user)
    assert not store.write(made(user=10), since=since), "one that is no longer known counts as all"
    assert store.write(made(user=5), since=since + 1)
    assert not store.write(made(user=12), since=since + 1)


def test_files_of_a_user_are_removed_from_a_store_that_another_process_owns(store):
    write(store, made(user=1))
    write(store, made(user=12))
    (model := store.folder / ("0" * 32)).mkdir()
    (model / ".1.tmp").write_bytes(b"begun")
    assert remove_user(store.folder, 1) == 2
    assert read(store, made(user=1)) is None
    assert same(read(store, made(user=12)), made(user=12))
    assert remove_user(store.folder / "gone", 1) == 0


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_file_is_no_folder_of_a_store(tmp_path, name):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="name a folder with --prefix-store"):
        open_stored(tmp_path / "serve", folder=tmp_path / name, cap=SIZE)
    assert (tmp_path / "file").read_text() == "precious"


FOREIGN = {
    "a run": ["lock", "config.json", "run.json", "serve/events.log", "checkpoints/step-000100/dense.pt"],
    "the serve folder of a run": ["events.log", "token", "prefixes/1/lock"],
    "a folder of stores": ["1/lock", f"1/{'0' * 32}/3.kv"],
    "a folder of stores, with a lock": ["lock", f"1/{'0' * 32}/3.kv"],
    "the folder of a model": ["3.kv", ".4.tmp"],
    "a folder named like a digest": [f"{'0' * 32}/3.kv"],
}


@pytest.mark.parametrize("names", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_folder_that_is_no_store_is_refused_and_keeps_its_files(tmp_path, names):
    folder, serve = tmp_path / "given", tmp_path / "serve"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match=r"it is no prefix store.*Name an empty or new folder with --prefix-store"):
        open_stored(serve, folder=folder, cap=SIZE)
    assert sorted(folder.rglob("*")) == before
    assert store_folders(serve) == [], "'nestpipe forget' does not search it either"


def test_a_store_removes_only_files_of_its_own_names(store):
    write(store, made(user=1))
    write(store, made(user=2, weights="old"))
    models = sorted({path.parent for path in files(store)})
    for model in models:
        (model / ".5.tmp").write_bytes(b"begun")
        for name in ("notes.txt", "x.kv", "7.kv.bak", "deep/8.kv"):
            (model / name).parent.mkdir(exist_ok=True)
            (model / name).write_text("precious")
        (model / "9.kv").mkdir()
    fresh = reopened(store)
    assert sorted(fresh.users()) == [1, 2]
    assert not list(fresh.folder.rglob("*.tmp"))
    fresh.retain_models([made().key.made_by])
    assert fresh.users() == [1]
    fresh.check()
    fresh.retain_models([])
    assert {path.name for path in files(fresh)} == {"notes.txt", "x.kv", "7.kv.bak", "8.kv"}
    assert len(files(fresh)) == 8


def test_models_that_are_gone_leave_nothing(store):
    write(store, made(user=1, weights="old"))
    write(store, made(user=1, weights="new"))
    store.retain_models([made(weights="new").key.made_by])
    assert len(files(store)) == 1
    assert same(read(store, made(user=1, weights="new")), made(user=1, weights="new"))


def test_users_whose_history_is_shorter_are_removed(store):
    for user in range(4):
        write(store, made(user=user, length=10 + user))
    store.retain(lambda user, length: length > 11)
    assert store.users() == [2, 3]


def test_one_process_owns_a_folder_and_the_next_takes_another(tmp_path):
    first = open_stored(tmp_path, folder=None, cap=SIZE)
    second = open_stored(tmp_path, folder=None, cap=SIZE)
    assert [one.store.folder.name for one in (first, second)] == ["1", "2"]
    with pytest.raises(StoreInUseError, match=r"--prefix-store"):
        open_stored(tmp_path, folder=first.store.folder, cap=SIZE)
    first.close()
    third = open_stored(tmp_path, folder=first.store.folder, cap=SIZE)
    assert open_stored(tmp_path, folder=None, cap=0) is None
    other = open_stored(tmp_path, folder=tmp_path / "elsewhere", cap=SIZE)
    note_store(tmp_path, tmp_path / "elsewhere")
    assert sorted(one.name for one in store_folders(tmp_path)) == ["1", "2", "elsewhere"]
    for one in (second, third, other):
        one.close()


def test_a_full_disk_is_no_error(store, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    write(store, made(user=1))
    monkeypatch.setattr(os, "pwritev", full)
    assert not write(store, made(user=2))
    assert not write(store, made(user=1, length=30), follows=made(user=1).key)
    monkeypatch.undo()
    assert (store.counts["failed"], len(files(store)), store.reserved) == (2, 1, 0)
    assert caplog.text.count("cannot be stored") == 1
    assert same(read(store, made(user=1)), made(user=1))


def test_readers_and_writers_share_a_store(store, scale):
    """Each reader gets what was written for its key, or nothing, while files grow, are replaced, removed and forgotten."""
    wrong = []

    def work(seed):
        for turn in range(scale(40, 3000)):
            user, length = (seed + turn) % 5, 5 + (seed * 7 + turn * 3) % 40
            short, long = made(user=user, length=length), made(user=user, length=length + 8)
            store.write(short, since=store.num_forgets)
            store.write(long, follows=short.key, since=store.num_forgets)
            for prefix in (short, long):
                found = read(store, prefix)
                if found is not None and not same(found, prefix):
                    wrong.append(prefix.key)
            if turn % 9 == seed:
                store.forget(user)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert store.counts["reads"] > 10
    assert not store.counts["corrupt"]


LENGTHS = (5, 20, 60)


class ThreeTiers(Books):
    """The books of both memory tiers, with a store below: any operation in any order, restarts and damage included."""

    def __init__(self):
        super().__init__()
        self.folder = Path(mkdtemp())
        self.store = PrefixStore(self.folder, cap=3 * SIZE)
        self.damaged: set[int] = set()

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(key=st.sampled_from(KEYS), length=st.sampled_from(LENGTHS), salt=st.integers(0, 1), stale=st.booleans())
    def write(self, key, length, salt, stale):
        user, prefix = user_of(key), made(user_of(key), length, salt=salt)
        entry = self.store.peek(prefix.key.made_by, user)
        begun = None if entry is None else made(user, min(entry.key.length, length), salt=salt)
        follows = begun.key if entry is not None and begun.key == entry.key else None
        is_new = entry is None or entry.key != prefix.key
        is_written = self.store.write(prefix, follows=follows, since=-1 if stale else self.store.num_forgets)
        assert is_written == (is_new and not stale), "three blocks hold any of them"
        if is_written and follows is None:
            self.damaged.discard(user)
        self.read_everything()

    @rule()
    def read_everything(self):
        """Any key of any user: what is stored for it, or nothing."""
        for user, length, salt in itertools.product(USERS, LENGTHS, (0, 1)):
            wanted = made(user, length, salt=salt)
            entry = self.store.peek(wanted.key.made_by, user)
            found = self.store.read(wanted.key, wanted.digest)
            if found is not None:
                assert same(found, wanted)
                assert user not in self.damaged
            elif entry is not None and entry.key == wanted.key:
                assert user in self.damaged
                self.damaged.discard(user)

    @rule(key=st.sampled_from(KEYS))
    def invalidate_everywhere(self, key):
        user = user_of(key)
        self.cache.invalidate(user)
        self.store.forget(user)
        assert not list(self.folder.rglob(f"*{user}.*"))
        self.damaged.discard(user)

    @rule(key=st.sampled_from(KEYS), place=st.integers(0, 10**6))
    def flip(self, key, place):
        for path in self.folder.rglob(f"{user_of(key)}.kv"):
            content = bytearray(path.read_bytes())
            if user_of(key) in self.damaged or len(content) < 100:
                return
            content[-1 - place % 60] ^= 1  # of the last payload
            path.write_bytes(content)
            self.damaged.add(user_of(key))

    @rule()
    def restart(self):
        users = self.store.users()
        self.store.close()
        self.store = PrefixStore(self.folder, cap=3 * SIZE)
        assert set(self.store.users()) == set(users)
        assert not self.store.counts["corrupt"], "payloads are read when they are used"

    @precondition(lambda self: len(self.store) > 1)
    @rule()
    def shrink(self):
        self.store.retain(lambda user, length: length > 5)
        assert all(self.store.peek(made().key.made_by, user).key.length > 5 for user in self.store.users())

    @invariant()
    def the_store_keeps_its_books(self):
        self.store.check()


TestThreeTiers = ThreeTiers.TestCase
TestThreeTiers.settings = settings(max_examples=80, stateful_step_count=30)


def test_a_kill_at_any_change_leaves_a_store_that_opens(tmp_path):
    command = [sys.executable, "-m", "tests.serve.store_kills", str(tmp_path / "store")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=root)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "calls at which it was killed"
