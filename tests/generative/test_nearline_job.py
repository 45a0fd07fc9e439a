"""The near-line job: windows, skipping, failing providers, and that a crash at any point loses nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from nestpipe.data.erase_user import forget_user
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError
from nestpipe.generative import instruction_store, nearline_job
from nestpipe.generative.instruction_store import ANY, SqliteStore
from nestpipe.generative.llm_provider import EndpointConfig, OpenAICompatibleProvider, TemplateProvider
from nestpipe.generative.nearline_job import (
    FolderHistoryFeed,
    JobLedger,
    NearlineJob,
    ThinkConfig,
    ledger_of,
    ledgers_of,
)
from nestpipe.generative.prompt_builder import CoVisits, RequestBuilder, season_of
from nestpipe.generative.work_shard import WorkShard
from tests.generative.llm_endpoint import answer_with, drip, serve_endpoint
from tests.small_runs import write_log

TEXTS = {item: f"{kind} number {item}" for item, kind in enumerate(["lamp", "chair", "table", "shelf", "carpet"] * 2)}
HISTORIES = {user: [(user + step) % 10 for step in range(3 + user % 3)] for user in range(7)}


class Growing:
    """Histories that grow: a feed with a counted mark."""

    def __init__(self, folder, histories):
        self._folder, self._number = folder, 0
        self.log: list[int] = []
        self.histories = {user: list(items) for user, items in histories.items()}
        for user in histories:
            self.log.append(user)
        self._write()

    def _write(self):
        self._number += 1
        self._feed = FolderHistoryFeed(write_log(self._folder / str(self._number), self.histories))

    def add(self, user, item):
        self.histories.setdefault(user, []).append(item)
        self.log.append(user)
        self._write()

    def forget(self, user):
        del self.histories[user]
        self._write()

    def changed_users(self, cursor):
        return self.log[int(cursor or 0) :], str(len(self.log))

    def history(self, user):
        return self._feed.history(user)

    def num_events(self, user):
        return self._feed.num_events(user)


class Recording(TemplateProvider):
    def __init__(self):
        super().__init__()
        self.asked: list[int] = []

    def generate(self, requests):
        self.asked += [one.user for one in requests]
        return super().generate(requests)


def letters(texts):
    """Vectors without torch's threads, so that a forked process can make them."""
    return torch.from_numpy(np.array([[len(text), sum(map(ord, text)) % 997, 1.0] for text in texts], np.float32))


def make_job(folder, feed, provider=None, *, now=None, **settings):
    now = now or [1000.0]
    return NearlineJob(
        feed=feed,
        builder=RequestBuilder(texts=TEXTS),
        provider=provider or Recording(),
        store=SqliteStore(folder / "store.sqlite"),
        ledger=JobLedger(folder / "ledger.sqlite"),
        encode=letters,
        version="v/e",
        config=ThinkConfig(**{"batch_size": 3, **settings}),
        clock=lambda: now[0],
    )


def expected_text(feed, user):
    request = RequestBuilder(texts=TEXTS).build(*feed.history(user))
    return TemplateProvider().text(request)


def is_complete(job, feed):
    found = {user: job.store.get(user, ANY) for user in feed.histories}
    return all(one is not None and one.text == expected_text(feed, user) for user, one in found.items())


def close(job):
    job.store.close()
    job.ledger.close()


@pytest.fixture
def feed(tmp_path):
    return Growing(tmp_path / "logs", HISTORIES)


def test_everybody_gets_an_instruction_once(tmp_path, feed):
    job = make_job(tmp_path, feed)
    job.run()
    assert is_complete(job, feed)
    assert sorted(job.provider.asked) == list(range(7))
    assert job.store.get(3, ANY).vector.tolist() == letters([expected_text(feed, 3)])[0].tolist()
    job.run()
    assert len(job.provider.asked) == 7
    assert job.ledger.num_pending == 0


def test_the_most_active_users_come_first(tmp_path, feed):
    job = make_job(tmp_path, feed)
    job.run()
    assert job.provider.asked == [2, 5, 1, 4, 0, 3, 6]  # with 5, 5, 4, 4, 3, 3, 3 events


