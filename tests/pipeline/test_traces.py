"""Traces of real runs: the runner of every schedule on real ranks, recorded, kept and divided."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nestpipe.cli import main
from nestpipe.distributed.process_group import World
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import MODES, Event, Schedule
from nestpipe.pipeline.stages import BatchWork
from nestpipe.profiling.overlap import CAUSES, steps_of
from nestpipe.profiling.overlap_report import choose, report
from nestpipe.profiling.recorder import Recorder
from nestpipe.profiling.trace_file import load, stage_of
from tests.pipeline.recorded_runs import batches_of, prepared, rates_of
from tests.rank_pool import run_ranks
from tests.small_runs import small_log

BARRIERS = (3, 7)  # the run stops and resumes after 3 batches


def asked_rows(work: BatchWork) -> int:
    """The rows that all ranks requested from this one."""
    return sum(len(owned.requests.places) for owned in work.window.owner.values())


def schedule_of(mode: str, micro_batches: int) -> Schedule:
    """Of a mode, or nested with chunks."""
    chunks = {"shared": "shared", "chunks": 3}.get(mode, 1)
    return Schedule.of(mode if chunks == 1 else "nested", micro_batches, chunks=chunks)


def record(world: World, path: Path, folder: Path, settings: dict[str, Any]) -> list[int]:
    """Trains and saves the trace; returns the rows requested from this rank, per batch."""
    channels = Channels.of(world)
    state, loader = prepared(world, path, settings, channels)
    recorder = Recorder(world.rank, world.size, capacity=1000, run="recorded")
    runner, sent = Runner(state, schedule_of(settings["mode"], settings["micro_batches"])), list[int]()
    for end in BARRIERS:
        first = state.num_steps
        runner.observe = recorder.observer(first, channels=state.channels)
        feed = BatchFeed(
            batches=batches_of(loader, first),
            rates=rates_of(settings),
            num_batches=end - first,
            on_step=lambda work: sent.append(asked_rows(work)),
        )
        runner.run(feed)
    recorder.save(folder)
    return sent


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("recorded") / "log").path


@pytest.mark.parametrize("mode", [*MODES, "shared", "chunks"])
@pytest.mark.parametrize("loss", ["sampled", "shared"])  # the latter has rows in 16 bits, which travel as bytes
def test_every_event_is_recorded_once(log, tmp_path, mode, loss):
    sent = run_ranks(2, record, log, tmp_path, {"mode": mode, "micro_batches": 3, "loss": loss})
    traces = load(tmp_path)
    schedule = schedule_of(mode, 3)
    expected: Counter[tuple[str, str, int, int]] = Counter()
    for first, end in zip((0, *BARRIERS), BARRIERS, strict=False):
        for stream, events in schedule.events(end - first).items():
            expected.update((stream, event.kind, first + event.batch, event.micro_batch) for event in events)
    for trace in traces:
        assert Counter((span.stream, span.kind, span.batch, span.micro_batch) for span in trace.spans) == expected
        for begin, end in zip((0, *BARRIERS), BARRIERS, strict=False):
            spans = {
                Event(one.kind, one.batch - begin, one.micro_batch): one
                for one in trace.spans
                if begin <= one.batch < end
            }
            for event, span in spans.items():
                first = [spans[one] for one in schedule.yields_to(event) if one in spans]
                assert all(one.end_ns <= span.begin_ns for one in first), f"{event} did not yield"
        steps = steps_of(trace)
        assert [step.batch for step in steps] == [1, 2, 3, 4, 5, 6]
        for step in steps:
            assert sum(step.time_ns(cause) for cause in CAUSES) == step.total_ns
            assert step.num_rows["rows"] == sent[trace.rank][step.batch]
    result = report(traces, choose(traces))
    assert result.rows_sent_ratio == {"rows": 1.0, "grads": 1.0}
    gathers = {"dense step"} if mode == "serial" else set()  # of new dense weights; elsewhere part of the sum
    assert {stage_of(kind) for kind in result.num_bytes} == {"keys", "rows", "grads", "dense sum"} | gathers
    assert 0 < result.busy_share < 1


def test_waits_stand_where_they_happen_and_the_command_reads_them(capsys, log, tmp_path):
    run_ranks(2, record, log, tmp_path, {"mode": "nested", "micro_batches": 3})
    for trace in load(tmp_path):
        waits = {(span.kind, wait.name) for span in trace.spans for wait in span.waits}
        assert waits == {
            *(("keys", "keys"), ("compute", "rows"), ("collect", "grads")),
            *(("flag", "flag"), ("dense sum", "dense")),
        }
    assert main(["trace", str(tmp_path)]) == 0
    assert "6 steps, batches 1 to 6" in capsys.readouterr().out
    assert (tmp_path / "trace" / "timeline.svg").stat().st_size > 5_000
