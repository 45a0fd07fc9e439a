"""The clock of the model against steps computed by hand, and against what must hold for any durations."""

from itertools import pairwise

import numpy as np
import pytest

from nestpipe.overlap import steps_of
from nestpipe.pipeline.schedule import MODES, Event, Schedule
from nestpipe.simulate.engine import Message, Run, Send, Wait, Work

AWAITED = {"compute": ("rows", "rows"), "collect": ("grads", "grads")}


def plan(work, wire, *, device=()):
    """Seconds of work by kind, and of the wire for rows and grads; compute waits for rows, collect for gradients."""

    def phases(event):
        kind, batch, part = event
        found = []
        sender, name = AWAITED.get(kind, ("", ""))
        if sender in wire:
            found.append(Wait(Message(Event(sender, batch, part)), name))
        seconds = work.get(kind, 0.0)
        found.append(Work(0.0, seconds) if kind in device else Work(seconds))
        if kind in wire:
            found.append(Send(Message(event), wire[kind]))
        return found

    return phases


def seconds_of(run):
    return max(span.end_ns for span in run.trace().spans) / 1e9


def steady(run):
    """The time of a step in the middle, and its parts."""
    step = steps_of(run.trace())[run.num_batches // 2 - 1]
    return step.total_ns / 1e9, {
        cause: step.time_ns(cause) / 1e9 for cause in ("busy", "lookup", "communication", "bubble")
    }


WORK = {"compute": 10.0, "retrieve": 4.0}
WIRE = {"rows": 3.0, "grads": 2.0}


def test_a_sequential_step_is_the_sum_of_its_parts():
    step, parts = steady(Run(Schedule.of("serial", 2), plan(WORK, WIRE), 6))
    assert step == 4 + 2 * (3 + 10 + 2)
    assert parts == {"busy": 20.0, "lookup": 4.0, "communication": 10.0, "bubble": 0.0}


def test_a_nested_step_waits_for_the_first_rows_and_the_last_gradients():
    step, parts = steady(Run(Schedule.of("nested", 2), plan(WORK, WIRE), 6))
    assert step == 3 + 2 * 10 + 2
    assert parts == {"busy": 20.0, "lookup": 0.0, "communication": 5.0, "bubble": 0.0}


def test_a_lane_that_takes_longer_than_the_rest_is_the_step():
    step, _ = steady(Run(Schedule.of("nested", 2), plan({**WORK, "retrieve": 40.0}, WIRE), 8))
    assert step == 40


def test_without_an_edge_a_step_ends_too_early():
    """Rows that do not wait for the update of the batch before arrive earlier; so the edges are what is simulated."""
    schedule, durations = Schedule.of("nested", 2), plan({**WORK, "update": 1.5}, WIRE)
    right, _ = steady(Run(schedule, durations, 6))
    assert right == 3 + 2 * 10 + 2 + 1.5

    def dropped(event):
        return [need for need in schedule.needs(event) if (event.kind, need.kind) != ("rows", "update")]

    wrong, _ = steady(Run(schedule, durations, 6, needs=dropped))
    assert wrong == 3 + 2 * 10 + 2


def test_lanes_share_cores_and_a_device_shares_nothing():
    # While 20 s of compute run, so do 4 s of retrieval: on one core they take as long as both.
    schedule, durations = Schedule.of("nested", 2), plan(WORK, {})
    assert steady(Run(schedule, durations, 6))[0] == 20
    assert steady(Run(schedule, durations, 6, cores=1))[0] == pytest.approx(24, abs=1e-6)  # ns in the trace
    assert steady(Run(schedule, plan(WORK, {}, device=("compute",)), 6, cores=1))[0] == 20
    assert steady(Run(schedule, plan(WORK, {}, device=("compute",)), 6, cores=0.1))[0] == pytest.approx(40, abs=1e-6)


def test_messages_take_their_turn_and_wait_for_open_receives():
    def phases(event):
        message = Message(event)
        if event.kind == "keys":  # two of 2 s, on one wire, each known to be wanted 1 s after it was opened
            return [
                Send(message, 2.0, 1.0),
                Send(Message(event, 1), 2.0, 1.0),
                Wait(message, "keys"),
                Wait(Message(event, 1), "keys"),
            ]
        return [Send(message, 2.0, 1.0, opened=Event("keys", event.batch))] if event.kind == "rows" else []

    spans = {span.kind: span for span in Run(Schedule.of("serial", 1), phases, 1).trace().spans}
    assert [wait.end_ns for wait in spans["keys"].waits] == [4_000_000_000, 6_000_000_000]

    def moved_by_a_core(event):
        if event.kind == "keys":
            return [Send(Message(event), 2.0, cpu_s=5.0), Wait(Message(event), "keys")]
        return []

    assert seconds_of(Run(Schedule.of("serial", 1), moved_by_a_core, 1)) == 5
    assert seconds_of(Run(Schedule.of("serial", 1), moved_by_a_core, 1, cores=0.5)) == 10


def random_plan(seed):
    random = np.random.default_rng(seed)
    kinds = (
        "read",
        "keys",
        "retrieve",
        "post",
        "compute",
        "collect",
        "flag",
        "dense sum",
        "dense step",
        "update",
        "write",
    )
    work = {kind: float(random.exponential(random.choice([0.1, 1.0, 5.0]))) for kind in (*kinds, "rows", "grads")}
    return work, {kind: float(random.exponential(2.0)) for kind in ("rows", "grads")}


@pytest.mark.parametrize("seed", range(12))
def test_no_mode_is_above_sequential_and_a_faster_wire_never_hurts(seed):
    work, wire = random_plan(seed)
    parts = 1 + seed % 4
    plain = seconds_of(Run(Schedule.of("serial", parts), plan(work, wire), 4))
    per_part = sum(work[kind] for kind in ("rows", "compute", "grads", "collect")) + sum(wire.values())
    once = sum(seconds for kind, seconds in work.items() if kind not in {"rows", "compute", "grads", "collect"})
    assert plain == pytest.approx(4 * (parts * per_part + once), abs=1e-6)
    for mode in MODES:
        assert seconds_of(Run(Schedule.of(mode, parts), plan(work, wire), 4)) <= plain + 1e-6
    faster = [{kind: seconds / times for kind, seconds in wire.items()} for times in (1, 2, 4, 1e9)]
    nested = [seconds_of(Run(Schedule.of("nested", parts), plan(work, one), 4)) for one in faster]
    assert all(after <= before + 1e-6 for before, after in pairwise(nested)), nested


def test_lanes_that_wait_for_each_other_are_named():
    schedule = Schedule.of("serial", 1)
    with pytest.raises(ValueError, match=r"no lane can go on: compute: keys\(0\)"):
        Run(
            schedule, lambda event: [], 2, needs=lambda event: [Event("write", 1)] if event.kind == "keys" else []
        ).trace()
