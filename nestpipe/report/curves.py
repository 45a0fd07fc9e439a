"""Section: everything in the metrics file, plotted over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nestpipe.profiling.svg import Markup
from nestpipe.report.html import note, side_by_side
from nestpipe.report.inputs import RunFacts
from nestpipe.report.number_format import num_bytes, share, significant
from nestpipe.report.plots import LinePlot, Series, draw_lines

_NO_CURVES = frozenset(("step", "epoch", "seconds"))  # axes
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _CurveKind:
    """How a family of curves is drawn."""

    title: str
    unit: str
    from_zero: bool = False
    show: Callable[[float], str] = significant


_KINDS = {
    "loss": _CurveKind("Training loss", "loss, mean of a batch"),
    "steps_per_s": _CurveKind("Steps per second", "steps/s, with saves and validations", True),
    "tokens_per_s": _CurveKind("Tokens per second", "tokens/s of rank 0, mean since its start", True),
    "mfu_effective": _CurveKind("Model FLOP utilisation", "share of the measured peak, rank 0", True, share),
    "lr": _CurveKind("Learning rates", "learning rate", True),
    "memory_bytes": _CurveKind("Memory", "resident bytes of rank 0, highest so far", True, num_bytes),
}


def curves(facts: RunFacts) -> Iterator[Markup]:
    if facts.no_records:
        yield note(facts.no_records.text)
        return
    if not facts.records:
        yield note("Nothing has been logged yet; --train.log-steps sets how often that happens.")
        return
    series = series_of(facts.records)
    yield side_by_side(_plot(family, named) for family, named in _families(series).items())
    for name in series:
        if steps := _nonfinite_steps(facts.records, name):
            yield note(f"{name}: {len(steps):,} values are not finite and left out, the first at step {steps[0]:,}.")
    if not any(name.startswith("validation/") for name in series):
        yield note("No validation metrics: --data.validation holds out one more event per user.")
    if "steps_per_s" not in series:
        yield note("No steps per second: there is only one record, or the records have no times (earlier versions).")


def series_of(records: Sequence[dict[str, Any]]) -> dict[str, Points]:
    """The finite points of every logged number, by name, and steps per second between records."""
    series: dict[str, Points] = {}
    for record in records:
        for name, value in record.items():
            if name not in _NO_CURVES and isinstance(value, int | float):
                points = series.setdefault(name, [])
                if math.isfinite(value):
                    points.append((record["step"], float(value)))
    times = [(record["step"], float(record["seconds"])) for record in records if "seconds" in record]
    rates = [
        (step, (step - before) / (at - earlier)) for (before, earlier), (step, at) in pairwise(times) if at > earlier
    ]
    return series | ({"steps_per_s": rates} if rates else {})


def _families(series: dict[str, Points]) -> dict[str, dict[str, Points]]:
    """Groups what belongs into one plot: losses, a validation metric at all list lengths or for all labels, rates."""
    families: dict[str, dict[str, Points]] = {}
    for name, points in series.items():
        head, _, rest = name.partition("/")
        if head == "validation":
            family = f"{head}/{rest.partition('@')[0].partition('/')[0]}"
        else:
            family = "loss" if head.startswith("loss") or head.endswith("loss") else head
        if points:
            families.setdefault(family, {})[name.removeprefix("validation/")] = points
    known = [*(name for name in families if name not in _KINDS and name.startswith("validation/")), *_KINDS]
    order = ["loss", *(name for name in known if name != "loss"), *families]
    return {name: families[name] for name in dict.fromkeys(order) if name in families}


def _plot(family: str, named: dict[str, Points]) -> Markup:
    metric = family.removeprefix("validation/")
    kind = _KINDS.get(family) or _CurveKind(f"Validation {metric}" if metric != family else family, metric)
    return draw_lines(
        LinePlot(
            title=kind.title,
            x_label="step",
            y_label=kind.unit,
            series=[Series(name, points) for name, points in named.items()],
            summary=_summary(named, kind.show),
            from_zero=kind.from_zero,
            show=kind.show,
        )
    )


def _summary(named: dict[str, Points], show: Callable[[float], str]) -> str:
    """Begin, end and extremes as a sentence."""
    if len(named) > 1:
        return "Last values: " + ", ".join(f"{name} {show(points[-1][1])}" for name, points in named.items()) + "."
    (points,) = named.values()
    (first, begin), (last, end) = points[0], points[-1]
    if len(points) == 1:
        return f"{show(begin)} at step {first:,}."
    (lowest, low), (highest, high) = min(points, key=_value), max(points, key=_value)
    return (
        f"From {show(begin)} at step {first:,} to {show(end)} at step {last:,}; "
        f"lowest {show(low)} at step {lowest:,}, highest {show(high)} at step {highest:,}."
    )


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _nonfinite_steps(records: Sequence[dict[str, Any]], name: str) -> list[int]:
    values = ((record["step"], record.get(name)) for record in records)
    return [step for step, value in values if isinstance(value, float) and not math.isfinite(value)]
