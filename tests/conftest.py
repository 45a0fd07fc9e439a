"""What all tests share: the `--soak` option, the `scale` fixture, hypothesis profiles, and the list of allowed skips.

A skipped test is a promise not kept, so every skip must stand in skips.toml with its reason; any other fails the run.
"""

from __future__ import annotations

import gc
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.rank_pool import close_ranks

pytest_plugins = ["tests.serve.fixtures"]  # trained rankers, for the tests of serve, gateway and cli
Report = pytest.TestReport | pytest.CollectReport

# Ordinary runs try the same examples every time, so CI never fails by luck; a soak looks for new ones.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000)

_LONGEST = (
    "tests/cli/test_demo.py",
    "tests/pipeline/test_mutants.py",
    "tests/training/test_outside_model.py",
    "tests/training/test_restarts.py",
    "tests/checkpoint/test_object_store.py",
    "tests/training/test_two_hosts.py",
)


class SkipList:
    """Collects the skips of a run, from all xdist workers, and compares them with the list."""

    def __init__(self, path: Path) -> None:
        entries = tomllib.loads(path.read_text()).get("skip", []) if path.exists() else []
        self.allowed = [(entry["test"], entry["reason"]) for entry in entries]
        self.seen: dict[str, str] = {}

    def add(self, report: Report) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.seen[report.nodeid] = text.removeprefix("Skipped: ")

    def unlisted(self) -> dict[str, str]:
        return {test: reason for test, reason in self.seen.items() if not self.allows(test, reason)}

    def allows(self, test: str, reason: str) -> bool:
        return any(reason == known and (test == name or fnmatchcase(test, name)) for name, known in self.allowed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.add(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        unlisted = self.unlisted()
        terminalreporter.write_line(f"skipped: {len(self.seen) - len(unlisted)} (listed in tests/skips.toml)")
        for test, reason in unlisted.items():
            line = f"skipped but not listed in tests/skips.toml with this reason: {test}: {reason!r}"
            terminalreporter.write_line(line, red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="large counts: the same tests, for hours instead of minutes")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the documentation's commands that were not run; test_docs.py records them."""
    passed = terminalreporter.stats.get("passed", [])
    not_run = [value for report in passed for name, value in report.user_properties if name == "not run"]
    if not_run:
        terminalreporter.write_line("\n".join([f"documentation blocks not run: {len(not_run)}", *map(str, not_run)]))


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("soak" if config.getoption("soak") else "fixed")
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # several workers share the cores
    else:
        config.pluginmanager.register(SkipList(Path(__file__).with_name("skips.toml")), "skip-list")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest tests first, so that no worker begins one when the others are done."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # modules and tests stay to the end: no collection need look at them


def pytest_unconfigure() -> None:
    gc.unfreeze()  # triton prints what stays as leaks


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> Callable[[int, int], int]:
    """`scale(small, large)`: the small count, or the large one with --soak."""
    soak = bool(pytestconfig.getoption("soak"))
    return lambda small, large: large if soak else small


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    """Ends the rank processes that tests have started."""
    yield
    close_ranks()
