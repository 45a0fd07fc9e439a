"""Schedules as data: complete, the same on every rank, free of deadlock; and the checker finds those that are not."""

from __future__ import annotations

from itertools import product

import pytest

from nestpipe.pipeline.deadlock_check import ScheduleError, all_events, check, check_programs
from nestpipe.pipeline.schedule import MODES, Event, Schedule


def schedules(micro_batches, depths):
    """Every mode with every number of micro-batches and, where it counts, every depth."""
    return sorted(
        {
            Schedule.of(mode, num_micro_batches, depth=depth, clip_rows=clip_rows, groups=groups)
            for mode, num_micro_batches, depth, clip_rows, groups in product(
                MODES, micro_batches, depths, (False, True), (False, True)
            )
        },
        key=lambda one: (one.mode, one.num_micro_batches, one.depth, one.clip_rows, one.groups),
    )


def test_no_schedule_can_get_stuck(scale):
    for schedule in schedules((1, 2, 5), (1, 3)):
        for num_batches, world_size in ((1, 2), (5, 3)):
            check(schedule, num_batches, world_size)
    check(Schedule.of("nested", 32, depth=4, clip_rows=True), 6, 2)
    for groups in (False, True):
        check(Schedule.of("nested", 2, depth=2, stale=True, groups=groups), 6, 2)
    for num_micro_batches, depth, num_batches in product((1, 2, 5), (1, 3), (1, 2, 6)):
        for groups, chunks in product((False, True), ("shared", 3)):
            check(Schedule.of("nested", num_micro_batches, depth=depth, groups=groups, chunks=chunks), num_batches, 2)
    for schedule in schedules((*range(1, 9), 32), range(1, 5)) if scale(0, 1) else ():
        for num_batches, world_size in product(range(1, 7), range(1, 5)):
            check(schedule, num_batches, world_size)


def test_every_batch_has_the_same_number_of_events():
    for schedule in schedules((1, 3), (1, 2)):
        assert len(all_events(schedule, 5)) == 5 * schedule.num_events
    for groups, chunks in product((False, True), ("shared", 4)):
        schedule = Schedule.of("nested", 3, groups=groups, chunks=chunks)
        assert len(all_events(schedule, 5)) == 5 * schedule.num_events


NESTED = Schedule.of("nested", 2, depth=1)


def moved(programs, event, before):
    """The programs with one event moved before another of its stream."""
    stream = NESTED.stream_of(event.kind)
    program = [one for one in programs[stream] if one != event]
    program.insert(program.index(before), event)
    return {**programs, stream: program}


@pytest.mark.parametrize(
    ("event", "before"),
    [
        (Event("rows", 2, 0), Event("grads", 1, 1)),  # rows that wait for an update that waits for these gradients
        (Event("retrieve", 3), Event("write", 1)),  # rows come from a table to which they have not been written
        (Event("update", 1), Event("collect", 1, 1)),
        (Event("compute", 2, 1), Event("compute", 2, 0)),
        (Event("compute", 2, 0), Event("dense step", 1)),
        (Event("post", 3), Event("rows", 0, 0)),  # ids of a batch that is not read before the first is done
        (Event("keys", 4), Event("keys", 0)),
        (Event("read", 5), Event("read", 0)),
        (Event("dense sum", 2), Event("dense sum", 1)),
        (Event("grads", 1, 1), Event("rows", 1, 1)),
    ],
    ids=str,
)
def test_the_checker_finds_a_cycle(event, before):
    programs = moved(NESTED.events(6), event, before)
    with pytest.raises(ScheduleError, match="wait for each other") as caught:
        check_programs(NESTED, [programs] * 2, 6)
    lines = str(caught.value).splitlines()[1:]
    waits = [line.strip().partition(":")[0].split(" waits for ") for line in lines]
    assert [one[1] for one in waits] == [one[0] for one in waits[1:] + waits[:1]], "the printed events are no cycle"
    assert any(f"comes later on stream '{NESTED.stream_of(event.kind)}'" in line for line in lines)


def test_the_checker_finds_a_cycle_of_what_lets_others_pass(monkeypatch):
    """Rows two batches later come from tables that are written only then."""
    monkeypatch.setattr(
        Schedule, "yields_to", lambda self, event: [Event("rows", event.batch + 2)] if event.kind == "write" else []
    )
    with pytest.raises(ScheduleError, match=r"write\(0\) on rank 0 waits for rows\(2.0\) on all ranks: yields to it"):
        check(NESTED, 6, 1)


def test_ranks_with_different_programs_are_refused():
    """Each alone would run; together, one sends rows first and the other gradients."""
    programs = NESTED.events(3)
    check_programs(NESTED, [programs] * 2, 3)
    other = moved(programs, Event("post", 2), Event("grads", 1, 0))
    check_programs(NESTED, [other] * 2, 3)
    with pytest.raises(ScheduleError, match="stream 'rows' runs another program on rank 1 than on rank 0"):
        check_programs(NESTED, [programs, other], 3)


