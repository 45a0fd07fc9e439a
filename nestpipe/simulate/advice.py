"""The one change of the pipeline that would help a recorded run most, with the gain that the cost model expects.

The constants are fitted to the run's own traces; every mode and number of micro-batches is simulated with them. Predictions are
compared with the prediction of the recorded setting, so that what the model leaves out cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from nestpipe.errors import DataError
from nestpipe.pipeline.schedule import Mode, Schedule
from nestpipe.profiling.overlap import StepTimes, steps_of
from nestpipe.profiling.trace_file import RankTrace
from nestpipe.simulate.calibrate import calibrate
from nestpipe.simulate.constants import Constants
from nestpipe.simulate.costs import Cluster, run_of

MODES: dict[str, Mode] = {
    "sequential": "serial",
    "dual-buffer": "dual-buffer",
    "frozen-window": "frozen-window",
    "nested": "nested",
}
_MICRO_BATCHES = (1, 2, 4, 8)
_WORTH_IT = 0.05  # relative gain below which nothing is proposed: the model is not that accurate
_WARM_UP, _COUNTED, _DRAIN = 5, 4, 3  # batches


@dataclass(frozen=True, slots=True)
class PipelineSetting:
    """A mode and its number of micro-batches."""

    mode: str
    micro_batches: int

    @property
    def flags(self) -> str:
        return f"--pipeline.mode {self.mode} --pipeline.micro-batches {self.micro_batches}"


def setting_of(traces: Sequence[RankTrace], mode: str | None = None) -> PipelineSetting:
    """The recorded setting; without `mode` it is told from the streams."""
    spans = [span for trace in traces for span in trace.spans]
    found = "sequential" if all(span.stream == "compute" for span in spans) else "nested"
    return PipelineSetting(mode or found, 1 + max(span.micro_batch for span in spans))


def advice(traces: Sequence[RankTrace], own: PipelineSetting, *, cores: int | None) -> str:
    """One sentence. `cores` are shared by all ranks; None if they are on several machines."""
    if len(traces) < 2:
        return "one rank exchanges no rows, so no pipeline setting can hide anything."
    try:
        constants = calibrate(traces)
    except DataError:
        return _upper_bound(traces, own)
    cluster = Cluster(workers=len(traces), cores=cores)
    times = {
        setting: step_s(setting, constants, cluster)
        for mode in MODES
        for number in {*_MICRO_BATCHES, own.micro_batches}
        if (setting := PipelineSetting(mode, number))
    }
    best = min(times, key=lambda one: (times[one], one.micro_batches))
    gain = times[own] / times[best] - 1
    measured_ms = median(step.total_ns for trace in traces for step in steps_of(trace)) / 1e6
    if gain < _WORTH_IT:
        return (
            f"a step took {measured_ms:.1f} ms; no other mode or number of micro-batches is expected to be "
            f"{_WORTH_IT:.0%} faster."
        )
    return (
        f"the change that would help most: {best.flags}; the cost model expects steps {gain:.0%} faster "
        f"({measured_ms:.1f} -> {measured_ms / (1 + gain):.1f} ms)."
        + (
            ""
            if best.micro_batches == own.micro_batches
            else " Another number of micro-batches changes the order of sums."
        )
    )


def _upper_bound(traces: Sequence[RankTrace], own: PipelineSetting) -> str:
    """Where messages are too small or too few for a fitted link."""
    steps = [step for trace in traces for step in steps_of(trace)]
    total = sum(step.total_ns for step in steps)
    exposed = sum(step.time_ns("lookup") + step.time_ns("communication") for step in steps) / total if total else 0.0
    if exposed < _WORTH_IT or own.mode == "nested":
        return f"exposed lookup and communication are {exposed:.0%} of a step; no other mode is expected to help."
    return (
        f"the change that would help most: --pipeline.mode nested; exposed lookup and communication are {exposed:.0%} of a step, "
        "which is the most that it can hide. The traces do not determine the bandwidth, so no gain is predicted."
    )


def step_s(setting: PipelineSetting, constants: Constants, cluster: Cluster) -> float:
    """Seconds of a simulated step of the full pipeline."""
    schedule = Schedule.of(MODES[setting.mode], setting.micro_batches)
    run = run_of(schedule, constants, cluster, num_batches=_WARM_UP + _COUNTED + _DRAIN)
    steps: list[StepTimes] = [step for step in steps_of(run.trace()) if _WARM_UP <= step.batch < _WARM_UP + _COUNTED]
    return mean(step.total_ns for step in steps) / 1e9
