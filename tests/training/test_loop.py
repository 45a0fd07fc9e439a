"""The loop: what it computes, how it stops, and that being killed changes nothing."""

import itertools
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from nestpipe import atomic_files, train
from nestpipe.atomic_files import read_jsonl
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.cli.demo import differing_tensors
from nestpipe.config import keys
from nestpipe.errors import CheckpointError, ConfigError, NestPipeError, TrainError
from nestpipe.generative.config import AlignedConfig
from nestpipe.models.config import EncDecConfig
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import FREE_KEYS, Run
from nestpipe.training.run_state import load_state, new_state
from tests.rank_pool import exit_code_of
from tests.small_runs import small_config, small_log

# Trains in a process of its own and dies by SIGKILL at the n-th call of a function of the checkpoint or the step.
KILLED = """
import os, signal, sys
from nestpipe import Config, atomic_files
from nestpipe.checkpoint import folders, writer
import nestpipe.training.loop as loop
target, count = sys.argv[3], int(sys.argv[4])
module = next(module for module in (atomic_files, folders, writer, loop) if hasattr(module, target))
original, calls = getattr(module, target), 0
def dying(*arguments, **named):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **named)
setattr(module, target, dying)
loop.train(Config.from_json(open(sys.argv[1]).read()), sys.argv[2], resume=True, quiet=True)
"""


