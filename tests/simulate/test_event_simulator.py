"""The clock of the model against steps computed by hand, and against what must hold for any durations."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from nestpipe.pipeline.schedule import MODES, Event, Schedule
from nestpipe.profiling.overlap import steps_of
from nestpipe.simulate.cpu_model import CoreSharing, CoreTurns, CpuJob, slice_s
from nestpipe.simulate.event_simulator import Message, MessageWait, Send, SimulatedRun, StageWork

AWAITED = {"compute": ("rows", "rows"), "collect": ("grads", "grads")}


def plan(work, wire, *, device=()):
    """Seconds of work by kind, and of the wire for rows and grads; compute waits for rows, collect for gradients."""

    def phases(event):
        kind, batch, micro_batch = event
        found = []
        sender, name = AWAITED.get(kind, ("", ""))
        if sender in wire:
            found.append(MessageWait(Message(Event(sender, batch, micro_batch)), name))
        seconds = work.get(kind, 0.0)
        found.append(StageWork(0.0, seconds) if kind in device else StageWork(seconds))
        if kind in wire:
            found.append(Send(Message(event), wire[kind]))
        return found

    return phases


def seconds_of(run):
    return max(span.end_ns for trace in run.traces() for span in trace.spans) / 1e9


def steady(run):
    """The time of a step in the middle, and its causes."""
    step = steps_of(run.trace())[run.num_batches // 2 - 1]
    return step.total_ns / 1e9, {
        cause: step.time_ns(cause) / 1e9 for cause in ("busy", "lookup", "communication", "bubble")
    }


WORK = {"compute": 10.0, "retrieve": 4.0}
WIRE = {"rows": 3.0, "grads": 2.0}


def test_a_sequential_step_is_the_sum_of_its_micro_batches():
    step, micro_batches = steady(SimulatedRun(Schedule.of("serial", 2), plan(WORK, WIRE), 6))
    assert step == 4 + 2 * (3 + 10 + 2)
    assert micro_batches == {"busy": 20.0, "lookup": 4.0, "communication": 10.0, "bubble": 0.0}


def test_a_nested_step_waits_for_the_first_rows_and_the_last_gradients():
    step, micro_batches = steady(SimulatedRun(Schedule.of("nested", 2), plan(WORK, WIRE), 6))
    assert step == 3 + 2 * 10 + 2
    assert micro_batches == {"busy": 20.0, "lookup": 0.0, "communication": 5.0, "bubble": 0.0}


def test_a_stream_that_takes_longer_than_the_rest_is_the_step():
    step, _ = steady(SimulatedRun(Schedule.of("nested", 2), plan({**WORK, "retrieve": 40.0}, WIRE), 8))
    assert step == 40


def test_without_an_edge_a_step_ends_too_early():
    """Rows that do not wait for the update of the batch before arrive earlier; so the edges are what is simulated."""
    # With groups of ranks another stream than that of rows updates; without them its order alone keeps rows waiting.
    schedule, durations = Schedule.of("nested", 2, groups=True), plan({**WORK, "update": 1.5}, WIRE)
    right, _ = steady(SimulatedRun(schedule, durations, 6))
    assert right == 3 + 2 * 10 + 2 + 1.5

    def dropped(event):
        return [need for need in schedule.needs(event) if (event.kind, need.kind) != ("rows", "update")]

    wrong, _ = steady(SimulatedRun(schedule, durations, 6, needs=dropped))
    assert wrong == 3 + 2 * 10 + 2


def test_streams_share_cores_and_a_device_shares_nothing():
    # While 20 s of compute run, so do 4 s of retrieval: on one core they take as long as both.
    schedule, durations = Schedule.of("nested", 2), plan(WORK, {})
    assert steady(SimulatedRun(schedule, durations, 6))[0] == 20
    one, little = partial(CoreSharing, 1), partial(CoreSharing, 0.1)
    assert steady(SimulatedRun(schedule, durations, 6, cores=one))[0] == pytest.approx(24, abs=1e-6)  # ns in the trace
    assert steady(SimulatedRun(schedule, plan(WORK, {}, device=("compute",)), 6, cores=one))[0] == 20
    assert steady(SimulatedRun(schedule, plan(WORK, {}, device=("compute",)), 6, cores=little))[0] == pytest.approx(
        40, abs=1e-6
    )


def test_messages_take_their_turn_and_wait_for_open_receives():
    def phases(event):
        message = Message(event)
        if event.kind == "keys":  # two of 2 s, on one wire, each known to be wanted 1 s after it was opened
            return [
                Send(message, 2.0, 1.0),
                Send(Message(event, 1), 2.0, 1.0),
                MessageWait(message, "keys"),
                MessageWait(Message(event, 1), "keys"),
            ]
        return [Send(message, 2.0, 1.0, opened=Event("keys", event.batch))] if event.kind == "rows" else []

    spans = {span.kind: span for span in SimulatedRun(Schedule.of("serial", 1), phases, 1).trace().spans}
    assert [wait.end_ns for wait in spans["keys"].waits] == [4_000_000_000, 6_000_000_000]

    def moved_by_a_core(event):
        if event.kind == "keys":
            return [Send(Message(event), 2.0, cpu_s=5.0), MessageWait(Message(event), "keys")]
        return []

    assert seconds_of(SimulatedRun(Schedule.of("serial", 1), moved_by_a_core, 1)) == 5
    assert seconds_of(SimulatedRun(Schedule.of("serial", 1), moved_by_a_core, 1, cores=partial(CoreSharing, 0.5))) == 10


def test_an_idle_line_passes_a_burst_at_once_and_then_its_rate():
    def phases(event):
        sends = [Send(Message(event, number), 3.0, burst_s=2.0) for number in (0, 1)]
        waits = [MessageWait(send.message, "keys") for send in sends]
        return [*sends, *waits] if event.kind == "keys" else []

    (keys,) = [span for span in SimulatedRun(Schedule.of("serial", 1), phases, 1).trace().spans if span.kind == "keys"]
    assert [wait.end_ns for wait in keys.waits] == [1_000_000_000, 4_000_000_000]  # the burst is spent by the first


def many(phases, num_ranks, *, cores=1, late=None, speed=1.0):
    """Ranks that share cores, each with two batches."""
    turns = partial(CoreTurns, cores, speed=speed)
    return SimulatedRun(Schedule.of("serial", 1), phases, 2, cores=turns, num_ranks=num_ranks, late=late)


@pytest.mark.parametrize(("num_ranks", "cores"), [(1, 2), (2, 2), (2, 1), (3, 1), (6, 2)])
def test_ranks_that_always_want_a_core_get_their_share_of_it(num_ranks, cores):
    run = many(plan({"keys": 0.02, "update": 0.03}, {}), num_ranks, cores=cores)
    alone_s = 2 * 0.05
    assert seconds_of(run) == pytest.approx(alone_s * max(num_ranks / cores, 1), abs=1e-6)
    slow = many(plan({"keys": 0.02, "update": 0.03}, {}), num_ranks, cores=cores, speed=0.5)
    assert seconds_of(slow) == pytest.approx(2 * seconds_of(run), abs=1e-6)


def test_ranks_that_never_want_a_core_together_take_no_longer():
    """The second rank's first wait is half as long, so each works while the other waits."""
    phases = plan({"compute": 0.1, "update": 0.04}, {}, device=("compute",))

    def late(rank, event):
        return 0.5 if rank and event == Event("compute", 0) else 1.0

    first, second = (max(span.end_ns for span in one.spans) / 1e9 for one in many(phases, 2, late=late).traces())
    assert first == pytest.approx(2 * 0.14, abs=1e-6)
    assert second == pytest.approx(2 * 0.14 - 0.05, abs=1e-6)
    # In step with each other both want it at the same time, and the one that comes second is late.
    assert seconds_of(many(phases, 2)) > 2 * 0.14 + 0.04


