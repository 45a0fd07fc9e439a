"""`nestpipe launch`: its own options and what it says about failed ranks; restarts are in tests/training/test_restarts.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.cli import launch
from nestpipe.errors import ConfigError
from tests.small_runs import small_log

ROOT = Path(__file__).resolve().parents[2]
TINY = "tiny --data.path log --data.batch-size 16 --train.epochs 0 --train.steps 8 --train.save-steps 3 --train.no-async-save"


def run(*command, cwd):
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**known, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_options_end_where_the_command_begins():
    given = launch.parse(["-n", "2", "--port=4", "train", "tiny", "-n", "--run", "x"])
    assert (given.options.ranks, given.options.port) == (2, 4)
    assert given.command == ("train", "tiny", "-n", "--run", "x")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2"], "none is given"),
        (["-n", "2", "serve", "runs/a"], "'serve' is none of them"),
        (["-n", "0", "train", "tiny"], "-n is 0"),
    ],
)
def test_what_is_no_command_for_ranks_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        launch.parse(words)


def test_a_users_mistake_starts_the_ranks_once_and_is_the_last_line(tmp_path):
    """A restart cannot mend it."""
    small_log(tmp_path / "log")
    done = run("nestpipe.cli", "launch", "-n", "2", "train", *TINY.split(), "--train.metric", "nonsense", cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert "nonsense" in lines[-1], done.stderr
    assert 2 <= done.stderr.count("nonsense") <= 3, done.stderr  # each rank once, and the launcher
    assert "Traceback" not in done.stderr


def test_a_killed_rank_is_named_last(tmp_path):
    small_log(tmp_path / "log")
    plan = json.dumps([[1, "_after_step", 5]])
    options = ("--max-restarts", "0", "-n", "2", "train", *TINY.split())
    ended = run("tests.training.launch_dying", plan, *options, cwd=tmp_path)
    assert ended.returncode == 9
    assert ended.stderr.splitlines()[-1] == "rank 1: killed by signal 9 (SIGKILL)", ended.stderr
