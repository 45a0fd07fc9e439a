"""Spans as they are recorded and kept."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest

from nestpipe.errors import DataError
from nestpipe.pipeline import schedule
from nestpipe.profiling.overlap_report import choose, report
from nestpipe.profiling.recorder import Recorder, now
from nestpipe.profiling.trace_file import KINDS, MICRO_BATCH_KINDS, STREAMS, RecordedWait, Span, load
from tests.profiling.made_up_traces import compute, made_up, ranks, trace_of


def test_a_span_takes_along_what_its_thread_waited_for_and_sent():
    recorder = Recorder(1, 2, capacity=10, run="x")

    def stream(name, kind, num_bytes):
        for batch in range(3):
            ready = now()
            begin = now()
            with recorder.wait("rows"):
                time.sleep(0.001)
            recorder.count(num_bytes, 7)
            recorder.count(num_bytes)
            recorder.add(name, kind, batch, batch + 1, ready, begin, now())

    threads = [
        threading.Thread(target=stream, args=args) for args in [("rows", "rows", 10), ("compute", "compute", 500)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = recorder.snapshot()
    assert (trace.run, trace.rank, trace.world_size, trace.num_dropped) == ("x", 1, 2, {})
    for name, num_bytes in (("rows", 20), ("compute", 1000)):
        spans = trace.stream(name)
        assert [(one.batch, one.micro_batch, one.num_bytes, one.num_rows) for one in spans] == [
            (batch, batch + 1, num_bytes, 7) for batch in range(3)
        ]
        for one in spans:
            (wait,) = one.waits
            assert one.ready_ns <= one.begin_ns <= wait.begin_ns
            assert wait.begin_ns + 1_000_000 <= wait.end_ns <= one.end_ns


def test_a_recorder_that_is_off_takes_nothing():
    recorder = Recorder.off()
    with recorder.wait("rows"):
        recorder.count(5, 5)
    recorder.add("compute", "compute", 0, 0, 1, 2, 3)
    assert recorder.snapshot().spans == ()


def test_waits_before_an_event_are_not_its_own():
    recorder = Recorder(capacity=4)
    with recorder.wait("keys"):
        pass
    recorder.add("compute", "compute", 0, 0, now(), now(), now())
    assert recorder.snapshot().spans[0].waits == ()


def test_a_full_stream_drops_its_oldest_spans_and_counts_them(tmp_path):
    recorder = Recorder(capacity=5)
    for batch in range(12):
        recorder.add("compute", "compute", batch, 0, 10 * batch, 10 * batch + 1, 10 * batch + 9)
    for batch in range(3):
        recorder.add("fetch", "retrieve", batch, 0, 10 * batch, 10 * batch + 1, 10 * batch + 9)
    recorder.save(tmp_path)
    (trace,) = load(tmp_path)
    assert trace.num_dropped == {"compute": 7}
    assert [span.batch for span in trace.stream("compute")] == [7, 8, 9, 10, 11]
    assert [span.batch for span in trace.stream("fetch")] == [0, 1, 2]
    assert report([trace], choose([trace])).num_dropped == 7


def test_kinds_and_streams_are_those_of_the_schedules():
    assert set(KINDS) == set(get_args(schedule.Kind)) - {"backward"}  # a sub-event, in no program
    assert MICRO_BATCH_KINDS == schedule.MICRO_BATCH_KINDS
    assert {stream for mode in schedule.MODES for stream in schedule.Schedule.of(mode, 2, groups=True).streams} == set(
        STREAMS
    )


def test_a_runners_batches_are_counted_from_the_first():
    recorder = Recorder(capacity=4)
    observe = recorder.observer(100)
    assert observe is not None
    observe("fetch", schedule.Event("retrieve", 3), 5, 6, 7)
    assert recorder.snapshot().spans == (Span("fetch", "retrieve", 103, 0, 5, 6, 7),)
    assert Recorder.off().observer(0) is None


def test_when_batches_were_done():
    recorder = Recorder(capacity=3)
    for batch in range(5):
        recorder.add("keys", "keys", batch, 0, 10 * batch, 10 * batch + 1, 10 * batch + 9)
        recorder.add("compute", "compute", batch, 0, 10 * batch, 10 * batch + 1, 10 * batch + 5)
        recorder.add("compute", "compute", batch, 1, 10 * batch, 10 * batch + 6, 10 * batch + 8)
    assert recorder.batch_ends(4) == [48]
    assert recorder.batch_ends() == [38, 48], "older ones were dropped"


def test_batches_before_the_first_to_take_leave_nothing_behind():
    """What a stream sends for an earlier batch is not counted when another stream has begun to record."""
    recorder, stream = Recorder(capacity=9), SimpleNamespace(watch="somebody else")
    observe = recorder.observer(100, 103, channels=[stream])
    assert stream.watch is None
    for batch in range(5):
        if batch == 2:
            observe("read", ("read", 3, 0), 0, 0, 0)
            assert stream.watch is recorder
        if stream.watch:
            stream.watch.launched("ids/items", 8, 7 if batch > 2 else 1000)
            with stream.watch.waiting("ids/items"):
                pass
        observe("keys", ("keys", batch, 0), 0, 1, 2)
    assert [(one.batch, one.num_rows, len(one.waits)) for one in recorder.snapshot().stream("keys")] == [
        (103, 7, 1),
        (104, 7, 1),
    ]
    recorder.observer(105)("keys", ("keys", 0, 0), 0, 1, 2)
    assert [one.num_rows for one in recorder.snapshot(105).spans] == [0], "and all is taken again"


def test_late_spans_are_found_behind_those_of_batches_ahead():
    recorder = Recorder(capacity=100)
    for batch in range(40):
        recorder.add("rows", "post", batch + 9, 0, 0, 0, 0)
        recorder.add("rows", "rows", batch, 0, 0, 0, 0)
    for first in (0, 20, 39, 48, 49):
        assert recorder.snapshot(first).spans == tuple(one for one in recorder.snapshot().spans if one.batch >= first)


def test_mistakes_of_a_caller():
    with pytest.raises(ValueError, match="unknown kind of event 'comptue'"):
        Recorder(capacity=1).add("compute", "comptue", 0, 0, 0, 0, 0)
    with pytest.raises(KeyError):
        Recorder(capacity=1).add("lookup", "retrieve", 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="at least one span"):
        Recorder(capacity=0)


def test_what_is_saved_is_loaded(tmp_path):
    made = ranks(3)
    for one in made:
        one.save(tmp_path)
    assert list(load(tmp_path)) == made
    assert not [path for path in (tmp_path / "trace").iterdir() if path.name.endswith(".tmp")]


def test_the_offset_of_a_clock_is_added(tmp_path):
    replace(made_up(), clock_offset_ns=-1_000).save(tmp_path)
    (loaded,) = load(tmp_path)
    first, shifted = made_up().stream("compute")[0], loaded.stream("compute")[0]
    for name in ("ready_ns", "begin_ns", "end_ns"):
        assert getattr(shifted, name) == getattr(first, name) - 1_000
    assert shifted.waits == tuple(
        RecordedWait(one.name, one.begin_ns - 1_000, one.end_ns - 1_000) for one in first.waits
    )


def test_fewer_ranks_leave_no_file_of_the_others(tmp_path):
    for world_size in (3, 2):
        for one in ranks(world_size):
            one.save(tmp_path)
    (tmp_path / "trace" / "trace.perfetto.json").touch()
    for one in ranks(2)[::-1]:
        one.save(tmp_path)
    assert [one.rank for one in load(tmp_path)] == [0, 1]
    assert (tmp_path / "trace" / "trace.perfetto.json").exists()


def test_a_changed_byte_is_found(tmp_path):
    path = made_up(num_steps=2).save(tmp_path)
    data = path.read_bytes()
    for place in (len(data) // 2, len(data) - 2):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DataError, match="is damaged: its spans do not match the digest"):
            load(tmp_path)
    for content in (data[:-30], data + b"[]\n"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="do not match the digest"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (b"", "line 1 is not JSON"),
        (b"\x00\xff", "line 1 is not JSON"),
        (b"[1]", "not a trace header"),
        (b"{}", "not a trace header"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path, first, message):
    path = made_up(num_steps=2).save(tmp_path)
    path.write_bytes(first + b"\n" + path.read_bytes())
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "has trace format version 1; this nestpipe reads version 2"),
        ({"rank": 1}, "it was written by rank 1"),
        ({"world_size": None}, "TypeError"),
        ({"num_dropped": []}, "AttributeError"),
    ],
)
def test_a_header_that_says_something_else(tmp_path, change, message):
    path = made_up(num_steps=2).save(tmp_path)
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(first) | change).encode() + b"\n" + rest)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span("compute", "compute", 0, 0, 5, 4, 9), "line 2 ends before it begins"),
        (Span("compute", "compute", 0, 0, 3, 4, 2), "ends before it begins"),
        (Span("lookup", "compute", 0, 0, 1, 2, 3), "unknown stream, kind or wait"),
        (Span("compute", "lookup", 0, 0, 1, 2, 3), "unknown stream, kind or wait"),
        (
            Span("compute", "compute", 0, 0, 1, 2, 9, waits=(RecordedWait("luck", 3, 4),)),
            "unknown stream, kind or wait",
        ),
        (Span("compute", "compute", 0, 0, 1, 2, 9, waits=(RecordedWait("rows", 3, 10),)), "waits outside itself"),
        (
            Span("compute", "compute", 0, 0, 1, 2, 9, waits=(RecordedWait("rows", 3, 6), RecordedWait("rows", 5, 7))),
            "twice at once",
        ),
    ],
)
def test_a_span_that_cannot_be(tmp_path, span, message):
    trace_of(span).save(tmp_path)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_the_compute_stream_does_one_thing_at_a_time(tmp_path):
    trace_of(compute(0, 1, 5), compute(0, 4, 9, micro_batch=1)).save(tmp_path)
    with pytest.raises(DataError, match="line 3 begins before the compute stream has ended"):
        load(tmp_path)


def test_files_of_two_runs_and_missing_ranks(tmp_path):
    for one in ranks(3):
        one.save(tmp_path)
    (tmp_path / "trace" / "rank-001.jsonl").unlink()
    with pytest.raises(DataError, match=r"rank-001.jsonl is missing; the run had 3 ranks"):
        load(tmp_path)
    replace(ranks(3)[1], run="other").save(tmp_path)
    with pytest.raises(
        DataError, match="mixes two runs: rank 0 belongs to run 'made-up' on 3 ranks, rank 1 to run 'other'"
    ):
        load(tmp_path)
    replace(ranks(3)[1], world_size=2).save(tmp_path)
    with pytest.raises(DataError, match="mixes two runs"):
        load(tmp_path)
