"""The change that `nestpipe trace` proposes."""

import pytest

from nestpipe.pipeline.schedule import Schedule
from nestpipe.simulate.advice import PipelineSetting, advice, setting_of
from nestpipe.simulate.constants import Constants
from nestpipe.simulate.costs import Cluster, run_of
from tests.profiling.made_up_traces import ranks

# A link on which rows take about as long as compute, so that overlap pays.
WORK = {"read": 1e-3, "retrieve": 1e-3, "compute": 40e-3, "update": 2e-3, "collect": 1e-3}
BUSY = Constants(
    source="made up",
    base_workers=2,
    work_s=WORK,
    num_rows=20_000,
    row_bytes=260,
    key_bytes=8,
    dense_bytes=1e5,
    bytes_per_s=125e6,
    delay_s=1e-3,
    first_use=0.8,
)


def recorded(mode, micro_batches, constants=BUSY):
    """Traces of both ranks, simulated one by one."""
    cluster = Cluster(workers=2, cores=64)
    return run_of(Schedule.of(mode, micro_batches), constants, cluster, num_batches=12).traces()


def test_a_sequential_run_on_a_slow_link_is_told_to_nest():
    traces = recorded("serial", 4)
    said = advice(traces, setting_of(traces), cores=None)
    assert "--pipeline.mode nested" in said
    assert "the cost model expects steps" in said


def test_the_expected_time_is_about_that_of_the_proposed_setting():
    traces = recorded("serial", 4)
    said = advice(traces, setting_of(traces), cores=None)
    expected_ms = float(said.partition("-> ")[2].partition(" ms")[0])
    flags = said.partition("help most: ")[2].partition(";")[0].split()
    best = recorded(flags[1], int(flags[3]))
    ends = sorted(span.end_ns for span in best[0].spans if span.kind == "dense step")
    step_ms = (ends[9] - ends[4]) / 5 / 1e6
    assert expected_ms == pytest.approx(step_ms, rel=0.25)  # constants are fitted again from the traces


def test_a_run_without_much_to_hide_is_left_alone():
    traces = recorded("nested", 2, Constants(source="fast", base_workers=2, work_s=WORK, num_rows=9, row_bytes=8))
    assert "no other mode" in advice(traces, setting_of(traces), cores=None)


def test_one_rank_has_nothing_to_hide():
    assert "one rank" in advice(
        ranks(1, num_steps=4, num_micro_batches=2), PipelineSetting("sequential", 2), cores=None
    )


def test_the_setting_is_told_from_the_trace():
    assert setting_of(recorded("serial", 4)) == PipelineSetting("sequential", 4)
    assert setting_of(recorded("nested", 2)) == PipelineSetting("nested", 2)
