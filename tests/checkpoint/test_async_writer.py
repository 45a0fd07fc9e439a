"""Background checkpoints: the copy is consistent, and every rank receives a failure."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from nestpipe import atomic_files, train
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.async_writer import CheckpointSaver
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.state import StateSnapshot
from nestpipe.checkpoint.writer import SaveContent
from nestpipe.distributed.process_group import World
from nestpipe.embedding import table
from nestpipe.embedding.buckets import num_table_buckets
from nestpipe.embedding.row_buffer import RowBuffer
from nestpipe.errors import NestPipeError, TrainError
from nestpipe.jagged import Cursor
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

KINDS = {"plain": {}, "limits": {"admit_after": 2, "max_rows": 12}}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("saver") / "log").path


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_writer_saves_what_was_there_when_it_was_asked(log, tmp_path, monkeypatch, kind):
    """Three steps pass while each checkpoint is written; the files are those of a run that waits for every save."""
    config = small_config(log, save_steps=3, async_save=False)
    config = replace(config, embedding=replace(config.embedding, **KINDS[kind]))
    waiting = train(config, tmp_path / "waiting", quiet=True)
    from nestpipe.training import loop

    step, write, num_steps, seen = loop.step, checkpoint_writer.write_pack, [0], []

    def counted(*arguments):
        logs = step(*arguments)
        num_steps[0] += 1
        return logs

    def slow(*arguments):
        first, end = num_steps[0], time.monotonic() + 20
        while num_steps[0] < min(first + 2, 12) and time.monotonic() < end:
            time.sleep(0.001)
        seen.append(num_steps[0] - first)
        return write(*arguments)

    monkeypatch.setattr(loop, "step", counted)
    monkeypatch.setattr(checkpoint_writer, "write_pack", slow)
    in_background = train(
        replace(config, train=replace(config.train, async_save=True)), tmp_path / "background", quiet=True
    )
    assert min(seen[:3]) >= 2, "training went on while they were written"
    assert checkpoint_folders.complete_steps(waiting.checkpoints) == [3, 6, 9, 12]
    for number in (3, 6, 9, 12):
        ours, theirs = (
            Manifest.read(checkpoint_folders.checkpoint_folder(run.checkpoints, number))
            for run in (in_background, waiting)
        )
        assert ours.contents() == theirs.contents()
        assert ours.cursor == theirs.cursor


def saver(parent, *, background=True):
    return CheckpointSaver(parent, World.single().channel("saves"), keep_last=2, background=background)


class Source:
    """A state of one dense tensor."""

    is_tight = False

    def __init__(self, value=0.0, dense=dict):
        self.dense = dense(w=torch.full((2,), value))

    def changed_bytes(self):
        return 0

    def snapshot(self, *, concurrent, delta):
        return self

    def content(self, chain):
        dense, self.dense = self.dense, None
        return SaveContent(dense, chain=chain)

    def close(self):
        pass


class SlowToFree(dict):
    def __del__(self):
        time.sleep(0.3)


def test_wait_joins_the_thread(tmp_path):
    """Freeing tensors during interpreter shutdown aborts the process."""
    own = saver(tmp_path)
    own.save(1, Cursor(0, 1), {}, Source(dense=SlowToFree))
    own.wait()
    assert "saver" not in [thread.name for thread in threading.enumerate()]


def test_one_save_is_in_flight_at_a_time_and_old_ones_are_pruned(tmp_path, monkeypatch):
    save, running, most = checkpoint_writer.save_checkpoint, [0], [0]

    def watched(*arguments):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        found = save(*arguments)
        running[0] -= 1
        return found

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", watched)
    ours = saver(tmp_path)
    for step in range(1, 6):
        ours.save(step, Cursor(0, step), {}, Source(), keep=1)
    assert not ours.abort(20)
    assert most == [1]
    assert checkpoint_folders.complete_steps(tmp_path) == [1, 4, 5]


@pytest.mark.parametrize("background", [True, False])
def test_an_error_of_the_writer_is_raised_once_and_the_next_save_works(tmp_path, background):
    ours = saver(tmp_path, background=background)

    def save_and_wait(value):
        ours.save(3, Cursor(0, 3), {}, Source(value))
        ours.wait()

    with pytest.raises(TrainError, match="dense/w is not finite after step 3; nothing was saved"):
        save_and_wait(torch.inf)
    assert not checkpoint_folders.complete_steps(tmp_path)
    ours.save(4, Cursor(0, 4), {}, Source())
    ours.wait()
    assert checkpoint_folders.complete_steps(tmp_path) == [4]
    assert not list(tmp_path.glob(".tmp*"))


def test_a_failure_is_known_without_waiting_and_returned_at_the_end(tmp_path):
    ours = saver(tmp_path)
    ours.save(3, Cursor(0, 3), {}, Source(torch.nan))
    end = time.monotonic() + 20
    while not ours.failed and time.monotonic() < end:
        time.sleep(0.001)
    assert ours.failed
    assert "not finite" in ours.abort(20)


def full_disk(world, config, folder, culprit):
    """Trains with a disk that is full for one rank; what ended the run there, and how many steps it did."""
    from nestpipe.training import loop

    flush, step, num_steps = atomic_files.flush, loop.step, [0]

    def failing(path):
        if world.rank == culprit:
            raise OSError(28, "No space left on device", str(path))
        flush(path)

    def counted(*arguments):
        num_steps[0] += 1
        time.sleep(0.05)
        return step(*arguments)

    atomic_files.flush, loop.step = failing, counted
    try:
        return train_to_end(config, folder, quiet=True, world=world).stopped, num_steps[0]
    except (NestPipeError, OSError) as error:
        return str(error), num_steps[0]
    finally:
        atomic_files.flush, loop.step = flush, step


@pytest.mark.parametrize("culprit", [0, 1])
def test_every_rank_stops_at_the_same_step_when_one_cannot_write(log, tmp_path, culprit):
    """Long before the next save."""
    config = small_config(log, pipeline={"mode": "sequential"}, epochs=0, steps=100, save_steps=40)
    found = run_ranks(2, full_disk, config, tmp_path / "run", culprit)
    assert all("No space left on device" in message for message, _ in found), found
    assert found[1 - culprit][0].startswith(f"rank {culprit} stopped: ")
    assert found[0][1] == found[1][1] < 80
    assert not checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints")


def test_a_failed_run_waits_for_the_checkpoint_in_flight(log, tmp_path, monkeypatch):
    from nestpipe.training import loop

    step, publish, broken = loop.step, checkpoint_writer._publish, threading.Event()

    def breaking(state, *arguments):
        if state.num_steps == 6:
            broken.set()
            raise TrainError("broken on purpose")
        return step(state, *arguments)

    def late(*arguments):
        assert broken.wait(20)
        publish(*arguments)

    monkeypatch.setattr(loop, "step", breaking)
    monkeypatch.setattr(checkpoint_writer, "_publish", late)
    with pytest.raises(TrainError, match="broken on purpose"):
        train(small_config(log), tmp_path / "run", quiet=True)
    assert checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints") == [5]


def test_a_failed_run_does_not_stay_for_a_save_that_hangs(log, tmp_path, monkeypatch, capfd):
    from nestpipe.training import loop

    step, release = loop.step, threading.Event()

    def breaking(state, *arguments):
        if state.num_steps == 6:
            raise TrainError("broken on purpose")
        return step(state, *arguments)

    monkeypatch.setattr(loop, "step", breaking)
    monkeypatch.setattr(checkpoint_writer, "_publish", lambda *_: release.wait(60))
    with pytest.raises(TrainError, match="broken on purpose"):
        train_to_end(small_config(log), tmp_path / "run", world=World.single(deadline_s=0.2))
    release.set()
    assert "the checkpoint in flight was not saved: it was not finished after 0.2 s" in capfd.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_in_files_is_saved_and_loaded_section_by_section(log, tmp_path, monkeypatch, kind):
    """Never the rows of two sections at once, here of one bucket each, with the content of the memory tier."""
    monkeypatch.setattr(table, "_SECTION_BYTES", 1)
    config = small_config(log, steps=6)
    config = replace(config, embedding=replace(config.embedding, **KINDS[kind]))
    if kind == "limits":  # two buckets
        config = replace(config, embedding=replace(config.embedding, max_rows=130))
    files = replace(config.embedding, tier="files", files_folder=str(tmp_path), buffer_bytes=1 << 20)
    threads, write = set(), checkpoint_writer.write_pack
    monkeypatch.setattr(
        checkpoint_writer, "write_pack", lambda *a: (threads.add(threading.current_thread().name[:5]), write(*a))[1]
    )
    calm = train(config, tmp_path / "memory", quiet=True)
    assert threads == {"saver"}
    threads.clear()
    run = train(replace(config, embedding=files), tmp_path / "files", quiet=True)
    assert threads == {"MainT"}
    ours, theirs = (Manifest.read(checkpoint_folders.checkpoint_folder(one.checkpoints)) for one in (run, calm))
    assert ours.contents() == theirs.contents()
    moved = {"read": [], "write": []}
    for name, sizes in moved.items():
        original = getattr(RowBuffer, name)

        def counted(self, slots, *rows, original=original, sizes=sizes):
            sizes.append(len(slots))
            return original(self, slots, *rows)

        monkeypatch.setattr(RowBuffer, name, counted)
    state, _ = load_state(Run.open(run.folder))
    again = list(StateSnapshot(state).content().tables["item"])
    _, saved = checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(run.checkpoints))
    buckets = [len(section.index["ids"]) for section in again]
    num_buckets = num_table_buckets(config.embedding)
    assert [section.buckets for section in again] == [range(number, number + 1) for number in range(num_buckets)]
    for sizes in moved.values():
        assert sizes == buckets
    assert sum(buckets) == len(saved["item"]["ids"]) > max(buckets)
    order = torch.cat([section.index["ids"] for section in again]).argsort()
    for key in again[0].rows:
        assert torch.equal(torch.cat([section.rows[key] for section in again])[order], saved["item"][key])
