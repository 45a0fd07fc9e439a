"""The off-policy report of `nestpipe align` on a log whose items were drawn with known probabilities: it covers the truth."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
import torch

from nestpipe.cli import main
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.errors import ConfigError
from nestpipe.eval.predictor import EvalBatches
from nestpipe.generative.scenarios import Scenario, Scenarios
from nestpipe.models.build_model import inputs_of
from nestpipe.training.loop import train_to_end
from nestpipe.training.off_policy_log import ProbabilityModel, ShownBy
from nestpipe.training.run_folder import Run
from tests.generative.test_training import make_ids
from tests.small_runs import small_log
from tests.training.aligned_runs import NUM_ITEMS, start_config

NUM_USERS, NUM_EVENTS = 240, 5


def write_shown(folder):
    """A shop that draws items, most often one of a user's third; the margin of an item is its number."""
    rng = np.random.default_rng(4)
    users = np.arange(NUM_USERS).repeat(NUM_EVENTS)
    chances = np.full((NUM_USERS, NUM_ITEMS), 0.4 / NUM_ITEMS)
    for third in range(3):
        chances[third::3, third::3] += 0.6 / (NUM_ITEMS / 3)
    items = (chances[users].cumsum(1) < rng.random((len(users), 1))).sum(1).clip(max=NUM_ITEMS - 1)
    log = pl.DataFrame(
        {
            "user": users,
            "item": items,
            "time": 1_000_000 + 60 * np.tile(np.arange(NUM_EVENTS), NUM_USERS),
            "margin": items / (NUM_ITEMS - 1),
            "chance": chances[users, items],
        }
    )
    features = (Feature(name="margin", kind="number"), Feature(name="chance", kind="number"))
    write_sequences(folder / "log", schema=Schema(features=features), log=log)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    write_shown(folder)
    make_ids(folder / "ids")
    train_to_end(start_config(folder, num_scenarios=0), folder / "start", quiet=True)
    (folder / "scenarios.json").write_text(Scenarios([Scenario(name="all", reward_weights={"margin": 1.0})]).to_json())
    return folder


def align(shop, *flags):
    common = ["--scenarios", str(shop / "scenarios.json"), "--run", str(shop / "aligned"), "--resume", "--quiet"]
    assert main(["align", str(shop / "start"), *common, "--passes", "2", "--group-size", "4", *map(str, flags)]) == 0
    return json.loads((shop / "aligned" / "align.json").read_text())["off_policy"]


@torch.no_grad()
def truth(run):
    """The mean margin if each held-out request showed an item drawn by a run: over all items."""
    opened, values = ProbabilityModel.open(run), np.arange(NUM_ITEMS) / (NUM_ITEMS - 1)
    leaves, found = opened.trie.item_nodes[:, -1], []
    for sample in EvalBatches(
        run.instructed, run.split, run.config, "test", inputs=inputs_of(run.config, run.instructed)
    ):
        every = leaves.expand(sample.batch.num_samples, -1)
        chances = opened.log_probs(sample.batch, every).double().sum(2).exp().numpy()
        np.testing.assert_allclose(chances.sum(1), 1.0, atol=1e-5)
        one = opened.probabilities(sample.batch, every[:, 3:4])
        np.testing.assert_allclose(one, chances[:, 3], atol=1e-6)
        found.append(chances @ values)
    return float(np.concatenate(found).mean())


def test_estimates_cover_the_true_value_of_both_runs(shop, capsys):
    found = align(shop, "--propensity", "chance")
    assert "difference " in capsys.readouterr().out
    assert (found["num_requests"], found["num_left_out"], found["reason"]) == (NUM_USERS, 0, "")
    run = Run.open(shop / "start")
    shown = run.sequences.event_features["margin"].values[run.sequences.offsets[:-1] + run.split.test]
    assert found["logged"]["mean"] == pytest.approx(float(shown.mean()), abs=1e-6)  # what was logged, not a model of it
    values = {name: truth(Run.open(shop / name)) for name in ("start", "aligned")}
    assert values["aligned"] > values["start"]
    for kind in ("snips", "doubly_robust"):
        for name, value in values.items():
            # Rewards are scaled by the outer hundredths of the log, which are 0 and 1 here.
            assert found[name][kind]["low"] < value < found[name][kind]["high"]
        gain = values["aligned"] - values["start"]
        assert found[kind]["low"] < gain < found[kind]["high"]
    assert found["aligned"]["effective_requests"] < NUM_USERS


def test_the_run_that_showed_the_items_gives_the_propensities(shop):
    """As if the start had drawn the log: its weights are 1, so its estimate is the mean of the log."""
    found = align(shop, "--shown-by", shop / "start")
    assert found["start"]["snips"] == pytest.approx(found["logged"])
    assert found["start"]["effective_requests"] == pytest.approx(NUM_USERS)


def test_without_propensities_the_reason_is_printed(shop, capsys):
    found = align(shop)
    assert found["start"] is None
    assert "no off-policy estimate: the log does not say with which probability" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--propensity odds is no number of events.*there are: margin, chance"):
        ShownBy("odds").check(Run.open(shop / "start").sequences)
    other = small_log(shop / "other")
    with pytest.raises(ConfigError, match=r"its numbers of users and items are others.*--propensity"):
        ShownBy("", shop / "start").check(other)
    with pytest.raises(ConfigError, match="give one"):
        ShownBy("chance", shop / "start").check(Run.open(shop / "start").sequences)
