"""Runs without KV prefixes switch models too: over HTTP, by a share of the users, remembered over a restart."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest

from nestpipe.cli import main
from nestpipe.errors import ConfigError
from nestpipe.serve.admin import Admin
from nestpipe.serve.open_instance import open_instance
from nestpipe.serve.serve_flags import ServeArguments
from nestpipe.serve.service_folder import kept_secret
from tests.gateway.fake_instances import Served
from tests.serve import small_generative
from tests.serve.small_services import SLOW_MS

KINDS = ("next item", "dcn", "generative")


@pytest.fixture(params=KINDS)
def pair(request, runs_of, second_of):
    """Two runs of a kind on one sequence folder, which differ."""
    return runs_of(request.param), second_of(request.param)


class World:
    """An instance of a run with its administration."""

    def __init__(self, run, notes=None, **flags):
        trigger = replace(ServeArguments().trigger, budget_ms=SLOW_MS)
        arguments = ServeArguments(run=run.folder, notes=notes, trigger=trigger, **flags)
        self.engine, self.instance, load, file = open_instance(run, arguments, name="a")
        self.load = load
        token = kept_secret(run.folder / "serve" / "token")
        admin = Admin(self.instance, self.engine, token=token, load=load, file=file)
        self._servers = [Served(self.instance.app()), Served(admin.app())]
        self.http = httpx.Client(base_url=self._servers[0].url, timeout=60)
        self.admin_port = self._servers[1].port

    def start(self):
        self.engine.start()
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()
        for one in self._servers:
            one.close()
        self.engine.stop()

    def ask(self, user, **more):
        answer = self.http.post("/v1/recommend", json={"user": user, "k": 4, "query_time": 2_000_000_000, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()


def wanted(run, user):
    ms = None if "EncDec" in type(run.config.model).__name__ else 2_000_000_000_000
    return run.predictor().recommend(user, 4, request_ms=ms).items


def test_another_model_for_everybody_or_for_some_users(pair, tmp_path, capsys):
    first, second = pair
    users = first.sequences.users[:12].tolist()
    truth = {run.folder.name: {user: wanted(run, user) for user in users} for run in pair}
    assert truth[first.folder.name] != truth[second.folder.name]

    def check(answers):
        for user, answer in answers.items():
            assert answer["items"] == truth[answer["model"].split("/")[0]][user], "the model that it names"
        return {user: answer["model"].split("/")[0] for user, answer in answers.items()}

    def swap(world, *words):
        command = ["swap", str(first.folder), *map(str, words), "--admin-port", str(world.admin_port)]
        assert main(command) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    notes = tmp_path / "notes.json"
    with World(first, notes).start() as world:
        assert set(check({user: world.ask(user) for user in users}).values()) == {first.folder.name}
        assert f"{second.folder.name}/step-" in swap(world, second.folder, "--share", 0.5)
        shared = check({user: world.ask(user) for user in users})
        assert set(shared.values()) == {first.folder.name, second.folder.name}
        if "DCN" not in type(first.config.model).__name__:
            explained = world.ask(users[0], explain=True)
            assert (explained["items"], len(explained["because"])) == (truth[shared[users[0]]][users[0]], 4)
    with World(first, notes).start() as world:  # another process of the instance
        assert check({user: world.ask(user) for user in users}) == shared
        answers, stop = [], threading.Event()

        def keep_asking():
            while not stop.is_set():
                answers.extend((user, world.ask(user)) for user in users)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        swap(world, "--share", 0)
        swap(world, second.folder)
        stop.set()
        thread.join()
        for user, answer in answers:
            check({user: answer})
        assert set(check({user: world.ask(user) for user in users}).values()) == {second.folder.name}
        text = world.http.get("/metrics").text
        assert f'nestpipe_recommended_total{{model="{second.folder.name}/' in text
        assert np.unique([one.name for one in world.engine.models]).size == 1, "nothing refers to the old one"


def test_requests_of_both_models_are_answered_together(pair):
    first, second = pair
    users = first.sequences.users[:8].tolist()
    truth = {run.folder.name: {user: wanted(run, user) for user in users} for run in pair}
    with World(first, compare=second.folder, share=0.5) as world, ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(world.ask, user) for user in users]
        deadline = time.monotonic() + 60
        while world.engine.num_waiting < len(users):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        world.start()  # now all of them are in the first batch
        found = {user: answer.result() for user, answer in zip(users, answers, strict=True)}
    assert {answer["model"].split("/")[0] for answer in found.values()} == set(truth)
    for user, answer in found.items():
        assert answer["items"] == truth[answer["model"].split("/")[0]][user]


def test_a_model_of_another_kind_is_refused_and_the_current_one_stays(pair, runs_of, capsys):
    first, _ = pair
    kind = next(kind for kind in KINDS if runs_of(kind).folder != first.folder and kind != "generative")
    with World(first).start() as world:
        command = ["swap", str(first.folder), str(runs_of(kind).folder), "--admin-port", str(world.admin_port)]
        assert main(command) == 2
        message = capsys.readouterr().err
        assert "refused" in message
        assert "which is not" in message or "which cannot" in message or "trained on the sequence folder" in message
        assert world.ask(int(first.sequences.users[0]))["model"].startswith(first.folder.name)


def test_a_generative_model_that_takes_other_requests_is_refused(runs_of):
    first = runs_of("generative")
    narrow = small_generative.make_run(first.folder.parent, name="narrow", beam=12)
    with (
        World(first).start() as world,
        pytest.raises(ConfigError, match="a beam of 12, but this inst"),
    ):
        world.load(narrow.folder, None)
