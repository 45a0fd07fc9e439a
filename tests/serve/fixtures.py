"""One log and two trained rankers for all tests of serving, and an engine whose clock stands still."""

from __future__ import annotations

import pytest

from nestpipe.serve.model import open_served
from tests.serve.small_rankers import Clock, make_engine, make_log, make_run
from tests.serve.small_services import make_runs


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    return make_log(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def runs(log, tmp_path_factory):
    """Trained when they are first asked for."""
    found = {}

    def of(backbone):
        if backbone not in found:
            found[backbone] = make_run(log, tmp_path_factory.mktemp("serve") / backbone, backbone)
        return found[backbone]

    return of


@pytest.fixture(scope="session")
def runs_of(log, runs, tmp_path_factory):
    """A run of each kind; see small_services.KINDS."""
    return make_runs(log.path, runs("hstu"), tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="session")
def served(runs, tmp_path_factory):
    found = {}

    def of(backbone="hstu"):
        if backbone not in found:
            found[backbone] = open_served(runs(backbone), folder=tmp_path_factory.mktemp("tables"))
        return found[backbone]

    return of


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine(runs, served, tmp_path, clock):
    return make_engine(runs("hstu"), tmp_path, clock=clock, served=served())
