"""Ways to train, and what a step of each takes on so many workers, in the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from nestpipe.pipeline.schedule import Mode, Schedule
from nestpipe.profiling.overlap import CAUSES, Cause, steps_of
from nestpipe.simulate.constants import Constants
from nestpipe.simulate.costs import Cluster, run_of

_FILLING, _COUNTED, _ENDING = 5, 4, 3  # batches: the pipeline is full between the first and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to train: a mode of the schedule, and what is done to the table."""

    name: str
    title: str
    mode: Mode
    in_micro_batches: bool = True  # otherwise a batch is one part
    stale: bool = False
    dedupe: bool = True  # every distinct row of a batch travels once
    groups: bool = False  # groups of workers hold the table once each

    def schedule(self, micro_batches: int) -> Schedule:
        # Rows that leave a batch earlier are retrieved a batch earlier.
        depth, in_micro_batches = 1 + self.stale, micro_batches if self.in_micro_batches else 1
        return Schedule.of(self.mode, in_micro_batches, depth=depth, stale=self.stale, groups=self.groups)


ARMS = (
    Case(name="torchrec", title="TorchRec-like", mode="serial", in_micro_batches=False, dedupe=False),
    Case(name="2d", title="2D groups", mode="serial", in_micro_batches=False, dedupe=False, groups=True),
    Case(name="prefetch", title="prefetch", mode="dual-buffer", in_micro_batches=False),
    Case(name="stale", title="stale", mode="nested", stale=True),
    Case(name="nested", title="nested", mode="nested"),
    Case(name="nested-2d", title="nested + groups", mode="nested", groups=True),
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A step of an arm, in the model; its four parts add up to it."""

    arm: Case
    workers: int
    step_s: float
    cause_s: dict[Cause, float]  # busy, and what compute waits for: lookup, communication, bubble
    efficiency: float  # step on the base number of workers / this step


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSettings:
    """What the arms have in common."""

    micro_batches: int = 8
    group_size: int = 128

    def cluster(self, arm: Case, workers: int) -> Cluster:
        group = min(self.group_size, workers) if arm.groups else None
        return Cluster(workers=workers, group_size=group, dedupe=arm.dedupe)


def results(arm: Case, constants: Constants, workers: Sequence[int], settings: CaseSettings) -> list[CaseResult]:
    """Steps of the arm on these numbers of workers."""
    base, _ = _step(arm, constants, constants.base_workers, settings)
    steps = (_step(arm, constants, number, settings) for number in workers)
    return [
        CaseResult(arm, number, step, causes, base / step)
        for number, (step, causes) in zip(workers, steps, strict=True)
    ]


def _step(arm: Case, constants: Constants, workers: int, settings: CaseSettings) -> tuple[float, dict[Cause, float]]:
    """Seconds of a step when the pipeline is full, and of its parts."""
    num_batches = _FILLING + _COUNTED + _ENDING
    cluster = settings.cluster(arm, workers)
    trace = run_of(arm.schedule(settings.micro_batches), constants, cluster, num_batches=num_batches).trace()
    steps = [step for step in steps_of(trace) if _FILLING <= step.batch < _FILLING + _COUNTED]
    causes: dict[Cause, float] = {cause: mean(step.time_ns(cause) for step in steps) / 1e9 for cause in CAUSES}
    return mean(step.total_ns for step in steps) / 1e9, causes


def seconds_of_block(schedule: Schedule, constants: Constants, cluster: Cluster, *, num_batches: int) -> float:
    """A step in a run of so few batches that filling and emptying the pipeline count: the whole run over its steps."""
    traces = run_of(schedule, constants, cluster, num_batches=num_batches).traces()
    return max(span.end_ns for trace in traces for span in trace.spans) / 1e9 / num_batches
