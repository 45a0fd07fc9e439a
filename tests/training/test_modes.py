"""`nestpipe train` in every mode: the checkpoints, losses and validations of the sequential run, wherever it was cut."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import ConfigError
from nestpipe.profiling.overlap import steps_of
from nestpipe.profiling.trace_file import load
from nestpipe.training import loop
from nestpipe.training.loop import INTERRUPTED, train_to_end
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

MODES = ("dual-buffer", "frozen-window", "nested")


def train(world, config, folder):
    return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("modes") / "log").path


def config_of(log, mode, *, validation=False, **settings):
    """Three epochs of four batches, saved in the middle of epochs; with validation after every epoch."""
    config = small_config(log, pipeline={"mode": mode, "micro_batches": 3, "depth": 2}, **settings)
    return replace(config, data=replace(config.data, validation=validation))


def metrics(folder):
    """All that was logged, but for times, memory and what was done since the last start."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for key in ("seconds", "ranks"):
        lines[-1]["summary"].pop(key)
    return [
        {
            key: value
            for key, value in line.items()
            if key not in ("tokens_per_s", "mfu_effective", "seconds", "memory_bytes")
        }
        for line in lines
    ]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "validated"])
def calm(request, log, tmp_path_factory):
    """A sequential run on two ranks."""
    folder = tmp_path_factory.mktemp("modes") / "calm"
    run_ranks(2, train, config_of(log, "sequential", validation=request.param), folder)
    return request.param, folder


@pytest.mark.parametrize("mode", MODES)
def test_every_checkpoint_and_every_logged_value_is_that_of_the_sequential_run(calm, log, tmp_path, mode):
    validation, folder = calm
    stopped = run_ranks(2, train, config_of(log, mode, validation=validation), tmp_path / "run")
    assert stopped == ["3 epochs done"] * 2
    steps = checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints")
    assert steps == checkpoint_folders.complete_steps(folder / "checkpoints")
    assert len(steps) >= 3
    for step in steps:
        ours, theirs = (
            checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(run / "checkpoints", step))
            for run in (tmp_path / "run", folder)
        )
        assert ours[0].contents() == theirs[0].contents()
        assert ours[0].cursor == theirs[0].cursor
    assert metrics(tmp_path / "run") == metrics(folder)


def test_a_run_may_change_its_mode_when_it_is_resumed(calm, log, tmp_path):
    validation, folder = calm
    chunks = {"shared": "shared", "chunks": 2}
    for steps, mode in (
        (3, "nested"),
        (5, "shared"),
        (6, "chunks"),
        (7, "sequential"),
        (9, "dual-buffer"),
        (0, "nested"),
    ):
        config = config_of(log, "nested" if mode in chunks else mode, validation=validation, steps=steps)
        config = replace(config, pipeline=config.pipeline.changed(chunks=chunks.get(mode, 1)))
        run_ranks(2, train, config, tmp_path / "run")
    assert not differing_tensors(folder, tmp_path / "run")


def interrupted(world, config, folder):
    """Rank 1 gets a signal after its fifth step."""
    plain = loop._Loop._after_step

    def after_step(loop, *arguments):
        plain(loop, *arguments)
        if loop._state.num_steps == 5:
            signal.raise_signal(signal.SIGINT)

    if world.rank == 1:
        loop._Loop._after_step = after_step
    try:
        return train(world, config, folder)
    finally:
        loop._Loop._after_step = plain


def test_a_signal_on_one_rank_stops_all_after_the_same_batch_and_the_run_resumes(log, tmp_path):
    many = config_of(log, "nested", epochs=0, steps=1000, save_steps=10_000)
    assert run_ranks(2, interrupted, many, tmp_path / "run") == [INTERRUPTED] * 2
    (step,) = checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints")
    assert 5 <= step < 20
    run_ranks(2, train, replace(many, train=replace(many.train, steps=step + 5)), tmp_path / "run")
    run_ranks(2, train, config_of(log, "sequential", epochs=0, steps=step + 5, save_steps=10_000), tmp_path / "calm")
    assert not differing_tensors(tmp_path / "calm", tmp_path / "run")


def test_a_traced_run_keeps_its_last_steps(log, tmp_path):
    config = config_of(log, "nested")
    run_ranks(2, train, replace(config, pipeline=config.pipeline.changed(trace_steps=4)), tmp_path / "run")
    for trace in load(tmp_path / "run"):
        assert [step.batch for step in steps_of(trace)][-3:] == [9, 10, 11]


def test_what_cannot_overlap_is_refused(log):
    config = config_of(log, "nested")
    limited = replace(config, embedding=replace(config.embedding, max_rows=9, protect_steps=2))
    with pytest.raises(ConfigError, match=r"set --embedding\.protect-steps 3"):
        limited.validate()
