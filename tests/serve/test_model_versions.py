"""Another model while the service runs, and two side by side: each answer is that of the model it names."""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from nestpipe.cli import main
from nestpipe.data.ingest import write_meta
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError
from nestpipe.serve import model_versions
from nestpipe.serve.admin import Admin
from nestpipe.serve.api import Instance
from nestpipe.serve.model import open_served
from nestpipe.serve.model_versions import VersionFile, VersionRecord, load_version
from nestpipe.serve.versioned_worker import ModelVersions
from tests.gateway.fake_instances import Served as Server
from tests.serve.small_rankers import ASKED, NUM_ITEMS, Clock, hint, make_engine, rank, settle

EXACT = 1e-5  # of scores of order one in 32 bits: the contract's tolerance
ITEMS, TOKEN = tuple(range(NUM_ITEMS)), "the token"


@pytest.fixture
def load(runs, tmp_path):
    """Loads the runs of the tests beside an engine's model."""

    def of(engine, folder, step=None):
        return load_version(engine.histories, folder, step=step, label="", tables=tmp_path / "tables", chunk=8)

    return of


def answer(engine, user, **fields):
    job = rank(engine, user, ITEMS, **fields)
    settle(engine)
    return job.reply.result(0)


def apart(a, b):
    a, b = (dict(zip(one.items, one.scores, strict=True)) for one in (a, b))
    return max(abs(a[item] - b[item]) for item in ITEMS)


def test_new_requests_get_the_new_model_and_tickets_the_old_one_which_then_goes(runs, served, tmp_path, load):
    clock = Clock()
    truth = {
        name: answer(make_engine(runs(name), tmp_path / name, served=served(name)), 3) for name in ("hstu", "fuxi")
    }
    assert apart(truth["hstu"], truth["fuxi"]) > 1e-3
    engine = make_engine(runs("hstu"), tmp_path, clock=clock)
    for request in ("held", "expires"):
        hint(engine, 3, request, ttl_s=5)
        settle(engine)
    hint(engine, 4, "begun", ttl_s=5)
    engine._accept()
    engine._prefills.run()  # one chunk of several
    waiting = rank(engine, 5, ITEMS)
    engine._accept()
    old = weakref.ref(engine.versions.main)
    engine.use(ModelVersions(load(engine, runs("fuxi").folder)))
    assert len(engine.models) == 2
    settle(engine)
    assert waiting.reply.result(0).model.startswith("hstu/"), "it came before the swap"
    begun = answer(engine, 4, request="begun")
    assert (begun.model.split("/")[0], begun.path) == ("hstu", "hit_device")
    found = answer(engine, 3, request="held")
    assert (found.model.split("/")[0], found.path) == ("hstu", "hit_device")
    assert apart(found, truth["hstu"]) <= EXACT
    new = answer(engine, 3)
    assert (new.model.split("/")[0], new.path) == ("fuxi", "full"), (
        "the prefix of the old model is not that of the new one"
    )
    assert apart(new, truth["fuxi"]) <= EXACT
    hint(engine, 3, "next", ttl_s=100)
    settle(engine)
    hit = answer(engine, 3, request="next")
    assert (hit.model.split("/")[0], hit.path) == ("fuxi", "hit_device")
    assert apart(hit, truth["fuxi"]) <= EXACT
    assert old() is not None, "a ticket is still out"
    clock.now += 6
    engine._refresh()  # the ticket expires
    del waiting
    assert old() is None, "nothing refers to it any more: its memory is free without a collection"
    clock.now += 1
    engine._refresh()
    assert len(engine.models) == 1
    assert {key.weights for key in engine.cache._entries} <= {engine.versions.main.ranker._weights}
    engine.cache.check()


def test_prefixes_of_a_model_that_goes_at_once_go_too(runs, served, tmp_path):
    """Between two looks one model went and one came: there are as many as before, and not the same."""
    clock = Clock()
    engine = make_engine(runs("hstu"), tmp_path, served=served("hstu"), clock=clock)
    hint(engine, 3)
    settle(engine)
    answer(engine, 3, request="r")
    engine._refresh()
    assert len(engine.cache) == 1
    engine.use(ModelVersions(served("fuxi")))
    assert len(engine.models) == 1
    clock.now += 1
    engine._refresh()
    assert len(engine.cache) == 0