def test_what_is_missing_or_twice_is_named():
    programs = NESTED.events(3)
    rows, dense = programs["rows"], programs["dense"]
    for changed, message in (
        ({"rows": [event for event in rows if event != Event("flag", 1)]}, r"rank 0 lack flag\(1\)"),
        ({"rows": [*rows, rows[-1]]}, r"rank 0 have too often update\(2\)"),
        (
            {"rows": rows[:-1], "dense": [*dense, rows[-1]]},
            r"stream 'dense' of rank 0 runs update\(2\), which belongs",
        ),
    ):
        with pytest.raises(ScheduleError, match=message):
            check_programs(NESTED, [{**programs, **changed}], 3)


def test_description():
    assert Schedule.of("nested", 2, depth=1).describe(2).splitlines() == [
        "compute  compute(0.0) · compute(0.1) · dense step(0) · compute(1.0) · compute(1.1) · dense step(1)",
        "read     read(0) · read(1)",
        "keys     keys(0) · keys(1)",
        "fetch    retrieve(0) · retrieve(1) · write(0) · write(1)",
        "rows     post(0) · rows(0.0) · rows(0.1) · grads(0.0) · grads(0.1) · post(1) · "
        "flag(0) · collect(0.0) · collect(0.1) · update(0) · "
        "rows(1.0) · rows(1.1) · grads(1.0) · grads(1.1) · flag(1) · collect(1.0) · collect(1.1) · update(1)",
        "dense    dense sum(0) · dense sum(1)",
    ]


def test_a_chunk_is_updated_and_its_rows_leave_while_the_next_one_travels():
    chunked = Schedule.of("nested", 2, depth=1, chunks=2)
    assert [str(event) for event in chunked.events(2)["rows"]] == [
        *(
            "post(0)",
            "rows(0.0)",
            "chunk rows(0.0)",
            "rows(0.1)",
            "grads(0.0)",
            "grads(0.1)",
            "chunk grads(0.0)",
            "post(1)",
        ),
        *("flag(0)", "collect(0.0)", "collect(0.1)", "update(0)", "rows(1.0)"),
        *("chunk collect(0.0)", "chunk update(0.0)", "chunk rows(1.0)", "rows(1.1)"),
        *("grads(1.0)", "grads(1.1)", "chunk grads(1.0)", "flag(1)", "collect(1.0)", "collect(1.1)", "update(1)"),
        *("chunk collect(1.0)", "chunk update(1.0)"),
    ]
    assert chunked.yields_to(Event("write", 2)) == [Event("chunk rows", 3, 0)]
    assert chunked.yields_to(Event("keys", 5)) == [Event("chunk rows", 3, 0), Event("read", 6)]
    for wrong in ({"clip_rows": True}, {"stale": True}):
        with pytest.raises(ValueError, match="only nested has chunks"):
            Schedule.of("nested", 2, chunks=2, **wrong)
    with pytest.raises(ValueError, match="only nested has chunks"):
        Schedule.of("dual-buffer", 2, chunks=2)


def test_groups_merge_a_chunk_while_the_previous_one_is_updated():
    grouped = Schedule.of("nested", 2, depth=1, groups=True, chunks=2).events(2)
    assert [str(event) for event in grouped["groups"]][:6] == [
        *("collect(0.0)", "merge(0.0)", "collect(0.1)", "merge(0.1)", "chunk collect(0.0)", "chunk merge(0.0)"),
    ]
    assert [str(event) for event in grouped["table"]] == [
        *("flag(0)", "update(0)", "chunk update(0.0)", "flag(1)", "update(1)", "chunk update(1.0)"),
    ]


def test_shared_rows_travel_alone():
    """Between the last gradients of a batch and the arrival of the next first rows nothing else is on the link or takes over."""
    shared = Schedule.of("nested", 2, depth=1, chunks="shared")
    assert shared.events(4)["rows"][-10:] == [
        *(
            Event("rows", 3, 0),
            Event("rows", 3, 1),
            Event("chunk grads", 2),
            Event("grads", 3, 0),
            Event("grads", 3, 1),
        ),
        *(
            Event("flag", 3),
            Event("collect", 3, 0),
            Event("collect", 3, 1),
            Event("update", 3),
            Event("chunk grads", 3),
        ),
    ]
    arrived = Event("arrive", 3)
    for later in (Event("rows", 3, 1), Event("chunk grads", 2), Event("keys", 5), Event("write", 2)):
        assert shared.yields_to(later) == [arrived], later
    assert shared.yields_to(Event("rows", 3, 0)) == []
