"""Runs that choose their settings on the way: written down before they are used, repeated by whoever follows them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nestpipe.atomic_files import read_jsonl
from nestpipe.autotune import backoff, controller, measure, search
from nestpipe.autotune.search import PipelineChoice, TuningDecision
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.cli import main
from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import ConfigError
from nestpipe.profiling.overlap import steps_of
from nestpipe.profiling.trace_file import load
from nestpipe.training.loop import train_to_end
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

PERIOD, NUM_STEPS = 8, 24


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("adapt") / "log", num_users=60).path


def config_of(log, mode, **pipeline):
    return small_config(
        log, pipeline={"mode": mode, **pipeline}, epochs=0, steps=NUM_STEPS, save_steps=PERIOD, log_steps=8
    )


def restless(found, **_):
    """Other settings every time, as if the workload changed; what it was shown must be of the settings that were in force."""
    number, now = len(SEEN), found[-1]
    SEEN.append(now)
    assert 0 < now.busy_s < 5 * now.step_s, "one is of all steps, the other of the last ones"
    assert now.rows > 0
    assert 0 < now.edge_rows <= 2 * now.rows
    micro_batches, ramp = (3, 2, 5, 4)[number % 4], (0.5, 1.0)[number % 2]
    return TuningDecision(
        PipelineChoice(micro_batches=micro_batches, ramp=ramp, depth=1 + number % 2, buffer_rows=64), "restless"
    )


SEEN = []


def train(world, config, folder, choose=None, trial=PERIOD):
    """Trains with another function that chooses, if given, from the first measurement on."""
    SEEN.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backoff, "TRIAL_STEPS", trial)
        if choose:
            patch.setattr(search, "is_new", lambda *_: False)
            for module in (controller, search):
                patch.setattr(module, "choose", choose)
        train_to_end(config, folder, resume=True, quiet=True, world=world)
    return [one.choice for one in SEEN]


@pytest.fixture(scope="module")
def adapted(log, tmp_path_factory):
    """A run on two ranks whose settings change after every eight steps."""
    folder = tmp_path_factory.mktemp("adapt") / "run"
    seen = run_ranks(2, train, config_of(log, "nested", micro_batches=2, adapt=PERIOD, rows="buffer"), folder, restless)
    assert seen[0] == seen[1], "the ranks were shown different things"
    return folder, seen[0]


def test_settings_are_written_down_for_every_step(adapted):
    folder, seen = adapted
    lines = read_jsonl(folder / "settings.jsonl")
    assert [(line["step"], line["micro_batches"], line["ramp"], line["depth"]) for line in lines] == [
        (0, 2, 1.0, 1),
        (8, 3, 0.5, 1),
        (16, 2, 1.0, 2),
        (24, 5, 0.5, 1),
    ]
    assert seen == [
        PipelineChoice(**{key: line[key] for key in ("micro_batches", "ramp", "depth", "buffer_rows")})
        for line in lines[:3]
    ]
    latest = checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(folder / "checkpoints", 16))[0]
    assert latest.progress["autotune"] == lines[:3]


def test_the_plain_loop_repeats_them_bit_for_bit(adapted, log, tmp_path):
    folder, _ = adapted
    run_ranks(2, train, config_of(log, "sequential", micro_batches=2, follow=str(folder)), tmp_path / "run")
    assert not differing_tensors(folder, tmp_path / "run")
    run_ranks(2, train, config_of(log, "sequential", micro_batches=2), tmp_path / "fixed")
    assert differing_tensors(folder, tmp_path / "fixed"), "other micro-batches give other results"


def on_trial(found, **_):
    """As restless, but with trials: whatever is new takes a few steps."""
    return restless(found)._replace(patience=int(len(SEEN) % 3 == 0))


def test_trials_are_short_and_repeated_too(log, tmp_path):
    """Three short measurements, then the rest of the period, and so on; a run that was killed in the middle of one repeats it."""
    config = config_of(log, "nested", micro_batches=2, adapt=2 * PERIOD)
    config = replace(config, train=replace(config.train, steps=6 * PERIOD))
    run_ranks(2, train, config, tmp_path / "run", on_trial, 6)
    lines = (tmp_path / "run" / "settings.jsonl").read_bytes()
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [0, 6, 12, 18, 32, 38, 44]
    killed = replace(config, train=replace(config.train, steps=14))
    run_ranks(2, train, killed, tmp_path / "killed", on_trial, 6)
    (tmp_path / "killed" / "settings.jsonl").write_bytes(lines)
    run_ranks(2, train, config, tmp_path / "killed", never, 6)
    assert not differing_tensors(tmp_path / "run", tmp_path / "killed")
    follow = config_of(log, "sequential", micro_batches=2, follow=str(tmp_path / "run"))
    run_ranks(2, train, replace(follow, train=config.train), tmp_path / "plain")
    assert not differing_tensors(tmp_path / "run", tmp_path / "plain")


def content(found, **_):
    """Stays with what there is."""
    SEEN.append(found[-1])
    return TuningDecision(found[-1].choice, "content")


def test_what_stays_is_not_written(log, tmp_path):
    seen = run_ranks(2, train, config_of(log, "nested", micro_batches=2, adapt=PERIOD), tmp_path / "run", content)
    assert [one.micro_batches for one in seen[0]] == [2, 2, 2]
    (line,) = read_jsonl(tmp_path / "run" / "settings.jsonl")
    assert line["why"] == "as configured"


def patient(found, **_):
    """Stays with what there is for a long time."""
    return content(found)._replace(patience=5)


def train_with_other_batches(world, config, folder, rank):
    """From step 12 on, this rank's batches seem four times as long; returns the steps of each measurement."""

    def saw(self, work):
        size = measure.size_of(work)
        self._timer.record(size._replace(tokens=4 * size.tokens) if work.number >= 12 and world.rank == rank else size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller.Controller, "record", saw)
        train(world, config, folder, patient)
    return [one.num_steps for one in SEEN]


