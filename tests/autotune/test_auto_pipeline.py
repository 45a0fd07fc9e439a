"""`--pipeline.mode auto`: what is chosen from which counts, that it is kept, and that sequential replays it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from nestpipe.autotune.auto_pipeline import AutoChoice, WorkloadCounts, flop_cost, waits
from nestpipe.cli import tune_pipeline
from nestpipe.cli.demo import differing_tensors
from nestpipe.config import Config
from nestpipe.data.config import ClicksConfig, DataConfig
from nestpipe.data.synthetic_clicks import ingest_clicks
from nestpipe.errors import ConfigError
from nestpipe.models.config import FuXiConfig, HSTUConfig, RankingConfig
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.training import loop
from nestpipe.training.loop import train_to_end
from tests.eval.ranking_ranks import ranking_config
from tests.generative.test_training import config_of as generative_config
from tests.generative.test_training import make_ids
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

STEPS = 6


def counts(num_ranks, num_hosts, num_tokens=0, **more):
    return WorkloadCounts(num_ranks=num_ranks, num_hosts=num_hosts, num_tokens=num_tokens, **more)


@pytest.mark.parametrize(
    ("given", "mode", "micro_batches"),
    [
        (counts(1, 1), "sequential", 1),
        (counts(1, 1, has_row_files=True), "dual-buffer", 1),
        (counts(4, 1, 100_000), "nested", 1),
        (counts(2, 2, 100), "nested", 1),
        (counts(2, 2, 512 * 50), "nested", 2),
        (counts(2, 2, 2048 * 50), "nested", 4),
        (counts(64, 8, 10_000_000), "nested", 8),
        (counts(2, 2, 10_000_000, num_samples=3), "nested", 3),
    ],
)
def test_the_choice_is_a_function_of_counts(given, mode, micro_batches):
    chosen = AutoChoice.of(given)
    assert (chosen.mode, chosen.micro_batches) == (mode, micro_batches)
    assert AutoChoice.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen


def test_what_a_user_sets_stays():
    chosen = AutoChoice.of(counts(2, 2, 2048 * 50, wait=0.4, balanced_wait=0.01))

    def applied(**pipeline):
        config = chosen.apply(Config(pipeline=PipelineConfig().changed(**pipeline)))
        assert not list(config.problems())
        return config

    assert (applied().pipeline.advanced.ramp, applied().data.balance) == (0.5, True)
    given = applied(micro_batches=3)
    assert (given.pipeline.micro_batches, given.pipeline.advanced.ramp, given.data.balance) == (3, 1.0, False)
    assert applied(mode="sequential").pipeline.mode == "sequential"
    assert applied(mode="sequential").data == applied().data, "the same division in every mode"
    grouped = applied(groups=2).pipeline
    assert (grouped.mode, grouped.advanced.chunks) == ("nested", 4)
    own = DataConfig(balance=True, cost_square=0.5)
    assert chosen.apply(Config(data=own)).data == own


def test_balance_is_chosen_by_flop_counts():
    """One long sample among short ones: whoever has it is waited for."""
    cost = flop_cost(Config(model=HSTUConfig(dim=64, num_blocks=2, num_heads=2, qk_dim=32, v_dim=32)))
    assert cost.linear == 1
    assert cost.square > 0
    even, uneven = np.full(32, 50), np.array([50] * 24 + [400] * 8)
    assert max(waits([even], cost, 2)) < 0.01
    plain, balanced = waits([uneven, uneven], cost, 2)
    assert balanced < 0.01
    assert plain > 0.3
    assert AutoChoice.of(counts(2, 1, 100, wait=plain, balanced_wait=balanced)).balance
    assert not AutoChoice.of(counts(2, 1, 100, wait=0.011, balanced_wait=0.0)).balance
    assert flop_cost(Config(model=RankingConfig())).square == 0


def test_old_choices_are_read_back():
    old = AutoChoice.from_json({"mode": "nested", "micro_batches": 4, "chunks": 4, "why": "x"})
    assert (old.micro_batches, old.ramp, old.balance, old.depth) == (4, 1.0, False, 1)


def train(world, config, folder, num_hosts=2):
    """Ranks of this machine, taken for those of several."""
    plain = loop.gather_hosts
    loop.gather_hosts = lambda control: [f"host{rank * num_hosts // world.size}" for rank in range(world.size)]
    try:
        return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped
    finally:
        loop.gather_hosts = plain


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("auto") / "log").path


def config_of(log, steps=STEPS, **pipeline):
    return small_config(log, pipeline=pipeline, epochs=0, steps=steps, save_steps=3)


def chosen_by(folder):
    return json.loads((folder / "run.json").read_text())["pipelines"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_on_several_machines_it_nests_and_sequential_replays_it(log, tmp_path, num_ranks):
    run_ranks(num_ranks, tuned_train, config_of(log), tmp_path / "auto")
    chosen = chosen_by(tmp_path / "auto")[str(num_ranks)]
    assert (chosen["mode"], chosen["micro_batches"] > 1) == ("nested", True)
    config = json.loads((tmp_path / "auto" / "config.json").read_text())["pipeline"]
    assert (config["mode"], config["micro_batches"]) == ("auto", 0), "the folder keeps what was asked for"
    replay = config_of(log, mode="sequential")
    run_ranks(num_ranks, tuned_train, replay, tmp_path / "replay")
    assert not differing_tensors(tmp_path / "auto", tmp_path / "replay")


def tuned_train(world, config, folder, num_hosts=2):
    """In the rank's own process."""
    from nestpipe.autotune import auto_pipeline

    before, auto_pipeline._TOKENS = auto_pipeline._TOKENS, 4
    try:
        return train(world, config, folder, num_hosts)
    finally:
        auto_pipeline._TOKENS = before


