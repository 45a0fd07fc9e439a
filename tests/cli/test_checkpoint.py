"""`nestpipe checkpoint` as a user meets it."""

import shutil

import pytest
import torch

from nestpipe import train
from nestpipe.checkpoint import manifest as checkpoint_manifest
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.cli import main
from nestpipe.training.run_state import new_state
from tests.small_runs import small_config, small_log


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    log = small_log(folder / "log").path
    return train(small_config(log, steps=6), folder / "run", quiet=True)


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "run")
    return tmp_path / "run"


def call(capsys, *arguments):
    code = main(["checkpoint", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("task", ["inspect", "verify"])
def test_help_has_an_example(capsys, task):
    with pytest.raises(SystemExit) as done:
        main(["checkpoint", task, "--help"])
    assert done.value.code == 0
    assert f"xample: nestpipe checkpoint {task}" in " ".join(capsys.readouterr().out.split())
    assert "Example: nestpipe checkpoint verify" in call(capsys)[1]


def test_inspect_counts_what_there_is(capsys, monkeypatch, run, trained):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(capsys, "inspect", run)
    assert code == 0
    _, content = checkpoint_reader.load_checkpoint(run / "checkpoints" / "step-000006")
    rows = sorted(len(content[f"item.{number:03d}"]["ids"]) for number in range(4))
    files = sum(path.stat().st_size for path in (run / "checkpoints" / "step-000006").glob("item.*"))
    assert "step 6, next batch 2 of epoch 1" in out
    (line,) = (line for line in out.splitlines() if "item" in line)
    cells = [cell.strip() for cell in line.replace("│", "|").split("|")]
    median = round((rows[1] + rows[2]) / 2)
    expected = ["item", "8", f"{sum(rows)}", "4", f"{rows[0]}", f"{median}", f"{rows[-1]}", f"{files:,}"]
    assert cells[1:9] == expected
    num_parameters = sum(one.numel() for one in new_state(trained).model.parameters())
    assert f"dense: {num_parameters:,} parameters" in out
    assert call(capsys, "inspect", run, "--step", "5")[1].count("step 5,") == 1
    assert call(capsys, "inspect", run / "checkpoints" / "step-000005")[1].count("step 5,") == 1


def test_verify_checks_all_and_names_each_damaged_file(capsys, run):
    code, out, _ = call(capsys, "verify", run)
    assert code == 0
    assert out.count("5 files") == 2
    damaged = run / "checkpoints" / "step-000005"
    data = bytearray((damaged / "dense.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / "dense.safetensors").write_bytes(data)
    (damaged / "item.002.safetensors").unlink()
    (damaged / "notes.txt").write_text("mine")
    code, out, _ = call(capsys, "verify", run)
    assert code == 1
    assert "dense.safetensors is not what was saved" in out
    assert "lacks item.002.safetensors" in out
    assert "notes.txt does not stand in the manifest" in out
    assert "item.001" not in out
    assert "step-000006: 5 files" in out
    assert call(capsys, "verify", run, "--step", "6")[0] == 0
    code, _, err = call(capsys, "inspect", damaged)
    assert (code, "item.002.safetensors is missing" in err) == (2, True)
    (damaged / "manifest.json").unlink()
    code, out, _ = call(capsys, "verify", damaged)
    assert (code, "has no manifest.json" in out) == (1, True)


def test_mistakes_have_a_message(capsys, tmp_path, run):
    for arguments, message in [
        (["look"], "unknown task 'look'; there are: inspect, verify"),
        (["verify", tmp_path / "none"], "is no run and no checkpoint"),
        (["verify", run, "--step", "7"], "has no complete checkpoint of step 7; it has [5, 6]"),
    ]:
        code, _, err = call(capsys, *arguments)
        assert code == 2
        assert message in err


def test_a_table_with_an_empty_bucket_is_shown(capsys, tmp_path):
    bucket = {"ids": torch.arange(3), "rows": torch.zeros(3, 2), "state.sum": torch.zeros(3, 1)}
    none = {name: values[:0] for name, values in bucket.items()}
    content = {"dense": {"weights.w": torch.zeros(2, 3)}, "user.home.000": bucket, "user.home.001": none}
    checkpoint_writer.save_checkpoint(
        tmp_path / "checkpoints", 1, checkpoint_manifest.Cursor(0, 1), {}, content.items()
    )
    code, out, _ = call(capsys, "inspect", tmp_path)
    assert code == 0
    assert "6 parameters in 1 tensors" in out
