"""Section: how good the model is, with intervals, in slices, and beside what any model must beat."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nestpipe.report.inputs import Evaluation, MetricLine, MetricValue, Missing, RunFacts
from nestpipe.report.number_format import interval, metric
from nestpipe.report.svg import IntervalRow, Markup, draw_intervals, element, note, paragraph, plots, table


def quality(facts: RunFacts) -> Iterator[Markup]:
    for found in facts.evaluations.values():
        if isinstance(found, Missing):
            yield note(found.text)
        else:
            yield from _evaluation(found, facts)


def _evaluation(found: Evaluation, facts: RunFacts) -> Iterator[Markup]:
    step = f", checkpoint of step {found.step:,}" if found.step is not None else ""
    yield paragraph(element("strong", f"{found.target} targets"), f": {found.about}{step}.")
    if not found.floors:
        yield note(
            f"What any model must beat is not recorded; 'nestpipe eval {facts.folder} --target {found.target}' "
            "works it out and keeps it."
        )
    yield plots(_plots(found))
    yield _table(found)


def _plots(found: Evaluation) -> Iterator[Markup]:
    """All metrics between 0 and 1 beside the floor, and the leading one in slices."""
    lines = [line for line in found.lines if line.rises and math.isfinite(line.overall.mean)]
    if not lines:
        return
    floor, leading = found.floor, found.headline
    rows = [_row(line.name, line.overall, line.floors.get(floor) if floor else None) for line in lines]
    summary = f"{_said(leading or lines[0], floor)}. Ranges hold the value in 95 of 100 resamplings of the users."
    yield draw_intervals(
        rows, title="Quality", x_label="value of the metric, 95 % interval", summary=summary, floor=floor
    )
    if leading and leading.slices and math.isfinite(leading.overall.mean):
        parts = {"all": leading.overall, **leading.slices}
        rows = [_row(name, value, None) for name, value in parts.items() if math.isfinite(value.mean)]
        yield draw_intervals(
            rows,
            title=f"{leading.name} in slices",
            x_label=f"{leading.name}, 95 % interval",
            summary=f"Slices by the {found.sliced_by}: "
            + "; ".join(f"{name} {size}" for name, size in found.slices.items())
            + ".",
            floor=None,
        )


def _said(line: MetricLine, floor: str | None) -> str:
    beside = line.floors.get(floor) if floor else None
    return f"{line.name} is {_shown(line.overall)}" + (f", {floor} has {metric(beside.mean)}" if beside else "")


def _row(name: str, value: MetricValue, floor: MetricValue | None) -> IntervalRow:
    low, high = (bound if bound is not None and math.isfinite(bound) else None for bound in (value.low, value.high))
    return IntervalRow(name, value.mean, low, high, floor.mean if floor and math.isfinite(floor.mean) else None)


def _table(found: Evaluation) -> Markup:
    heads = ("metric", "all [95 %]", *found.floors, *(f"{name} ({size})" for name, size in found.slices.items()))
    rows = []
    for line in found.lines:
        floors = (_mean(line.floors.get(name)) for name in found.floors)
        rows.append(
            (line.name, _shown(line.overall), *floors, *(_mean(line.slices.get(name)) for name in found.slices))
        )
    return table(heads, rows, caption=f"All metrics; slices by the {found.sliced_by}")


def _shown(value: MetricValue) -> str:
    if value.low is None or value.high is None:
        return metric(value.mean)
    return interval(value.mean, value.low, value.high)


def _mean(value: MetricValue | None) -> str:
    return "–" if value is None else metric(value.mean)
