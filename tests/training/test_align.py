"""Alignment on the engine: the same bits in every mode and after a kill, groups that no number of ranks changes, clear errors."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import ConfigError
from nestpipe.eval.candidate_values import CandidateValues
from nestpipe.eval.predictor import GenerativePredictor
from nestpipe.eval.scenario_eval import scenario_metrics
from nestpipe.generative.policy_model import PolicyModel
from nestpipe.generative.scenario_triggers import with_trigger_rules
from nestpipe.generative.scenarios import Scenario
from nestpipe.jagged import Jagged
from nestpipe.models.instruction import Queries
from nestpipe.training.align_report import align_report
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import behaviour_table, load_state
from tests.eval.ranking_ranks import ranking_config
from tests.generative.test_training import make_ids
from tests.rank_pool import RanksError, run_ranks
from tests.small_runs import small_config
from tests.training.aligned_runs import align, start_config, write_scenarios, write_shop


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("align")
    write_shop(folder)
    make_ids(folder / "ids")
    train_to_end(start_config(folder), folder / "start", quiet=True)
    return folder


@pytest.fixture(scope="module")
def calm(shop):
    """Sequential, on two ranks."""
    folder = shop / "calm"
    stopped = run_ranks(2, _align, shop, folder, {"mode": "sequential"})
    assert stopped == ["3 epochs done"] * 2
    return folder


def _align(world, shop, folder, flags, kill_at=0, cart=None):
    scenarios = write_scenarios(shop, **(cart or {})) if world is None or world.rank == 0 else shop / "scenarios.json"
    return align(world, shop / "start", folder, kill_at, scenarios=scenarios, **flags)


def groups(folder):
    found = {}
    for path in sorted((folder / "rollouts").glob("*.npz")):
        with np.load(path) as content:
            found[path.name] = {name: content[name] for name in content.files}
    return found


def test_nested_is_bitwise_sequential_on_two_ranks(shop, calm, tmp_path):
    run_ranks(2, _align, shop, tmp_path / "run", {"mode": "nested"})
    assert not differing_tensors(calm, tmp_path / "run")


def test_a_killed_run_resumes_to_the_same_bits(shop, calm, tmp_path):
    with pytest.raises(RanksError):
        run_ranks(2, _align, shop, tmp_path / "run", {"mode": "nested"}, 5)
    for part in list((tmp_path / "run" / "rollouts").glob("*.npz"))[:1]:  # as if killed while it drew
        part.unlink()
    run_ranks(2, _align, shop, tmp_path / "run", {"mode": "nested"})
    assert not differing_tensors(calm, tmp_path / "run")


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_groups_do_not_depend_on_the_number_of_ranks(shop, calm, tmp_path, num_ranks):
    run_ranks(num_ranks, _align, shop, tmp_path / "run", {"mode": "sequential"})
    theirs = groups(calm)
    assert len(theirs) == 3
    for name, ours in groups(tmp_path / "run").items():
        for column, values in ours.items():
            np.testing.assert_array_equal(values, theirs[name][column])
    ours, theirs = (load_state(Run.open(one))[0].dense.weights for one in (tmp_path / "run", calm))
    # Sums in another order in fp32, and Adam divides small gradients by their own size.
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0.0)


def test_the_result_is_a_run_like_any_other_and_the_report_is_paired(shop, calm):
    run = Run.open(calm)
    assert isinstance(load_state(run)[0].model, PolicyModel)
    scorer = run.predictor()
    assert isinstance(scorer, GenerativePredictor)
    assert len(scorer.recommend(3, k=5).items) == 5
    assert run.scenarios is not None
    assert {one.name for one in run.scenarios} == {"home", "cart"}
    report = align_report(run)
    assert set(report.num_users) == {"all", "home", "cart"}
    assert report.num_users["all"] == report.num_users["home"] + report.num_users["cart"] == 40
    # Items are worth what the log says: in 9 steps the margin of what is shown first rises.
    assert report.reward["all"].difference.low > 0
    report.save(calm)
    assert json.loads((calm / "align.json").read_text())["reward"]["all"]["aligned"] == report.reward["all"].aligned


def test_a_pool_bounds_what_is_drawn(shop, tmp_path):
    _align(None, shop, tmp_path / "run", {"passes": 1}, cart={"pool": "stock"})
    run = Run.open(tmp_path / "run")
    cart = [one.name for one in run.scenario_records].index("cart")
    offsets, scenario = run.sequences.offsets[:-1], run.sequences.event_features["scenario"].values
    asked = scenario[offsets + run.split.train_end - 1]
    leaves = groups(run.folder)["pass-0-part-00000.npz"]["leaves"]
    trie = run.semantic_ids
    in_stock = np.zeros(trie.num_leaves, bool)
    in_stock[trie.item_nodes[::2, -1].numpy()] = True
    assert in_stock[leaves[asked == cart]].all()
    assert not in_stock[leaves[asked != cart]].all()


@pytest.mark.parametrize(
    ("cart", "message"),
    [
        ({"reward_weights": {"margn": 1.0}}, "neither a reward nor a number column of .*did you mean 'margin'"),
        ({"reward_weights": {"ranking": 1.0}}, "name its run with --ranker"),
        ({"reward_weights": {"relative": 1.0}}, r"--model\.q2i 0\.1"),
        ({"pool": "shelf"}, "the pool 'shelf' of scenario 'cart'"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_anything_is_written(shop, tmp_path, cart, message):
    with pytest.raises(ConfigError, match=message):
        _align(None, shop, tmp_path / "run", {"passes": 1}, cart=cart)
    assert not (tmp_path / "run" / "config.json").exists()


def test_without_a_scenario_file_something_must_say_what_is_better(shop, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing says which items are better.*margin, stock"):
        align(None, shop / "start", tmp_path / "run", passes=1)
    align(None, shop / "start", tmp_path / "ranked", passes=1, ranker=_ranker(shop))
    rewards = groups(tmp_path / "ranked")["pass-0-part-00000.npz"]["rewards"]
    assert 0 <= rewards.min() < rewards.max() <= 1


def _ranker(shop):
    """A next-item run on the same log."""
    folder = shop / "ranker"
    config = small_config(shop / "log", "sasrec", "full", epochs=1)
    train_to_end(replace(config, data=replace(config.data, batch_size=20)), folder, quiet=True)
    return folder


@pytest.mark.parametrize("kind", ["hstu", "dcn"])
def test_a_ranking_run_rewards_what_it_ranks_first(shop, tmp_path, kind):
    """A ranker of dear items: rewards are its quantiles, the same on three ranks as on one, and dear items get the most."""
    config = ranking_config(shop / "log", kind)
    data = replace(config.data, max_len=8, batch_size=20, split="last", split_time=None)
    settings = replace(config.train, epochs=6, save_steps=10_000)
    model = replace(config.model, features=("stock",) if kind == "hstu" else ("item", "stock"))
    rates = {"embedding": replace(config.embedding, lr=0.05), "dense": replace(config.dense, lr=0.02)}
    ranker = tmp_path / kind
    config = replace(config, data=data, train=settings, model=model, **rates)
    run = train_to_end(config, ranker, quiet=True).run
    flags = {"passes": 1, "ranker": ranker}
    cart = {"reward_weights": {"ranking": 1.0}}
    _align(None, shop, tmp_path / "on 1", flags, cart=cart)
    (alone,) = groups(tmp_path / "on 1").values()
    if kind == "hstu":
        run_ranks(3, _align, shop, tmp_path / "on 3", flags, 0, cart)
        (shared,) = groups(tmp_path / "on 3").values()
        np.testing.assert_allclose(alone["rewards"], shared["rewards"], atol=1e-6)
    aligned = Run.open(tmp_path / "on 1")
    trie, numbers = aligned.semantic_ids, [one.name for one in aligned.scenario_records]
    asked = aligned.sequences.event_features["scenario"].values[
        aligned.sequences.offsets[:-1] + aligned.split.train_end - 1
    ]
    of_cart = asked == numbers.index("cart")
    items = trie.leaf_items[trie.first[-1][torch.from_numpy(alone["leaves"])]].numpy()[of_cart]
    rewards = alone["rewards"][of_cart]
    assert rewards[items >= 20].mean() > rewards[items < 10].mean() + 0.2
    assert 0 <= rewards.min() < rewards.max() <= 1
    # The values behind the rewards are the ranker's own, those that its evaluation predicts for the held-out events.
    predicted = run.predictor().predict("test")
    values = CandidateValues(run.load_model().model, run.load_model().rows, run.sequences, run.split, run.config)
    positions = torch.from_numpy(np.searchsorted(run.sequences.catalogue, run.sequences.items[predicted.event]))
    found = values.of(predicted.user, predicted.num_before, positions.unsqueeze(1)).flatten().numpy()
    # Evaluation knows the time of the target, a minute later than that of the last event: HSTU sees a little of it.
    np.testing.assert_allclose(found, predicted.scores[:, 0], atol=0.02 if kind == "hstu" else 1e-6)


def test_a_run_is_evaluated_by_scenario(calm):
    run = Run.open(calm)
    report = run.predictor().evaluate(progress=False)
    found = scenario_metrics(report, run.sequences, run.split, "test", seed=0, num_bootstrap=100)
    assert sum(found.num_users.values()) == report.num_users == 40
    weights = {name: found.num_users[name] / 40 for name in ("home", "cart")}
    for metric, whole in report.metrics.items():
        parts = {name: found.metrics[name][metric] for name in weights}
        assert sum(weights[name] * one.mean for name, one in parts.items()) == pytest.approx(whole.mean)
        assert all(one.low <= one.mean <= one.high for one in parts.values())


def test_training_weighs_behaviours_by_scenario():
    weights = behaviour_table([Scenario(name="a"), Scenario(name="b", behaviour_weights=(3.0, 5.0))], (1.0, 2.0))
    assert weights.tolist() == [[1.0, 2.0], [3.0, 5.0]]
    given = {"scenario": Jagged(torch.tensor([1, 0]), torch.tensor([0, 1, 1, 2]), 1)}  # the second names none
    rows = Jagged(torch.zeros(3), torch.tensor([0, 3]), 3)
    places = torch.arange(3)
    queries = Queries(rows, places, places, given, places, places)
    assert queries.weights(torch.tensor([1, 1, 0]), weights).tolist() == [5.0, 2.0, 1.0]
    with pytest.raises(ConfigError, match="'b' has 2 behaviour_weights, but the model has 3 levels"):
        behaviour_table([Scenario(name="b", behaviour_weights=(3.0, 5.0))], (1.0, 1.5, 2.0))


def test_training_sees_the_triggers_that_requests_will_have(shop):
    log = Run.open(shop / "start").sequences
    numbers = {name: number for number, name in enumerate(log.vocabulary("scenario").own_ids([0, 1]))}
    rules = {"home": "last", "cart": "none"}
    records = [Scenario(name=name, trigger=rules[name]) for name in sorted(numbers, key=numbers.get)]
    steered = with_trigger_rules(log, records)
    stored = steered.event_features["trigger"]
    scenario = log.event_features["scenario"].values
    for event in range(len(log.items)):
        found = stored.values[stored.offsets[event] : stored.offsets[event + 1]].tolist()
        is_first = event in log.offsets
        wanted = [] if is_first or scenario[event] == numbers["cart"] else [int(log.items[event - 1])]
        assert found == wanted
    given = with_trigger_rules(steered, [replace(one, trigger="given") for one in records])
    np.testing.assert_array_equal(given.event_features["trigger"].values, stored.values)
    none = with_trigger_rules(steered, [replace(one, trigger="none") for one in records])
    assert not len(none.event_features["trigger"].values)
    assert with_trigger_rules(log, [replace(one, trigger="none") for one in records]) is log
