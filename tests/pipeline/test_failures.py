"""What ends a pipelined run early: a rank that stops, sleeps or fails, a stop request, a value that is not finite."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from itertools import islice
from unittest.mock import patch

import pytest

from nestpipe.distributed.process_group import World
from nestpipe.errors import CommError, TrainError
from nestpipe.pipeline import sequential, stages
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from tests.pipeline.recorded_runs import content, tapped
from tests.pipeline.toy_training import NOT_FINITE, Case, new_toy, toy_batches
from tests.rank_pool import run_ranks

VICTIM = 1
DEADLINE_S = 4.0
CASE = Case(buffered=True)
MODES = ("serial", "dual-buffer", "frozen-window", "nested", "chunks")


def runner_of(state, mode="nested", **wrapped):
    chunks = 2 if mode == "chunks" else 1
    schedule = Schedule.of("nested" if chunks > 1 else mode, state.micro_batching.micro_batches, depth=1, chunks=chunks)
    micro_batches = {
        **stages.MICRO_BATCH_STAGES,
        **{kind: stage for kind, stage in wrapped.items() if kind in stages.MICRO_BATCH_STAGES},
    }
    return Runner(state, schedule, micro_batch_stages=micro_batches)


def feed_of(rank, case=CASE, start=0, **more):
    return BatchFeed(batches=toy_batches(rank, start), rates=case.rates, **more)


def stop(_):
    """Freezes this process; another wakes it up when the deadline has passed."""
    subprocess.Popen(["sh", "-c", f"sleep {1.7 * DEADLINE_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(_):
    time.sleep(1.7 * DEADLINE_S)


def fail(work):
    raise ZeroDivisionError(f"the model divides by nothing at {work.where}")


def lanes_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("nestpipe-")]


def lose_one(world: World, accident, deadline_s: float):
    """A run in whose third batch something happens to one rank: what each rank says, whom it blames, and when."""
    channels = Channels.of(world)
    for stream in (channels.keys, channels.rows, channels.dense):
        stream.deadline_s = deadline_s  # of exchanges; to start with, ranks take their time
    state = new_toy(CASE, channels)

    def compute(state, work, micro_batch):
        if (world.rank, work.number, micro_batch) == (VICTIM, 2, 0):
            accident(work)
        stages.compute(state, work, micro_batch)

    start = time.monotonic()
    try:
        runner_of(state, compute=compute).run(feed_of(world.rank, num_batches=20))
    except (CommError, ZeroDivisionError) as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ()), time.monotonic() - start, lanes_left()
    return None


@pytest.mark.parametrize("accident", [stop, sleep], ids=["stopped", "asleep"])
def test_a_rank_that_hangs_is_named_by_all_others(accident):
    answers = run_ranks(3, lose_one, accident, DEADLINE_S)
    for rank, (kind, text, blamed, seconds, left) in enumerate(answers):
        assert kind == "CommError", text
        assert VICTIM in blamed, text
        assert not left, f"rank {rank}: {left}"
        if rank != VICTIM:
            assert "never entered it" in text, text
            assert seconds < 1.7 * DEADLINE_S + 5, "it waited for the rank instead of giving up"


def test_a_rank_that_fails_ends_the_others_at_once():
    answers = run_ranks(3, lose_one, fail, 60.0)
    assert answers[VICTIM][:2] == ("ZeroDivisionError", "the model divides by nothing at step 3")
    for rank, (kind, text, blamed, seconds, left) in enumerate(answers):
        assert not left, f"rank {rank}: {left}"
        assert seconds < 20, "a deadline passed first"
        if rank != VICTIM:
            assert (kind, blamed) == ("CommError", (VICTIM,)), text
            assert f"rank {VICTIM} aborted: ZeroDivisionError: the model divides by nothing at step 3" in text


def stop_and_go_on(world: World, mode: str):
    """One rank asks to stop while its fifth batch is read; all stop, look at what they have, and go on."""
    channels = Channels.of(world)
    state, plain = new_toy(CASE, channels), new_toy(replace(CASE, buffered=False), channels)
    runner = runner_of(state, mode)
    stop_flags = iter([False, False, False, False, True])
    stop = (lambda: next(stop_flags, True)) if world.rank == VICTIM else (lambda: False)
    done = [runner.run(feed_of(world.rank, stop_requested=stop))]
    batches = toy_batches(world.rank)
    for number, batch in enumerate(islice(batches, done[0])):
        sequential.step(plain, batch, CASE.rates(number))
    assert state.num_steps == done[0]
    assert content(state) == content(plain), "the state at the stop"
    done.append(runner.run(feed_of(world.rank, start=state.num_steps, num_batches=3)))
    for number, batch in enumerate(islice(batches, 3), start=done[0]):
        sequential.step(plain, batch, CASE.rates(number))
    assert content(state) == content(plain), "the state after going on"
    return done


@pytest.mark.parametrize("mode", ["frozen-window", "nested", "chunks"])
def test_a_stop_request_of_one_rank_stops_all_after_the_same_batch(mode):
    assert run_ranks(3, stop_and_go_on, mode) == [[5, 3]] * 3


def skip_not_finite(world: World):
    """The updates and what is left in every mode; a batch is not finite on one rank."""
    channels, found = Channels.of(world), []
    for mode in (None, *MODES):
        log, logs = [], []
        state = new_toy(replace(CASE, buffered=mode is not None), channels)
        taps = tapped(log)
        with (
            patch.object(sequential, "update", taps.batch["update"]),
            patch.dict(stages.BATCH_STAGES, taps.batch),
            patch.dict(stages.MICRO_BATCH_STAGES, taps.micro_batch),
        ):
            if mode is None:
                for number, batch in enumerate(islice(toy_batches(world.rank), 6)):
                    logs.append(sequential.step(state, batch, CASE.rates(number)))
            else:
                feed = feed_of(world.rank, num_batches=6, on_step=lambda work, logs=logs: logs.append(work.means))
                runner_of(state, mode).run(feed)
        found.append((log, content(state), [{**one, "loss": str(one["loss"])} for one in logs]))
    assert [one for one in found if one != found[0]] == []
    return [number for number, means in enumerate(found[0][2]) if means.get("skipped")]


def test_a_batch_that_is_not_finite_is_skipped_alike_in_every_mode():
    assert run_ranks(2, skip_not_finite) == [[NOT_FINITE]] * 2


def meet_not_finite(world: World, mode: str):
    channels = Channels.of(world)
    state = new_toy(replace(CASE, skip_nonfinite=False), channels)
    with pytest.raises(TrainError) as caught:
        runner_of(state, mode).run(feed_of(world.rank, num_batches=6))
    return str(caught.value), state.num_steps, lanes_left()


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_is_not_finite_ends_the_training_on_every_rank(mode):
    said = f"loss is nan at step {NOT_FINITE + 1} on rank 0; no parameter was updated."
    assert run_ranks(3, meet_not_finite, mode) == [(said, NOT_FINITE, [])] * 3
