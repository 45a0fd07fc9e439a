"""`nestpipe checkpoint` as a user meets it."""

import shutil
from dataclasses import replace

import pytest
import torch

from nestpipe import train
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.writer import SaveContent
from nestpipe.cli import main
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.row_snapshot import TableSection
from nestpipe.jagged import Cursor
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


@pytest.mark.parametrize("task", ["inspect", "verify", "diff", "compact", "rebucket"])
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
    manifest, content = checkpoint_reader.load_checkpoint(run / "checkpoints" / "step-000006")
    rows = sorted(Owners(4, 1).bucket_of(content["item"]["ids"]).bincount(minlength=4).tolist())
    files = sum(blob.num_bytes for blob in manifest.blobs if blob.table == "item")
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
    assert out.count("1 files") == 2
    damaged = run / "checkpoints" / "step-000005"
    (part,) = damaged.glob("part-*.pack")
    good = part.read_bytes()
    part.write_bytes(good[:20] + bytes([good[20] ^ 1]) + good[21:])
    (damaged / "notes.txt").write_text("mine")
    code, out, _ = call(capsys, "verify", run)
    assert code == 1
    assert f"{part.name} is not what was saved: the digest of its dense differs" in out
    assert "notes.txt is not in the manifest" in out
    assert "step-000006: 1 files" in out
    assert call(capsys, "verify", run, "--step", "6")[0] == 0
    part.write_bytes(good + b"more")
    assert "bytes instead of" in call(capsys, "verify", damaged)[1]
    part.unlink()
    assert f"lacks {part.name}" in call(capsys, "verify", damaged)[1]
    code, _, err = call(capsys, "inspect", damaged)
    assert (code, f"lacks {part.name}" in err or f"{part.name} is missing" in err) == (2, True)
    (damaged / "manifest.json").unlink()
    code, out, _ = call(capsys, "verify", damaged)
    assert (code, "has no manifest.json" in out) == (1, True)


def test_mistakes_have_a_message(capsys, tmp_path, run):
    for arguments, message in [
        (["look"], "unknown command 'look'; there are: inspect, verify, diff, compact, rebucket"),
        (["verify", tmp_path / "none"], "is no run and no checkpoint"),
        (["verify", run, "--step", "7"], "has no complete checkpoint of step 7; it has [5, 6]"),
    ]:
        code, _, err = call(capsys, *arguments)
        assert code == 2
        assert message in err


def test_a_table_with_an_empty_bucket_is_shown(capsys, tmp_path):
    rows = {"rows": torch.zeros(3, 2), "state.sum": torch.zeros(3, 1)}
    content = SaveContent(
        {"weights.w": torch.zeros(2, 3)},
        {"user.home": [TableSection(range(2), {"ids": torch.arange(3)}, rows)]},
        {"user.home": 2},
    )
    checkpoint_writer.save_checkpoint(tmp_path / "checkpoints", 1, Cursor(0, 1), {}, content)
    code, out, _ = call(capsys, "inspect", tmp_path)
    assert code == 0
    assert "6 parameters in 1 tensors" in out


def test_diff_names_what_differs(capsys, run, trained):
    code, out, _ = call(capsys, "diff", run, trained.folder)
    assert (code, "dense: equal" in out, "common ids, equal" in out) == (0, True, True)
    code, out, _ = call(capsys, "diff", run / "checkpoints" / "step-000005", run)
    assert code == 1
    assert "these tensors differ: " in out
    assert "rows differs in " in out


def test_a_run_with_more_buckets_has_the_same_rows_and_goes_on(capsys, run, trained):
    """From 4 to 6: some new buckets take ids of two old ones. Repeated after an interruption, it completes."""
    before = (run / "config.json").read_text()
    for _ in range(2):
        code, out, _ = call(capsys, "rebucket", run, "--buckets", "6")
        assert (code, "6 buckets" in out) == (0, True)
        assert call(capsys, "diff", run, trained.folder)[0] == 0
        assert call(capsys, "verify", run)[0] == 0
        assert checkpoint_reader.Manifest.read(run / "checkpoints" / "step-000006").tables == {"item": 6}
        if before:
            assert "rewritten checkpoints: 5, 6" in out
            (run / "config.json").write_text(before)
            before = ""
    config = trained.config
    config = replace(config, embedding=replace(config.embedding, num_buckets=6), train=replace(config.train, steps=8))
    train(config, run, resume=True, quiet=True)
    limited = replace(config, embedding=replace(config.embedding, max_rows=9))
    (run / "config.json").write_text(limited.to_json())
    code, _, err = call(capsys, "rebucket", run, "--buckets", "8")
    assert (code, "limits its rows (embedding.max_rows 9)" in err) == (2, True)