@pytest.mark.parametrize(("rank", "least", "most"), [(None, 40, 40), (1, 24, 36)], ids=["nobody", "one"])
def test_a_rank_whose_batches_become_others_makes_all_look(log, tmp_path, rank, least, most):
    """At step 8, and then not before step 48, unless one of them asks for it: then at the new batches alone."""
    config = config_of(log, "nested", micro_batches=2, adapt=PERIOD)
    config = replace(config, train=replace(config.train, steps=6 * PERIOD))
    measured_at, same = run_ranks(2, train_with_other_batches, config, tmp_path / "run", rank)
    assert measured_at == same
    assert measured_at[0] == 8
    assert least <= measured_at[1] <= most
    plain = replace(config, pipeline=replace(config.pipeline, mode="sequential", adapt=0))
    run_ranks(2, train, plain, tmp_path / "plain")
    assert not differing_tensors(tmp_path / "run", tmp_path / "plain"), "batches were lost or came twice"


@pytest.mark.parametrize("mode", ["dual-buffer", "frozen-window"])
def test_other_modes_choose_too(log, tmp_path, mode):
    config = config_of(log, mode, micro_batches=2, tune=True, adapt=PERIOD)
    seen = run_ranks(2, train, config, tmp_path / "run", content)
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 3


def test_stale_steps_are_measured_anew(log, tmp_path):
    """Measurements of exact steps are dropped, without waiting for the end of a long period."""
    config = config_of(log, "nested", micro_batches=2, adapt=PERIOD, staleness=1, sync_steps=12)
    measured_at, same = run_ranks(2, train_and_count, config, tmp_path / "run")
    assert measured_at == same == [(8, 1), (12, 1)]


def train_and_count(world, config, folder):
    """The steps of each measurement, and the number of known settings then."""
    counts = []

    def counting(found, **_):
        counts.append((found[-1].num_steps, len(found)))
        return TuningDecision(replace(found[-1].choice, micro_batches=2 + len(counts)), "counting", patience=5)

    train(world, config, folder, counting)
    return counts


def test_a_resumed_run_measures_before_it_decides(log, tmp_path):
    """Of the steps since it was started, all with one setting, though the last line is older; and at first it stays."""
    config = config_of(log, "nested", micro_batches=2, adapt=2 * PERIOD)
    run_ranks(2, train, replace(config, train=replace(config.train, steps=14)), tmp_path / "run", on_trial, 6)
    seen = run_ranks(2, train, config, tmp_path / "run", on_trial, 6)
    lines = read_jsonl(tmp_path / "run" / "settings.jsonl")
    assert [line["step"] for line in lines] == [0, 6, 12, 20]
    assert [one.micro_batches for one in seen[0]] == [lines[2]["micro_batches"]]


