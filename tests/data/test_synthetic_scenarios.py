"""The synthetic world: frozen, the same for every accuracy but for what instructions say, and its optimum is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nestpipe.data.synthetic_scenarios import ScenarioLog, ScenarioLogConfig
from nestpipe.errors import ConfigError

# Ablations were run on exactly these worlds; a change makes another benchmark, with another name.
FROZEN = {  # by accuracy and seed
    (0.0, 0): "2afdb35cf34c603fead4652782b67f54",
    (0.5, 0): "d84b71808cd818ff8ae6d3b6dea25843",
    (0.9, 0): "1da4f581a378b311a9e43be67d1fd338",
    (0.9, 1): "0d3f8d00d1bda1fbd9d2efbff5ee6fd1",
    (0.9, 2): "daeddf77a2894c53d974a55ca93e996f",
}


@pytest.mark.parametrize(("accuracy", "seed"), FROZEN)
def test_the_world_is_frozen(accuracy, seed):
    assert ScenarioLog.make(ScenarioLogConfig(accuracy=accuracy, seed=seed)).digest() == FROZEN[accuracy, seed]


SMALL = ScenarioLogConfig(num_users=400, num_events=12)


def test_only_what_is_told_depends_on_the_accuracy():
    worlds = [ScenarioLog.make(replace(SMALL, accuracy=one)) for one in (0.0, 0.5, 0.9)]
    for name in ("items", "scenarios", "triggers", "intents", "behaviours", "values", "styles"):
        assert all(np.array_equal(getattr(worlds[0], name), getattr(one, name)) for one in worlds), name
    right = [float((one.named_topics == one.intents).mean()) for one in worlds]
    # 4,800 instructions: a standard deviation of at most 0.007, and a topic at random is right in 1 of 16.
    assert right == pytest.approx([1 / 16, 0.5 + 0.5 / 16, 0.9 + 0.1 / 16], abs=0.03)


def test_the_best_possible_rises_with_the_accuracy_and_is_met_by_the_events():
    found = [ScenarioLog.make(replace(SMALL, accuracy=one)).optimum() for one in (0.0, 0.5, 0.9)]
    assert found[0].ndcg10 < found[1].ndcg10 < found[2].ndcg10
    assert found[0].utility < found[1].utility < found[2].utility
    world = ScenarioLog.make(SMALL)
    chances = world.chances(11, world.known_intent(11))
    assert chances.sum(1) == pytest.approx(1.0)
    hits = chances.argmax(1) == world.items[:, 11]
    # 400 draws with a chance of about a quarter: a standard deviation of 0.022.
    assert float(hits.mean()) == pytest.approx(found[2].hr1, abs=0.07)


def test_events_follow_intent_trigger_complement_and_style():
    world = ScenarioLog.make(replace(SMALL, num_users=2000))
    topics, per_topic = world.items // 16, 16
    feed, detail, cart = (world.scenarios == one for one in range(3))
    # Beside the noise (0.05) and chance meetings of topics.
    assert float((topics == world.intents)[feed].mean()) == pytest.approx(0.95, abs=0.03)
    anchors = world.triggers // per_topic
    assert 0.45 < float((topics == anchors)[detail].mean()) < 0.75
    assert 0.45 < float((topics == world.complements[anchors.clip(min=0)])[cart].mean()) < 0.65
    assert not (world.complements == np.arange(16)).any()
    preferred = np.take_along_axis(world.styles, topics, 1)
    assert float((world.items // 4 % 4 == preferred).mean()) == pytest.approx(0.8 * 0.95 + 0.05 / 4, abs=0.02)
    assert (world.triggers[feed] == -1).all()
    assert (world.triggers[~feed] >= 0).all()


def test_utilities_are_linear_in_the_intent_and_differ_by_scenario():
    world = ScenarioLog.make(SMALL)
    one, other = (np.eye(16)[np.full(400, topic)] for topic in (3, 8))
    mixed = 0.25 * world.utilities(5, one) + 0.75 * world.utilities(5, other)
    assert world.utilities(5, 0.25 * one + 0.75 * other) == pytest.approx(mixed)
    assert not np.array_equal(world.values[0], world.values[1])


def test_an_impossible_world_is_refused():
    with pytest.raises(ConfigError, match=r"accuracy is 2.*"):
        ScenarioLog.make(replace(SMALL, accuracy=2.0))


def test_texts_name_what_instructions_name():
    world = ScenarioLog.make(SMALL)
    word = world.instructions()[5].split()[-1]
    assert [item for item, text in enumerate(world.texts()) if word in text.split()] == list(range(80, 96))
    assert len(set(world.texts())) == world.config.num_items