# Likewise, but the writer of the first checkpoint stops at the n-th flush, and the loop dies two steps further.
KILLED_IN_BACKGROUND = """
import os, signal, sys, threading
from nestpipe import Config, atomic_files
from nestpipe.checkpoint import folders, writer
import nestpipe.training.loop as loop
last_call, calls, writing, steps = int(sys.argv[3]), 0, threading.Event(), 0
flush, step = atomic_files.flush, loop.step
def stuck(path):
    global calls
    calls += 1
    if calls == last_call:
        writing.set()
        threading.Event().wait()
    flush(path)
def dying(*arguments):
    global steps
    steps += 1
    if steps > 5:
        writing.wait()
    if steps == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)
atomic_files.flush, loop.step = stuck, dying
loop.train(Config.from_json(open(sys.argv[1]).read()), sys.argv[2], quiet=True)
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("train") / "log").path


@pytest.fixture(scope="module")
def calm(log, tmp_path_factory):
    """Undisturbed runs by (model, loss)."""
    runs = {}

    def run(model, loss):
        if (model, loss) not in runs:
            folder = tmp_path_factory.mktemp("calm") / "run"
            runs[model, loss] = train(small_config(log, model, loss), folder, quiet=True).folder
        return runs[model, loss]

    return run


@pytest.mark.parametrize(("model", "loss"), [("hstu", "sampled"), ("sasrec", "full")])
def test_the_same_run_twice_and_in_three_pieces_has_the_same_bits(log, calm, tmp_path, model, loss):
    config = small_config(log, model, loss)
    again = train(config, tmp_path / "again", quiet=True)
    assert not differing_tensors(calm(model, loss), again.folder)
    for steps in (1, 6, 0):
        train(
            replace(config, train=replace(config.train, steps=steps)),
            tmp_path / "in three lives",
            resume=True,
            quiet=True,
        )
    assert not differing_tensors(calm(model, loss), tmp_path / "in three lives")
    losses = [
        [r["loss"] for r in read_jsonl(f / "metrics.jsonl") if "loss" in r]
        for f in (again.folder, tmp_path / "in three lives")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
    assert sum(losses[0][-4:]) < sum(losses[0][:4])  # of whole epochs, which hold the same samples


def test_another_seed_gives_other_bits(log, calm, tmp_path):
    other = train(replace(small_config(log), seed=1), tmp_path / "run", quiet=True)
    assert differing_tensors(calm("hstu", "sampled"), other.folder)


def test_killed_with_validation_and_patience_remembers_both(log, tmp_path, scale):
    """Two threads, a validation after each epoch, a best checkpoint that may not be pruned."""
    config = small_config(log, epochs=9, patience=3, keep_last=1, metric="hr@10", num_threads=2)
    config = replace(config, data=replace(config.data, validation=True))
    calm = train(config, tmp_path / "calm", quiet=True)
    (tmp_path / "config.json").write_text(config.to_json())
    for count in range(2, scale(24, 60), scale(14, 1)):
        folder = tmp_path / str(count)
        exit_code_of(KILLED, str(tmp_path / "config.json"), str(folder), "flush", str(count))
        again = train(config, folder, resume=True, quiet=True)
        assert not differing_tensors(calm.folder, folder)
        assert load_state(again)[1].progress["best"] == load_state(calm)[1].progress["best"]
        assert checkpoint_folders.complete_steps(again.checkpoints) == checkpoint_folders.complete_steps(
            calm.checkpoints
        )


@pytest.mark.parametrize(
    ("target", "count"),
    [("step", 4), ("step", 9), *[("flush", n) for n in (1, 2, 3, 4, 5, 7)], ("prune_checkpoints", 2)],
)
def test_killed_anywhere_and_resumed_ends_with_the_same_bits(log, calm, tmp_path, target, count):
    """flush 1 to 4 is inside the first save (packed file, manifest, folder, parent), 5 to 8 inside the second."""
    folder, settings = tmp_path / "run", tmp_path / "config.json"
    settings.write_text(small_config(log).to_json())
    assert exit_code_of(KILLED, str(settings), str(folder), target, str(count)) == -signal.SIGKILL
    assert checkpoint_folders.complete_steps(folder / "checkpoints") in ([], [5], [5, 10])
    train(small_config(log), folder, resume=True, quiet=True)
    assert not differing_tensors(calm("hstu", "sampled"), folder)
    assert [r["step"] for r in read_jsonl(folder / "metrics.jsonl") if "step" in r] == list(range(1, 13))
    assert not list((folder / "checkpoints").glob(".tmp*"))


@pytest.mark.parametrize("count", [2, 4])
def test_killed_while_a_checkpoint_is_written_beside_the_training(log, calm, tmp_path, count):
    """Inside the folder, and after the rename: only the disk may not know of it yet."""
    folder, settings = tmp_path / "run", tmp_path / "config.json"
    settings.write_text(small_config(log).to_json())
    assert exit_code_of(KILLED_IN_BACKGROUND, str(settings), str(folder), str(count)) == -signal.SIGKILL
    assert checkpoint_folders.complete_steps(folder / "checkpoints") == ([] if count < 4 else [5])
    assert len(list((folder / "checkpoints").glob(".tmp*"))) == (count < 4)
    assert [r["step"] for r in read_jsonl(folder / "metrics.jsonl")] == list(range(1, 8))
    train(small_config(log), folder, resume=True, quiet=True)
    assert not differing_tensors(calm("hstu", "sampled"), folder)
    assert not list((folder / "checkpoints").glob(".tmp*"))


def test_a_non_finite_loss_updates_nothing(log, tmp_path, monkeypatch):
    run = Run.create(small_config(log, loss="full"), tmp_path / "run")
    state = new_state(run)
    from nestpipe.data.loader import Loader
    from nestpipe.jagged import Cursor
    from nestpipe.pipeline.sequential import step
    from nestpipe.pipeline.stages import Rates

    batch = Loader(run.sequences, run.split, run.config.data, seed=0).batch(Cursor(0, 0))
    with torch.no_grad():
        state.model.backbone.blocks[0].out.bias[0] = torch.nan
    before = state.dense.export()
    with pytest.raises(TrainError, match="loss is nan at step 1 on rank 0; no parameter was updated"):
        step(state, batch, Rates(0.1, 0.1))
    after = state.dense.export()
    assert all(torch.equal(before[name], after[name]) or before[name].isnan().any() for name in before)
    table = state.embedding.tables["item"].export()
    assert torch.equal(table["rows"], state.embedding.tables["item"].initial(table["ids"]))


def test_a_diverged_run_stops_and_keeps_its_last_good_checkpoint(log, tmp_path):
    config = small_config(log, loss="full", save_steps=1)
    config = replace(config, dense=replace(config.dense, optimizer="sgd", lr=1e30))
    with pytest.raises(TrainError, match="no parameter was updated"):
        train(config, tmp_path / "run", quiet=True)
    _, content = checkpoint_reader.load_checkpoint(
        checkpoint_folders.checkpoint_folder(tmp_path / "run" / "checkpoints")
    )
    assert all(
        bool(torch.isfinite(t).all())
        for micro_batch in content.values()
        for t in micro_batch.values()
        if t.is_floating_point()
    )


def test_ctrl_c_saves_and_the_run_resumes(log, tmp_path):
    settings, config = tmp_path / "config.json", small_config(log, epochs=100_000)
    settings.write_text(config.to_json())
    code = (
        "import sys; from nestpipe import train, Config; train(Config.from_json(open(sys.argv[1]).read()), sys.argv[2])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(settings), str(tmp_path / "run")], stderr=subprocess.PIPE, text=True
    )
    marker = tmp_path / "run" / "checkpoints" / "step-000005"
    deadline = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "interrupted" in err
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["summary"]
    assert last["stopped"] == "interrupted"
    assert checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints")[-1] == last["steps"]
    ends = {"epochs": 0, "steps": last["steps"] + 3}
    for name in ("run", "undisturbed"):
        train(replace(config, train=replace(config.train, **ends)), tmp_path / name, resume=True, quiet=True)
    assert not differing_tensors(tmp_path / "run", tmp_path / "undisturbed")


def test_ctrl_c_during_the_last_save_loses_nothing(log, tmp_path, monkeypatch):
    original = atomic_files.flush

    def interrupted(path):
        if path.name == "dense.safetensors":
            signal.raise_signal(signal.SIGINT)
        original(path)

    monkeypatch.setattr(atomic_files, "flush", interrupted)
    run = train(small_config(log, save_steps=1000), tmp_path / "run", quiet=True)
    assert checkpoint_folders.complete_steps(run.checkpoints) == [12]


def test_a_weight_that_overflows_is_not_saved(log, tmp_path):
    config = small_config(log, save_steps=1)
    config = replace(config, embedding=replace(config.embedding, lr=3e38))
    with pytest.raises(TrainError, match=r"is not finite after step 1; nothing was saved|no parameter was updated"):
        train(config, tmp_path / "run", quiet=True)
    assert not checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints")


def test_an_int_in_a_float_field_makes_a_run_that_resumes(log, tmp_path):
    config = small_config(log)
    config = replace(config, dense=replace(config.dense, weight_decay=0), train=replace(config.train, clip_norm=1))
    first = train(replace(config, train=replace(config.train, epochs=0, steps=2)), tmp_path / "run", quiet=True)
    again = Run.open(first.folder).config
    assert type(again.train.clip_norm) is float
    longer = replace(again, train=replace(again.train, steps=3))
    assert train(longer, tmp_path / "run", resume=True, quiet=True).checkpoint()[1].step == 3


def test_a_resumed_configuration_is_checked_and_saved(log, tmp_path):
    config = small_config(log, steps=2)
    train(config, tmp_path / "run", quiet=True)
    for wrong in ({"save_steps": 0}, {"epochs": 0, "steps": 0}):
        with pytest.raises(ConfigError):
            train(replace(config, train=replace(config.train, **wrong)), tmp_path / "run", resume=True, quiet=True)
    train(replace(config, train=replace(config.train, steps=3)), tmp_path / "run", resume=True, quiet=True)
    assert Run.open(tmp_path / "run").config.train.steps == 3


def test_checkpoints_of_an_unknown_run_are_not_taken_over(log, tmp_path):
    train(small_config(log, steps=2), tmp_path / "run", quiet=True)
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(ConfigError, match="already holds a run"):
        train(replace(small_config(log), seed=7), tmp_path / "run", quiet=True)


def test_a_refused_run_leaves_no_folder(log, tmp_path):
    config = small_config(log, loss="full")
    with pytest.raises(ConfigError, match="max_full_catalogue"):
        train(replace(config, loss=replace(config.loss, max_full_catalogue=5)), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_train_in_one_folder(log, tmp_path):
    from nestpipe.training.process import lock_run

    with lock_run(tmp_path / "run"), pytest.raises(TrainError, match=r"process \d+ is training in"):
        train(small_config(log), tmp_path / "run", quiet=True)
    train(small_config(log, steps=1), tmp_path / "run", quiet=True)


def test_moved_data_is_recognised_by_its_digest(log, tmp_path):
    import shutil

    shutil.copytree(log, tmp_path / "one")
    config = small_config(tmp_path / "one", steps=2)
    train(config, tmp_path / "run", quiet=True)
    (tmp_path / "one").rename(tmp_path / "two")
    moved = replace(small_config(tmp_path / "two", steps=3), data=replace(config.data, path=str(tmp_path / "two")))
    assert load_state(train(moved, tmp_path / "run", resume=True, quiet=True))[1].step == 3


@pytest.mark.parametrize(
    ("name", "content"), [("run.json", "{"), ("run.json", "[]"), ("run.json", None), ("config.json", "[]")]
)
def test_damaged_run_files_have_a_message(log, tmp_path, name, content):
    run = train(small_config(log, steps=1), tmp_path / "run", quiet=True)
    (run.folder / name).write_text(content) if content else (run.folder / name).unlink()
    with pytest.raises(NestPipeError, match=name if name == "run.json" else "model.kind is None"):
        Run.open(run.folder)


def test_a_profiled_run_that_fails_leaves_no_profiler_running(log, tmp_path, monkeypatch):
    from nestpipe.training import loop

    calls = iter(range(100))
    original = loop.step
    monkeypatch.setattr(loop, "step", lambda *arguments: original(*arguments) if next(calls) < 4 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(small_config(log), tmp_path / "run", quiet=True, profile=True)
    assert not torch.autograd._profiler_enabled()


def test_time_biases_say_that_they_are_off_without_times(tmp_path, capfd):
    log = small_log(tmp_path / "log", times=False).path
    train(small_config(log, steps=1), tmp_path / "run")
    assert "order-only log: the time biases are off" in capfd.readouterr().err


def test_minutes_are_added_up_over_interruptions(log, tmp_path):
    config, seconds = small_config(log, epochs=0, minutes=0.02), itertools.count(0.0, 0.1)
    outcome = train_to_end(config, tmp_path / "run", quiet=True, clock=lambda: next(seconds))
    assert outcome.stopped == "0.02 minutes done"
    _, manifest = load_state(Run.open(tmp_path / "run"))
    assert manifest.progress["seconds"] >= 1.2
    train_to_end(config, tmp_path / "run", resume=True, quiet=True, clock=lambda: next(seconds))
    assert load_state(Run.open(tmp_path / "run"))[1].step == manifest.step


def test_patience_stops_and_the_best_checkpoint_is_used(log, tmp_path):
    config = small_config(log, epochs=500, patience=2, keep_last=1, metric="hr@10")
    with pytest.raises(ConfigError, match=r"add --data\.validation"):
        train(config, tmp_path / "run", quiet=True)
    config = replace(config, data=replace(config.data, validation=True))
    run = train(config, tmp_path / "run", quiet=True)
    values = {
        r["step"]: r["validation/hr@10"] for r in read_jsonl(run.folder / "metrics.jsonl") if "validation/hr@10" in r
    }
    best = max(values, key=lambda step: (values[step], -step))
    steps = sorted(values)
    assert steps.index(best) == len(steps) - 3
    assert checkpoint_folders.complete_steps(run.checkpoints) == [best, steps[-1]]
    report = run.predictor().evaluate("validation")
    assert report.metrics["hr@10"].mean == values[best]
    assert "did not rise" in read_jsonl(run.folder / "metrics.jsonl")[-1]["summary"]["stopped"]


def test_a_run_refuses_another_configuration_and_other_data(log, calm, tmp_path):
    folder = calm("hstu", "sampled")
    config = small_config(log)
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        train(config, folder, quiet=True)
    with pytest.raises(ConfigError, match=r"embedding\.lr: 0\.004 -> 0\.5"):
        train(replace(config, embedding=replace(config.embedding, lr=0.5)), folder, resume=True, quiet=True)
    other = small_log(tmp_path / "log", num_users=20).path
    (tmp_path / "run").mkdir()
    for name in ("config.json", "run.json"):
        (tmp_path / "run" / name).write_text((folder / name).read_text().replace(str(log), str(other)))
    with pytest.raises(CheckpointError, match="was trained on other data"):
        Run.open(tmp_path / "run")


def test_free_keys_exist():
    configs = [small_config("x"), *(replace(small_config("x"), model=one()) for one in (EncDecConfig, AlignedConfig))]
    assert set(FREE_KEYS) <= {key for config in configs for key in keys(config)}


def test_warm_up_and_decay_scale_the_rates(log, tmp_path, monkeypatch):
    from nestpipe.training import loop

    seen, original = [], loop.step
    monkeypatch.setattr(
        loop, "step", lambda state, batch, rates: (seen.append(rates.rows), original(state, batch, rates))[1]
    )
    train(small_config(log, warmup_steps=4, steps=6), tmp_path / "run", quiet=True)
    assert seen == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004, 0.004])
    seen.clear()
    train(small_config(log, warmup_steps=2, decay_steps=5, steps=6), tmp_path / "falling", quiet=True)
    assert seen == pytest.approx([0.0016, 0.0024, 0.0016, 0.0008, 0.00004, 0.00004])
    seen.clear()
    train(small_config(log, decay_epochs=2, epochs=2), tmp_path / "to the end", quiet=True)
    assert seen == pytest.approx([0.004 * max(0.01, 1 - (step + 1) / len(seen)) for step in range(len(seen))])


def test_profile_writes_a_table_and_a_trace(log, tmp_path, capsys):
    train(small_config(log), tmp_path / "run", quiet=True, profile=True)
    assert "aten::mm" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]


def test_tensorboard_events_on_request(log, tmp_path):
    train(small_config(log, tensorboard=True), tmp_path / "run", quiet=True)
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.*"))


def test_recommendations_are_unseen_and_best_first(calm):
    run = Run.open(calm("hstu", "sampled"))
    best = run.predictor().recommend(5, 10)
    had = set(run.sequences.items[run.sequences.offsets[5] : run.sequences.offsets[6]].tolist())
    assert len(best.items) == 10
    assert not had & set(best.items)
    assert best.scores == sorted(best.scores, reverse=True)
    assert len(run.predictor().recommend(5, 100).items) == 30 - len(had)


def test_the_request_time_changes_what_hstu_recommends_and_not_the_weights(calm):
    run = Run.open(calm("hstu", "sampled"))
    scorer = run.predictor()
    soon, late = scorer.recommend(5, 5), scorer.recommend(5, 5, request_ms=10**12)
    assert soon.scores != late.scores
    assert scorer.recommend(5, 5) == soon


def test_evaluation_asks_at_the_time_of_the_target(calm):
    from nestpipe.eval.predictor import EvalBatches

    run = Run.open(calm("hstu", "sampled"))
    for sample in EvalBatches(run.sequences, run.split, run.config, "test"):
        last = sample.batch.items.offsets[1:] - 1
        assert torch.equal(sample.batch.query_times.values[last], sample.batch.times.values[last] + 60)
        assert sample.target_positions.tolist() == [
            int(run.sequences.items[run.sequences.offsets[u + 1] - 1]) for u in sample.users.tolist()
        ]