def test_two_models_side_by_side_by_a_hash_of_the_user(runs, served, tmp_path):
    other = served("fuxi")
    engine = make_engine(runs("hstu"), tmp_path, served=served("hstu"))
    versions = ModelVersions(engine.versions.main, other, 0.3)
    engine.use(versions)
    chosen = [versions.of(user) is other for user in range(20_000)]
    assert 0.28 < np.mean(chosen) < 0.32
    assert all(
        ModelVersions(engine.versions.main, other, 0.5).of(user) is other for user in np.flatnonzero(chosen).tolist()
    ), "who was in stays in"
    jobs = [rank(engine, user, ITEMS) for user in range(16)]
    settle(engine)
    said = [job.reply.result(0).model.split("/")[0] for job in jobs]
    assert said == ["fuxi" if one else "hstu" for one in chosen[:16]]
    assert len(set(said)) == 2, "in the same batches"
    assert engine.versions.main.counts["full"] == said.count("hstu")


def undeclared(served):
    """Places that count from the end, in a model that does not say so."""
    model = served.ranker.model
    model.__class__ = type("Undeclared", (type(model),), {"place_of": lambda self, event, num: num - event})
    return served


@pytest.fixture
def running(runs, tmp_path, load):
    """An instance with its administration, over HTTP."""
    engine = make_engine(runs("hstu"), tmp_path)
    instance = Instance(engine, name="one", secret=b"the secret of the tests")
    engine.start()
    admin = Admin(instance, engine, token=TOKEN, load=partial(load, engine), file=VersionFile(tmp_path / "notes.json"))
    servers = [Server(instance.app()), Server(admin.app())]
    with httpx.Client(timeout=60, headers={"authorization": f"Bearer {TOKEN}"}) as http:
        yield engine, http, *(one.url for one in servers)
    for one in servers:
        one.close()
    engine.stop()


def _with_other_events(source, target):
    """Copies a sequence folder and gives its users the items of others; returns its digest."""
    shutil.copytree(source, target)
    np.save(target / "items.npy", np.roll(np.load(target / "items.npy"), 1))
    meta = json.loads((target / "meta.json").read_text())
    (target / "meta.json").unlink()
    write_meta(target, {name: one for name, one in meta.items() if name not in {"files", "digest"}})
    return Sequences.open(target).digest


def test_what_cannot_be_served_is_refused_and_the_old_model_goes_on(runs, running, tmp_path, monkeypatch):
    engine, http, url, admin = running
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(runs("fuxi").folder, elsewhere)
    config = runs("fuxi").config
    digest = _with_other_events(Path(config.data.path), tmp_path / "log")
    (elsewhere / "config.json").write_text(
        replace(config, data=replace(config.data, path=str(tmp_path / "log"))).to_json()
    )
    facts = json.loads((elsewhere / "run.json").read_text())
    (elsewhere / "run.json").write_text(json.dumps({**facts, "data_digest": digest}))
    fuxi, before = str(runs("fuxi").folder), engine.versions
    for call, body, status, code, message in (
        ("swap", {}, 400, "bad_run", "field 'run'"),
        ("swap", {"run": str(tmp_path / "nowhere")}, 400, "bad_model", "a run folder"),
        ("swap", {"run": str(elsewhere)}, 400, "bad_model", "was trained on the sequence folder"),
        ("swap", {"run": fuxi, "step": 7}, 400, "bad_model", "no complete checkpoint of step 7"),
        ("swap", {"run": fuxi, "share": 1}, 400, "unknown_field", "share"),
        ("compare", {"run": fuxi}, 400, "bad_share", "0 .. 1"),
        ("compare", {"run": fuxi, "share": 1.5}, 400, "bad_share", "0 .. 1"),
        ("compare", {"share": 0.5}, 400, "bad_run", "field 'run'"),
    ):
        found = http.post(f"{admin}/{call}", json=body)
        assert (found.status_code, found.json()["error"]["code"]) == (status, code), found.text
        assert message in found.json()["error"]["message"]
    assert http.post(f"{admin}/swap", json={"run": fuxi}, headers={"authorization": "Bearer x"}).status_code == 401
    assert http.post(f"{url}/swap", json={"run": fuxi}).status_code == 404
    monkeypatch.setattr(model_versions, "open_served", lambda *args, **fields: {}["no such weight"])
    found = http.post(f"{admin}/swap", json={"run": fuxi})
    assert (found.status_code, found.json()["error"]["code"]) == (500, "failed")
    assert main(["swap", str(tmp_path), fuxi, "--admin-port", admin.rpartition(":")[2]]) == 2
    monkeypatch.setattr(model_versions, "open_served", lambda *args, **fields: undeclared(open_served(*args, **fields)))
    found = http.post(f"{admin}/swap", json={"run": fuxi})
    assert (found.status_code, found.json()["error"]["code"]) == (409, "parity")
    assert engine.versions is before
    body = {"user": 3, "request": "r", "candidates": ITEMS, "query_time": ASKED, "deadline_ms": 60_000}
    assert http.post(f"{url}/v1/rank", json=body).json()["model"].startswith("hstu/")