def test_a_run_that_begins_to_follow_later_says_so(adapted, log, tmp_path):
    """Its first steps had settings of its own; whoever follows it must not take the other run's for them."""
    folder, _ = adapted
    alone = config_of(log, "sequential", micro_batches=3)
    run_ranks(2, train, replace(alone, train=replace(alone.train, steps=5)), tmp_path / "late")
    run_ranks(2, train, config_of(log, "sequential", micro_batches=3, follow=str(folder)), tmp_path / "late")
    assert [(line["step"], line["micro_batches"]) for line in read_jsonl(tmp_path / "late" / "settings.jsonl")] == [
        *((5, 2), (8, 3), (16, 2), (24, 5))
    ]
    run_ranks(2, train, config_of(log, "nested", micro_batches=3, follow=str(tmp_path / "late")), tmp_path / "again")
    assert not differing_tensors(tmp_path / "late", tmp_path / "again")


def sixteen(found, **_):
    return TuningDecision(PipelineChoice(micro_batches=16), "many")


def test_a_tuned_run_keeps_as_many_traced_steps_as_were_asked_for(log, tmp_path):
    run_ranks(2, train, config_of(log, "nested", tune=True, trace_steps=4), tmp_path / "run", sixteen)
    assert [step.batch for step in steps_of(load(tmp_path / "run")[0])][-3:] == [
        NUM_STEPS - 3,
        NUM_STEPS - 2,
        NUM_STEPS - 1,
    ]


def never(found, **_):
    raise AssertionError("what was decided is decided again")


def test_a_run_that_goes_on_takes_the_decisions_that_were_made(adapted, log, tmp_path):
    """Killed after step 16, with the lines up to step 24 written: it follows them, and then decides on its own."""
    folder, _ = adapted
    short = config_of(log, "nested", micro_batches=2, adapt=PERIOD)
    short = replace(short, train=replace(short.train, steps=16))
    run_ranks(2, train, short, tmp_path / "run", restless)
    (tmp_path / "run" / "settings.jsonl").write_bytes((folder / "settings.jsonl").read_bytes())
    run_ranks(2, train, replace(short, train=replace(short.train, steps=NUM_STEPS)), tmp_path / "run", never)
    assert not differing_tensors(folder, tmp_path / "run")
    (tmp_path / "run" / "settings.jsonl").unlink()  # a folder that was restored from a URL has no log
    alone = config_of(log, "sequential", micro_batches=2)
    run_ranks(2, train, replace(alone, train=replace(alone.train, steps=NUM_STEPS + 1)), tmp_path / "run", never)
    assert len(read_jsonl(tmp_path / "run" / "settings.jsonl")) == 4


def test_a_tuned_run_begins_with_what_a_profile_suggests(log, tmp_path, capsys):
    run_ranks(2, train, config_of(log, "nested", micro_batches=2, tune=True), tmp_path / "run")
    (line,) = read_jsonl(tmp_path / "run" / "settings.jsonl")
    assert line["step"] == 0
    assert "ms" in line["why"]
    assert "of a step waited for lookup" in line["why"]
    run_ranks(2, train, config_of(log, "sequential", micro_batches=2, follow=str(tmp_path / "run")), tmp_path / "same")
    assert not differing_tensors(tmp_path / "run", tmp_path / "same")


def test_the_command_measures_and_explains(log, capsys):
    arguments = ["--data.path", str(log), "--train.num-threads", "1", "--data.batch-size", "16"]
    assert main(["tune", "pipeline", "tiny", "--json", *arguments]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {one["choice"]["micro_batches"] for one in said["measured"]} >= {2, 8}
    assert said["choice"]["micro_batches"] >= 1
    assert all(one["step_s"] > 0 and one["busy_s"] > 0 for one in said["measured"])
    assert main(["tune", "pipelin"]) == 2
    assert "did you mean 'pipeline'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"adapt": 8}, "mode auto may have none; use nested"),
        ({"mode": "sequential", "adapt": 8}, "mode sequential has none; use nested"),
        ({"mode": "nested", "adapt": 3}, "at least 8 steps"),
        ({"mode": "nested", "adapt": 8, "follow": "x"}, "remove them"),
    ],
)
def test_what_makes_no_sense_is_refused(log, more, message):
    with pytest.raises(ConfigError, match=message):
        small_config(log, pipeline=more).validate()


def test_a_run_that_chose_nothing_cannot_be_followed(log, tmp_path):
    with pytest.raises(ConfigError, match="neither tuned nor adapted"):
        train_to_end(config_of(log, "nested", follow=str(tmp_path)), tmp_path / "run", quiet=True)