def test_equal_ranks_drift_apart_on_one_core():
    """They take turns of a slice: who is first waits for its device while the other works, so it does not take twice as long."""
    work_s = 0.9 * slice_s(1)
    phases = plan({"keys": work_s, "compute": 1.0}, {}, device=("compute",))
    ends = [max(span.end_ns for span in one.spans) / 1e9 for one in many(phases, 2).traces()]
    assert ends == pytest.approx([2 * (work_s + 1), 2 * (work_s + 1) + work_s], abs=1e-6)


def test_a_thread_that_had_less_goes_first_and_sleeping_saves_up_nothing():
    turns, long, slept = CoreTurns(1), CpuJob(1.0), CpuJob(1.0)
    turns.add(long)
    for _ in range(10):
        turns.go_on(turns.until_s())
    turns.add(slept)
    for _ in range(10):
        turns.go_on(turns.until_s())
    # One slice later at most they are even from the moment at which the second came.
    assert slept.left_s - long.left_s == pytest.approx(10 * slice_s(1), abs=1.01 * slice_s(1))
    with pytest.raises(ValueError, match="no job would ever end"):
        CoreTurns(2, speed=-0.1)


def test_a_message_is_there_when_all_ranks_have_sent_it_and_a_core_has_received_it():
    def phases(event):
        if event.kind != "keys":
            return []
        return [
            StageWork(0.0, 1.0),
            Send(Message(event), 0.5, cpu_s=0.4, fabric_s=0.3),
            MessageWait(Message(event), "keys"),
        ]

    def late(rank, event):
        return 3.0 if rank == 2 else 1.0

    run = SimulatedRun(Schedule.of("serial", 1), phases, 1, cores=partial(CoreTurns, 3), num_ranks=3, late=late)
    ends = [max(span.end_ns for span in one.spans) / 1e9 for one in run.traces()]
    # The last sends at 3 s and 0.5 s later its share is there, of which each of two receives a half for 0.1 s; it has those
    # of the others, two after each other through what all share (1.5 and 1.8 s), long before.
    assert ends == pytest.approx([3.6, 3.6, 3.0], abs=1e-6)


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
    micro_batches = 1 + seed % 4
    plain = seconds_of(SimulatedRun(Schedule.of("serial", micro_batches), plan(work, wire), 4))
    per_micro_batch = sum(work[kind] for kind in ("rows", "compute", "grads", "collect")) + sum(wire.values())
    once = sum(seconds for kind, seconds in work.items() if kind not in {"rows", "compute", "grads", "collect"})
    assert plain == pytest.approx(4 * (micro_batches * per_micro_batch + once), abs=1e-6)
    for mode in MODES:
        assert seconds_of(SimulatedRun(Schedule.of(mode, micro_batches), plan(work, wire), 4)) <= plain + 1e-6
    faster = [{kind: seconds / times for kind, seconds in wire.items()} for times in (1, 2, 4, 1e9)]
    nested = [seconds_of(SimulatedRun(Schedule.of("nested", micro_batches), plan(work, one), 4)) for one in faster]
    assert all(after <= before + 1e-6 for before, after in pairwise(nested)), nested


def test_streams_that_deadlock_are_named():
    schedule = Schedule.of("serial", 1)
    with pytest.raises(ValueError, match=r"no stream can continue: compute: keys\(0\)"):
        SimulatedRun(
            schedule, lambda event: [], 2, needs=lambda event: [Event("write", 1)] if event.kind == "keys" else []
        ).trace()
