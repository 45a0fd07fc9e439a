"""`nestpipe train`: recipes, overrides, run folders."""

import json

from nestpipe.recipes import RECIPES


def test_train_without_a_recipe_lists_them(run):
    code, out, _ = run("train")
    assert code == 0
    assert all(name in out for name in RECIPES)


def test_overrides_reach_the_saved_configuration(folder):
    saved = json.loads((folder / "a" / "config.json").read_text())
    assert saved["train"]["epochs"] == 1
    assert saved["data"]["batch_size"] == 16
    assert saved["model"]["kind"] == "sasrec"


def test_a_run_below_a_file_is_one_message(run, folder):
    (folder / "file").touch()
    code, _, err = run("train", "tiny", "--data.path", str(folder / "log"), "--run", str(folder / "file" / "x"))
    assert code == 2
    assert "Not a directory" in err


def test_brackets_in_a_path_are_printed_as_they_are(run, folder):
    name = str(folder / "a[/x]")
    code, _, err = run("train", "tiny", "--data.path", str(folder / "log"), "--run", name, "--train.steps", "1")
    assert code == 0
    assert name in err
    code, out, _ = run("eval", name)
    assert code == 0
    assert name in out.replace("\n", "")


def test_training_and_evaluation_end_with_the_next_command(run, folder):
    name = str(folder / "next step")
    _, out, _ = run("train", "tiny", "--data.path", str(folder / "log"), "--train.steps", "1", "--run", name)
    assert f"Next: nestpipe eval '{name}'" in out
    _, out, _ = run("eval", name)
    assert f"Next: nestpipe recommend '{name}' --user 0" in out
