"""`--pipeline.mode auto`: what is chosen from which counts, that it is kept, and that sequential replays it."""

import json
from dataclasses import replace

import pytest

from nestpipe.autotune.auto_pipeline import AutoChoice, WorkloadCounts
from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import ConfigError
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.training import loop
from nestpipe.training.loop import train_to_end
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
        (counts(4, 1, 100_000), "sequential", 1),
        (counts(2, 2, 100), "nested", 1),
        (counts(2, 2, 512 * 50), "nested", 2),
        (counts(2, 2, 2048 * 50), "nested", 4),
        (counts(64, 8, 10_000_000), "nested", 8),
    ],
)
def test_the_choice_is_a_function_of_counts(given, mode, micro_batches):
    chosen = AutoChoice.of(given)
    assert (chosen.mode, chosen.micro_batches) == (mode, micro_batches)
    assert AutoChoice.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen


def test_what_a_user_sets_stays():
    chosen = AutoChoice.of(counts(2, 2, 2048 * 50))
    assert chosen.apply(PipelineConfig(micro_batches=3)).micro_batches == 3
    assert chosen.apply(PipelineConfig(mode="sequential")).mode == "sequential"
    grouped = chosen.apply(PipelineConfig(groups=2))
    assert (grouped.mode, grouped.chunks) == ("nested", 4)
    assert not list(grouped.problems())
    assert not list(chosen.apply(PipelineConfig()).problems())


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
    replay = config_of(log, mode="sequential", micro_batches=chosen["micro_batches"])
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


def test_ranks_of_one_machine_stay_sequential(log, tmp_path):
    run_ranks(2, train, config_of(log), tmp_path / "run", 1)
    assert chosen_by(tmp_path / "run")["2"]["mode"] == "sequential"
    plain = config_of(log, mode="sequential", micro_batches=1)
    run_ranks(2, train, plain, tmp_path / "plain", 1)
    assert not differing_tensors(tmp_path / "run", tmp_path / "plain")


def test_other_settings_of_a_run_are_still_compared(log, tmp_path):
    config = config_of(log, steps=2)
    train_to_end(config, tmp_path / "run", quiet=True)
    other = replace(config, pipeline=replace(config.pipeline, micro_batches=2))
    with pytest.raises(ConfigError, match="micro_batches: 0 -> 2"):
        train_to_end(other, tmp_path / "run", resume=True, quiet=True)
