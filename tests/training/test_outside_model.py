"""A model in a file of 40 lines outside the package does all that our own models do."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.cli import main
from nestpipe.cli.demo import differing_tensors
from tests.small_runs import small_log

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("outside_gru.py")
NUM_STEPS, SAVE_STEPS = 8, 2
LIMITS = f"--train.epochs 0 --train.steps {NUM_STEPS} --train.save-steps {SAVE_STEPS} --train.log-steps 1"
SIZES = "--data.path log --data.batch-size 16 --embedding.num-buckets 4 --train.num-threads 1 --eval.ks 1 10"
SIZES += " --pipeline.micro-batches 2"
SETTINGS = (*LIMITS.split(), *SIZES.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder: one log, one file with a model."""
    shutil.copy(SOURCE, tmp_path)
    small_log(tmp_path / "log")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_on_two_ranks(folder, run, *flags, deaths=()):
    command = ("train", "outside_gru:recipe", "--run", run, "--resume", "--model.hidden", "8", *SETTINGS, *flags)
    options = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        str(len(deaths)),
        "--monitor-interval",
        "0.05",
    ]
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    start = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "--", "tests.training.dying_rank"]
    done = subprocess.run(
        [*start, json.dumps(deaths), *command],
        cwd=folder,
        env={**known, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stderr


def measured(run, metric):
    return json.loads((run / "eval" / "test" / "report.json").read_text())["metrics"][metric]["mean"]


def test_the_file_is_short_and_needs_nestpipe_and_torch_alone():
    text = SOURCE.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert len(text.splitlines()) <= 40
    assert imported == {"dataclasses", "torch", "nestpipe"}


@pytest.mark.timeout(600)
def test_it_is_trained_killed_resumed_evaluated_compared_and_reported(folder, capsys):
    sequential = train_on_two_ranks(folder, "calm", "--pipeline.mode", "sequential")
    assert f"stopped at step {NUM_STEPS}: {NUM_STEPS} steps done" in sequential
    said = train_on_two_ranks(folder, "run", "--pipeline.mode", "nested", deaths=[[1, "_after_step", 5]])
    assert "rank 1 dies in _after_step" in said
    assert f"stopped at step {NUM_STEPS}: {NUM_STEPS} steps done" in said
    assert not differing_tensors(folder / "calm", folder / "run")
    about = json.loads((folder / "run" / "run.json").read_text())
    assert (about["num_ranks"], about["recipe"]) == (2, "outside_gru:recipe")
    model = json.loads((folder / "run" / "config.json").read_text())["model"]
    assert model == {"kind": "outside_gru:GRU", "dim": 16, "hidden": 8}

    assert main(["train", "tiny", "--model", "sasrec", "--model.dim", "16", "--run", "sasrec", *SETTINGS]) == 0
    assert main(["eval", "run"]) == 0
    shown = capsys.readouterr().out
    assert "run, test targets" in shown
    assert "ndcg@10" in shown
    assert main(["eval", "run", "--compare", "sasrec", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["metrics"]["ndcg@10"]
    own, other = (measured(folder / run, "ndcg@10") for run in ("run", "sasrec"))
    assert (compared["a"], compared["b"]) == (pytest.approx(own), pytest.approx(other))
    assert compared["verdict"]
    assert main(["report", "run"]) == 0
    page = (folder / "run" / "report.html").read_text()
    assert "outside_gru:GRU" in page
    assert "recipe outside_gru:recipe" in page
    assert f">ndcg@10</th><td>{own:.4f} [" in page
    assert "<dt>ranks</dt><dd>2</dd>" in page


def test_its_settings_are_flags(folder, capsys):
    for command in (
        ["outside_gru:recipe"],
        ["tiny", "--model", "outside_gru:GRU"],
        ["tiny", "--model=outside_gru:GRU"],
    ):
        with pytest.raises(SystemExit):
            main(["train", *command, "--help"])
        shown = capsys.readouterr().out
        assert "--model.hidden INT" in shown
        assert "Width of the recurrent state. (default: 12)" in shown
        assert main(["train", *command, "--model.hiden", "4"]) == 2
        assert "did you mean 'model.hidden'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["outside_gru:GRUConfig"], "'outside_gru:GRUConfig' is no recipe"),
        (["outside_gru:recip"], "module 'outside_gru' has no 'recip'"),
        (["tiny", "--model"], "--model needs a name"),
        (["tiny", "--model", "outside_gru:recipe"], "outside_gru:recipe is not registered as a model"),
        (["tiny", "--model", "sasrek"], "unknown model 'sasrek'; did you mean 'sasrec'?"),
    ],
)
def test_what_is_no_recipe_or_model_is_said(folder, command, message, capsys):
    assert main(["train", *command]) == 2
    assert message in capsys.readouterr().err
