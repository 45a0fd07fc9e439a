"""PostgreSQL servers for the tests of the state."""

from __future__ import annotations

import pytest

from tests.state.postgres_process import PostgresProcess
from tests.state.shop import make_shop


@pytest.fixture(scope="session")
def server():
    """One for all tests that leave it alone; each makes a database of its own."""
    process = PostgresProcess()
    yield process
    process.close()


@pytest.fixture
def own_server():
    """One that a test may kill."""
    process = PostgresProcess()
    yield process
    process.close()


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    """A run whose users and items have texts as ids."""
    return make_shop(tmp_path_factory.mktemp("shop"))
