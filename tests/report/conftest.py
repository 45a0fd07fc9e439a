"""Runs that the tests of the report share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.reported_runs import ranking_run, retrieval_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that retrieves items and one that ranks events; nobody changes them."""
    folder = tmp_path_factory.mktemp("runs")
    return {"retrieval": retrieval_run(folder), "ranking": ranking_run(folder)}