def test_each_shard_writes_its_own_users(tmp_path, feed):
    asked = []
    for number in (1, 2, 3):
        job = make_job(tmp_path, feed)
        job.ledger.close()
        job.shard = WorkShard(number, 3)
        job.ledger = JobLedger(ledger_of(tmp_path / "store.sqlite", job.shard))
        job.run()
        assert all(job.shard.has(user) for user in job.provider.asked)
        asked += job.provider.asked
    assert sorted(asked) == list(range(7))
    assert is_complete(job, feed)
    (tmp_path / "store.think-other.sqlite").touch()
    assert [one.name for one in ledgers_of(tmp_path / "store.sqlite")] == [
        f"store.think-{n}-of-3.sqlite" for n in (1, 2, 3)
    ]
    for wrong in ("0/3", "4/3", "1", "1/3/5", "a/b"):
        with pytest.raises(ConfigError, match="--shard is"):
            WorkShard.parse(wrong)
    assert WorkShard.parse("2/4") == WorkShard(2, 4)


def test_a_ledger_of_an_older_version_is_read(tmp_path):
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as old:
        old.execute("CREATE TABLE pending (user INTEGER PRIMARY KEY, due_s REAL NOT NULL, tries INTEGER NOT NULL)")
        old.execute("INSERT INTO pending VALUES (4, 0, 1)")
        old.commit()
    ledger = JobLedger(tmp_path / "ledger.sqlite")
    assert ledger.due(1.0, 9) == [(4, 1)]
    ledger.enqueue([(5, 3)], "")
    assert ledger.due(1.0, 9) == [(5, 0), (4, 1)]
    ledger.close()


def test_only_users_with_new_events_and_only_once_in_a_window(tmp_path, feed):
    now = [1000.0]
    job = make_job(tmp_path, feed, now=now)
    job.run()
    job.provider.asked.clear()
    for second, item in ((10, 7), (200, 8)):
        now[0] = 1000.0 + second
        feed.add(2, item)
        job.run()
    assert job.provider.asked == []
    assert (job.ledger.num_pending, job.ledger.next_due_s) == (1, 1300.0)
    now[0] = 1299.9
    job.run()
    assert job.provider.asked == []
    now[0] = 1300.0
    job.run()
    assert job.provider.asked == [2]
    assert is_complete(job, feed)


def test_a_request_that_did_not_change_is_skipped(tmp_path, feed):
    now = [1000.0]
    job = make_job(tmp_path, feed, now=now)
    job.run()
    feed.log += [4, 5]  # said to be new, but nothing is
    now[0] += 1000
    job.run()
    assert len(job.provider.asked) == 7
    assert job.counts["unchanged"] == 2


def test_each_scenario_has_its_own(tmp_path, feed):
    job = make_job(tmp_path, feed, scenarios=(ANY, "1"))
    job.run()
    assert job.counts["written"] == 14
    assert job.store.get(2, "1").request != job.store.get(2, ANY).request


def test_another_version_writes_everybody_again(tmp_path, feed):
    now = [1000.0]
    job = make_job(tmp_path, feed, now=now)
    job.run()
    now[0] += 300
    job.version = "w/e"
    job.run()
    assert {job.store.get(user, ANY).version for user in HISTORIES} == {"w/e"}


def test_a_store_that_was_thrown_away_is_written_again(tmp_path, feed):
    job = make_job(tmp_path, feed)
    job.run()
    job.store.close()
    for path in tmp_path.glob("store.sqlite*"):
        path.unlink()
    job.run()
    assert is_complete(job, feed)


def test_one_who_is_forgotten_while_the_provider_writes_gets_nothing(tmp_path, feed):
    class Forgets(TemplateProvider):
        def generate(self, requests):
            if 2 in {one.user for one in requests}:
                feed.forget(2)
            return super().generate(requests)

    job = make_job(tmp_path, feed, Forgets())
    job.run()
    assert job.store.get(2, ANY) is None
    assert is_complete(job, feed)
    assert job.ledger.num_pending == 0


def test_a_folder_that_is_replaced_is_read_anew(tmp_path):
    feed = FolderHistoryFeed(write_log(tmp_path / "log", HISTORIES))
    _, cursor = feed.changed_users("")
    assert feed.changed_users(cursor)[0] == []
    forget_user(Sequences.open(tmp_path / "log"), 3, announce=lambda digest: None)
    assert feed.history(3) is None, "who was forgotten has no events here either"
    users, later = feed.changed_users(cursor)
    assert (sorted(users), later != cursor) == ([user for user in HISTORIES if user != 3], True)


