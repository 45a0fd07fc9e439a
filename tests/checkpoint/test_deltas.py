"""Delta checkpoints: base and deltas are bitwise the full checkpoint, on any number of ranks; every link is verified."""

import shutil
from dataclasses import replace
from unittest.mock import patch

import pytest

from nestpipe.checkpoint import async_writer
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.difference import dense_differences, table_differences
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.state import StateSnapshot
from nestpipe.cli import main
from nestpipe.cli.demo import differing_tensors
from nestpipe.embedding import buckets, table
from nestpipe.errors import NestPipeError
from nestpipe.pipeline.channels import Channels
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

KINDS = {
    "adam": {"optimizer": "adam"},
    "limits": {"optimizer": "rowwise_adagrad", "admit_after": 2, "max_rows": 20},
    "stale": {},
}


def small_buckets():
    """So that four ranks evict rows of a small log."""
    return patch.object(buckets, "MIN_ROWS_PER_BUCKET", 5)


def train(world, config, folder):
    """Trains with deltas however much changes, in sections of few rows."""
    share, async_writer._DELTA_SHARE = async_writer._DELTA_SHARE, 1e9
    size, table._SECTION_BYTES = table._SECTION_BYTES, 400
    try:
        with small_buckets():
            return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped
    except NestPipeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        async_writer._DELTA_SHARE, table._SECTION_BYTES = share, size


def reshard(world, folder, out):
    """Loads the latest checkpoint on these ranks and saves it again, whole."""
    channels = Channels.of(world)
    with small_buckets():
        state, manifest = load_state(Run.open(folder), channels=channels)
    content = StateSnapshot(state).content()
    checkpoint_writer.save_checkpoint(out, manifest.step, manifest.cursor, {}, content, channels.control)


@pytest.fixture(scope="module", params=KINDS)
def runs(request, tmp_path_factory):
    """A run of four ranks that saves a base and four deltas, and the same run that saves everything whole."""
    folder = tmp_path_factory.mktemp("deltas")
    log = small_log(folder / "log", num_users=60, num_items=200).path
    pipeline = {"micro_batches": 2}
    if request.param == "stale":
        pipeline |= {"mode": "nested", "staleness": 1}
    config = small_config(log, epochs=0, steps=10, save_steps=2, pipeline=pipeline, skip_nonfinite=True)
    config = replace(config, embedding=replace(config.embedding, num_buckets=16, **KINDS[request.param]))
    run_ranks(4, train, config, folder / "deltas")
    run_ranks(4, train, replace(config, train=replace(config.train, max_deltas=0)), folder / "whole")
    return config, folder / "deltas", folder / "whole"


def chain_of(run, step=None):
    return [link.step for link in Manifest.read(checkpoint_folders.checkpoint_folder(run / "checkpoints", step)).chain]


def assert_equal(a, b):
    assert not dense_differences(a, b)
    assert [one for one in table_differences(a, b) if not one.is_equal] == []


def test_every_delta_is_bitwise_the_full_checkpoint(runs):
    _, deltas, whole = runs
    steps = checkpoint_folders.complete_steps(whole / "checkpoints")
    assert steps == checkpoint_folders.complete_steps(deltas / "checkpoints") == [2, 4, 6, 8, 10]
    for number, step in enumerate(steps):
        assert (chain_of(deltas, step), chain_of(whole, step)) == (steps[:number], [])
        ours, theirs = (checkpoint_folders.checkpoint_folder(run / "checkpoints", step) for run in (deltas, whole))
        assert_equal(ours, theirs)
    assert not differing_tensors(deltas, whole)


@pytest.mark.parametrize("world_size", [4, 3, 2, 1])
def test_any_number_of_ranks_loads_base_and_deltas(runs, tmp_path, world_size):
    _, deltas, whole = runs
    run_ranks(world_size, reshard, deltas, tmp_path)
    again = checkpoint_folders.checkpoint_folder(tmp_path)
    assert_equal(again, checkpoint_folders.checkpoint_folder(whole / "checkpoints"))


