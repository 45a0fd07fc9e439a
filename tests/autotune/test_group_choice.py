"""Runs in groups of ranks: resumed on the same and on other grids, chosen once, refused where they make no sense."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.cli import main
from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import ConfigError
from nestpipe.training.loop import train_to_end
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log


def train(world, config, folder):
    try:
        return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped
    except ConfigError as error:
        return str(error)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("grouping") / "log").path


def config_of(log, steps, **pipeline):
    return small_config(log, steps=steps, pipeline={"micro_batches": 2, **pipeline})


def weights_of(folder):
    _, files = checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(folder / "checkpoints"))
    return {(file, name): tensor for file, tensors in files.items() for name, tensor in tensors.items()}


@pytest.mark.timeout(300)
def test_a_run_in_groups_goes_on_in_any_grid(log, tmp_path):
    calm, cut = tmp_path / "calm", tmp_path / "cut"
    assert run_ranks(4, train, config_of(log, 9, groups=2), calm, deadline_s=250) == ["9 steps done"] * 4
    run_ranks(4, train, config_of(log, 5, groups=2, mode="nested"), cut)
    shutil.copytree(cut, tmp_path / "other")
    run_ranks(4, train, config_of(log, 9, groups=2, mode="nested", trace_steps=3), cut)
    assert not differing_tensors(calm, cut)
    assert "merge" in (cut / "trace" / "rank-003.jsonl").read_text()
    assert main(["trace", str(cut)]) == 0
    # On another grid sums are in another order: the same rows, and close.
    run_ranks(2, train, config_of(log, 7, groups=2), tmp_path / "other")
    run_ranks(3, train, config_of(log, 9, groups=1), tmp_path / "other")
    ours, theirs = weights_of(tmp_path / "other"), weights_of(calm)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-3, atol=1e-5) for key in theirs)


def test_groups_are_chosen_once_for_a_number_of_ranks(log, tmp_path):
    folder = tmp_path / "run"

    def config(steps):  # rows with limits are measured too
        found = config_of(log, steps, groups=0)
        return replace(found, embedding=replace(found.embedding, admit_after=2, max_rows=130))

    run_ranks(2, train, config(2), folder)
    facts, settings = (json.loads((folder / name).read_text()) for name in ("run.json", "config.json"))
    assert facts["groups"] in ({"2": 1}, {"2": 2})
    assert settings["pipeline"]["groups"] == facts["groups"]["2"]
    other = {"2": 3 - facts["groups"]["2"], "7": 7}  # as if it had been chosen
    (folder / "run.json").write_text(json.dumps({**facts, "groups": other}))
    run_ranks(2, train, config(4), folder)
    facts, settings = (json.loads((folder / name).read_text()) for name in ("run.json", "config.json"))
    assert facts["groups"] == other
    assert settings["pipeline"]["groups"] == other["2"]


def test_groups_that_ranks_cannot_make_are_refused_by_all(log, tmp_path):
    for message in run_ranks(3, train, config_of(log, 2, groups=2), tmp_path / "run"):
        assert message.startswith("3 ranks do not make 2 groups of equal size; set --pipeline.groups to one of 1, 3")
    assert not (tmp_path / "run").exists()