def test_two_jobs_at_once_are_refused(tmp_path, feed):
    job = make_job(tmp_path, feed)
    with (
        job.ledger.only_one(),
        pytest.raises(ConfigError, match="only one may run at a time"),
        JobLedger(job.ledger.path).only_one(),
    ):
        pass


FAULTS = {
    "timeout": None,
    "slow stream": lambda body: drip(answer_with(" " * 1000), 0.1),
    "500": lambda body: 500,
    "invalid JSON": lambda body: answer_with("no"),
    "wrong schema": lambda body: answer_with('{"results": {"0": "POISON"}}'),
    "fewer": lambda body: [{"id": 0, "text": "from the model"}],
    "oversize": lambda body: [{"id": 0, "text": "POISON " * 1000}],
    "unprintable": lambda body: [{"id": 0, "text": "POISON \x00"}],
}


@pytest.fixture(scope="module")
def endpoint():
    with serve_endpoint() as found:
        yield found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_model_never_stalls_the_job_nor_stores_a_bad_text(tmp_path, feed, endpoint, fault):
    endpoint.behave = FAULTS[fault] or endpoint.silent
    settings = EndpointConfig(
        url=endpoint.url, model="m", retries=0, max_bytes=4000, cooldown_s=0.0, requests_per_call=3
    )
    hasty = replace(settings, timeout_s=0.2) if fault in {"timeout", "slow stream"} else settings
    job = make_job(tmp_path, feed, OpenAICompatibleProvider(hasty), now=(now := [1000.0]))
    job.run()
    kept = {user: job.store.get(user, ANY) for user in HISTORIES}
    own = [user for user, one in kept.items() if one.provenance == "model/m"]
    assert len(own) == (3 if fault == "fewer" else 0)
    for user in set(HISTORIES) - set(own):
        assert (kept[user].text, kept[user].provenance) == (expected_text(feed, user), "template/1")
    assert job.ledger.num_pending == 7 - len(own)
    # The model gets another chance in the next window, and not for ever.
    endpoint.behave = lambda body: [{"id": n, "text": f"fine {n}"} for n in range(3)]
    now[0], job.provider = 1300.0, OpenAICompatibleProvider(settings)
    job.run()
    assert {job.store.get(user, ANY).provenance for user in HISTORIES} == {"model/m"}
    assert job.ledger.num_pending == 0


def test_a_model_that_always_fails_is_given_up(tmp_path, feed, endpoint):
    endpoint.behave = lambda body: 500
    settings = EndpointConfig(url=endpoint.url, model="m", retries=0, cooldown_s=0.0)
    now = [1000.0]
    job = make_job(tmp_path, feed, OpenAICompatibleProvider(settings), now=now, max_retries=2)
    for _ in range(3):
        job.run()
        now[0] += 300
    assert job.ledger.num_pending == 0
    assert is_complete(job, feed)


# Crashes.


def die_at(monkeypatch, count, kind):
    """This process dies by SIGKILL at the n-th operation of a kind: an SQL statement, opening a file, a provider's call."""
    calls = 0

    def step(*_):
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)

    real = sqlite3.connect

    def connect(*arguments, **named):
        if kind == "open":
            step()
        connection = real(*arguments, **named)
        if kind == "statement":
            connection.set_trace_callback(step)
        return connection

    monkeypatch.setattr(instruction_store.sqlite3, "connect", connect)
    if kind == "generate":
        write = nearline_job.NearlineJob._write

        def dying(self, requests, now):
            found = write(self, requests, now)
            step()  # written, but nobody was told
            return found

        monkeypatch.setattr(nearline_job.NearlineJob, "_write", dying)


