"""Runs with item features: the same bits in every mode, wherever they were cut, and zero rows for new items."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.cli.demo import differing_tensors
from nestpipe.eval.catalogue_predictor import training_counts
from nestpipe.training.distributed_eval import eval_world
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from tests.rank_pool import run_ranks
from tests.small_content import content_config, content_log


def train(world, config, folder):
    return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped


def evaluated(world, folder):
    with eval_world(world) as own:
        run = Run.open(folder)
        return own.predictor(run, 9).evaluate(ranks=own.ranks, progress=False).rank.tolist()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return content_log(tmp_path_factory.mktemp("items") / "log")


def config_of(log, mode, loss="sample", **settings):
    pipeline = {"mode": mode, "micro_batches": 3, "depth": 2}
    return content_config(log.path, "hstu", loss, pipeline=pipeline, epochs=0, **{"steps": 9, **settings})


@pytest.fixture(scope="module")
def calm(log, tmp_path_factory):
    """A sequential run on two ranks."""
    folder = tmp_path_factory.mktemp("items") / "calm"
    run_ranks(2, train, config_of(log, "sequential"), folder)
    return folder


def test_nested_is_sequential_bit_for_bit_on_two_ranks_also_resumed(calm, log, tmp_path):
    for steps, mode in ((4, "nested"), (6, "dual-buffer"), (9, "frozen-window")):
        run_ranks(2, train, config_of(log, mode, steps=steps), tmp_path / "run")
    assert not differing_tensors(calm, tmp_path / "run")


def test_new_items_have_no_row_and_read_as_zero(calm, log):
    run = Run.open(calm)
    loaded, counts = run.load_model(), training_counts(run.sequences, run.split)
    new = torch.from_numpy(np.array(log.catalogue)[counts == 0])
    assert len(new) >= 5
    assert not loaded.rows.peek("item", new).any()
    old = torch.from_numpy(np.array(log.catalogue)[counts > 3])
    assert (loaded.rows.peek("item", old).abs().sum(1) > 0).all()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_evaluate_to_the_bits_of_one(calm, num_ranks):
    own = Run.open(calm).predictor(9).evaluate(progress=False).rank.tolist()
    assert run_ranks(num_ranks, evaluated, calm) == [own] * num_ranks
