"""`--init-from`: what a new run takes over from another, what it refuses, and that it stands alone afterwards."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from nestpipe import train
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.origin import InitFrom
from nestpipe.checkpoint.reader import table_facts
from nestpipe.checkpoint.writer import SaveContent
from nestpipe.cli import main
from nestpipe.cli.demo import differing_tensors
from nestpipe.embedding.row_snapshot import TableSection
from nestpipe.errors import CheckpointError, ConfigError, NestPipeError
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state, new_state
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

NONE = {"epochs": 0, "steps": 1}  # the shortest run there is; its checkpoint of step 0 is what was taken over


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("warm") / "log").path


@pytest.fixture(scope="module")
def old(log, tmp_path_factory):
    """A run of six steps in four buckets."""
    return train(small_config(log, steps=6), tmp_path_factory.mktemp("warm") / "old", quiet=True).folder


def contents(folder, step=None):
    """All tables as one, by ascending id, and the dense part."""
    manifest, content = checkpoint_reader.load_checkpoint(
        checkpoint_folders.checkpoint_folder(folder / "checkpoints", step)
    )
    table = {name: values for name, values in content["item"].items() if name[:5] != "pendi"}
    return table, content["dense"], manifest


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def warm(config, folder, source, *allow):
    return train(config, folder, init_from=InitFrom(source, allow), quiet=True)


def test_weights_and_state_are_taken_over_and_the_run_starts_at_its_first_batch(log, old, tmp_path):
    config = replace(small_config(log, **NONE), seed=9)
    run = warm(config, tmp_path / "new", old)
    table, dense, manifest = contents(run.folder, 0)
    before, dense_before, _ = contents(old)
    assert same(table, before)
    assert same(dense, dense_before)
    assert (manifest.step, tuple(manifest.cursor)) == (0, (0, 0))
    said = json.loads((run.folder / "run.json").read_text())["init_from"]
    assert (said["source"], said["step"], said["allow"]) == (str(old), 6, [])
    assert load_state(run)[1].step == 1


def test_a_resumed_warm_run_is_bitwise_identical_and_does_not_need_its_origin(log, old, tmp_path):
    shutil.copytree(old, tmp_path / "old")
    config = small_config(log)
    calm = warm(config, tmp_path / "calm", tmp_path / "old")
    again = InitFrom(tmp_path / "old")
    train(replace(config, train=replace(config.train, steps=1)), tmp_path / "run", init_from=again, quiet=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000001")  # as if killed in the first step
    shutil.rmtree(tmp_path / "old")
    train(config, tmp_path / "run", resume=True, init_from=again, quiet=True)  # as torchrun would
    assert not differing_tensors(calm.folder, tmp_path / "run")
    assert Run.open(tmp_path / "run").origin == calm.origin
    with pytest.raises(ConfigError, match=r"was initialised from .*old, not from .*else"):
        train(config, tmp_path / "run", resume=True, init_from=InitFrom(tmp_path / "else"), quiet=True)
    train(config, tmp_path / "run", resume=True, quiet=True)


def test_a_kill_before_the_first_checkpoint_starts_again_from_the_same_origin(log, old, tmp_path):
    config = small_config(log, **NONE)
    run = warm(config, tmp_path / "run", old)
    expected = contents(run.folder)[0]
    shutil.rmtree(run.checkpoints)
    train(config, run.folder, resume=True, quiet=True)
    assert same(contents(run.folder)[0], expected)
    shutil.rmtree(run.checkpoints)
    path = run.folder / "run.json"
    path.write_text(path.read_text().replace(run.origin.digest, "0" * 64))
    with pytest.raises(CheckpointError, match="has changed since the run was created from it"):
        train(config, run.folder, resume=True, quiet=True)


def test_the_best_checkpoint_is_taken_unless_one_is_named(log, tmp_path):
    config = small_config(log, epochs=4, metric="hr@10")
    config = replace(config, data=replace(config.data, validation=True))
    old = train(config, tmp_path / "old", quiet=True)
    best = load_state(old)[1].progress["best"]["step"]
    latest = checkpoint_folders.complete_steps(old.checkpoints)[-1]
    assert best != latest
    config = replace(config, train=replace(config.train, **NONE))
    assert warm(config, tmp_path / "a", old.folder).origin.step == best
    assert warm(config, tmp_path / "b", checkpoint_folders.checkpoint_folder(old.checkpoints)).origin.step == latest


def test_what_differs_is_listed_whole_and_nothing_is_written(log, old, tmp_path):
    other = small_log(tmp_path / "log", num_users=20).path
    config = small_config(other, **NONE)
    config = replace(
        config,
        model=replace(config.model, num_blocks=1, qk_dim=4),
        embedding=replace(config.embedding, optimizer="adagrad"),
        dense=replace(config.dense, optimizer="sgd"),
    )
    with pytest.raises(ConfigError) as refused:
        warm(config, tmp_path / "run", old)
    message = str(refused.value)
    assert "  - table 'item': dim 8, 30 rows, mean, square, step there, dim 8, sum here" in message
    assert "dropped (dropped)" in message
    assert "initialised (reshaped)" in message
    assert "model.qk_dim: 3 there, 4 here; differs (model)" in message
    assert "dense state: mean, square, step there, none here; differs (optimizer)" in message
    assert "  - data: " in message
    words = message.rpartition("Add --allow ")[2].partition(" to start")[0].split()
    assert set(words) == {"dropped", "reshaped", "optimizer", "model", "data"}
    assert not (tmp_path / "run").exists()
    for missing in words:
        with pytest.raises(ConfigError, match=rf"\({missing}\)"):
            warm(config, tmp_path / "run", old, *(word for word in words if word != missing))
    run = warm(config, tmp_path / "run", old, *words)
    table, dense, _ = contents(run.folder, 0)
    before, dense_before, _ = contents(old)
    assert torch.equal(table["rows"], before["rows"])
    assert not table["state.sum"].any()
    fresh = new_state(run).dense.export()
    assert dense.keys() == fresh.keys()
    for key, tensor in dense.items():
        taken = key in dense_before and dense_before[key].shape == tensor.shape
        assert torch.equal(tensor, dense_before[key] if taken else fresh[key]), key
    assert 0 < sum(torch.equal(dense[key], fresh[key]) for key in dense) < len(dense)


def test_tables_are_added_and_dropped(log, old, tmp_path):
    """The old model had a table of its own and lacked ours."""
    manifest, content = checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(old / "checkpoints"))
    rows = {name: values for name, values in content["item"].items() if name != "ids"}
    section = TableSection(range(1), {"ids": content["item"]["ids"]}, rows)
    renamed = SaveContent(content["dense"], {"user": [section]}, {"user": 1})
    checkpoint_writer.save_checkpoint(tmp_path / "old" / "checkpoints", 6, manifest.cursor, manifest.progress, renamed)
    config = small_config(log, **NONE)
    with pytest.raises(ConfigError) as refused:
        warm(config, tmp_path / "run", tmp_path / "old")
    assert "table 'item': nothing there, dim 8 here; initialised (added)" in str(refused.value)
    assert "table 'user': dim 8, 30 rows there, nothing here; dropped (dropped)" in str(refused.value)
    run = warm(config, tmp_path / "run", tmp_path / "old", "added", "dropped")
    _, dense, manifest = contents(run.folder, 0)
    assert same(dense, content["dense"])
    facts = table_facts(checkpoint_folders.checkpoint_folder(run.checkpoints, 0), manifest)
    assert [(one.name, one.num_rows) for one in facts] == [("item", 0)]


def test_a_model_that_shares_nothing_is_refused_whatever_is_allowed(log, old, tmp_path):
    config = small_config(log, "sasrec", "full", **NONE)
    config = replace(config, model=replace(config.model, dim=4))
    allow = ("added", "dropped", "reshaped", "optimizer", "model", "data")
    with pytest.raises(ConfigError, match=r"no tensor of .* matches the model"):
        warm(config, tmp_path / "run", old, *allow)
    with pytest.raises(ConfigError, match="--allow everything is not known; there are: added, dropped"):
        warm(config, tmp_path / "run", old, "everything")
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        warm(config, tmp_path / "run", tmp_path / "none")
    assert not (tmp_path / "run").exists()


def start(world, config, folder, source, allow=()):
    """Trains on these ranks; the error, if it is refused."""
    try:
        return train_to_end(config, folder, init_from=InitFrom(source, allow), quiet=True, world=world).stopped
    except NestPipeError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("world_size", "num_buckets"), [(2, 4), (3, 7), (1, 3)])
def test_any_number_of_ranks_and_buckets_takes_over_the_same_rows(log, old, tmp_path, world_size, num_buckets):
    config = small_config(log, **NONE)
    config = replace(config, embedding=replace(config.embedding, num_buckets=num_buckets, max_rows=50 * num_buckets))
    assert run_ranks(world_size, start, config, tmp_path / "run", old) == ["1 steps done"] * world_size
    table, dense, _ = contents(tmp_path / "run", 0)
    before, dense_before, _ = contents(old)
    assert same(dense, dense_before)
    assert {name for name in table if name[:6] == "index."} == {"index.frequency", "index.last_step"}
    assert same({name: values for name, values in table.items() if name[:6] != "index."}, before)


def test_a_refusal_reaches_every_rank(log, old, tmp_path):
    config = small_config(log, **NONE)
    config = replace(config, model=replace(config.model, num_blocks=1))
    found = run_ranks(2, start, config, tmp_path / "run", old)
    assert all("--allow dropped model" in message for message in found), found
    shutil.copytree(old, tmp_path / "old")
    (part,) = (tmp_path / "old" / "checkpoints" / "step-000006").glob("part-*.pack")
    good = part.read_bytes()
    for damaged, message in ((good[:-1] + bytes([good[-1] ^ 1]), "is not what was saved"), (b"", "cannot be read")):
        part.write_bytes(damaged)
        found = run_ranks(2, start, small_config(log, **NONE), tmp_path / "run", tmp_path / "old")
        assert all(one.startswith("CheckpointError") and f"{part} {message}" in one for one in found), found
    assert not (tmp_path / "run").exists()


def test_the_command_line_shows_what_was_taken_over(log, old, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    settings = ["--data.path", str(log), "--train.steps", "1", "--run", str(tmp_path / "run")]
    assert main(["train", "tiny", *settings, "--init-from", str(old)]) == 2
    assert "to start anyway" in capsys.readouterr().err
    model = ["--model.dim", "8", "--model.num-heads", "2"]
    length = ["--data.max-len", "8", "--allow", "model", "dropped", "added", "reshaped"]
    assert main(["train", "tiny", *settings, *model, *length, "--init-from", str(old)]) == 0
    shown = capsys.readouterr().err
    assert "initialised from" in shown
    (line,) = (line for line in shown.splitlines() if "table 'item'" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "table 'item'",
        "dim 8, 30 rows",
        "dim 8",
        "loaded",
        "kept",
    ]
    assert main(["train", "tiny", *settings, "--allow", "data"]) == 2
    assert "name that run with --init-from" in capsys.readouterr().err
