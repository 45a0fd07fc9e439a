"""A generative run from ids to recommendations: every mode gives the same bits, and other ids are refused everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from nestpipe import recipes
from nestpipe.checkpoint.folders import complete_steps
from nestpipe.cli.demo import differing_tensors
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.errors import CheckpointError, ConfigError, DataError
from nestpipe.eval.predictor import GenerativePredictor
from nestpipe.generative.semantic_ids import Registry, SidConfig
from nestpipe.jagged import Jagged
from nestpipe.models.build_model import inputs_of
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log
from tests.training.evaluating_ranks import evaluated


def make_ids(folder: Path, *, seed: int = 0) -> Registry:
    """Ids of 30 items whose codes say something about them: neighbours in the log's rule are near."""
    angle = torch.arange(30) * 7 % 30 * (2 * np.pi / 30)
    vectors = torch.stack([angle.cos(), angle.sin(), (2 * angle).cos()], 1)
    registry = Registry.build(torch.arange(30), vectors, SidConfig(levels=2, codes=4, seed=seed), encoder="rule")
    registry.save(folder)
    return registry


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generative")
    small_log(folder / "log", times=False)
    make_ids(folder / "ids")
    make_ids(folder / "other", seed=5)
    return folder


def config_of(world, mode="sequential", *, parts=3):
    config = small_config(world / "log", pipeline={"mode": mode, "micro_batches": parts, "depth": 2}, epochs=2)
    model = replace(
        recipes.beauty_sid().model,
        ids=str(world / "ids"),
        dim=8,
        num_encoder=1,
        num_decoder=1,
        num_heads=2,
        hidden_dim=16,
        dropout=0.2,
        user_rows=True,
        beam=16,
    )
    return replace(config, model=model, data=replace(config.data, validation=True))


def train(rank_world, config, folder):
    return train_to_end(config, folder, resume=True, quiet=True, world=rank_world).stopped


