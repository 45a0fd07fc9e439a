"""Ranks of equal cost: who gets what, the same on every rank, and training that does not notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestpipe import recipes
from nestpipe.cli.tune_balance import tuned
from nestpipe.data.config import DataConfig
from nestpipe.data.load_balance import Imbalance, SampleCost, _swap, assign, fit, fixed, loads_of
from nestpipe.data.loader import Loader
from nestpipe.data.splits import make_split
from nestpipe.jagged import Cursor
from nestpipe.training.run_folder import FREE_KEYS
from tests.embedding.sharding_ranks import merged, train_steps
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log, write_log

COST = SampleCost(1.0, 0.0005)


def kuai(num, seed=0):
    drawn = np.exp(np.random.default_rng(seed).normal(6.0, 1.1, num)).clip(max=2048)
    return np.ceil(drawn).astype(np.int64)


@pytest.mark.parametrize(("samples", "world_size", "most"), [(8, 8, 0.01), (6, 16, 0.015)])
def test_ranks_wait_little(samples, world_size, most):
    waits = []
    for seed in range(20):
        lengths = kuai(samples * world_size, seed)
        costs, ids = COST.of(lengths), np.arange(len(lengths))
        found = [
            loads_of(costs, rank_of, world_size)
            for rank_of in (
                fixed(len(lengths), world_size),
                assign(costs, ids, world_size, swaps=False),
                assign(costs, ids, world_size),
            )
        ]
        assert all(np.isclose(loads.sum(), costs.sum()) for loads in found)
        waits.append([Imbalance.of(loads, loads).wait for loads in found])
    fixed_wait, greedy, swapped = np.mean(waits, axis=0)
    assert swapped <= most
    assert swapped < greedy < fixed_wait / 5


def test_the_order_of_samples_does_not_matter_and_ties_go_by_id():
    lengths = np.concatenate([kuai(40), np.full(9, 300)])
    ids = np.random.default_rng(1).permutation(1000)[: len(lengths)].astype(np.int64)
    rank_of = dict(zip(ids, assign(COST.of(lengths), ids, 5), strict=True))
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(ids))
        again = assign(COST.of(lengths[order]), ids[order], 5)
        assert dict(zip(ids[order], again, strict=True)) == rank_of


def test_fewer_samples_than_ranks_and_none_at_all():
    assert sorted(assign(COST.of(np.array([5, 9, 2])), np.arange(3), 5).tolist()) == [0, 1, 2]
    assert assign(np.zeros(0), np.arange(0), 3).tolist() == []
    assert Imbalance.of(np.zeros(3), np.zeros(3)) == Imbalance(0.0, 0.0, 0.0)


def test_the_fit_finds_the_coefficients_and_none_is_negative():
    lengths = [np.full(events // length, length) for length in (8, 64, 256, 1024) for events in (2048, 4096)]
    seconds = np.array([0.01 + 1e-6 * SampleCost(3.0, 0.05).of(one).sum() for one in lengths])
    cost, constant = fit(lengths, seconds)
    assert np.allclose([cost.linear, cost.square, constant], [3.0, 0.05, 0.01], rtol=1e-6)
    falling = np.array([0.02 - 1e-9 * np.square(one.astype(float)).sum() for one in lengths])
    cost, constant = fit(lengths, falling)
    assert min(cost.linear, cost.square, constant) >= 0


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("balance") / "log")


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sample_of_a_batch_has_one_rank_and_costs_are_near(log, world_size, group_size):
    def batch(rank, size, *, balance):
        data = DataConfig(path="", max_len=8, batch_size=24, group_size=group_size, balance=balance, cost_square=0.1)
        loader = Loader(log, make_split(log, data), data, seed=3, rank=rank, world_size=size)
        return loader.batch(Cursor(0, 0))

    whole = batch(0, 1, balance=False)
    parts = [batch(rank, world_size, balance=True) for rank in range(world_size)]
    assert sorted(torch.cat([one.sample_ids for one in parts]).tolist()) == sorted(whole.sample_ids.tolist())
    for one in parts:
        place = {int(sample): number for number, sample in enumerate(whole.sample_ids)}
        places = [place[int(sample)] for sample in one.sample_ids]
        assert places == sorted(places), "samples stay in the order of the epoch"
    if group_size > 1:
        owners = {}
        for rank, one in enumerate(parts):
            for number in one.groups.tolist():
                owners.setdefault(number, set()).add(rank)
        assert all(len(ranks) == 1 for ranks in owners.values())
    else:
        loads = np.array([SampleCost(1.0, 0.1).of(one.items.lengths().numpy()).sum() for one in parts])
        assert loads.max() - loads.min() <= 0.15 * loads.max()


# fp64: the same gradients added in another order.
def test_balanced_ranks_train_as_unbalanced_ones(log):
    one = merged(run_ranks(1, train_steps, log.path, {}, 4))
    for world_size, more in ((2, {}), (3, {"micro_batches": 2}), (4, {"group_size": 2, "batch_size": 12})):
        plain = one if "group_size" not in more else merged(run_ranks(1, train_steps, log.path, more, 4))
        other = merged(run_ranks(world_size, train_steps, log.path, {**more, "balance": True}, 4))
        for name, value in plain.items():
            assert torch.allclose(value.double(), other[name].double(), rtol=1e-12, atol=1e-12), (world_size, name)


def test_tune_measures_the_cost_of_a_recipe(tmp_path):
    histories = {user: list(range(user % 60 + 3)) for user in range(60)}
    log = write_log(tmp_path / "log", histories)
    config = small_config(log.path)
    found = tuned(replace(config, data=replace(config.data, max_len=64)), num_events=256, num_steps=1)
    assert found.cost.linear + found.cost.square > 0
    assert found.constant_s >= 0


def test_coefficients_belong_to_the_run():
    assert not {"data.balance", "data.cost_linear", "data.cost_square"} & set(FREE_KEYS)
    data = recipes.tiny().data
    assert list(replace(data, cost_linear=-1.0).problems())
    assert list(replace(data, cost_linear=0.0, cost_square=0.0).problems())


@pytest.mark.parametrize(
    ("costs", "before", "after"),
    [
        ([1.0, 1.0, 1.0], [0, 0, 0], [1, 0, 0]),
        ([3.0, 3.0, 4.0], [0, 0, 1], [2, 0, 1]),
        ([3.0, 3.0, 4.0], [2, 2, 1], [0, 2, 1]),
    ],
)
def test_a_unit_moves_without_a_swap_if_that_is_best(costs, before, after):
    rank_of, loads = np.array(before), loads_of(np.array(costs), np.array(before), 3)
    assert _swap(np.array(costs), np.arange(3), rank_of, loads)
    assert rank_of.tolist() == after
    assert loads.tolist() == loads_of(np.array(costs), rank_of, 3).tolist()


@pytest.mark.parametrize("costs", [[2.0, 2.0], [4.0, 3.0, 2.0]])
def test_nothing_moves_if_nothing_helps(costs):
    rank_of = np.array([0, 1, 1][: len(costs)])
    loads = loads_of(np.array(costs), rank_of, 2)
    assert not _swap(np.array(costs), np.arange(len(costs)), rank_of, loads)
    assert rank_of.tolist() == [0, 1, 1][: len(costs)]
    assert assign(np.empty(0), np.empty(0, dtype=np.int64), 2).tolist() == []
