"""Fleets of every kind of run as one command starts them, asked by several threads while instances are killed.

"No failed answer" means: every request is answered with 200, and by a model. An answer in the order of pre-rank, for want of
an instance, would be marked as degraded; degraded answers are counted, and with a second instance alive there are none.
"""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe import train
from nestpipe.cli import main
from nestpipe.client import Client, ServiceError
from tests.gateway.fleet_process import Clients, FleetProcess
from tests.serve.small_rankers import ASKED
from tests.small_runs import small_config

USERS, NOW = list(range(24)), 2_000_000_000
EXACT = 1e-5  # of scores of order one in 32 bits: the contract's tolerance


@pytest.fixture(scope="module")
def retrieval(log, tmp_path_factory):
    """A next-item run on the log of the rankers."""
    return train(small_config(log.path, "hstu", epochs=1), tmp_path_factory.mktemp("retrieval") / "run", quiet=True)


def test_retrieval_answers_under_load_while_instances_are_killed(runs, retrieval, tmp_path):
    small = ("--stages.num-retrieved", 20, "--stages.num-candidates", 10)
    run = runs("hstu").folder
    with FleetProcess(run, tmp_path / "log", "--retrieval", retrieval.folder, *small) as fleet:
        clients = Clients(fleet.url, USERS, k=5, query_time=ASKED)
        try:
            clients.more(40)
            fleet.kill_instance()
            clients.more(60)
            fleet.wait(lambda: len(fleet.instances()) == 2)
            clients.more(40)
        finally:
            clients.stop()
        with Client(fleet.url, timeout_s=60) as client:
            explained = client.recommend(3, k=2, explain=True, query_time=ASKED)
            assert len(explained.because or []) == len(explained.items)
    check_answers(clients, USERS)


def check_answers(clients, users):
    """None failed, none is degraded, and whoever answers, it is the same."""
    assert not clients.failures, clients.failures
    degraded = [answer.problem for _, answer in clients.answers if answer.degraded]
    assert not degraded, f"{len(degraded)} of {len(clients.answers)} answers are degraded: {degraded[:3]}"
    assert {answer.instance for _, answer in clients.answers} == {"i1", "i2"}
    for user in users:
        scores = np.array([answer.scores for one, answer in clients.answers if one == user])
        assert np.ptp(scores, axis=0).max() <= EXACT
    assert any(answer.attempts == 2 for _, answer in clients.answers), "an instance died with a request"


@pytest.mark.parametrize("kind", ["next item", "generative"])
def test_a_fleet_of_any_run_answers_while_its_model_is_switched_and_instances_are_killed(
    kind, runs_of, second_of, tmp_path, capsys, scale
):
    kind = scale(kind, "dcn" if kind == "next item" else kind)  # both are forwarded by user
    first, second = runs_of(kind), second_of(kind)
    users = [int(user) for user in first.sequences.users[:8]]
    with FleetProcess(first.folder, tmp_path / "log", "--demo") as fleet:
        clients = Clients(fleet.url, users, k=4, query_time=NOW)
        try:
            clients.more(20)
            words = ["swap", first.folder, second.folder, "--instances", 2, "--admin-port", fleet.admin_port]
            assert main([str(word) for word in words]) == 0, capsys.readouterr().err
            clients.more(20)
            fleet.kill_instance()
            clients.more(40)
            fleet.wait(lambda: len(fleet.instances()) == 2)
        finally:
            clients.stop()
        with Client(fleet.url, timeout_s=60) as client:
            fleet.wait(lambda: {client.recommend(user, k=4).instance for user in users} == {"i1", "i2"})
            after = [client.recommend(user, k=4).model for user in users]
            assert all(one.startswith(second.folder.name) for one in after), "the restarted instance kept its version"
            check_calls(client, kind, first)
    assert not clients.failures, clients.failures
    assert not any(answer.degraded for _, answer in clients.answers)
    assert any(answer.attempts == 2 for _, answer in clients.answers), "an instance died with a request"
    truth = {run.folder.name: {user: offline(run, user) for user in users} for run in (first, second)}
    found = {answer.model.split("/")[0] for _, answer in clients.answers}
    assert found == {first.folder.name, second.folder.name}
    for user, answer in clients.answers:
        assert answer.items == truth[answer.model.split("/")[0]][user]


def offline(run, user):
    ms = None if "EncDec" in type(run.config.model).__name__ else NOW * 1000
    return run.predictor().recommend(user, 4, request_ms=ms).items


def check_calls(client, kind, run):
    """Everything else that a gateway of this kind answers."""
    user, item = int(run.sequences.users[3]), int(run.sequences.catalogue[5])
    assert client.recommend("nobody", k=3).path == "popular"
    assert len(client.similar(item, k=4).items) == 4
    event = {"id": "e", "user": user, "item": item, "time": 1_702_000_000 if kind != "generative" else 2_000_000}
    client.send_events([{**event, "click": 1} if kind == "dcn" else event])
    assert item not in client.recommend(user, k=30).items
    client.invalidate(user)
    if kind == "dcn":
        assert set(client.rank(user, [1, 2, 3], request="r").items) == {1, 2, 3}
        with pytest.raises(ServiceError, match="this model reads no history") as caught:
            client.recommend(user, explain=True)
        assert caught.value.status == 400
    else:
        assert client.recommend(user, k=2, explain=True).because
    if kind == "generative":
        assert len(client.generate(user, k=3).items) == 3
