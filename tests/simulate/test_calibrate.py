"""Constants are found again in traces made from them, and in made-up traces of a known clock."""

from dataclasses import asdict, replace

import pytest

from nestpipe.errors import DataError
from nestpipe.pipeline.schedule import Event, Schedule
from nestpipe.profiling.overlap import steps_of
from nestpipe.simulate.calibrate import Probes, calibrate
from nestpipe.simulate.cases import CASES, CaseSettings, results
from nestpipe.simulate.constants import Constants
from nestpipe.simulate.costs import Cluster, StageCosts, run_of, slowest
from nestpipe.simulate.event_simulator import StageWork
from tests.profiling.made_up_traces import TIMES_MS, ranks

WORK_S = {
    "read": 0.004, "keys": 0.002, "retrieve": 0.003, "rows": 0.002, "grads": 0.0015, "compute": 0.01, "collect": 0.001,
    "flag": 0.0001, "dense sum": 0.0005, "dense step": 0.0008, "update": 0.003, "write": 0.0007,
}  # fmt: skip
KNOWN = Constants(
    source="test",
    base_workers=2,
    work_s=WORK_S,
    device_s=0.05,
    num_rows=10_000,
    row_bytes=256,
    key_bytes=9,
    dense_bytes=40_000,
    first_use=0.7,
    bytes_per_s=1.2e8,
    delay_s=0.0003,
    peer_s=0.00002,
)


def traced(constants, mode="serial", *, workers=2, micro_batches=4, run=None):
    made = run_of(Schedule.of(mode, micro_batches), constants, Cluster(workers=workers), num_batches=6)
    return [replace(made.trace(rank), run=run or mode) for rank in range(workers)]


def compared(found, known, *, rel):
    mine, theirs = asdict(found), asdict(known)
    work, expected = mine.pop("work_s"), theirs.pop("work_s")
    for one in (mine, theirs):
        del one["source"], one["jitter"]
    assert mine == pytest.approx(theirs, rel=rel)
    assert {kind: seconds for kind, seconds in work.items() if seconds > 1e-8} == pytest.approx(expected, rel=rel)


def test_constants_are_found_again_in_traces_made_from_them():
    # Counts and times in a trace are integers: rows of a micro-batch to one, and a nanosecond in 20 us.
    compared(calibrate(traced(KNOWN), device_s=0.05), KNOWN, rel=1e-3)
    nested = calibrate(traced(KNOWN, "nested"), device_s=0.05)
    # The sum of dense gradients is on the wire with the last gradients: 20 kB next to 485 kB.
    assert nested.bytes_per_s == pytest.approx(KNOWN.bytes_per_s, rel=0.05)
    both = calibrate([*traced(KNOWN), *traced(KNOWN, "nested")], device_s=0.05)
    assert both.work_s == calibrate(traced(KNOWN), device_s=0.05).work_s


def test_the_cost_of_a_micro_batch_is_found_from_two_numbers_of_them_and_is_0_from_one():
    known = replace(KNOWN, micro_batch_s=0.0006)
    both = [*traced(known, micro_batches=2, run="two"), *traced(known, micro_batches=8, run="eight")]
    found = calibrate(both, device_s=0.05)
    assert found.micro_batch_s == pytest.approx(0.0006, rel=0.01)
    assert found.work_s["compute"] == pytest.approx(WORK_S["compute"], rel=0.01)
    one = calibrate(traced(known, micro_batches=8), device_s=0.05)
    assert one.micro_batch_s == 0
    assert one.work_s["compute"] == pytest.approx(WORK_S["compute"] + 8 * 0.0006, rel=0.01)


def test_congestion_is_found_from_two_numbers_of_workers_and_is_0_from_one():
    known = replace(KNOWN, congestion=0.4, wire_cpu_s=0.0)
    assert calibrate(traced(known), device_s=0.05).congestion == 0
    both = [*traced(known, run="two"), *traced(known, workers=8, run="eight")]
    assert calibrate(both, device_s=0.05).congestion == pytest.approx(0.4, rel=0.01)


def test_background_cpu_time_beyond_idle_moves_bytes():
    found, step_s = calibrate(traced(KNOWN), device_s=0.05), steps_of(traced(KNOWN)[0])[2].total_ns / 1e9
    sent = (2 * (KNOWN.num_rows * KNOWN.row_bytes + KNOWN.dense_bytes) + KNOWN.num_rows * KNOWN.key_bytes) / 2
    probes = Probes(background_s=0.006 + 0.02 * step_s, idle_share=0.02, peer_s=KNOWN.peer_s / 2)
    busy = calibrate(traced(KNOWN), device_s=0.05, probes=probes)
    assert busy.wire_cpu_s == pytest.approx(0.006 / sent, rel=0.01)
    assert (busy.idle_share, busy.peer_s) == (0.02, KNOWN.peer_s / 2)
    assert (found.wire_cpu_s, found.idle_share) == (0, 0)