def test_a_resumed_run_reads_back_what_was_chosen(log, tmp_path):
    """Also in another mode, and though the batch would now give another number."""
    run_ranks(2, tuned_train, config_of(log, steps=3), tmp_path / "run")
    first = chosen_by(tmp_path / "run")
    run_ranks(2, train, config_of(log, mode="sequential"), tmp_path / "run")
    assert chosen_by(tmp_path / "run") == first
    run_ranks(2, tuned_train, config_of(log), tmp_path / "calm")
    assert not differing_tensors(tmp_path / "run", tmp_path / "calm")


def test_another_number_of_ranks_chooses_once_more(log, tmp_path):
    run_ranks(2, tuned_train, config_of(log, steps=3), tmp_path / "run")
    run_ranks(1, tuned_train, config_of(log), tmp_path / "run", 1)
    both = chosen_by(tmp_path / "run")
    assert (both["2"]["mode"], both["1"]["mode"]) == ("nested", "sequential")


@pytest.mark.parametrize("model", ["fuxi", "ranker", "semantic ids"])
def test_every_kind_of_model_equals_sequential(log, tmp_path, model):
    """One command, with and without --pipeline.mode sequential; the division of batches is chosen in both."""
    config = config_of(log, steps=4)
    if model == "fuxi":
        config = replace(config, model=FuXiConfig(dim=8, num_heads=2, qk_dim=3, v_dim=5))
    elif model == "ranker":
        clicks = ingest_clicks(tmp_path / "clicks", ClicksConfig(num_users=40, num_items=25, num_events=900))
        config = replace(ranking_config(clicks.path, "hstu"), train=config.train)
    else:
        make_ids(tmp_path / "ids")
        config = generative_config(tmp_path)
        config = replace(config, data=replace(config.data, path=str(log), validation=False), train=config_of(log).train)
        config = replace(config, pipeline=PipelineConfig())
    for mode in ("auto", "sequential"):
        pipeline = replace(config.pipeline, mode=mode)
        run_ranks(2, tuned_train, replace(config, pipeline=pipeline), tmp_path / mode, deadline_s=120)
    assert chosen_by(tmp_path / "auto") == chosen_by(tmp_path / "sequential")
    assert chosen_by(tmp_path / "auto")["2"]["micro_batches"] > 1
    assert not differing_tensors(tmp_path / "auto", tmp_path / "sequential")


def test_a_long_run_on_several_machines_measures_what_decides_no_bits(log, tmp_path):
    config = config_of(log)
    run_ranks(2, profiled_train, config, tmp_path / "long")
    chosen = chosen_by(tmp_path / "long")["2"]
    assert "of sequential expected" in chosen["gain"]
    run_ranks(2, tuned_train, config, tmp_path / "short")
    counted = chosen_by(tmp_path / "short")["2"]
    assert counted["gain"] == ""
    assert all(chosen[name] == counted[name] for name in ("micro_batches", "ramp", "balance"))
    assert not differing_tensors(tmp_path / "long", tmp_path / "short")


def profiled_train(world, config, folder):
    from nestpipe.autotune import run_settings

    before, run_settings.PROFILED_STEPS = run_settings.PROFILED_STEPS, STEPS
    try:
        return tuned_train(world, config, folder)
    finally:
        run_settings.PROFILED_STEPS = before


def test_other_settings_of_a_run_are_still_compared(log, tmp_path):
    config = config_of(log, steps=2)
    train_to_end(config, tmp_path / "run", quiet=True)
    other = replace(config, pipeline=replace(config.pipeline, micro_batches=2))
    with pytest.raises(ConfigError, match="micro_batches: 0 -> 2"):
        train_to_end(other, tmp_path / "run", resume=True, quiet=True)


def test_tune_recommends_what_was_fastest(log):
    for measured, predicted, best, why in run_ranks(2, tuned, log):
        assert {(mode, number) for mode, number, _ in measured} == {("nested", 2), ("nested", 5), ("sequential", 1)}
        times = {(mode, number): seconds for mode, number, seconds in (*predicted, *measured)}
        assert all(seconds > 0 for seconds in times.values())
        assert best in times
        assert f"--pipeline.mode {best[0]} --pipeline.micro-batches {best[1]}" in why
        assert min(seconds for *_, seconds in measured) >= times[best] * 0.98


def tuned(world, log):
    found = tune_pipeline.tuned(small_config(log), world)
    rows = [[(one.mode, one.micro_batches, s) for one, s in part.items()] for part in (found.measured, found.predicted)]
    return *rows, (found.best.mode, found.best.micro_batches), found.why
