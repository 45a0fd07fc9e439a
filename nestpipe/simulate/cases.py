"""The simulated ways to train (cases), and the step time of each on a number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from nestpipe.pipeline.schedule import Mode, Schedule
from nestpipe.profiling.overlap import CAUSES, Cause, steps_of
from nestpipe.simulate.constants import Constants
from nestpipe.simulate.costs import Cluster, run_of

_WARM_UP, _COUNTED, _DRAIN = 5, 4, 3  # batches; only those of the full pipeline are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to train: a mode of the schedule, and how the table is distributed."""

    name: str
    title: str
    mode: Mode
    in_micro_batches: bool = True  # otherwise a batch is one micro-batch
    stale: bool = False
    dedupe: bool = True  # every distinct row of a batch is sent once
    groups: bool = False  # each group of workers holds the whole table

    def schedule(self, micro_batches: int) -> Schedule:
        # Stale rows are sent one batch earlier, so they are retrieved one batch earlier.
        depth, in_micro_batches = 1 + self.stale, micro_batches if self.in_micro_batches else 1
        return Schedule.of(self.mode, in_micro_batches, depth=depth, stale=self.stale, groups=self.groups)


CASES = (
    Case(name="torchrec", title="TorchRec-like", mode="serial", in_micro_batches=False, dedupe=False),
    Case(name="2d", title="2D groups", mode="serial", in_micro_batches=False, dedupe=False, groups=True),
    Case(name="prefetch", title="prefetch", mode="dual-buffer", in_micro_batches=False),
    Case(name="stale", title="stale", mode="nested", stale=True),
    Case(name="nested", title="nested", mode="nested"),
    Case(name="nested-2d", title="nested + groups", mode="nested", groups=True),
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A simulated step; its four causes add up to it."""

    case: Case
    workers: int
    step_s: float
    cause_s: dict[Cause, float]  # busy, and idle time of compute: lookup, communication, bubble
    efficiency: float  # step on the base number of workers / this step


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSettings:
    """Settings common to all cases."""

    micro_batches: int = 8
    group_size: int = 128

    def cluster(self, case: Case, workers: int) -> Cluster:
        group = min(self.group_size, workers) if case.groups else None
        return Cluster(workers=workers, group_size=group, dedupe=case.dedupe)


def results(case: Case, constants: Constants, workers: Sequence[int], settings: CaseSettings) -> list[CaseResult]:
    """Steps of a case on these numbers of workers."""
    base, _ = _step(case, constants, constants.base_workers, settings)
    steps = (_step(case, constants, number, settings) for number in workers)
    return [
        CaseResult(case, number, step, causes, base / step)
        for number, (step, causes) in zip(workers, steps, strict=True)
    ]


def _step(case: Case, constants: Constants, workers: int, settings: CaseSettings) -> tuple[float, dict[Cause, float]]:
    """Seconds of a step of the full pipeline, and of its causes."""
    num_batches = _WARM_UP + _COUNTED + _DRAIN
    cluster = settings.cluster(case, workers)
    trace = run_of(case.schedule(settings.micro_batches), constants, cluster, num_batches=num_batches).trace()
    steps = [step for step in steps_of(trace) if _WARM_UP <= step.batch < _WARM_UP + _COUNTED]
    causes: dict[Cause, float] = {cause: mean(step.time_ns(cause) for step in steps) / 1e9 for cause in CAUSES}
    return mean(step.total_ns for step in steps) / 1e9, causes
