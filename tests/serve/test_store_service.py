"""The prefix store behind HTTP and the command line: every tier's scores, prefills by administration, nothing left after forgetting."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import httpx
import pytest

from nestpipe.cli import main
from nestpipe.cli import prefill as command
from nestpipe.serve.admin import Admin
from nestpipe.serve.api import Instance
from nestpipe.serve.config import TriggerConfig
from nestpipe.serve.prefix_store import PrefixStore
from nestpipe.serve.stored_prefixes import StoredPrefixes
from tests.gateway.fake_instances import Served as Server
from tests.serve.small_rankers import ASKED, MAX_LEN, costs, make_engine
from tests.serve.test_api import LIMITS, SECRET, TOKEN, World, same, wait_until

BEHIND = 4


def frozen():
    """Costs that a busy machine does not change."""
    known = costs()
    known.observe = lambda *_: None
    return known


@pytest.fixture
def open_world(runs, served, tmp_path):
    """An instance whose store is in a folder of the test; the next one is a restart."""
    opened = []

    def of(backbone="hstu", *, load=None, mode="always"):
        close()
        stored = StoredPrefixes(PrefixStore(tmp_path / "store", cap=1 << 20), behind=BEHIND)
        trigger = TriggerConfig(mode=mode, budget_ms=1e6, burst_ms=1e9)
        engine = make_engine(
            runs(backbone), tmp_path / backbone, served=served(backbone), stored=stored, known=frozen(), trigger=trigger
        )
        instance = Instance(engine, name="one", secret=SECRET, limits=LIMITS, wall_clock=lambda: 1.8e9)
        engine.start()
        admin = Admin(instance, engine, token=TOKEN, load=load)
        servers, http = [Server(instance.app()), Server(admin.app())], httpx.Client(timeout=60)
        opened.append((engine, servers, http))
        return World(instance, servers[0].url, servers[1].url, http, [])

    def close():
        while opened:
            engine, servers, http = opened.pop()
            http.close()
            for server in servers:
                server.close()
            engine.stop()

    yield of
    close()


def store_of(world):
    return world.instance.engine.tiers.stored.store


def files(world):
    return sorted(store_of(world).folder.glob("*/*"))


def admin(world, call, body=None):
    headers = {"authorization": f"Bearer {TOKEN}"}
    where = f"{world.admin}/{call}"
    return world.http.request("GET" if body is None else "POST", where, json=body, headers=headers)


def young(world):
    """A user whose window does not move for some events."""
    engine = world.instance.engine
    prepare = engine.versions.main.prepare
    lengths = {user: prepare(engine.histories.of(user), ASKED).num_events for user in range(50)}
    return next(user for user, length in lengths.items() if length < MAX_LEN - BEHIND)


def in_full(world, user):
    """The oracle, over HTTP: nothing of the user is in any tier."""
    world.post("invalidate", {"user": user})
    found = world.rank(user)
    assert found["path"] == "full"
    return found


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
def test_every_tier_answers_as_full_inference_does(open_world, backbone):
    world = open_world(backbone)
    user = young(world)
    full = world.rank(user)
    assert full["path"] == "full"
    ticket = world.prefill(user)["ticket"]
    world.settle()
    found = {}
    for fields in ({"ticket": ticket}, {}):
        answer = world.rank(user, **fields)
        world.settle()
        found[answer["path"]] = answer
    world.instance.engine.tiers.stored.flush()
    world = open_world(backbone)
    answer = world.rank(user)
    found[answer["path"]] = answer
    assert set(found) == {"hit_device", "hit_host", "hit_store"}
    assert all(same(one, full) for one in found.values())
    event = {"id": "a", "user": user, "item": 3, "time": ASKED - 9, "click": 1}
    for path in ("extend", "hit_store"):  # from memory, from disk
        world.post("events", {"events": [event | {"id": path}]})
        longer = world.rank(user)
        assert longer["path"] == path
        assert not same(longer, full)
        world.settle()
        world.instance.engine.cache.invalidate()
    assert same(longer, in_full(world, user))
    text = world.http.get(f"{world.url}/metrics").text
    assert re.search(r'nestpipe_path_total{path="hit_store"} 2', text)
    assert re.search(r"nestpipe_store_reads_total [1-9]", text)
    assert re.search(r"nestpipe_store_corrupt_total 0", text)


def test_a_flipped_byte_is_counted_and_changes_no_answer(open_world):
    world = open_world(mode="on")
    truth = world.rank(7)
    wait_until(lambda: files(world))  # written after the reply
    world.instance.engine.tiers.stored.flush()
    (path,) = files(world)
    world = open_world(mode="on")
    content = bytearray(path.read_bytes())
    content[-9] ^= 2
    path.write_bytes(content)
    found = world.rank(7)
    assert found["path"] == "full"
    assert same(found, truth)
    assert "nestpipe_store_corrupt_total 1" in world.http.get(f"{world.url}/metrics").text


def test_invalidating_and_forgetting_over_http_leave_no_file(open_world):
    world = open_world(mode="on")
    for user in (7, 8, 9):
        world.rank(user)
    wait_until(lambda: len(files(world)) == 3)  # written after the replies
    assert world.post("invalidate", {"user": 7}).json() == {"entries": 2}
    assert world.http.delete(f"{world.url}/v1/users/8").status_code == 200
    wait_until(lambda: [path.stem for path in files(world)] == ["9"])


def test_users_are_prefilled_on_request_and_progress_is_in_the_state(open_world):
    world = open_world()
    assert admin(world, "prefill", {"users": [1, 2, 3, 10**6], "rate_ms_per_s": 1e9}).status_code == 200
    wait_until(lambda: admin(world, "state").json()["nearline"]["waiting"] == 0)
    world.instance.engine.tiers.stored.flush()
    state = admin(world, "state").json()
    assert (state["nearline"]["stored"], state["nearline"]["passed_over"]) == (3, 1)
    assert state["store"]["entries"] == 3
    assert world.rank(2)["path"] == "hit_store"
    assert admin(world, "prefill", {"users": ["x"] * 1001}).status_code == 400
    world.instance.engine.nearline = world.instance.engine.tiers.stored = None
    answer = admin(world, "prefill", {"users": [1]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_store")


def test_a_swap_fills_the_store_of_the_new_model_before_it_is_used(open_world, served, tmp_path):
    new = served("fuxi")
    new.costs = frozen()
    world = open_world(mode="on", load=lambda folder, step: new)
    for user in (1, 2, 3):
        world.rank(user)
    wait_until(lambda: len(files(world)) == 3)  # written after the replies
    assert admin(world, "swap", {"run": "new", "prefill_ms_per_s": 1e9}).status_code == 200
    for user in (1, 2, 3):
        found = world.rank(user)
        assert (found["path"], found["model"].split("/")[0]) == ("hit_store", "fuxi")
        assert same(found, in_full(world, user))
    wait_until(lambda: {one.parent for one in files(world)} <= {files(world)[0].parent})


@pytest.fixture
def small_prefixes(monkeypatch):
    """Prefixes of the tests' short histories are worth storing."""
    monkeypatch.setitem(StoredPrefixes.__init__.__kwdefaults__, "behind", BEHIND)
    monkeypatch.setattr(command, "BEHIND", BEHIND)
    monkeypatch.setattr(command, "measure_costs", lambda *_, **__: frozen())


