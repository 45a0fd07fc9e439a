"""The ablations: what models see of the world, what a verdict is, and that the page shows what was recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nestpipe.data.synthetic_scenarios import ScenarioLog, ScenarioLogConfig
from nestpipe.rng import Rng

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import ablation_arms  # noqa: E402
import ablations  # noqa: E402
import instruction_world  # noqa: E402
from ablation_world import Stage  # noqa: E402

STAGE = Stage(ScenarioLog.make(ScenarioLogConfig(num_users=60, num_events=20)))


def test_a_request_knows_the_past_and_its_instruction_but_not_its_target():
    users, places = torch.tensor([3, 7]), torch.tensor([15, 4])
    batch = STAGE.requests(users, places, newest=6)
    world = STAGE.world
    assert batch.items.values.tolist() == [*world.items[3, 9:15], *world.items[7, 0:4]]
    assert batch.targets.values.tolist() == [*world.items[3, 10:16], *world.items[7, 1:5]]
    asked = STAGE.with_instructions(batch)
    assert asked.targets is None
    assert asked.sample_features["scenario"].values.tolist() == [world.scenarios[3, 15], world.scenarios[7, 4]]
    told = [world.named_topics[3, 15], world.named_topics[7, 4]]
    assert torch.equal(asked.sample_features["reasoning"].values, STAGE.instructions[told])
    trigger = [one for one in (world.triggers[3, 15], world.triggers[7, 4]) if one >= 0]
    assert asked.sample_features["trigger"].values.tolist() == trigger


def test_training_never_sees_the_test_event():
    batch = STAGE.histories(torch.arange(60))
    assert batch.targets.values.view(60, 18)[:, -1].tolist() == STAGE.world.items[:, 18].tolist()
    users, places = STAGE.draw_requests(Rng(0, 0), 500, scenario=2)
    assert int(places.max()) < STAGE.test_place
    assert (STAGE.world.scenarios[users, places] == 2).all()


def test_lists_are_worth_what_the_world_expects():
    world, place = STAGE.world, STAGE.test_place
    intent = np.eye(16)[world.intents[:, place]]
    best = torch.from_numpy(np.argsort(-world.chances(place, intent), 1, kind="stable")[:, :10].copy())
    found = STAGE.worth(best, torch.arange(60))
    assert found["hr10"] == pytest.approx(-np.sort(-world.chances(place, intent), 1)[:, :10].sum(1).mean(), abs=1e-5)
    assert found["hr1"] < found["ndcg10"] < found["hr10"]
    utilities = STAGE.utilities(torch.tensor([5, 9]), torch.tensor([place, 13]))
    assert utilities[0].tolist() == pytest.approx(world.utilities(place, intent)[5].tolist())
    assert utilities[1].tolist() == pytest.approx(world.utilities(13, np.eye(16)[world.intents[:, 13]])[9].tolist())


@pytest.mark.parametrize("arm", ["igr query, q2i", "per scenario", "sa_gcpo"])
def test_arms_run(arm, monkeypatch):
    for name in ("EPOCHS", "POLICY_START_EPOCHS", "POLICY_STEPS"):
        monkeypatch.setattr(ablation_arms, name, 1)
    monkeypatch.setattr(ablation_arms, "REQUEST_STEPS", 3)
    monkeypatch.setattr(ablation_arms, "ScenarioLogConfig", lambda **given: ScenarioLogConfig(num_users=48, **given))
    figures = ablation_arms.run(ablation_arms.ARMS[arm], 5)
    assert 0 < figures["ndcg10"] < figures["optimum_ndcg10"]
    assert 0 < figures["utility1"] < 1


def test_verdicts_need_twice_the_error_and_all_seeds():
    mean, error = ablations.effect([0.5, 0.6, 0.7], [0.4, 0.4, 0.4])
    assert (mean, error) == pytest.approx((0.2, 0.1 / 3**0.5))
    verdicts = [ablations.verdict(one, 0.1) for one in (0.21, 0.2, 0.0, -0.2, -0.21)]
    assert verdicts == ["confirmed", "open", "open", "open", "refuted"]
    figures = {"ndcg10": 0.5, "utility1": 0.5}
    found = {arm: {0: figures, 1: figures} for arm in ablation_arms.ARMS}
    assert {row[-1] for row in ablations.rows_of(found)} == {"open: 2 of 3 seeds"}


def test_the_page_shows_what_is_recorded():
    text = ablations.PAGE.read_text()
    assert ablations.page(text, ablations.rows_of(ablations.recorded())) == text, (
        "run 'python benchmarks/ablations.py --write'"
    )


def test_the_page_shows_what_the_commands_reached():
    text = ablations.PAGE.read_text()
    assert instruction_world.page(text) == text, "run 'python benchmarks/instruction_world.py --write'"
    rows = instruction_world.rows_of()
    assert [row[-1] for row in rows] == ["agree"] * len(rows)
