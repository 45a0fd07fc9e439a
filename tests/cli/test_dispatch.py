"""The command line as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.cli import COMMANDS, main
from nestpipe.recipes import RECIPES
from tests.small_runs import small_log


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data and two short runs."""
    folder = tmp_path_factory.mktemp("cli")
    small_log(folder / "log")
    common = ["--data.path", str(folder / "log"), "--train.num-threads", "1", "--data.batch-size", "16"]
    for name, epochs in (("a", "1"), ("b", "3")):
        assert main(["train", "tiny", "--run", str(folder / name), "--train.epochs", epochs, *common]) == 0
    return folder


def run(capsys, *arguments):
    code = main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert all(name in out for name in COMMANDS)


def test_train_without_a_recipe_lists_them(capsys):
    code, out, _ = run(capsys, "train")
    assert code == 0
    assert all(name in out for name in RECIPES)


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
def test_mistakes_get_one_message_and_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir()), "a refused command must leave nothing behind"


def test_overrides_reach_the_saved_configuration(folder):
    saved = json.loads((folder / "a" / "config.json").read_text())
    assert saved["train"]["epochs"] == 1
    assert saved["data"]["batch_size"] == 16
    assert saved["model"]["kind"] == "sasrec"


def test_eval_prints_a_table_beside_the_floor_and_keeps_the_report(capsys, folder):
    code, out, _ = run(capsys, "eval", str(folder / "a"))
    assert code == 0
    assert "hr@10" in out
    assert "popularity floor" in out
    assert (folder / "a" / "eval" / "test" / "report.json").exists()


def test_eval_json_and_comparison(capsys, folder):
    code, out, _ = run(capsys, "eval", str(folder / "a"), "--json")
    assert code == 0
    alone = json.loads(out)["metrics"]["ndcg@10"]["mean"]
    code, out, _ = run(capsys, "eval", str(folder / "a"), "--compare", str(folder / "b"), "--json")
    compared = json.loads(out)["metrics"]["ndcg@10"]
    assert compared["a"] == alone
    assert compared["interval"]["mean"] == pytest.approx(compared["b"] - compared["a"])
    assert compared["verdict"] in {"better", "worse", "no difference shown"}


def test_a_run_below_a_file_is_one_message(capsys, folder):
    (folder / "file").touch()
    code, _, err = run(capsys, "train", "tiny", "--data.path", str(folder / "log"), "--run", str(folder / "file" / "x"))
    assert code == 2
    assert "Not a directory" in err


def test_brackets_in_a_path_are_printed_as_they_are(capsys, folder):
    name = str(folder / "a[/x]")
    code, _, err = run(capsys, "train", "tiny", "--data.path", str(folder / "log"), "--run", name, "--train.steps", "1")
    assert code == 0
    assert name in err
    code, out, _ = run(capsys, "eval", name)
    assert code == 0
    assert name in out.replace("\n", "")


def test_validation_targets_are_missed_with_their_reason(capsys, folder):
    code, _, err = run(capsys, "eval", str(folder / "a"), "--target", "validation")
    assert code == 2
    assert "It was trained without --data.validation" in err


def test_quickstart_runs_and_is_short(tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"
    assert len(example.read_text().splitlines()) < 60
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("user 0: item") == 10


def test_the_installed_program_runs():
    done = subprocess.run(
        [str(Path(sys.executable).with_name("nestpipe")), "--help"], capture_output=True, text=True, check=True
    )
    assert "usage: nestpipe COMMAND" in done.stdout