def test_the_command_fills_a_store_goes_on_and_forgetting_reaches_it(runs, tmp_path, capsys, small_prefixes):
    log = tmp_path / "log"
    shutil.copytree(runs("hstu").sequences.path, log)
    folder = tmp_path / "run"
    shutil.copytree(runs("hstu").folder, folder)
    shutil.rmtree(folder / "serve", ignore_errors=True)
    config = json.loads((folder / "config.json").read_text())
    config["data"]["path"] = str(log)
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["prefill", str(folder), "--top", "10"]) == 0
    assert "10 KV prefixes were stored" in capsys.readouterr().out
    (tmp_path / "users").write_text("1\n2\n\n3\n10000001\n")
    elsewhere = tmp_path / "elsewhere"
    for stored, passed in ((3, 1), (0, 4)):
        assert main(["prefill", str(folder), "--users", str(tmp_path / "users"), "--prefix-store", str(elsewhere)]) == 0
        out = capsys.readouterr().out
        assert f"{stored} KV prefixes were stored" in out, "the second time all of them are there"
        assert f"{passed} users have none to store" in out
    assert len(list(folder.rglob("*.kv"))) == 10
    assert main(["forget", str(folder), "--user", "2"]) == 0
    assert sorted(path.stem for path in elsewhere.rglob("*.kv")) == ["1", "3"]
    assert not list(folder.rglob("2.kv"))


def test_the_command_asks_running_instances(open_world, runs, tmp_path, capsys, small_prefixes):
    world = open_world()
    folder = runs("hstu").folder
    (folder / "serve").mkdir(exist_ok=True)
    (folder / "serve" / "token").write_text(TOKEN)
    before = admin(world, "state").json()["nearline"]["rate_ms_per_s"]
    flags = ["--instances", world.admin, "--top", "5", "--rate", "1e9"]
    assert main(["prefill", str(folder), *flags]) == 0
    assert "one stored 5 KV prefixes" in capsys.readouterr().out
    assert admin(world, "state").json()["nearline"]["rate_ms_per_s"] == before
    taken = ["--prefix-store", str(store_of(world).folder)]
    assert main(["prefill", str(folder), *taken, "--top", "1"]) == 2
    assert "name the admin addresses with --instances" in capsys.readouterr().err, "somebody else is at the usual one"
    assert main(["prefill", str(folder), "--top", "0"]) == 2
    (folder / "serve" / "token").unlink()


def test_settings_that_cannot_be_are_refused():
    problems = list(replace(TriggerConfig(), nearline_ms_per_s=-1.0).problems())
    assert problems == ["nearline_ms_per_s is -1.0; it must be 0 or more, and finite"]