@pytest.fixture(scope="module")
def calm(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generative") / "calm"
    assert run_ranks(2, train, config_of(world), folder, deadline_s=240) == ["2 epochs done"] * 2
    return folder


def test_nested_equals_sequential_bit_for_bit(world, calm, tmp_path):
    run_ranks(2, train, config_of(world, "nested"), tmp_path / "run", deadline_s=240)
    assert complete_steps(tmp_path / "run" / "checkpoints") == complete_steps(calm / "checkpoints")
    assert not differing_tensors(calm, tmp_path / "run")


def test_the_number_of_ranks_and_parts_does_not_decide_what_is_learned(world, calm, tmp_path):
    alone = train_to_end(config_of(world, parts=1), tmp_path / "run", quiet=True).run
    _, ours = load_state(alone)
    ours_dense, theirs = load_state(alone)[0].dense.weights, load_state(Run.open(calm))[0].dense.weights
    assert ours.step == 8
    # Sums in another order in fp32, and Adam divides small gradients by their own size.
    torch.testing.assert_close(ours_dense, theirs, atol=2e-3, rtol=0.0)


def test_a_run_recommends_unseen_items_and_is_evaluated_on_items(world, calm):
    run = Run.open(calm)
    scorer = run.predictor()
    assert isinstance(scorer, GenerativePredictor)
    found = scorer.recommend(12, k=5)
    row = int(np.flatnonzero(run.sequences.users == 12)[0])
    history = run.sequences.items[run.sequences.offsets[row] : run.sequences.offsets[row + 1]]
    assert len(found.items) == 5
    assert not set(found.items) & set(history.tolist())
    assert found.scores == sorted(found.scores, reverse=True)
    report = scorer.evaluate()
    lists = {user: scorer.recommend(user, k=1).items for user in (3, 9)}
    assert all(len(items) == 1 for items in lists.values())
    assert report.num_items == 30
    assert report.num_users == 40
    hits = [int(rank) <= 10 for rank in report.rank]
    assert report.metrics["hr@10"].mean == pytest.approx(sum(hits) / 40)
    alone, *_ = run_ranks(1, evaluated, calm, {"batch_size": 7})
    assert run_ranks(3, evaluated, calm, {"batch_size": 7}) == [alone] * 3


def test_other_ids_are_refused_by_run_and_checkpoint(world, calm, tmp_path):
    config = config_of(world)
    other = replace(config, model=replace(config.model, ids=str(world / "other")))
    with pytest.raises((CheckpointError, ConfigError), match="semantic ids"):
        train_to_end(other, calm, resume=True, quiet=True)
    with pytest.raises((CheckpointError, ConfigError), match="semantic ids"):
        load_state(Run(calm, other))
    gone = replace(config, model=replace(config.model, ids=str(tmp_path / "gone")))
    with pytest.raises(DataError, match="no semantic ids in"):
        train_to_end(gone, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "config.json").exists()


def test_selection_takes_part_in_overlap_and_resume_bit_for_bit(world, tmp_path):
    """Events are chosen ahead of time, by a snapshot of every third step: whatever overlaps, and wherever a run is cut."""

    def config(mode, steps):
        found = config_of(world, mode)
        model = replace(
            found.model, queries="last", igr="query", igr_recent=2, igr_related=2, igr_refresh_steps=3, q2i=0.5
        )
        data = replace(found.data, max_len=12, batch_size=12, group_size=4)
        return replace(found, model=model, data=data, train=replace(found.train, steps=steps, epochs=9, eval_epochs=2))

    calm = train_to_end(config("sequential", 8), tmp_path / "calm", quiet=True).run
    train_to_end(config("nested", 4), tmp_path / "run", quiet=True)
    train_to_end(config("nested", 8), tmp_path / "run", resume=True, quiet=True)
    assert not differing_tensors(calm.folder, tmp_path / "run")
    state = load_state(calm)[0]
    assert int(state.model.igr.version) == 6
    assert not torch.equal(state.model.igr.frozen_up_weight, state.model.igr.ask.up.weight)


def test_lists_cannot_be_longer_than_the_beam(world):
    config = config_of(world)
    with pytest.raises(ConfigError, match=r"eval\.ks goes up to 10, but model\.beam 4"):
        replace(config, model=replace(config.model, beam=4)).validate()


def write_halves(folder: Path, *, num_users: int = 100, num_events: int = 13) -> None:
    """Items 0 .. 14 in scenario 0, 15 .. 29 in scenario 1, and nothing else to know."""
    rng = np.random.default_rng(3)
    scenario = rng.integers(0, 2, num_users * num_events)
    log = pl.DataFrame(
        {
            "user": np.arange(num_users).repeat(num_events),
            "item": 15 * scenario + rng.integers(0, 15, len(scenario)),
            "scenario": scenario,
        }
    )
    schema = Schema(time=None, features=(Feature(name="scenario", kind="id"),))
    write_sequences(folder / "log", schema=schema, log=log)


def test_a_scenario_of_the_log_is_learned_and_asked_for_in_evaluation(tmp_path):
    write_halves(tmp_path)
    make_ids(tmp_path / "ids")
    config = config_of(tmp_path, parts=1)
    model = replace(config.model, placement="after", num_scenarios=2, dropout=0.0, dim=16, user_rows=False)
    settings = replace(config.train, epochs=8)
    faster = {"dense": replace(config.dense, lr=0.01), "eval": replace(config.eval, seen="none")}
    config = replace(config, model=model, train=settings, **faster)
    run = train_to_end(config, tmp_path / "run", quiet=True).run
    # Ten of the fifteen items of the right half are in a list of ten: 0.67. Who does not know the half hits 0.33.
    assert run.predictor().evaluate(progress=False).metrics["hr@10"].mean > 0.5
    for number in (0, 1):
        asked = run.predictor().request_of(np.array([0])).batch
        given = {**asked.sample_features, "scenario": Jagged.singles(torch.tensor([number]))}
        found = run.predictor().generate(replace(asked, sample_features=given), 10).positions[0]
        assert set((found // 15).tolist()) == {number}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("number", {"num_scenarios": 2}, "'scenario' is of kind 'number'; an instruction takes kind 'id'"),
        (
            "id",
            {"num_scenarios": 1},
            "'scenario' has 0 .. 1, but model.num_scenarios is 1: scenarios are numbered from 0",
        ),
    ],
)
def test_an_instruction_that_the_model_cannot_read_is_refused(tmp_path, kind, settings, message):
    log = pl.DataFrame({"user": [1] * 4, "item": [1, 2, 3, 4], "scenario": [0, 1, 1, 0]})
    schema = Schema(time=None, features=(Feature(name="scenario", kind=kind),))
    sequences = write_sequences(tmp_path / "log", schema=schema, log=log)
    config = config_of(tmp_path)
    config = replace(config, model=replace(config.model, **settings))
    with pytest.raises(ConfigError, match=message):
        inputs_of(config, sequences)
    ignored = replace(config, model=replace(config.model, num_scenarios=0))
    assert inputs_of(ignored, sequences).requests == ()


def test_a_trigger_without_events_is_refused(tmp_path):
    log = pl.DataFrame({"user": [1] * 3, "item": [1, 2, 3], "trigger": [None, 7, 2]})
    schema = Schema(time=None, features=(Feature(name="trigger", kind="id"),))
    sequences = write_sequences(tmp_path / "log", schema=schema, log=log)
    with pytest.raises(ConfigError, match=r"'trigger' names items that no event has \(1, for example 7\)"):
        inputs_of(config_of(tmp_path), sequences)


def test_a_reasoning_vector_of_another_width_is_refused(tmp_path):
    log = pl.DataFrame({"user": [1] * 3, "item": [1, 2, 3], "reasoning": [[0.0, 1.0]] * 3})
    schema = Schema(time=None, features=(Feature(name="reasoning", kind="vector", dim=2),))
    sequences = write_sequences(tmp_path / "log", schema=schema, log=log)
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match=r"has width 2, but model\.reasoning_dim is 3"):
        inputs_of(replace(config, model=replace(config.model, reasoning_dim=3)), sequences)
