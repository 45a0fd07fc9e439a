"""Section: evaluation metrics with intervals, in slices, next to the popularity or mean baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nestpipe.profiling.svg import Markup, element
from nestpipe.report.html import note, paragraph, side_by_side, table
from nestpipe.report.inputs import Evaluation, MetricLine, MetricValue, Missing, RunFacts
from nestpipe.report.number_format import interval, metric
from nestpipe.report.plots import IntervalRow, draw_intervals


def quality(facts: RunFacts) -> Iterator[Markup]:
    for found in facts.evaluations.values():
        if isinstance(found, Missing):
            yield note(found.text)
        else:
            yield from _evaluation(found, facts)


def _evaluation(found: Evaluation, facts: RunFacts) -> Iterator[Markup]:
    step = f", checkpoint of step {found.step:,}" if found.step is not None else ""
    yield paragraph(element("strong", f"{found.target} targets"), f": {found.about}{step}.")
    if found.protocol is None:
        yield note(
            f"The protocol is not recorded; 'nestpipe eval {facts.folder}' evaluates the run again and stores it."
        )
    else:
        yield paragraph(element("strong", "Protocol"), f": {found.protocol}.")
    if not found.baselines:
        yield note(
            f"No baseline is recorded; 'nestpipe eval {facts.folder} --target {found.target}' computes and stores it."
        )
    yield side_by_side(_plots(found))
    yield _table(found)
    if found.seeds is not None:
        rows = [
            (
                name,
                f"{metric(one['mean'])} ± {metric(one['deviation'])}",
                interval(one["mean"], one["low"], one["high"]),
            )
            for name, one in found.seeds["metrics"].items()
        ]
        heads = ("metric", "mean ± deviation", "mean [95 %]")
        yield table(heads, rows, caption=f"One result of {len(found.seeds['runs'])} runs that differ in their seed")
    if found.audit is not None:
        rows = [("declared input", "declared", one) for one in found.audit["declared"]]
        rows += [(one["name"], "leak" if one["is_leak"] else "ok", one["seen"]) for one in found.audit["checks"]]
        yield table(("check", "result", "seen"), rows, caption="Audit: what the run reads of held-out events")


def _plots(found: Evaluation) -> Iterator[Markup]:
    """Metrics between 0 and 1 with their baseline, and the headline metric in slices."""
    lines = [line for line in found.lines if line.rises and math.isfinite(line.overall.mean)]
    if not lines:
        return
    baseline, leading = found.baseline, found.headline
    rows = [_row(line.name, line.overall, line.baselines.get(baseline) if baseline else None) for line in lines]
    summary = f"{_sentence(leading or lines[0], baseline)}. Ranges are 95 % bootstrap intervals over users."
    yield draw_intervals(
        rows, title="Quality", x_label="value of the metric, 95 % interval", summary=summary, baseline=baseline
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
            baseline=None,
        )


def _sentence(line: MetricLine, baseline: str | None) -> str:
    other = line.baselines.get(baseline) if baseline else None
    return f"{line.name} is {_shown(line.overall)}" + (f", {baseline} has {metric(other.mean)}" if other else "")


def _row(name: str, value: MetricValue, baseline: MetricValue | None) -> IntervalRow:
    low, high = (bound if bound is not None and math.isfinite(bound) else None for bound in (value.low, value.high))
    return IntervalRow(
        name, value.mean, low, high, baseline.mean if baseline and math.isfinite(baseline.mean) else None
    )


def _table(found: Evaluation) -> Markup:
    heads = ("metric", "all [95 %]", *found.baselines, *(f"{name} ({size})" for name, size in found.slices.items()))
    rows = []
    for line in found.lines:
        baselines = (_mean(line.baselines.get(name)) for name in found.baselines)
        rows.append(
            (line.name, _shown(line.overall), *baselines, *(_mean(line.slices.get(name)) for name in found.slices))
        )
    return table(heads, rows, caption=f"All metrics; slices by the {found.sliced_by}")


def _shown(value: MetricValue) -> str:
    if value.low is None or value.high is None:
        return metric(value.mean)
    return interval(value.mean, value.low, value.high)


def _mean(value: MetricValue | None) -> str:
    return "–" if value is None else metric(value.mean)
