"""`nestpipe train --pipeline.staleness 1`: the plain loop and the pipeline agree, over saves, validations, stops and resumes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nestpipe.atomic_files import read_jsonl
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import ConfigError
from nestpipe.training.loop import INTERRUPTED
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log
from tests.training.test_modes import interrupted, metrics, train

STALE = {"micro_batches": 3, "staleness": 1, "sync_steps": 3}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("stale") / "log").path


def config_of(log, mode, *, validation=True, more=STALE, **settings):
    config = small_config(log, pipeline={"mode": mode, **more}, **settings)
    return replace(config, data=replace(config.data, validation=validation))


@pytest.fixture(scope="module")
def calm(log, tmp_path_factory):
    """The plain loop on two ranks."""
    folder = tmp_path_factory.mktemp("stale") / "calm"
    run_ranks(2, train, config_of(log, "sequential"), folder)
    return folder


def test_the_pipeline_has_the_checkpoints_and_metrics_of_the_loop(calm, log, tmp_path):
    run_ranks(2, train, config_of(log, "nested"), tmp_path / "run")
    steps = checkpoint_folders.complete_steps(calm / "checkpoints")
    for step in steps:
        ours, theirs = (
            checkpoint_folders.checkpoint_folder(run / "checkpoints", step) for run in (tmp_path / "run", calm)
        )
        assert Manifest.read(ours).contents() == Manifest.read(theirs).contents()
    assert len(steps) >= 3
    assert metrics(tmp_path / "run") == metrics(calm)
    rates = {line["step"]: line["collision_rate"] for line in read_jsonl(calm / "metrics.jsonl") if "loss" in line}
    assert [rates[step] > 0 for step in sorted(rates)] == [step > 4 for step in sorted(rates)], (
        "three steps, and one after"
    )


def test_a_run_goes_on_wherever_it_was_saved(calm, log, tmp_path):
    """Also where a step without barriers would have been, in the other mode, and in the synchronous steps."""
    for steps, mode in ((2, "nested"), (6, "nested"), (7, "sequential"), (9, "nested"), (0, "nested")):
        run_ranks(2, train, config_of(log, mode, steps=steps), tmp_path / "run")
    assert not differing_tensors(calm, tmp_path / "run")


def test_a_signal_leaves_no_trace(log, tmp_path):
    many = config_of(log, "nested", validation=False, epochs=0, steps=1000, save_steps=10_000)
    assert run_ranks(2, interrupted, many, tmp_path / "run") == [INTERRUPTED] * 2
    (step,) = checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints")
    whole = replace(many, train=replace(many.train, steps=step + 5))
    run_ranks(2, train, whole, tmp_path / "run")
    run_ranks(2, train, whole, tmp_path / "calm")
    assert not differing_tensors(tmp_path / "calm", tmp_path / "run")


def test_another_number_of_ranks_finds_the_rows_that_were_kept(calm):
    run = Run.open(calm)
    latest = checkpoint_folders.complete_steps(calm / "checkpoints")[-1]
    alone = load_state(run, latest)[0].embedding.row_access["item"].previous
    _, content = checkpoint_reader.load_checkpoint(
        checkpoint_folders.checkpoint_folder(calm / "checkpoints", latest), lambda name: name == "item"
    )
    assert len(alone.ids)
    assert torch.equal(alone.ids, content["item"]["kept.ids"])
    assert torch.equal(alone.rows, content["item"]["kept.rows"])
    table = load_state(run, latest)[0].embedding.tables["item"]
    assert not torch.equal(table.peek(alone.ids), alone.rows), "the last update is in the rows, and not in those kept"


def test_staleness_belongs_to_a_run(calm, log):
    with pytest.raises(AssertionError, match=r"pipeline\.staleness: 1 -> 0"):
        run_ranks(1, train, config_of(log, "nested", more={"micro_batches": 3}), calm)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mode": "dual-buffer", "staleness": 1}, "mode dual-buffer has no stale rows"),
        ({"staleness": 2}, "it must be 0"),
        ({"sync_steps": 3}, "staleness is 0: all steps are exact"),
        ({"staleness": 1, "sync_steps": -1}, "must not be negative"),
        ({"staleness": 1, "trace_steps": 4}, "use nested"),
    ],
)
def test_what_makes_no_sense_is_refused(log, more, message):
    with pytest.raises(ConfigError, match=message):
        small_config(log, pipeline=more).validate()


def test_rows_in_flight_need_more_protection(log):
    config = small_config(log, pipeline={"mode": "nested", "staleness": 1})
    with pytest.raises(ConfigError, match=r"set --embedding\.protect-steps 3"):
        replace(config, embedding=replace(config.embedding, max_rows=9, protect_steps=2)).validate()
