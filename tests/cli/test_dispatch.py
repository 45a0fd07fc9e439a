"""The command line as a user meets it."""

import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.cli import COMMANDS


def test_help_lists_every_command(run):
    code, out, _ = run()
    assert code == 0
    assert all(name.split()[0] in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["train", "tinny"], "unknown recipe 'tinny'; did you mean 'tiny'?"),
        (["tune", "pipeline", "tinny"], "unknown recipe 'tinny'; did you mean 'tiny'?"),
        (["train", "tiny", "--train.step", "5"], "unknown config key 'train.step'; did you mean 'train.steps'?"),
        (
            ["train", "tiny", "--data.max-length=5"],
            "unknown config key 'data.max_length'; did you mean 'data.max_len'?",
        ),
        (["train", "tiny", "--data.path", "nowhere"], "there is no sequence folder"),
        (["train", "tiny", "--train.epochs", "0"], "nothing would end the run"),
        (["eval", "nowhere"], "is nowhere a run folder?"),
        (["train", "tiny", "--model.dropout", "0.999999"], "it must be in [0, 0.99]"),
        (["train", "tiny", "--data.validation", "--eval.ks", "5", "20"], "add its list length to eval.ks"),
        (["train", "tiny", "--dense.lr", "inf"], "dense.lr is inf"),
    ],
)
def test_mistakes_get_one_message_and_code_2(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir()), "a refused command must leave nothing behind"


def test_the_installed_program_runs():
    done = subprocess.run(
        [str(Path(sys.executable).with_name("nestpipe")), "--help"], capture_output=True, text=True, check=True
    )
    assert "usage: nestpipe COMMAND" in done.stdout
