"""Sums up the steps of all ranks: medians, shares of each cause, how much lookup and communication was exposed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Group
from rich.table import Table

from nestpipe.errors import DataError
from nestpipe.profiling.overlap import CAUSES, Cause, StepTimes, steps_of
from nestpipe.profiling.trace_file import KINDS, RankTrace

NAMES: dict[Cause, str] = {
    "busy": "busy",
    "lookup": "exposed lookup",
    "communication": "exposed communication",
    "bubble": "bubbles",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its 10-90 % range."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        median, low, high = np.percentile(list(values), [50, 10, 90]).tolist()
        return Spread(median, low, high)

    def cells(self) -> tuple[str, str]:
        return f"{self.median:.2f}", f"{self.low:.2f} - {self.high:.2f}"


@dataclass(frozen=True, slots=True)
class StepDivision:
    """Causes of the steps of one rank, or of the slowest rank of each step."""

    step_ms: Spread
    ms: dict[Cause, Spread]
    share: dict[Cause, float]  # of the time of all steps; sums to 1

    @staticmethod
    def of(steps: Sequence[StepTimes]) -> StepDivision:
        total = sum(step.total_ns for step in steps)
        times: dict[Cause, list[int]] = {cause: [step.time_ns(cause) for step in steps] for cause in CAUSES}
        return StepDivision(
            Spread.of(step.total_ns / 1e6 for step in steps),
            {cause: Spread.of(ns / 1e6 for ns in values) for cause, values in times.items()},
            {cause: sum(values) / total for cause, values in times.items()},
        )


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """Summary of a range of steps over all ranks."""

    first_batch: int
    last_batch: int
    num_steps: int
    ranks: dict[int, StepDivision]
    waited_for_others: dict[int, float]  # by rank, share of its time: communication while another rank still computed
    slowest: StepDivision  # of each step, the rank that took longest
    busy_share: float  # of the slowest rank
    exposed_lookup: float  # time that compute was blocked on it / its total time
    exposed_communication: float
    rows_sent_ratio: dict[str, float]  # "rows" and "grads" sent, over unique keys per rank and window
    num_bytes: dict[str, Spread]  # sent by all ranks in a step, by kind of event
    num_dropped: int  # spans dropped by full recorders

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Group:
        """Tables for `rich.print`, narrower than 80 columns."""
        slowest = Table(
            title=f"{self.num_steps} steps, batches {self.first_batch} to {self.last_batch}", pad_edge=False
        )
        ranks = Table(pad_edge=False)
        for table, heads in (
            (slowest, ("slowest rank of each step", "median ms", "10-90 %", "of the time")),
            (ranks, ("rank", "median ms", *CAUSES, "slower rank")),
        ):
            for number, head in enumerate(heads):
                table.add_column(head, justify="right" if number else "left", no_wrap=True)
        slowest.add_row("step", *self.slowest.step_ms.cells(), "100.0 %", end_section=True)
        for cause, name in NAMES.items():
            slowest.add_row(name, *self.slowest.ms[cause].cells(), f"{100 * self.slowest.share[cause]:.1f} %")
        for rank, one in self.ranks.items():
            shares = (f"{100 * one.share[cause]:.1f} %" for cause in CAUSES)
            ranks.add_row(
                str(rank), f"{one.step_ms.median:.2f}", *shares, f"{100 * self.waited_for_others[rank]:.1f} %"
            )
        lines = [
            f"exposed: lookup {100 * self.exposed_lookup:.1f} %, communication {100 * self.exposed_communication:.1f} % of their time",
            "rows sent / unique keys: "
            + (", ".join(f"{kind} {ratio:.3f}" for kind, ratio in self.rows_sent_ratio.items()) or "not counted"),
            "bytes per step, all ranks: "
            + (", ".join(f"{kind} {one.median:,.0f}" for kind, one in self.num_bytes.items()) or "none"),
        ]
        if self.num_dropped:
            lines.append(f"{self.num_dropped:,} older spans were dropped for lack of space; their steps are left out")
        return Group(slowest, ranks, *lines)


def choose(traces: Sequence[RankTrace], first: int | None = None, last: int | None = None) -> list[list[StepTimes]]:
    """Per rank the steps of batches first .. last - 1 that all ranks recorded completely. Raises DataError if there are none."""
    by_rank = [{step.batch: step for step in steps_of(trace)} for trace in traces]
    complete = sorted(set.intersection(*(set(steps) for steps in by_rank)))
    chosen = [batch for batch in complete if (first is None or batch >= first) and (last is None or batch < last)]
    if not chosen:
        wanted = ":".join("" if bound is None else str(bound) for bound in (first, last))
        raise DataError(
            f"no step of batches {wanted} was recorded completely by all ranks; there are {len(complete)}, "
            f"from {complete[0]} to {complete[-1]}."
            if complete
            else "no step was recorded completely by all ranks: that takes two batches, because the first only marks where the "
            "second begins. Record more steps with --pipeline.advanced.trace-steps N."
        )
    return [[steps[batch] for batch in chosen] for steps in by_rank]


def report(
    traces: Sequence[RankTrace], steps: Sequence[Sequence[StepTimes]], *, sequential: Sequence[Sequence[StepTimes]] = ()
) -> OverlapReport:
    """Summarises the steps of all ranks.

    Exposed time is the time that the slowest rank was blocked, over the total duration of what it waited for. Durations come
    from a `sequential` run, in which nothing is hidden. Without one they are what the trace recorded; a message in flight that
    nothing waits for is not recorded, so the shares are then upper bounds.
    """
    slowest = [max(same, key=lambda step: step.total_ns) for same in zip(*steps, strict=True)]
    totals: dict[Cause, float] = {}
    for cause in ("lookup", "communication"):
        if sequential:
            exposed = [max(same, key=lambda step: step.total_ns) for same in zip(*sequential, strict=True)]
            totals[cause] = sum(step.time_ns(cause) for step in exposed) / len(exposed) * len(slowest)
        else:
            totals[cause] = sum(step.seen_ns[cause] for step in slowest)
    division = StepDivision.of(slowest)
    return OverlapReport(
        first_batch=slowest[0].batch,
        last_batch=slowest[-1].batch,
        num_steps=len(slowest),
        ranks={own[0].rank: StepDivision.of(own) for own in steps},
        waited_for_others=_waited_for_others(steps),
        slowest=division,
        busy_share=division.share["busy"],
        exposed_lookup=_exposed(slowest, "lookup", totals),
        exposed_communication=_exposed(slowest, "communication", totals),
        rows_sent_ratio=_rows_sent_ratio(steps),
        num_bytes=_bytes(steps),
        num_dropped=sum(sum(trace.num_dropped.values()) for trace in traces),
    )


def _exposed(steps: Sequence[StepTimes], cause: Cause, totals: dict[Cause, float]) -> float:
    return sum(step.time_ns(cause) for step in steps) / totals[cause] if totals[cause] else 0.0


def _waited_for_others(steps: Sequence[Sequence[StepTimes]]) -> dict[int, float]:
    untils = [max(step.computed_ns for step in same) for same in zip(*steps, strict=True)]
    return {
        own[0].rank: sum(map(waited_for_others_ns, own, untils)) / sum(step.total_ns for step in own) for own in steps
    }


def _rows_sent_ratio(steps: Sequence[Sequence[StepTimes]]) -> dict[str, float]:
    num_rows = {
        kind: sum(step.num_rows.get(kind, 0) for own in steps for step in own) for kind in ("keys", "rows", "grads")
    }
    return {kind: num_rows[kind] / num_rows["keys"] for kind in ("rows", "grads") if num_rows["keys"]}


def _bytes(steps: Sequence[Sequence[StepTimes]]) -> dict[str, Spread]:
    per_step = [
        [sum(step.num_bytes.get(kind, 0) for step in same) for kind in KINDS] for same in zip(*steps, strict=True)
    ]
    columns = zip(*per_step, strict=True)
    return {kind: Spread.of(numbers) for kind, numbers in zip(KINDS, columns, strict=True) if any(numbers)}


def waited_for_others_ns(step: StepTimes, until_ns: int) -> int:
    """Communication of a step while a slower rank still computed the batch, until `until_ns`; that is load imbalance."""
    own = (one for one in step.segments if one.cause == "communication")
    return sum(max(min(one.end_ns, until_ns) - max(one.begin_ns, step.computed_ns), 0) for one in own)