def test_prefixes_of_a_model_that_knows_the_request_fail_the_self_test(runs, served, tmp_path):
    engine = make_engine(runs("hstu"), tmp_path)
    undeclared(engine.versions.main)
    with pytest.raises(
        model_versions.ParityError, match=r"failed its parity self-test: with a prefix of .* the model in use stays"
    ):
        model_versions.check_parity(engine.versions.main, engine.histories, chunk=8)
    sound = copy(served("hstu"))
    model_versions.check_parity(sound, engine.histories, chunk=8)
    sound.scores = lambda asked, wanted, kept=None: [torch.full((len(wanted[0].items.values),), torch.nan)]
    with pytest.raises(model_versions.ParityError, match="nan away from full inference"):
        model_versions.check_parity(sound, engine.histories, chunk=8)


def test_one_model_is_loaded_at_a_time(runs, served, tmp_path):
    began, may_end = threading.Event(), threading.Event()

    def load(folder, step):
        began.set()
        assert may_end.wait(60)
        return served("fuxi")

    engine = make_engine(runs("hstu"), tmp_path, served=served("hstu"))
    instance = Instance(engine, name="one", secret=b"x" * 16)
    server = Server(Admin(instance, engine, token=TOKEN, load=load).app())
    ask = partial(httpx.post, f"{server.url}/swap", json={"run": "r"}, headers={"authorization": f"Bearer {TOKEN}"})
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(ask, timeout=60)
        assert began.wait(60)
        second = ask()
        may_end.set()
        assert (second.status_code, second.json()["error"]["code"]) == (409, "busy")
        assert first.result().json()["model"].startswith("fuxi/")
    assert ask().status_code == 200, "and then the next"
    server.close()


def test_the_command_understands_strange_answers_and_asks_no_proxy(tmp_path, monkeypatch, capsys):
    async def strange(http):
        return JSONResponse({"detail": "who are you"}, 404 if http.url.path == "/swap" else 200)

    server = Server(Starlette(routes=[Route(f"/{one}", strange, methods=["POST"]) for one in ("swap", "compare")]))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "token").write_text(TOKEN)
    for share in ([], ["--share", "0.5"]):
        assert main(["swap", str(tmp_path), "new", *share, "--admin-port", server.url.rpartition(":")[2]]) == 2
        said = capsys.readouterr().err
        assert "KeyError" in said, "the server was asked, and not the proxy"
        assert "is this its --admin-port?" in said
    server.close()


