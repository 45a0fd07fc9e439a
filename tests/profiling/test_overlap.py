"""Steps divided by cause, and what they come to over steps and ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import DataError
from nestpipe.pipeline.schedule import MODES
from nestpipe.profiling.overlap import CAUSES, steps_of
from nestpipe.profiling.overlap_report import choose, report, waited_for_others_ns
from nestpipe.profiling.trace_file import KINDS, STREAMS, WAITS, RecordedWait, Span
from tests.profiling.made_up_traces import compute, made_up, ranks, trace_of


def event(stream, kind, batch, begin, end, *waits):
    return Span(stream, kind, batch, 0, begin, begin, end, waits=waits)


def causes(step):
    """Segments relative to the begin of the step."""
    return [
        (segment.begin_ns - step.begin_ns, segment.end_ns - step.begin_ns, segment.cause) for segment in step.segments
    ]


def test_a_step_divides_by_what_was_unfinished():
    step = steps_of(
        trace_of(
            compute(0, 0, 100),
            event("fetch", "retrieve", 1, 90, 130),  # 0-30 of the idle time
            event("rows", "rows", 1, 130, 145),  # 30-45
            event("table", "update", 0, 145, 165),  # 45-65: table work is no communication
            compute(1, 180, 300, ready=100, waits=(RecordedWait("rows", 200, 240),)),
            event("dense", "dense sum", 1, 300, 330),
            compute(1, 350, 370, kind="dense step"),
        )
    )[0]
    assert causes(step) == [
        (0, 30, "lookup"),
        (30, 45, "communication"),
        (45, 80, "bubble"),
        (80, 100, "busy"),
        (100, 140, "communication"),
        (140, 200, "busy"),
        (200, 230, "communication"),
        (230, 250, "bubble"),
        (250, 270, "busy"),
    ]
    assert step.seen_ns == {"lookup": 40, "communication": 15 + 40 + 30}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], "bubble"),
        ([event("read", "read", 1, 100, 200)], "lookup"),
        ([event("keys", "keys", 1, 100, 200, RecordedWait("keys", 110, 190))], "lookup"),
        ([event("fetch", "retrieve", 2, 100, 200)], "bubble"),  # of the batch after: nobody waits for it yet
        ([event("rows", "rows", 2, 100, 200)], "bubble"),
        ([event("fetch", "retrieve", 1, 100, 201)], "bubble"),  # ended after the event began: not waited for
        ([event("rows", "grads", 0, 100, 200)], "communication"),
        ([event("table", "collect", 0, 100, 200)], "bubble"),
        ([event("table", "collect", 0, 100, 200, RecordedWait("grads", 100, 200))], "communication"),
        ([event("dense", "flag", 0, 100, 200), event("fetch", "retrieve", 1, 100, 200)], "lookup"),
        ([event("table", "update", 0, 100, 200), event("rows", "rows", 1, 100, 200)], "communication"),
        ([event("table", "update", 0, 100, 200), event("fetch", "retrieve", 1, 200, 200)], "bubble"),
        ([event("fetch", "retrieve", 1, 199, 200), event("rows", "rows", 0, 199, 200)], "lookup"),  # not begun yet
        ([event("rows", "rows", 1, 199, 200), event("table", "update", 0, 199, 200)], "communication"),
    ],
)
def test_the_cause_of_idle_time(others, expected):
    ahead = [event("read", "read", 0, 0, 1), event("keys", "keys", 0, 1, 2), event("fetch", "retrieve", 0, 2, 3)]
    (step,) = steps_of(trace_of(*ahead, compute(0, 0, 100), *others, compute(1, 200, 300)))
    assert causes(step)[0][2] == expected
    assert step.time_ns("busy") == 100
    assert step.time_ns(expected) == 100


def test_other_events_on_the_compute_stream_are_not_busy():
    """A schedule that runs everything inline."""
    spans = [compute(0, 0, 10)]
    for number, kind in enumerate(("read", "keys", "retrieve", "rows", "compute", "grads", "dense sum", "update")):
        spans.append(compute(1, 10 + 10 * number, 20 + 10 * number, kind=kind))
    (step,) = steps_of(trace_of(*spans))
    assert causes(step) == [
        *((0, 30, "lookup"), (30, 40, "communication"), (40, 50, "busy")),
        *((50, 70, "communication"), (70, 80, "bubble")),
    ]


def test_the_nested_pipeline_hides_what_its_edges_allow():
    usual, late = (steps_of(made_up(num_steps=8, retrieve_ms=ms))[2:] for ms in (4.0, 25.0))
    assert all(step.time_ns("lookup") == 0 for step in usual)
    assert all(step.time_ns("lookup") > 3 * step.time_ns("communication") for step in late[:-1])
    # What is late are the rows of the next batch, for which the rows stream waits; after the last one there is none.
    assert late[-1].time_ns("lookup") == 0
    assert late[-1].total_ns < 1.1 * usual[-1].total_ns
    for step in usual:
        assert step.time_ns("busy") / step.total_ns > 0.6
        assert step.time_ns("communication") >= 3_600_000  # rows of the first micro-batch, and the dense sum
        assert 0 < step.time_ns("bubble") < 1_000_000
        assert step.seen_ns["communication"] > step.time_ns("communication")


def test_ids_that_come_late_are_lookup_wherever_streams_wait_for_them():
    """The rows stream opens the receives of the next batch before it collects the last gradients of this one.

    Ids of a batch wait until the next one is read, to announce it; so the last two batches have nothing to wait for.
    """
    late = steps_of(made_up(num_steps=8, read_ms=40.0))[2:-2]
    usual = steps_of(made_up(num_steps=8))[2:-2]
    for step, other in zip(late, usual, strict=True):
        assert step.time_ns("lookup") > 20_000_000
        assert step.time_ns("communication") < 1.2 * other.time_ns("communication")


def test_each_mode_hides_what_it_can():
    """Lookup takes 8.5 ms, messages 2 ms each way."""
    middle = {mode: steps_of(made_up(mode, num_steps=8))[3] for mode in MODES}
    lookup = {mode: step.time_ns("lookup") / 1e6 for mode, step in middle.items()}
    communication = {mode: step.time_ns("communication") for mode, step in middle.items()}
    assert 7.6 < lookup["serial"] < 9.4
    assert 5 < lookup["frozen-window"] < 6.1  # all but reading
    assert lookup["dual-buffer"] == lookup["nested"] == 0
    assert communication["nested"] < communication["frozen-window"] + 100_000 < communication["dual-buffer"]
    assert middle["serial"].total_ns > middle["dual-buffer"].total_ns > middle["nested"].total_ns
    for step in middle.values():
        assert step.seen_ns["lookup"] >= 7_600_000
        assert 9_000_000 < step.time_ns("busy") < 12_000_000  # 10 ms of compute, 0.7 of dense step


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_follow_each_other(rank):
    steps = steps_of(made_up(num_steps=7, rank=rank))
    assert [step.batch for step in steps] == [1, 2, 3, 4, 5, 6]
    for before, step in pairwise(steps):
        assert before.end_ns == step.begin_ns


@st.composite
def any_trace(draw):
    """Any spans that streams could have executed: one after the other on the compute stream, anything elsewhere."""

    def waits(bounds):
        names = draw(st.lists(st.sampled_from(WAITS), min_size=len(bounds) // 2, max_size=len(bounds) // 2))
        return tuple(RecordedWait(*mark) for mark in zip(names, bounds[::2], bounds[1::2], strict=False))

    spans, place, batch = [], 0, 0
    for _ in range(draw(st.integers(2, 12))):
        batch += draw(st.integers(0, 2))
        ready, *bounds, end = sorted(draw(st.lists(st.integers(place, place + 60), min_size=2, max_size=6)))
        begin = draw(st.integers(ready, end))
        spans.append(Span("compute", draw(st.sampled_from(KINDS)), batch, 0, ready, begin, end, waits=waits(bounds)))
        place = end
    for _ in range(draw(st.integers(0, 20))):
        begin, *bounds, end = sorted(draw(st.lists(st.integers(0, place), min_size=2, max_size=4)))
        stream, kind = draw(st.sampled_from(STREAMS[:4] + STREAMS[5:])), draw(st.sampled_from(KINDS))
        spans.append(Span(stream, kind, draw(st.integers(0, batch)), 0, begin, begin, end, waits=waits(bounds)))
    return trace_of(*spans)


def check_division(trace):
    """The four causes of each step add up to it, segment by segment and without a gap."""
    spans, steps = trace.stream("compute"), steps_of(trace)
    for step in steps:
        own = [span for span in spans if span.batch == step.batch]
        before = [span for span in spans if span.batch < step.batch]
        assert (step.begin_ns, step.end_ns) == (before[-1].end_ns, own[-1].end_ns)
        assert sum(step.time_ns(cause) for cause in CAUSES) == own[-1].end_ns - before[-1].end_ns
        assert all(one.begin_ns < one.end_ns == other.begin_ns for one, other in pairwise(step.segments))
        work = [span for span in own if span.kind in {"arrive", "compute", "dense step"}]
        waits = [(span.begin_ns, wait) for span in work for wait in span.waits]
        waited = sum(max(wait.end_ns - max(wait.begin_ns, begin), 0) for begin, wait in waits)
        assert step.time_ns("busy") == sum(span.end_ns - span.begin_ns for span in work) - waited
        for cause in ("lookup", "communication"):
            assert step.time_ns(cause) <= step.seen_ns[cause]
    return steps


@given(any_trace())
def test_any_step_divides_exactly(trace):
    check_division(trace)


@pytest.mark.parametrize("mode", MODES)
def test_steps_of_every_schedule_divide_exactly(scale, mode):
    for seed in range(scale(4, 400)):
        assert len(check_division(made_up(mode, seed=seed, num_steps=5, num_micro_batches=1 + seed % 4))) == 4


def test_batches_out_of_order_are_refused():
    with pytest.raises(DataError, match="computed batch 0 after batch 1"):
        steps_of(trace_of(compute(0, 0, 1), compute(1, 2, 3), compute(0, 4, 5)))


def test_steps_that_lost_spans_are_left_out():
    whole = made_up(num_steps=8)
    fetch = [span for span in whole.spans if span.stream == "fetch"]
    gone = set(map(id, fetch[: fetch.index(next(span for span in fetch if span.batch == 2 and span.kind == "write"))]))
    kept = [span for span in whole.spans if id(span) not in gone]
    lost = trace_of(*kept, num_dropped={"fetch": len(gone)})
    # W(2) is the first span left; R(4) comes right after it, and R(3) is gone. Nothing of 5 can be missing.
    assert [step.batch for step in steps_of(lost)] == [5, 6, 7]
    assert [step.batch for step in steps_of(replace(lost, num_dropped={}))] == [4, 5, 6, 7]
    assert [step.batch for step in steps_of(whole)] == [1, 2, 3, 4, 5, 6, 7]


def test_steps_whose_lookup_ran_before_the_recording_are_left_out():
    whole = made_up(num_steps=12)
    begin = next(span.begin_ns for span in whole.spans if span.kind == "compute" and span.batch == 3)
    late = trace_of(*(span for span in whole.spans if span.ready_ns >= begin))
    firsts = {kind: min(span.batch for span in late.spans if span.kind == kind) for kind in ("read", "keys", "compute")}
    assert firsts == {"read": 8, "keys": 6, "compute": 3}
    assert [step.batch for step in steps_of(late)] == [8, 9, 10, 11]
    assert steps_of(trace_of()) == []


def test_a_report_of_two_ranks():
    first, second = ranks(2, num_steps=9, num_micro_batches=4, seed=1)
    steps = choose([first, second])
    result = report([first, second], steps)
    assert (result.first_batch, result.last_batch, result.num_steps, result.num_dropped) == (1, 8, 8, 0)
    slowest = [max(pair, key=lambda step: step.total_ns) for pair in zip(*steps, strict=True)]
    assert {step.rank for step in slowest} == {0, 1}, "the example should have both ranks slowest at times"
    total = sum(step.total_ns for step in slowest)
    assert result.busy_share == sum(step.time_ns("busy") for step in slowest) / total
    for division in (*result.ranks.values(), result.slowest):
        assert sum(division.share.values()) == pytest.approx(1, abs=1e-12)  # four roundings of fp64
        assert division.step_ms.low <= division.step_ms.median <= division.step_ms.high
    assert result.rows_sent_ratio == {"rows": 1.0, "grads": 1.0}
    assert {kind: one.median for kind, one in result.num_bytes.items()} == {
        "keys": 16_000,
        "rows": 2 * 1000 * 128,
        "grads": 2 * 1000 * 128,
        "dense sum": 100_000,
    }
    assert json.loads(result.to_json())["slowest"]["share"]["busy"] == result.busy_share


def test_waiting_for_a_slower_rank_is_told_from_messages():
    """Rank 0 has computed batch 1 at 200, rank 1 at 260; then the dense sum takes 40 more on both."""

    def rank(number, computed):
        spans = (
            compute(0, 0, 100),
            compute(1, 100, computed),
            event("dense", "dense sum", 1, computed, 300),
            compute(1, 300, 310, kind="dense step", ready=computed),
        )
        return replace(trace_of(*spans), rank=number)

    traces = [rank(0, 200), rank(1, 260)]
    fast, slow = (steps_of(trace)[0] for trace in traces)
    assert (fast.time_ns("communication"), slow.time_ns("communication")) == (100, 40)
    assert (waited_for_others_ns(fast, 260), waited_for_others_ns(slow, 260)) == (60, 0)
    assert report(traces, choose(traces)).waited_for_others == {0: 60 / fast.total_ns, 1: 0.0}


def test_rows_that_travel_twice_show_in_the_ratio():
    trace = made_up(num_steps=4)
    twice = [replace(span, num_rows=2 * span.num_rows) if span.kind == "grads" else span for span in trace.spans]
    doubled = replace(trace, spans=tuple(twice))
    assert report([doubled], choose([doubled])).rows_sent_ratio == {"rows": 1.0, "grads": 2.0}
    silent = replace(trace, spans=tuple(replace(span, num_rows=0) for span in trace.spans))
    assert report([silent], choose([silent])).rows_sent_ratio == {}


def test_exposure_against_what_a_sequential_run_shows():
    def spans(lookup, message):
        for t in range(4):
            at = 1000 * t
            yield event("fetch", "retrieve", t, at, at + lookup)
            yield event("rows", "rows", t, at + lookup, at + lookup + message)
            yield compute(t, at + lookup + message, at + 1000, ready=at)

    nested_run, sequential = trace_of(*spans(10, 20)), trace_of(*spans(200, 50))
    result = report([nested_run], choose([nested_run]), sequential=choose([sequential]))
    assert (result.exposed_lookup, result.exposed_communication) == (10 / 200, 20 / 50)
    seen = report([nested_run], choose([nested_run]))
    assert (seen.exposed_lookup, seen.exposed_communication) == (1.0, 1.0)


def test_only_steps_that_all_ranks_have_are_chosen():
    first, second = ranks(2, num_steps=6)
    shorter = replace(second, spans=tuple(span for span in second.spans if span.batch < 4))
    assert [[step.batch for step in own] for own in choose([first, shorter])] == [[1, 2, 3], [1, 2, 3]]
    assert [step.batch for step in choose([first], 2, 4)[0]] == [2, 3]
    with pytest.raises(
        DataError, match="no step of batches 9: was recorded completely by all ranks; there are 5, from 1 to 5"
    ):
        choose([first], 9)
    with pytest.raises(DataError, match="that takes two batches"):
        choose([made_up(num_steps=1)])


def test_time_before_the_stream_reached_an_event_is_a_bubble_whatever_ran():
    """A checkpoint between two runs of the pipeline: the next batch is read meanwhile or not, nobody waited for it."""
    step = steps_of(
        trace_of(
            compute(0, 0, 100),
            event("fetch", "retrieve", 1, 580, 620),
            compute(1, 650, 700, ready=600),
        )
    )[0]
    assert causes(step) == [(0, 500, "bubble"), (500, 520, "lookup"), (520, 550, "bubble"), (550, 600, "busy")]
