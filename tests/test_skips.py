"""The list of allowed skips: listed ones pass, others fail the run, also under xdist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.parametrize("rank", [0, 1])
def test_network(rank):
    pytest.skip("needs root")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""
MODULE = 'import pytest\npytest.skip("no module", allow_module_level=True)\n'


@pytest.fixture
def project(pytester: pytest.Pytester, pytestconfig: pytest.Config) -> Iterator[pytest.Pytester]:
    """A project with our conftest and one skipping, parametrised test."""
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(test_some=TESTS)
    yield pytester
    # The inner runs share this process and chose a profile of their own.
    hypothesis.settings.load_profile("soak" if pytestconfig.getoption("soak") else "fixed")


def allow(project: pytest.Pytester, test: str, reason: str) -> None:
    (project.path / "skips.toml").write_text(f'[[skip]]\ntest = "{test}"\nreason = "{reason}"\n')


@pytest.mark.parametrize("test", ["test_some.py::test_network*", "*"])
def test_listed_skips_pass(project: pytest.Pytester, test: str) -> None:
    allow(project, test, "needs root")
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["skipped: 2 (listed in tests/skips.toml)"])
    result.stdout.no_fnmatch_line("*not listed*")


def test_a_bracket_in_a_test_id_is_not_a_glob(project: pytest.Pytester) -> None:
    allow(project, "test_some.py::test_network[[]0]", "needs root")
    assert project.runpytest_inprocess("-k", "0").ret == pytest.ExitCode.OK
    allow(project, "test_some.py::test_network[0]", "needs root")
    assert project.runpytest_inprocess("-k", "0").ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("test", "reason"),
    [("test_some.py::test_network*", "another reason"), ("test_other.py::*", "needs root")],
)
def test_other_skips_fail_the_run(project: pytest.Pytester, test: str, reason: str) -> None:
    allow(project, test, reason)
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*not listed in tests/skips.toml*test_some.py::test_network?0]: 'needs root'"])


def test_skipped_modules_count(project: pytest.Pytester) -> None:
    project.makepyfile(test_module=MODULE)
    allow(project, "*", "needs root")
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*not listed in tests/skips.toml*test_module.py: 'no module'"])


@pytest.mark.parametrize(
    ("reason", "code"), [("needs root", pytest.ExitCode.OK), ("other", pytest.ExitCode.TESTS_FAILED)]
)
def test_skips_of_xdist_workers_count(project: pytest.Pytester, reason: str, code: pytest.ExitCode) -> None:
    allow(project, "*::test_network*", reason)
    result = project.runpytest_inprocess("-n", "2")
    assert result.ret == code
    result.stdout.fnmatch_lines([f"skipped: {2 if code == pytest.ExitCode.OK else 0} (listed in tests/skips.toml)"])


def test_scale_follows_soak(project: pytest.Pytester) -> None:
    project.makepyfile(test_some="def test_scale(scale):\n    assert scale(3, 40) == 40\n")
    assert project.runpytest_inprocess().ret == pytest.ExitCode.TESTS_FAILED
    assert project.runpytest_inprocess("--soak").ret == pytest.ExitCode.OK