def test_the_command_swaps_compares_and_ends_a_comparison(runs, running, tmp_path, capsys):
    engine, http, url, admin = running
    (tmp_path / "run" / "serve").mkdir(parents=True)
    base, fuxi = [str(tmp_path / "run")], str(runs("fuxi").folder)
    port = ["--admin-port", admin.rpartition(":")[2]]
    assert main(["swap", *base, fuxi, *port]) == 2
    assert "'nestpipe serve' was started with" in capsys.readouterr().err
    (tmp_path / "run" / "serve" / "token").write_text(TOKEN)
    assert main(["swap", *base, *port]) == 2
    assert "name the run to serve" in capsys.readouterr().err
    assert main(["swap", *base, str(tmp_path / "nowhere"), *port]) == 2
    assert "refused" in capsys.readouterr().err
    assert main(["swap", *base, fuxi, "--share", "0.5", *port]) == 0
    assert "for 50% of the users" in capsys.readouterr().out
    said = {}
    for user in range(12):
        body = {"user": user, "request": "r", "candidates": ITEMS, "query_time": ASKED, "deadline_ms": 60_000}
        said[user] = http.post(f"{url}/v1/rank", json=body).json()["model"]
    assert said == {user: engine.versions.of(user).name for user in said}
    text = http.get(f"{url}/metrics").text
    for name in set(said.values()):
        count = list(said.values()).count(name)
        assert f'nestpipe_ranked_total{{model="{name}",path="full"}} {float(count)}' in text
        assert f'nestpipe_rank_seconds_count{{model="{name}"}} {float(count)}' in text
    assert main(["swap", *base, "--share", "0", *port]) == 0
    assert "of the users" not in capsys.readouterr().out
    assert main(["swap", *base, fuxi, *port]) == 0
    assert "one serves fuxi/step-" in capsys.readouterr().out
    state = http.get(f"{admin}/state").json()
    assert (state["model"].split("/")[0], state["compared"]) == ("fuxi", None)
    assert notes_of(tmp_path) == VersionRecord(run=fuxi)


def notes_of(tmp_path):
    return VersionFile(tmp_path / "notes.json").record


def test_the_next_process_goes_on_with_what_the_one_before_was_told(runs, served, running, tmp_path, caplog):
    _, http, _, admin = running
    fuxi = str(runs("fuxi").folder)
    assert http.post(f"{admin}/swap", json={"run": fuxi, "step": 7}).status_code == 400
    assert not (tmp_path / "notes.json").exists(), "nothing was changed"
    assert http.post(f"{admin}/compare", json={"run": fuxi, "share": 0.25}).status_code == 200
    assert http.post(f"{admin}/compare", json={"share": 0.5}).status_code == 200
    assert http.post(f"{admin}/compare", json={"step": 7, "share": 0.5}).status_code == 400, "a step of which run?"
    assert notes_of(tmp_path) == VersionRecord(compared=fuxi, share=0.5)
    loaded = {"fuxi": served("fuxi"), "hstu": served("hstu")}

    def load(folder, step):
        if folder.name not in loaded:
            raise ConfigError(f"{folder} is gone")
        return loaded[folder.name]

    def versions(path, first=None):
        new = make_engine(runs("hstu"), tmp_path / "next", served=served("hstu"))
        VersionFile(path, first=first).follow(new, load)
        main, other = new.versions.main, new.versions.other
        return main.name.split("/")[0], other and other.name.split("/")[0], new.versions.share

    assert versions(tmp_path / "notes.json") == ("hstu", "fuxi", 0.5)
    VersionFile(tmp_path / "notes.json").store(VersionRecord(run=fuxi))
    assert versions(tmp_path / "notes.json", VersionRecord(compared=fuxi, share=0.1)) == ("fuxi", None, 0.0)
    assert versions(tmp_path / "none.json", VersionRecord(compared=fuxi, share=0.1)) == ("hstu", "fuxi", 0.1)
    VersionFile(tmp_path / "notes.json").store(VersionRecord(run=fuxi, compared="runs/gone", share=0.3))
    assert versions(tmp_path / "notes.json") == ("hstu", None, 0.0)
    assert "runs/gone is gone); serving those of the command line" in caplog.text
    with pytest.raises(ConfigError, match="gone"):
        versions(None, VersionRecord(compared="runs/gone", share=0.1))
    (tmp_path / "notes.json").write_text('{"run": 3, "st')
    assert versions(tmp_path / "notes.json") == ("hstu", None, 0.0)
