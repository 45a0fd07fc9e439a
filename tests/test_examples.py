"""Every example runs as a reader would run it, is short, and prints what it should."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm_program import warm_program

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRINTS = {
    "http_client.py": "after one more event:",
    "own_data.py": "read 1601 records: 1600 kept, 1 quarantined",
    "own_schedule.py": "bitwise identical to sequential: True",
    "quickstart.py": "user-0, after item-21 -> ['item-24',",
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warm_program(tmp_path_factory.mktemp("warm")) as folder:
        yield folder


def run(command: list[str], folder: Path, *, code: str = "") -> str:
    """What a command prints in a folder from which the examples can be imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run(
        command, input=code, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES} == {*PRINTS, "own_model.py"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example):
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name, warm, tmp_path):
    assert PRINTS[name] in run([str(warm / "warm-python")], tmp_path, code=(ROOT / "examples" / name).read_text())


def test_the_model_of_the_example_keeps_the_contracts_and_trains(warm, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # as in a clone
    run([str(warm / "nestpipe"), "check-model", "examples.own_model:GRU"], tmp_path)
    run(
        [
            str(warm / "nestpipe"),
            *["data", "synthetic", "--num-users", "100", "--num-items", "200", "--out", "data/tiny"],
        ],
        tmp_path,
    )
    code = """
from dataclasses import replace
import nestpipe
from nestpipe.registry import find

config = find("examples.own_model:recipe")()
run = nestpipe.train(replace(config, train=replace(config.train, epochs=1)), "runs/gru", quiet=True)
print(nestpipe.Run.open("runs/gru").predictor().evaluate(progress=False).scalars())
"""
    assert "hr@10" in run([str(warm / "warm-python")], tmp_path, code=code)


def test_the_readme_shows_the_quickstart():
    _, _, code = (ROOT / "examples" / "quickstart.py").read_text().split('"""', 2)
    assert code.strip() in (ROOT / "README.md").read_text()