def test_a_resumed_run_continues_the_chain_and_begins_a_new_one_in_time(runs, tmp_path):
    config, deltas, whole = runs
    shutil.copytree(deltas, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000010")
    config = replace(config, train=replace(config.train, max_deltas=4, steps=14))
    run_ranks(4, train, config, tmp_path / "run")
    assert chain_of(tmp_path / "run", 10) == [2, 4, 6, 8]
    assert chain_of(tmp_path / "run", 12) == []
    assert chain_of(tmp_path / "run", 14) == [12]
    shutil.copytree(whole, tmp_path / "whole")
    run_ranks(4, train, replace(config, train=replace(config.train, max_deltas=0)), tmp_path / "whole")
    assert not differing_tensors(tmp_path / "run", tmp_path / "whole")


# What follows depends on chains and files, not on what is in them: one kind shows it, the one that removes rows.
one_kind = pytest.mark.parametrize("runs", ["limits"], indirect=True)


@one_kind
def test_damage_in_any_link_is_refused_by_name(runs, tmp_path, capsys):
    config, deltas, _ = runs
    shutil.copytree(deltas, tmp_path / "run")
    config = replace(config, train=replace(config.train, steps=11))
    for step in (2, 6, 10):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        for damage, message in ((_flip, "is not what was saved"), (_remove, "lacks"), (_forget, "no manifest.json")):
            victim, good = damage(folder)
            if not (damage is _forget and step == 10):  # then step 8 is the latest
                found = run_ranks(2, train, config, tmp_path / "run")
                assert all(one.startswith("CheckpointError") or "CheckpointError" in one for one in found), found
                assert all(message in one and folder.name in one for one in found), found
                assert main(["checkpoint", "verify", str(tmp_path / "run"), "--step", "10"]) == 1
                assert message in (out := capsys.readouterr().out)
                assert folder.name in out
            victim.write_bytes(good)
    # Another checkpoint in the place of a link, complete in itself.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    shutil.copytree(runs[2] / "checkpoints" / "step-000004", tmp_path / "run" / "checkpoints" / "step-000004")
    found = run_ranks(2, train, config, tmp_path / "run")
    assert all("step-000004 than is there: its manifest has changed" in one for one in found), found


def _flip(folder):
    victim = next(folder.glob("part-*-0.pack"))  # its buckets are read by every number of ranks
    good = victim.read_bytes()
    blob = next(Manifest.read(folder).blobs_of("item", "rows"))
    place = blob.offset + blob.num_bytes - 1
    victim.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
    return victim, good


def _remove(folder):
    victim = next(folder.glob("part-*-0.pack"))
    good = victim.read_bytes()
    victim.unlink()
    return victim, good


def _forget(folder):
    good = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").unlink()
    return folder / "manifest.json", good


@one_kind
def test_commands_show_compare_and_compact(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, deltas, whole = runs
    shutil.copytree(deltas, tmp_path / "run")
    run = str(tmp_path / "run")
    assert main(["checkpoint", "inspect", run]) == 0
    shown = capsys.readouterr().out
    assert "a delta: what changed since step 8; it needs the checkpoints of 2, 4, 6, 8" in shown
    assert main(["checkpoint", "diff", run, str(whole)]) == 0
    assert main(["checkpoint", "compact", run, "--step", "6"]) == 2
    assert "is needed as it is by the delta of step 8; compact that one" in capsys.readouterr().err
    assert main(["checkpoint", "compact", run]) == 0
    assert "is now full; it needed 4 earlier checkpoints" in capsys.readouterr().out
    checkpoint_folders.prune_checkpoints(tmp_path / "run" / "checkpoints", keep_last=1, keep=6)
    assert checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints") == [2, 4, 6, 10], "6 needs 2 and 4"
    assert main(["checkpoint", "verify", run]) == 0
    for step in ("6", "10"):
        assert main(["checkpoint", "diff", run, str(whole), "--step", step]) == 0
    assert main(["checkpoint", "compact", run]) == 0
    assert "is full already" in capsys.readouterr().out
