"""An instance over HTTP: exact scores, limits, refusals, tickets, events, privacy, memory."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.requests import Request

from nestpipe.cli import main
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError
from nestpipe.gateway.router import Ticket, sign
from nestpipe.models.kv_prefix import KVPrefix
from nestpipe.serve import event_log
from nestpipe.serve.admin import Admin
from nestpipe.serve.api import Instance
from nestpipe.serve.config import Limits, TriggerConfig
from nestpipe.serve.engine import Engine
from nestpipe.serve.openapi import document, instance_calls
from nestpipe.serve.request_guard import lacks_token
from nestpipe.training.run_folder import Run
from tests.gateway.fake_instances import Served as Server
from tests.serve.small_rankers import ASKED, NUM_ITEMS, make_engine

SECRET, TOKEN = b"the secret of the tests", "the token"
ITEMS = list(range(NUM_ITEMS))
EXACT = 1e-5  # of scores of order one in 32 bits: the contract's tolerance
LIMITS = Limits(body_bytes=60_000, body_s=0.5, candidates=50, history=100, events=20)
SLOW = {"deadline_ms": 60_000}  # the machine may be busy


def nothing_else(folder, step):
    raise AssertionError("no test here loads another model")


@dataclass
class World:
    instance: Instance
    url: str
    admin: str
    http: httpx.Client
    now: list

    def post(self, call, body, **fields):
        return self.http.post(f"{self.url}/v1/{call}", json={**body, **fields})

    def rank(self, user, request="r", **fields):
        body = {"user": user, "request": request, "candidates": ITEMS, "query_time": ASKED, **SLOW, **fields}
        found = self.post("rank", body)
        assert found.status_code == 200, found.text
        return found.json()

    def prefill(self, user, request="r", **fields):
        body = {"user": user, "request": request, "candidates": 20, "query_time": ASKED, **fields}
        found = self.post("prefill", body)
        assert found.status_code == 200, found.text
        return found.json()

    def settle(self):
        wait_until(lambda: not self.instance.engine._prefills and not self.instance.engine._evictable)


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def open_world(runs, served, tmp_path):
    opened = []

    def of(backbone="hstu", **config):
        engine = make_engine(runs(backbone), tmp_path / backbone, served=served(backbone), **config)
        now = [1_800_000_000.0]
        instance = Instance(engine, name="one", secret=SECRET, limits=LIMITS, wall_clock=lambda: now[0])
        engine.start()
        servers = [Server(instance.app()), Server(Admin(instance, engine, token=TOKEN, load=nothing_else).app())]
        http = httpx.Client(timeout=60)
        opened.append((engine, servers, http))
        return World(instance, servers[0].url, servers[1].url, http, now)

    yield of
    for engine, servers, http in opened:
        http.close()
        for server in servers:
            server.close()
        engine.stop()


@pytest.fixture
def world(open_world):
    return open_world()


def by_item(answer):
    return dict(zip(answer["items"], answer["scores"], strict=True))


def same(a, b):
    a, b = by_item(a), by_item(b)
    return a.keys() == b.keys() and max(abs(a[item] - b[item]) for item in a) <= EXACT


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
def test_cached_equals_full_through_http(open_world, backbone):
    world = open_world(backbone)
    full = world.rank(7)
    assert (full["path"], full["prefix_len"], full["degraded"]) == ("full", 0, False)
    assert full["scores"] == sorted(full["scores"], reverse=True)
    assert full["model"].startswith(f"{backbone}/step-")
    said = world.prefill(7)
    assert (said["admitted"], said["reason"], said["instance"]) == (True, "admitted", "one")
    first = world.rank(7, ticket=said["ticket"])
    assert first["path"] in {"hit_device", "join"}
    assert first["prefix_len"] > 10
    world.settle()
    second = world.rank(7, k=5)
    assert second["path"] == "hit_host"
    assert second["items"] == full["items"][:5]
    assert same(first, full)
    posted = {"events": [{"id": "e1", "user": 7, "item": 3, "time": ASKED - 9, "click": 1, "device": "tablet"}]}
    for result, accepted in (("stored", 1), ("duplicate", 0)):
        said = world.post("events", posted).json()
        assert said["results"] == [{"result": result, "error": None}]
        assert (said["accepted"], said["duplicates"]) == (accepted, 1 - accepted)
    third = world.rank(7)
    assert third["path"] == "extend", "the next request sees the event"
    assert not same(third, full)
    assert world.post("invalidate", {"user": 7}).json()["entries"] >= 1
    fourth = world.rank(7)
    assert fourth["path"] == "full"
    assert same(third, fourth)


def sent_history(log, user):
    """What is stored of a user, as a caller sends it."""
    rows = slice(*log.offsets[user : user + 2].tolist())
    device, names = log.event_features["device"], dict(log.vocabulary("device").table.iter_rows())
    sent = []
    for n in range(rows.start, rows.stop):
        event = {"item": int(log.items[n]), "time": int(log.times[n] // 1000), "device": names[int(device.values[n])]}
        for name in ("click", "dwell", "hour"):
            value = float(log.event_features[name].values[n])
            event[name] = None if np.isnan(value) else value
        sent.append(event)
    return sent


def test_a_sent_history_gives_the_scores_of_the_stored_one(world, log):
    sent, stored = sent_history(log, 7), world.rank(7)
    assert same(world.rank(7, history=sent), stored)
    world.prefill(7)
    world.settle()
    assert world.rank(7, history=sent)["path"] == "hit_device", "the same inputs, so the same prefix"
    changed = [*sent[:-3], {**sent[-3], "click": 1 - sent[-3]["click"]}, *sent[-2:]]
    edited = world.rank(7, history=changed)
    assert edited["path"] == "full", "an action was edited"
    assert not same(edited, stored)
    assert same(world.rank(7, history=[]), world.rank(7, history=[]))


# Tickets.


def test_tickets_hold_release_and_carry_the_time_of_the_signal(world):
    said = world.prefill(7, query_time=None)
    world.settle()
    assert world.instance.engine.cache.device.used > 0
    now = world.rank(7, "other", query_time=int(world.now[0]))
    world.now[0] += 5
    assert same(world.rank(7, ticket=said["ticket"], query_time=None), now)
    again = world.prefill(8)
    world.settle()
    assert world.post("release", {"ticket": again["ticket"]}).json() == {"released": True}
    assert world.post("release", {"ticket": again["ticket"]}).json() == {"released": False}


@pytest.mark.parametrize("kind", ["forged", "cut", "expired", "epoch", "instance", "request", "clock back", "nonsense"])
def test_a_ticket_that_is_not_good_is_refused_and_the_request_answered(world, kind):
    good = world.prefill(7)
    full = world.rank(5)
    own = Ticket(request="x", instance="one", epoch=world.instance.epoch, key="k", expiry=world.now[0] + 5)
    text = {
        "forged": sign(own, b"another secret here"),
        "cut": good["ticket"][:-3],
        "expired": good["ticket"],
        "epoch": sign(Ticket(**{**fields(own), "epoch": "before"}), SECRET),
        "instance": sign(Ticket(**{**fields(own), "instance": "two"}), SECRET),
        "request": good["ticket"],
        "clock back": good["ticket"],
        "nonsense": "x" * 900,
    }[kind]
    world.now[0] += {"expired": 3600, "clock back": -3600}.get(kind, 0)
    user = 7 if kind in {"expired", "clock back", "cut"} else 5
    found = world.rank(user, ticket=text)
    assert not found["degraded"]
    if user == 5:
        assert same(found, full)
    if kind != "request":
        refused = world.post("release", {"ticket": text})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "bad_ticket")
    assert "nestpipe_tickets_refused_total 1.0" in world.http.get(f"{world.url}/metrics").text


def fields(ticket):
    return {name: getattr(ticket, name) for name in ticket.__slots__}


@pytest.mark.parametrize(("mode", "reason"), [("on", "not_at_risk"), ("shadow", "not_at_risk"), ("off", "off")])
def test_where_the_relay_is_of_no_use_a_signal_does_not_reach_the_engine(open_world, monkeypatch, mode, reason):
    world = open_world(trigger=TriggerConfig(mode=mode, budget_ms=1e6))
    monkeypatch.setattr(world.instance.engine, "submit", lambda job: pytest.fail("it was queued"))
    for user in (7, 10**15):
        said = world.prefill(user)
        assert (said["ticket"], said["admitted"], said["reason"]) == (None, False, reason)
        assert said["quiet_s"] == 1.0, "no other signal is needed for a while"
    assert f'nestpipe_reason_total{{reason="{reason}"}} 2.0' in world.http.get(f"{world.url}/metrics").text


def test_candidates_that_the_catalogue_lacks_are_listed_and_the_rest_is_ranked(open_world):
    world = open_world()
    known = world.rank(7, candidates=[3, 5, 9])
    found = world.rank(7, candidates=[10**6, 3, 5, 9, -1])
    assert (found["items"], found["scores"]) == (known["items"], known["scores"])
    assert found["unknown"] == [10**6, -1]
    assert (known["unknown"], world.rank(7, candidates=[10**6])["items"]) == ([], [])
    assert world.rank("guest \u200d", candidates=[3, 5, "sold out"])["unknown"] == ["sold out"]  # without history
    assert world.rank("7", candidates=["3", 5, "9"])["items"] == known["items"]  # a number may come as its text


# Refusals and limits.


@pytest.mark.parametrize(
    ("call", "body", "status", "code"),
    [
        ("rank", {"request": "r", "candidates": [1]}, 400, "bad_user"),
        ("rank", {"user": True, "request": "r", "candidates": [1]}, 400, "bad_user"),
        ("rank", {"user": 2**63, "request": "r", "candidates": [1]}, 400, "bad_user"),
        ("rank", {"user": 1, "request": "r", "candidates": []}, 400, "bad_candidates"),
        ("rank", {"user": 1, "request": "r", "candidates": [1] * 51}, 400, "bad_candidates"),
        ("rank", {"user": 1, "request": "r", "candidates": [1], "k": 0}, 400, "bad_k"),
        ("rank", {"user": 1, "request": "r", "candidates": [1], "deadline_ms": -1}, 400, "bad_deadline_ms"),
        ("rank", {"user": 1, "request": "r", "candidates": [1], "query_time": -1}, 400, "bad_query_time"),
        ("rank", {"user": 1, "request": "r", "candidates": [1], "colour": 1}, 400, "unknown_field"),
        ("rank", {"user": 1, "request": "\ud800", "candidates": [1]}, 400, "not_json"),
        ("rank", {"user": 1, "request": "r", "candidates": [1], "history": [{"item": 1}]}, 400, "bad_data"),
        (
            "rank",
            {"user": 1, "request": "r", "candidates": [1], "history": [{"item": 1, "time": 1}] * 101},
            400,
            "bad_history",
        ),
        ("prefill", {"user": 1, "request": "r", "candidates": 0}, 400, "bad_candidates"),
        ("events", {"events": [{}] * 21}, 413, "too_many"),
        ("events", {"events": {}}, 400, "bad_events"),
        ("events", {}, 400, "bad_events"),
        ("invalidate", {"user": 1.5}, 400, "bad_user"),
        ("release", {"ticket": ""}, 400, "bad_ticket"),
    ],
)
def test_mistakes_are_refused_with_their_reason(shared, call, body, status, code):
    found = shared.http.post(f"{shared.url}/v1/{call}", content=json.dumps(body))
    assert (found.status_code, found.json()["error"]["code"]) == (status, code), found.text
    assert len(found.json()["error"]["message"]) > 10


def test_a_bad_event_has_an_error_of_its_own_and_spoils_no_other(shared):
    good = {"id": "a", "user": 1, "item": 1, "time": 1}
    changes = [
        {"id": 5},
        {"id": "\n"},
        {"click": "x"},
        {"user": "one"},
        {"user": 2.5},
        {"device": {}},
        {"device": True},
    ]
    changes += [{"device": ["tv"]}, {"item": None}, {"time": -1}, {"colour": 1}]
    sent = [7, {"id": "a"}, *({**good, "id": f"b{place}", **change} for place, change in enumerate(changes))]
    sent += [{**good, "id": "new item", "item": 10**6}, {**good, "id": "new value", "device": "fax"}]
    said = shared.http.post(f"{shared.url}/v1/events", json={"events": [*sent, good]}).json()
    assert [one["result"] for one in said["results"]] == ["error"] * 13 + ["stored"] * 3
    assert [one["error"]["code"] for one in said["results"][:5]] == [
        "bad_data",
        "bad_item",
        "bad_id",
        "bad_data",
        "bad_data",
    ]
    assert all(len(one["error"]["message"]) > 10 for one in said["results"][:13])
    assert (said["accepted"], said["duplicates"]) == (3, 0)


@pytest.fixture(scope="module")
def shared(runs, served, tmp_path_factory):
    engine = make_engine(runs("hstu"), tmp_path_factory.mktemp("shared"), served=served())
    instance = Instance(engine, name="one", secret=SECRET, limits=LIMITS)
    engine.start()
    server, admin = Server(instance.app()), Server(Admin(instance, engine, token=TOKEN, load=nothing_else).app())
    with httpx.Client(timeout=60) as http:
        yield World(instance, server.url, admin.url, http, [])
    server.close()
    admin.close()
    engine.stop()


def test_bodies_that_are_no_json_too_large_or_too_slow(shared):
    for content in (
        b"",
        b"{",
        b"[]",
        b"nan",
        b'{"user": NaN}',
        b"\xff",
        b'{"user": 1e999}',
        b'{"user": "\xed\xa0\x80"}',
        b"[" * 5000,
    ):
        assert shared.http.post(f"{shared.url}/v1/rank", content=content).status_code == 400
    large = shared.http.post(f"{shared.url}/v1/rank", content=b" " * 60_001)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
    host, port = shared.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in slow.recv(4096)
    assert shared.http.get(f"{shared.url}/v1/rank").status_code == 405
    assert shared.http.get(f"{shared.url}/nothing").status_code == 404


def test_health_metrics_and_the_document(shared):
    shared.rank(5)
    assert shared.http.get(f"{shared.url}/healthz").json() == {"alive": True}
    assert shared.http.get(f"{shared.url}/readyz").json() == {"ready": True}
    text = shared.http.get(f"{shared.url}/metrics").text
    assert 'nestpipe_path_total{path="full"}' in text
    assert 'nestpipe_cache_cap_bytes{tier="device"}' in text
    assert re.search(r'nestpipe_answers_total\{call="rank",status="200"\} \d', text)
    assert "user" not in text
    said = shared.http.get(f"{shared.url}/openapi.json").json()
    schema = shared.instance.engine.histories.sequences.schema
    assert said == json.loads(
        json.dumps(document("An instance of nestpipe", instance_calls(LIMITS), schema, max_elements=LIMITS.events))
    )
    asked = said["paths"]["/v1/rank"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert asked["properties"]["candidates"]["maxItems"] == 50
    answer = said["paths"]["/v1/rank"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(shared.rank(5)) == set(answer["required"])


def test_administration_needs_its_token(shared):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}):
        for call in (
            shared.http.get(f"{shared.admin}/state", headers=headers),
            shared.http.post(f"{shared.admin}/drain", headers=headers),
        ):
            assert call.status_code == 401
    assert lacks_token(Request({"type": "http", "headers": []}), "") is not None, "nobody knows an empty one"
    assert not shared.instance.is_draining
    assert shared.http.get(f"{shared.url}/state").status_code == 404, "not on the public port"
    state = shared.http.get(f"{shared.admin}/state", headers={"authorization": f"Bearer {TOKEN}"}).json()
    assert state["instance"] == "one"
    assert state["device"]["cap"] > 0


def test_a_call_that_fails_is_an_answer_and_is_counted(world, monkeypatch):
    monkeypatch.setattr(world.instance.engine, "submit", lambda job: {}["nothing"])
    found = world.post("rank", {"user": 1, "request": "a", "candidates": [1]})
    assert (found.status_code, found.json()["error"]["code"]) == (503, "failed")
    text = world.http.get(f"{world.url}/metrics").text
    assert 'nestpipe_answers_total{call="rank",status="503"} 1.0' in text


def test_overload_and_draining_are_said_at_once(open_world):
    world = open_world(max_queue=1)
    engine = world.instance.engine
    engine.stop()  # nothing is taken from the queue any more
    engine.is_stopping = False
    with httpx.Client(timeout=1) as waiting, pytest.raises(httpx.ReadTimeout):
        waiting.post(f"{world.url}/v1/rank", json={"user": 1, "request": "a", "candidates": [1]})
    wait_until(lambda: engine._inbox and engine._inbox[0].reply.cancelled())
    full = world.post("rank", {"user": 1, "request": "b", "candidates": [1]})
    assert (full.status_code, full.json()["error"]["code"], full.headers["retry-after"]) == (429, "overloaded", "1")
    engine.is_stopping = True
    gone = world.post("rank", {"user": 1, "request": "c", "candidates": [1]})
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "stopping")
    assert world.http.get(f"{world.url}/readyz").status_code == 503


def test_three_times_what_fits_is_refused_without_any_work_and_what_was_taken_is_answered(open_world, monkeypatch):
    """No clock: while the engine does nothing at all, refusals come; when it goes on, so does the service."""
    world = open_world(max_queue=4, max_batch=1)
    engine, step, go_on = world.instance.engine, Engine.step, threading.Event()
    full = {user: world.rank(user) for user in range(3)}

    def stand_still(self):
        go_on.wait(60)
        return step(self)

    monkeypatch.setattr(Engine, "step", stand_still)
    with ThreadPoolExecutor(16) as threads:
        body = {"request": "a", "candidates": ITEMS, "query_time": ASKED, **SLOW}
        asked = [(n % 3, threads.submit(world.post, "rank", {"user": n % 3, **body})) for n in range(15)]
        wait_until(lambda: sum(one.done() for _, one in asked) >= 10)
        assert {one.result().status_code for _, one in asked if one.done()} == {429}
        assert world.http.get(f"{world.url}/healthz").status_code == 200
        go_on.set()
        taken = [(user, one.result().json()) for user, one in asked if one.result().status_code == 200]
        refused = [one.result() for _, one in asked if one.result().status_code != 200]
    assert {(one.status_code, one.json()["error"]["code"]) for one in refused} == {(429, "overloaded")}
    assert all(one.headers["retry-after"] == "1" for one in refused)
    assert len(taken) >= 4
    assert all(same(found, full[user]) and not found["degraded"] for user, found in taken)
    assert engine.num_waiting == 0
    assert same(world.rank(1), full[1]), "it is as before"
    assert (
        f'nestpipe_answers_total{{call="rank",status="429"}} {float(len(refused))}'
        in world.http.get(f"{world.url}/metrics").text
    )


def test_what_is_too_much_is_refused_before_its_history_is_read(open_world, monkeypatch):
    world = open_world(max_queue=1, max_batch=1)
    engine = world.instance.engine
    go_on, parsed = threading.Event(), []

    def slow(user, events):
        parsed.append(user)
        assert go_on.wait(60)
        raise DataError("enough")

    monkeypatch.setattr(engine.histories, "given", slow)
    many = [{"item": 5, "time": ASKED - 50}] * 100  # few are read without a thread
    body = {"request": "a", "candidates": [1], "history": many}
    with ThreadPoolExecutor(2) as threads:
        first = [threads.submit(world.post, "rank", {"user": user, **body}) for user in (1, 2)]
        wait_until(lambda: len(parsed) == 2)
        found = world.post("rank", {"user": 3, **body})
        go_on.set()
        assert [one.result().status_code for one in first] == [400, 400]
    assert (found.status_code, found.json()["error"]["code"], found.headers["retry-after"]) == (429, "overloaded", "1")
    assert sorted(parsed) == [1, 2]
    assert world.post("rank", {"user": 1, "request": "a", "candidates": [1], **SLOW}).status_code == 200


def test_posts_of_events_that_wait_for_the_disk_keep_no_rank_waiting(open_world, log, monkeypatch):
    """As many as there are threads and places for ranks: those with a history, and those without, are answered meanwhile."""
    world, disk = open_world(), threading.Event()
    monkeypatch.setattr(event_log.os, "fsync", lambda file: disk.wait(30))
    many = world.instance.engine.config.max_queue + world.instance.engine.config.max_batch

    def post(number):
        event = {"id": f"e{number}", "user": 9, "item": 5, "time": ASKED - 50}
        return client.post(f"{world.url}/v1/events", json={"events": [event]}).status_code

    unlimited = httpx.Limits(max_connections=None)
    with httpx.Client(timeout=60, limits=unlimited) as client, ThreadPoolExecutor(many) as executor:
        posts = [executor.submit(post, number) for number in range(many)]
        wait_until(lambda: sum(one.done() for one in posts) >= many - 64)  # the others wait for the disk
        try:
            assert world.rank(7)["items"]
            assert world.rank(7, history=sent_history(log, 7))["items"]
        finally:
            disk.set()
        codes = Counter(one.result() for one in posts)
    assert set(codes) == {200, 429}
    assert codes[200] == 64


def test_a_deadline_that_passed_is_a_503_or_the_callers_order(shared):
    found = shared.post("rank", {"user": 5, "request": "r", "candidates": ITEMS, "deadline_ms": 0.0001})
    assert found.status_code == 503 or found.json()["path"] == "fallback"
    if found.status_code == 503:
        assert found.json()["error"]["code"] == "deadline"


# Privacy.


def test_forgetting_leaves_no_byte_of_the_user(runs, log, tmp_path, capsys):
    """Tiers, work, event log, sequence folder: an instance that serves meanwhile notices by itself."""
    shutil.copytree(log.path, tmp_path / "log")
    shutil.copytree(runs("hstu").folder, tmp_path / "run")
    (tmp_path / "run" / "eval" / "test").mkdir(parents=True)
    config = runs("hstu").config
    moved = replace(config, data=replace(config.data, path=str(tmp_path / "log")))
    (tmp_path / "run" / "config.json").write_text(moved.to_json())
    engine = make_engine(Run.open(tmp_path / "run"), tmp_path / "run" / "serve")
    instance = Instance(engine, name="one", secret=SECRET)
    engine.start()
    server = Server(instance.app())
    with httpx.Client(timeout=60) as http:
        world = World(instance, server.url, "", http, [])
        mark = 1_702_512_345  # a time that nobody else has
        world.post(
            "events",
            {
                "events": [
                    {"id": "secret-id", "user": 7, "item": 3, "time": mark},
                    {"id": "b", "user": 8, "item": 4, "time": mark + 1},
                ]
            },
        )
        for user in (7, 8):
            world.prefill(user)
            world.settle()
            world.rank(user)
        world.settle()
        kept = world.rank(8)
        assert main(["forget", str(tmp_path / "run"), "--user", "7"]) == 0
        assert "stored and 1 logged events were erased" in capsys.readouterr().out
        wait_until(lambda: not engine.cache.peek_user(7))
        found = world.rank(7)
        assert same(found, world.rank(10**9))
        assert (found["path"], found["prefix_len"]) == ("full", 0)
        assert len(engine.histories.of(7).items) == 0
        again = world.rank(8)
        assert same(again, kept), "nobody else lost anything"
        gc.collect()
        mapped = Path("/proc/self/maps")
        assert not mapped.exists() or str(tmp_path / ".log.old") not in mapped.read_text(), (
            "nor is the old folder mapped"
        )
    server.close()
    engine.stop()
    now, others = Sequences.open(tmp_path / "log"), log
    now.verify()
    assert 7 not in now.users
    assert len(now.users) == len(others.users) - 1
    mine = others.items[others.offsets[7] : others.offsets[8]]
    assert len(now.items) == len(others.items) - len(mine)
    for place, user in enumerate(now.users):
        before = others.offsets[user]
        size = now.offsets[place + 1] - now.offsets[place]
        assert (now.items[now.offsets[place] : now.offsets[place + 1]] == others.items[before : before + size]).all()
        for name, one in now.event_features.items():
            if one.offsets is None:
                old = others.event_features[name].values[before : before + size]
                assert np.array_equal(one.values[now.offsets[place] : now.offsets[place + 1]], old, equal_nan=True)
        segment, old = now.user_features["segment"], others.user_features["segment"]
        assert segment.values[segment.offsets[place]] == old.values[old.offsets[user]]
    logged = (tmp_path / "run" / "serve" / "events.log").read_bytes()
    assert b"secret-id" not in logged
    assert str(mark).encode() not in logged
    assert b'"user":8' in logged
    times = others.times[others.offsets[7] : others.offsets[8]]
    unique = [one for one in times if (others.times == one).sum() == 1]
    content = (tmp_path / "log" / "times.npy").read_bytes()
    assert unique
    assert not any(np.int64(one).tobytes() in content for one in unique)
    assert not (tmp_path / "run" / "eval").exists()
    assert Run.open(tmp_path / "run").sequences.digest == now.digest, "the run opens with what is left"


def anonymous_bytes():
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc")  # noqa: PTH110
def test_memory_after_many_requests_is_that_after_few(open_world, scale):
    """RssAnon after ten times as many requests; the small count would hide a leak below about 50 KiB per request."""
    world = open_world(device_bytes=40_000, host_bytes=60_000)
    num = scale(60, 1000)

    def ask(first, last):
        for number in range(first, last):
            user = number % 40
            ticket = world.prefill(user, f"r{number}")["ticket"] if number % 3 == 0 else None
            world.rank(user, f"r{number}", ticket=ticket)

    ask(0, num)
    before = anonymous_bytes()
    ask(num, num * scale(4, 10))
    after = anonymous_bytes()
    assert after <= before * 1.05, f"{before:,} bytes after {num} requests, {after:,} later"
    world.instance.engine.cache.check()


def test_a_prefix_is_all_that_is_counted(open_world):
    """What the books say is what the tensors take."""
    world = open_world()
    for user in range(5):
        world.prefill(user, f"r{user}")
    world.settle()
    kept: list[KVPrefix] = [one for user in range(5) for one in world.instance.engine.cache.peek_user(user)]
    assert len(kept) == 5
    assert world.instance.engine.cache.device.used == sum(one.num_bytes for one in kept)
