"""Fleets of every kind of run as one command starts them, asked by several threads while instances are killed.

"No failed answer" means: every request is answered with 200, and by a model. An answer in the order of pre-rank, for want of
an instance, would be marked as degraded; degraded answers are counted, and with a second instance alive there are none.
"""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe import train
from nestpipe.client import Client
from tests.eval.test_catalogue_predictor import named_log
from tests.gateway.fleet_process import Clients, FleetProcess
from tests.serve.small_rankers import ASKED
from tests.small_runs import small_config

USERS = list(range(24))
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


@pytest.fixture(scope="module")
def next_item(tmp_path_factory):
    """A run whose users and items have names."""
    folder = tmp_path_factory.mktemp("named")
    return train(small_config(named_log(folder / "log").path, "sasrec", epochs=1), folder / "run", quiet=True)


def test_a_fleet_of_a_next_item_run_answers_while_instances_are_killed(next_item, tmp_path):
    users = [f"Zoë {number}" for number in range(12)]
    with FleetProcess(next_item.folder, tmp_path / "log") as fleet:
        clients = Clients(fleet.url, users, k=5)
        try:
            clients.more(40)
            fleet.kill_instance()
            clients.more(60)
        finally:
            clients.stop()
        with Client(fleet.url, timeout_s=60) as client:
            assert client.recommend("nobody", k=3).path == "popular"
            assert client.recommend(users[3], k=2, explain=True).because
            assert client.similar("p7", k=4).items == next_item.predictor().similar("p7", 4).items
            client.send_events([{"id": "e", "user": users[5], "item": "p1", "time": 2_000_000}])
            assert "p1" not in client.recommend(users[5], k=30).items
    check_answers(clients, users)
    for user, answer in clients.answers[:20]:
        assert answer.items == next_item.predictor().recommend(user, 5).items