def run_and_die(folder, feed, count, kind, now, dead):
    """In a process of its own; False if it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                die_at(patch, count, kind)
                job = make_job(folder, feed, now=now)
                job.run()
            os._exit(0)
        except BaseException:
            os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, -signal.SIGKILL}
    dead.append(code)
    return code != 0


@pytest.mark.parametrize("kind", ["statement", "open", "generate"])
def test_a_crash_at_any_operation_loses_nothing(tmp_path, feed, kind, scale):
    """The n-th life dies at the n-th operation: some lives die while they mend what an earlier one left."""
    dead, now, count = [], [1000.0], 1
    while run_and_die(tmp_path / "chain", feed, count, kind, now, dead):
        count += scale(3, 1) if kind == "statement" else 1
    assert len(dead) > (8 if kind == "statement" else 2)
    job = make_job(tmp_path / "chain", feed, now=now)
    job.run()
    assert job.provider.asked == []
    assert is_complete(job, feed)
    assert job.ledger.num_pending == 0
    close(job)


def test_a_crash_keeps_events_that_came_before_and_after_it(tmp_path, feed, scale):
    """From a finished state: new events, a crash at each statement of taking them in, more events, and the end is complete."""
    first = make_job(tmp_path / "a", feed)
    first.run()
    close(first)
    now, dead, count, item = [1300.0], [], 1, 0
    while True:
        feed.add(count % 7, item % 10)
        if not run_and_die(tmp_path / "a", feed, count, "statement", now, dead):
            break
        count, item, now[0] = count + scale(6, 1), item + 3, now[0] + 301
    job = make_job(tmp_path / "a", feed, now=[now[0] + 301])
    job.run()
    assert len(dead) > 4
    assert is_complete(job, feed)
    close(job)


# The leak rule.


def poisoned_world(folder, *, user=0, place=3):
    """Everything from a place of a user on, and what others did from that time on, is another item with a loud text."""
    histories = {0: [0, 1, 2, 3, 4, 5], 1: [2, 3, 2, 4], 2: [2, 1, 2, 1]}
    texts = {**TEXTS, 9: "POISON poison"}
    calm = write_log(folder / "calm", histories)
    cut = int(calm.times[calm.offsets[user] + place])
    changed = {}
    for row, (one, items) in enumerate(histories.items()):
        times = calm.times[calm.offsets[row] : calm.offsets[row + 1]]
        changed[one] = [9 if time >= cut else item for item, time in zip(items, times, strict=True)]
    return calm, write_log(folder / "poisoned", changed), texts


def test_a_training_row_sees_nothing_of_its_target_or_behind_it(tmp_path):
    calm, poisoned, texts = poisoned_world(tmp_path)
    seen = []
    for sequences in (calm, poisoned):
        builder = RequestBuilder(texts=texts, co_visits=CoVisits(sequences))
        seen.append(builder.before_target(sequences, 0, 3))
    assert seen[0] == seen[1]
    assert [one.text for one in seen[0].actions] == [TEXTS[0], TEXTS[1], TEXTS[2]]
    assert seen[0].complements == (TEXTS[1], TEXTS[3])
    assert "POISON" not in TemplateProvider().text(seen[1])
    later = RequestBuilder(texts=texts, co_visits=CoVisits(poisoned)).before_target(poisoned, 0, 4, trigger=2)
    assert "POISON" in later.actions[-1].text
    assert "POISON" in later.complements[0]


def test_a_place_without_a_target_is_refused(tmp_path):
    calm, _, texts = poisoned_world(tmp_path)
    with pytest.raises(ValueError, match="no event 6"):
        RequestBuilder(texts=texts).before_target(calm, 0, 6)


def test_a_request_has_the_last_fifty_actions_and_the_season_of_the_last(tmp_path):
    log = write_log(tmp_path / "log", {0: list(range(10)) * 6})
    spring, summer = 86_400_000 * 90, 86_400_000 * 181
    timed = replace(log, times=np.array([spring] * 59 + [summer]))
    builder = RequestBuilder(texts={})
    request = builder.build(timed, 0, 60)
    assert [action.text for action in request.actions] == [f"item {item % 10}" for item in range(10, 60)]
    assert (request.season, builder.build(timed, 0, 59).season, builder.build(timed, 0, 0).season) == (
        "summer",
        "spring",
        "",
    )
    assert builder.build(replace(timed, times=None), 0, 60).season == ""


def test_seasons_and_levels(tmp_path):
    assert [season_of(86_400_000 * day) for day in (0, 90, 181, 270, 350)] == [
        "winter",
        "spring",
        "summer",
        "autumn",
        "winter",
    ]
    log = pl.DataFrame({"user": [1, 1], "item": [0, 1], "time": [0, 60], "kind": [2.0, None]})
    label = Label(name="kind_of", kind="ordinal", feature="kind", num_levels=3)
    schema = Schema(features=(Feature(name="kind", kind="number"),), labels=(label,))
    sequences = write_sequences(tmp_path / "log", schema=schema, log=log)
    builder = RequestBuilder(texts=TEXTS, behaviour=label, behaviour_weights=(1.0, 1.5, 2.0))
    assert [(one.level, one.weight) for one in builder.build(sequences, 0, 2).actions] == [(2, 2.0), (0, 1.0)]