def test_ranks_that_share_cores_are_simulated_one_by_one():
    """With a core for every thread they take as long as one that stands for all; with fewer longer, also for what runs when idle."""
    schedule = Schedule.of("nested", 4)

    def seconds(cores, constants=KNOWN):
        traces = run_of(schedule, constants, Cluster(workers=4, cores=cores), num_batches=3).traces()
        return max(span.end_ns for trace in traces for span in trace.spans)

    assert seconds(64) == pytest.approx(seconds(None), rel=1e-3)
    assert seconds(64) < seconds(2) < seconds(1)
    assert seconds(1) < seconds(1, replace(KNOWN, idle_share=0.05))
    shaken = replace(KNOWN, jitter=0.1)
    assert seconds(64) < seconds(64, shaken) == seconds(64, shaken)  # drawn, but the same each time
    narrow = replace(KNOWN, fabric_bytes_per_s=KNOWN.bytes_per_s)
    assert seconds(64) < seconds(64, narrow)


def test_a_clock_that_is_not_ours():
    """tests/profiling/made_up_traces.py draws its own times: messages take 2 ms of whatever size, compute 10 ms +- 10 %."""
    (one,) = ranks(1, "serial", num_steps=12)
    found = calibrate(
        [replace(one, rank=rank, world_size=2) for rank in (0, 1)]
    )  # its ranks do not wait for each other
    assert found.work_s["read"] == pytest.approx(1e-3 * TIMES_MS["read"], rel=0.1)
    assert found.work_s["compute"] == pytest.approx(0.010, rel=0.1)
    assert found.delay_s + 250 * 128 / found.bytes_per_s == pytest.approx(0.002, rel=0.05)
    assert 0 < found.jitter < 0.1


def test_traces_that_do_not_tell_are_refused():
    with pytest.raises(DataError, match="a trace of one rank contains no messages"):
        calibrate(ranks(1))
    with pytest.raises(DataError, match="had 2 ranks, but there are traces of rank 1"):
        calibrate(ranks(2)[1:])
    with pytest.raises(DataError, match=r"less than the device time of 90[.]0 ms"):
        calibrate(traced(KNOWN), device_s=0.09)
    with pytest.raises(DataError, match="trained in groups"):
        calibrate([replace(one, spans=(replace(one.spans[0], kind="merge"), *one.spans[1:])) for one in ranks(2)])
    with pytest.raises(DataError, match="there is no trace"):
        calibrate([])


def test_every_message_costs_its_own_peers():
    """In groups rows go to the group, dense gradients to all, and sums of micro-batches to the replicas."""
    costs = StageCosts(Schedule.of("nested", 4, groups=True), KNOWN, Cluster(workers=64, group_size=16))

    def messages(kind):
        (work,) = (phase for phase in costs.phases(Event(kind, 3, 0)) if isinstance(phase, StageWork))
        share = 0.25**0.7 if kind == "rows" else 1.0  # of the first micro-batch
        return (work.cpu_s - share * KNOWN.work_s.get(kind, 0.0)) / KNOWN.peer_s

    found = {kind: messages(kind) for kind in ("rows", "keys", "dense sum", "merge", "update")}
    assert found == pytest.approx({"rows": 15, "keys": 4 * 15, "dense sum": 4 * 63, "merge": 4 * 3, "update": 0})


def test_constants_are_kept_as_json(tmp_path):
    KNOWN.save(tmp_path / "c.json")
    assert Constants.load(tmp_path / "c.json") == KNOWN
    (tmp_path / "d.json").write_text('{"format": "nestpipe constants", "version": 1, "sorce": "x"}')
    with pytest.raises(DataError, match="sorce"):
        Constants.load(tmp_path / "d.json")
    with pytest.raises(ValueError, match="constant 'delay_s' is -1"):
        replace(KNOWN, delay_s=-1)


def test_more_bandwidth_is_never_slower_and_more_stragglers_never_faster():
    settings = CaseSettings(micro_batches=2, group_size=8)
    for case in CASES:
        steps = [
            results(case, replace(KNOWN, bytes_per_s=rate, jitter=jitter), [64], settings)[0].step_s
            for rate, jitter in ((1e7, 0.1), (1e7, 0), (4e7, 0), (1e10, 0))
        ]
        assert steps == sorted(steps, reverse=True), case.name
    assert slowest(1) == 0
    assert slowest(2) == pytest.approx(0.564, abs=0.03)  # Blom's approximation; the exact value is 1/sqrt(pi)
    assert slowest(1000) == pytest.approx(3.241, abs=0.03)


def test_dedupe_groups_and_staleness_do_what_they_should():
    constants = replace(KNOWN, duplicates=3.0, congestion=0.5)
    step = {
        case.name: results(case, constants, [256], CaseSettings(micro_batches=4, group_size=16))[0] for case in CASES
    }
    assert step["torchrec"].step_s > step["2d"].step_s  # smaller exchanges are less congested
    assert step["prefetch"].step_s > step["nested"].step_s > step["stale"].step_s
    assert step["torchrec"].cause_s["communication"] > 2.5 * step["prefetch"].cause_s["communication"]
    for one in step.values():
        assert sum(one.cause_s.values()) == pytest.approx(one.step_s)
