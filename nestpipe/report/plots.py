"""Plots of the report as SVG: lines over steps, values with intervals, stacked bars.

Colours are in style.css, so they follow the reader's light or dark scheme; every series also has its own dash pattern. Plots are as
wide as a phone's screen, so their text stays readable there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from nestpipe.profiling.svg import LinearScale, Markup, element, joined, label, pixel, ticks
from nestpipe.report.number_format import metric, significant

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 236, 58, 14, 26, 38
_LETTER = 6.6  # width of a letter
_MOST_POINTS = 200  # more are drawn as means with the range around them
_MOST_DOTS = 30
_STYLES = 6  # of series in style.css


@dataclass(frozen=True, slots=True)
class Series:
    """A line: its name and its points, all finite, in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlot:
    """The content of a plot of lines."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    summary: str
    from_zero: bool = False
    show: Callable[[float], str] = significant


@dataclass(frozen=True, slots=True)
class IntervalRow:
    """A value, with its interval and the value of a baseline where there are such."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None
    baseline: float | None = None


def draw_lines(plot: LinePlot) -> Markup:
    """A figure of lines; there must be at least one point."""
    points = [point for one in plot.series for point in one.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    legend, rows = _legend([one.name for one in plot.series])
    top, height = _TOP + 18 * rows, _HEIGHT + 18 * rows
    low, high = (0.0, max(ys)) if plot.from_zero and min(ys) >= 0 else (min(ys), max(ys))
    across = LinearScale(*_widened(min(xs), max(xs), 0), _LEFT, _WIDTH - _RIGHT)
    up = LinearScale(*_widened(low, high, 0.05, keep_low=plot.from_zero), height - _BOTTOM, top)
    parts = [*_grid(across, up, plot), *legend]
    for number, one in enumerate(plot.series):
        parts += _line(one, across, up, number % _STYLES)
    return figure(joined(parts), title=plot.title, summary=plot.summary, height=height)


def draw_intervals(
    rows: Sequence[IntervalRow], *, title: str, x_label: str, summary: str, baseline: str | None
) -> Markup:
    """A figure with a dot and a range per row, and a diamond for the baseline of that name."""
    values = [value for row in rows for value in (row.mean, row.low, row.high, row.baseline) if value is not None]
    left = min(8 + _LETTER * max(len(row.name) for row in rows), 150) + 8
    legend, extra = _marks_legend(baseline, left)
    top = 14 + extra
    height = top + 24 * len(rows) + _BOTTOM
    from_zero = baseline is not None and min(values) >= 0  # without one, rows are compared with each other
    low, high = 0.0 if from_zero else min(values), max(values)
    across = LinearScale(*_widened(low, high, 0.04, keep_low=from_zero), left, _WIDTH - 54)
    bottom = height - _BOTTOM
    parts = [*legend, *_x_axis(across, top - 4, bottom, x_label, most=5)]
    for row, y in zip(rows, count(top + 12, 24)):
        parts += [
            label(left - 8, y + 4, row.name, anchor="end"),
            label(_WIDTH - 4, y + 4, metric(row.mean), anchor="end"),
        ]
        parts += _interval(row, across, y)
    return figure(joined(parts), title=title, summary=summary, height=height)


def draw_shares(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, title: str, x_label: str, summary: str
) -> Markup:
    """A figure of stacked bars; a row is a name and its parts, each a name, which is also a CSS class, and a size."""
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    left, top = 8 + _LETTER * max(len(name) for name, _ in rows) + 8, 14.0
    drawn = list[Markup]()
    x, y = 8.0, 12.0
    for name in names:
        wide = 18 + _LETTER * len(name) + 12
        if x + wide > _WIDTH and x > 8:
            x, y = 8.0, y + 18
        drawn += [element("rect", x=x, y=y - 9, width=13, height=11, class_=f"part {name}"), label(x + 18, y, name)]
        x += wide
    top = y + 12
    height = top + 24 * len(rows) + _BOTTOM
    most = max(sum(size for _, size in parts) for _, parts in rows)
    across = LinearScale(*_widened(0.0, most, 0.02, keep_low=True), left, _WIDTH - _RIGHT)
    drawn += _x_axis(across, top, height - _BOTTOM, x_label, most=6)
    for (name, parts), at in zip(rows, count(top + 4, 24)):
        drawn.append(label(left - 8, at + 13, name, anchor="end"))
        reached = 0.0
        for part, size in parts:
            begin, end = across(reached), across(reached + size)
            tip = element("title", f"{name}, {part}: {significant(size)}")
            drawn.append(
                element("rect", tip, x=pixel(begin), y=at, width=pixel(end - begin), height=18, class_=f"part {part}")
            )
            reached += size
    return figure(joined(drawn), title=title, summary=summary, height=height)


def figure(content: Markup, *, title: str, summary: str, height: float) -> Markup:
    """A drawing with a title and a caption, which screen readers read out too."""
    drawing = element(
        "svg",
        element("title", title),
        element("desc", summary),
        content,
        viewBox=f"0 0 {_WIDTH} {height:g}",
        role="img",
        aria_label=f"{title}. {summary}",
    )
    return element("figure", element("h3", title), drawing, element("figcaption", summary))


def _widened(low: float, high: float, margin: float, *, keep_low: bool = False) -> tuple[float, float]:
    """A range with a margin around it; never empty."""
    wide = high - low
    if wide <= 1e-12 * max(abs(low), abs(high)):
        half = abs(high) / 2 or 0.5
        return (low if keep_low else low - half), high + half
    return (low if keep_low else low - margin * wide), high + margin * wide


def _grid(across: LinearScale, up: LinearScale, plot: LinePlot) -> list[Markup]:
    top, bottom = up(up.high), up(up.low)
    marks = [label(4, top - 10, plot.y_label, kind="axis")]
    for value in ticks(up.low, up.high, most=6):
        y = pixel(up(value))
        marks.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        marks.append(label(_LEFT - 6, up(value) + 4, plot.show(value), anchor="end"))
    return [*marks, *_x_axis(across, top, bottom, plot.x_label, most=6)]


def _x_axis(across: LinearScale, top: float, bottom: float, title: str, *, most: int) -> list[Markup]:
    left, right, base = across(across.low), across(across.high), pixel(bottom)
    marks = [element("line", x1=pixel(left), x2=pixel(right), y1=base, y2=base, class_="base")]
    for value in ticks(across.low, across.high, most=most):
        x = pixel(across(value))
        marks.append(element("line", x1=x, x2=x, y1=pixel(top), y2=pixel(bottom + 4), class_="grid"))
        marks.append(label(across(value), bottom + 16, significant(value), anchor="middle"))
    return [*marks, label((left + right) / 2, bottom + 32, title, anchor="middle", kind="axis")]


def _line(one: Series, across: LinearScale, up: LinearScale, style: int) -> list[Markup]:
    points, band = _thinned(one.points)
    marks = []
    if band:
        edge = [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]
        marks.append(element("polygon", points=_path(edge, across, up), class_=f"band s{style}"))
    marks.append(element("polyline", points=_path(points, across, up), class_=f"line s{style}"))
    if len(points) <= _MOST_DOTS:
        marks += [
            element(
                "circle",
                element("title", f"{one.name}: {significant(y)} at {significant(x)}"),
                cx=pixel(across(x)),
                cy=pixel(up(y)),
                r=2.6,
                class_=f"dot s{style}",
            )
            for x, y in points
        ]
    return marks


def _thinned(
    points: Sequence[tuple[float, float]],
) -> tuple[Sequence[tuple[float, float]], list[tuple[float, float, float]]]:
    """All points if they are few; else means of neighbours, with a band from their lowest to their highest."""
    if len(points) <= _MOST_POINTS:
        return points, []
    size = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return means, [
        (x, min(y for _, y in group), max(y for _, y in group)) for (x, _), group in zip(means, groups, strict=True)
    ]


def _legend(names: Sequence[str]) -> tuple[list[Markup], int]:
    """Samples of the lines in rows above the plot, and the number of rows; empty for a single line."""
    if len(names) < 2:
        return [], 0
    marks, x, row = list[Markup](), float(_LEFT), 0
    for number, name in enumerate(names):
        wide = 32 + _LETTER * len(name) + 10
        if x + wide > _WIDTH and x > _LEFT:
            x, row = float(_LEFT), row + 1
        y = 12 + 18 * row
        marks.append(
            element("line", x1=pixel(x), x2=pixel(x + 26), y1=y - 4, y2=y - 4, class_=f"line s{number % _STYLES}")
        )
        marks.append(label(x + 32, y, name))
        x += wide
    return marks, row + 1


def _interval(row: IntervalRow, across: LinearScale, y: float) -> list[Markup]:
    marks = []
    if row.low is not None and row.high is not None:
        low, high = pixel(across(row.low)), pixel(across(row.high))
        marks.append(element("line", x1=low, x2=high, y1=y, y2=y, class_="range"))
        marks += [element("line", x1=x, x2=x, y1=y - 4, y2=y + 4, class_="range") for x in (low, high)]
    marks.append(element("circle", cx=pixel(across(row.mean)), cy=y, r=4, class_="dot s0"))
    if row.baseline is not None:
        marks.append(_diamond(across(row.baseline), y))
    return marks


def _marks_legend(baseline: str | None, left: float) -> tuple[list[Markup], int]:
    if baseline is None:
        return [], 0
    return [
        element("circle", cx=left + 4, cy=9, r=4, class_="dot s0"),
        label(left + 14, 13, "this run"),
        _diamond(left + 86, 9),
        label(left + 96, 13, baseline),
    ], 18


def _diamond(x: float, y: float) -> Markup:
    return element("path", d=f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z", class_="baseline")


def _path(points: Sequence[tuple[float, float]], across: LinearScale, up: LinearScale) -> str:
    return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
