"""Fleets of every kind of run as one command starts them, asked by several threads while instances are killed.

"No failed answer" means: every request is answered with 200, and by a model. An answer in the order of pre-rank, for want of
an instance, would be marked as degraded; degraded answers are counted, and with a second instance alive there are none.
"""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe import train
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
    assert not clients.failures, clients.failures
    degraded = [answer.problem for _, answer in clients.answers if answer.degraded]
    assert not degraded, f"{len(degraded)} of {len(clients.answers)} answers are degraded: {degraded[:3]}"
    assert {answer.instance for _, answer in clients.answers} == {"i1", "i2"}
    for user in USERS:
        scores = np.array([answer.scores for one, answer in clients.answers if one == user])
        assert np.ptp(scores, axis=0).max() <= EXACT, "whoever answers, it is the same"
    assert any(answer.attempts == 2 for _, answer in clients.answers), "an instance died with a request"
