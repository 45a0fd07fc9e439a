"""Ways to train, and what a step of each takes on so many workers, in the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from nestpipe.overlap import CAUSES, Cause, steps_of
from nestpipe.pipeline.schedule import Mode, Schedule
from nestpipe.simulate.constants import Constants
from nestpipe.simulate.costs import Cluster, run_of

_FILLING, _COUNTED, _ENDING = 5, 4, 3  # batches: the pipeline is full between the first and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to train: a mode of the schedule, and what is done to the table."""

    name: str
    title: str
    mode: Mode
    in_parts: bool = True  # otherwise a batch is one part
    stale: bool = False
    dedupe: bool = True  # every distinct row of a batch travels once
    groups: bool = False  # groups of workers hold the table once each

    def schedule(self, parts: int) -> Schedule:
        # Rows that leave a batch earlier are retrieved a batch earlier.
        depth, in_parts = 1 + self.stale, parts if self.in_parts else 1
        return Schedule.of(self.mode, in_parts, depth=depth, stale=self.stale, groups=self.groups)


ARMS = (
    Arm(name="torchrec", title="TorchRec-like", mode="serial", in_parts=False, dedupe=False),
    Arm(name="2d", title="2D groups", mode="serial", in_parts=False, dedupe=False, groups=True),
    Arm(name="prefetch", title="prefetch", mode="dual-buffer", in_parts=False),
    Arm(name="stale", title="stale", mode="nested", stale=True),
    Arm(name="nested", title="nested", mode="nested"),
    Arm(name="nested-2d", title="nested + groups", mode="nested", groups=True),
)


@dataclass(frozen=True, slots=True)
class Result:
    """A step of an arm, in the model; its four parts add up to it."""

    arm: Arm
    workers: int
    step_s: float
    part_s: dict[Cause, float]  # busy, and what compute waits for: lookup, communication, bubble
    efficiency: float  # step on the base number of workers / this step


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the arms have in common."""

    parts: int = 8
    group_size: int = 128

    def cluster(self, arm: Arm, workers: int) -> Cluster:
        group = min(self.group_size, workers) if arm.groups else None
        return Cluster(workers=workers, group_size=group, dedupe=arm.dedupe)


def results(arm: Arm, constants: Constants, workers: Sequence[int], settings: Settings) -> list[Result]:
    """Steps of the arm on these numbers of workers."""
    base, _ = _step(arm, constants, constants.base_workers, settings)
    steps = (_step(arm, constants, number, settings) for number in workers)
    return [Result(arm, number, step, parts, base / step) for number, (step, parts) in zip(workers, steps, strict=True)]


def _step(arm: Arm, constants: Constants, workers: int, settings: Settings) -> tuple[float, dict[Cause, float]]:
    """Seconds of a step when the pipeline is full, and of its parts."""
    num_batches = _FILLING + _COUNTED + _ENDING
    cluster = settings.cluster(arm, workers)
    trace = run_of(arm.schedule(settings.parts), constants, cluster, num_batches=num_batches).trace()
    steps = [step for step in steps_of(trace) if _FILLING <= step.batch < _FILLING + _COUNTED]
    parts: dict[Cause, float] = {cause: mean(step.time_ns(cause) for step in steps) / 1e9 for cause in CAUSES}
    return mean(step.total_ns for step in steps) / 1e9, parts


def seconds_of_block(schedule: Schedule, constants: Constants, cluster: Cluster, *, num_batches: int) -> float:
    """A step in a run of so few batches that filling and emptying the pipeline count: the whole run over its steps."""
    traces = run_of(schedule, constants, cluster, num_batches=num_batches).traces()
    return max(span.end_ns for trace in traces for span in trace.spans) / 1e9 / num_batches
