"""Drawings as SVG: lines over steps, values with their intervals, and times that divide.

Colours stand in style.css, so that they follow the reader's light or dark; every series also has a dash of its own. The size is
that of a phone's screen, so that letters stay readable there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from nestpipe.report.number_format import metric, significant, ticks


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: object) -> Markup:
    """An element: plain text inside is escaped, `text_anchor` and `class_` are attributes, None leaves one out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>{joined(content)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """One after the other, plain text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def paragraph(*content: str, kind: str | None = None) -> Markup:
    return element("p", *content, class_=kind)


def note(text: str) -> Markup:
    """One line about something that is missing, or that a reader must know."""
    return paragraph(text, kind="note")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str) -> Markup:
    """A table that scrolls by itself where it is too wide; the first cell of a row names it."""
    head = element("tr", *(element("th", text, scope="col") for text in heads))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in rest))
        for first, *rest in rows
    ]
    inner = element("table", element("thead", head), element("tbody", *body))
    return element("div", element("h3", caption), scrolled(inner, about=caption), class_="block")


def plots(drawings: Iterable[Markup]) -> Markup:
    """Drawings and small tables side by side, as far as the screen is wide; two share it equally."""
    content = list(drawings)
    return element("div", *content, class_="plots two" if len(content) == 2 else "plots")


def scrolled(content: Markup, *, about: str) -> Markup:
    """Content that may be wider than a phone, in a box that can be scrolled with the keyboard too."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=about)


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 236, 58, 14, 26, 38
_LETTER = 6.6  # width of a letter
_MOST_POINTS = 200  # more are drawn as means with the range around them
_MOST_DOTS = 30
_STYLES = 6  # of series, see style.css


@dataclass(frozen=True, slots=True)
class Series:
    """A line: its name and its points, all finite, in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlot:
    """What a plot of lines shows."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    summary: str
    from_zero: bool = False
    show: Callable[[float], str] = significant


@dataclass(frozen=True, slots=True)
class IntervalRow:
    """A value with its interval, if it has one, and what stands beside it."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None
    floor: float | None = None


def draw_lines(plot: LinePlot) -> Markup:
    """A figure of lines; there must be at least one point."""
    points = [point for one in plot.series for point in one.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    legend, rows = _legend([one.name for one in plot.series])
    top, height = _TOP + 18 * rows, _HEIGHT + 18 * rows
    low, high = (0.0, max(ys)) if plot.from_zero and min(ys) >= 0 else (min(ys), max(ys))
    across = _Scale(*_widened(min(xs), max(xs), 0), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(*_widened(low, high, 0.05, keep_low=plot.from_zero), height - _BOTTOM, top)
    parts = [*_grid(across, up, plot), *legend]
    for number, one in enumerate(plot.series):
        parts += _line(one, across, up, number % _STYLES)
    return figure(joined(parts), title=plot.title, summary=plot.summary, height=height)


def draw_intervals(rows: Sequence[IntervalRow], *, title: str, x_label: str, summary: str, floor: str | None) -> Markup:
    """A figure with a dot and a range per row, and a diamond for what is named by `floor`."""
    values = [value for row in rows for value in (row.mean, row.low, row.high, row.floor) if value is not None]
    left = min(8 + _LETTER * max(len(row.name) for row in rows), 150) + 8
    legend, extra = _marks_legend(floor, left)
    top = 14 + extra
    height = top + 24 * len(rows) + _BOTTOM
    from_zero = floor is not None and min(values) >= 0  # slices are compared with each other, not with nothing
    low, high = 0.0 if from_zero else min(values), max(values)
    across = _Scale(*_widened(low, high, 0.04, keep_low=from_zero), left, _WIDTH - 54)
    bottom = height - _BOTTOM
    parts = [*legend, *_x_axis(across, top - 4, bottom, x_label, significant, most=5)]
    for row, y in zip(rows, count(top + 12, 24)):
        parts += [
            _text(left - 8, y + 4, row.name, anchor="end"),
            _text(_WIDTH - 4, y + 4, metric(row.mean), anchor="end"),
        ]
        parts += _interval(row, across, y)
    return figure(joined(parts), title=title, summary=summary, height=height)


def draw_shares(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, title: str, x_label: str, summary: str
) -> Markup:
    """A figure of stacked bars; the parts of a row are a name, which decides the colour, and a size."""
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    left, top = 8 + _LETTER * max(len(name) for name, _ in rows) + 8, 14.0
    drawn = list[Markup]()
    x, y = 8.0, 12.0
    for name in names:
        wide = 18 + _LETTER * len(name) + 12
        if x + wide > _WIDTH and x > 8:
            x, y = 8.0, y + 18
        drawn += [element("rect", x=x, y=y - 9, width=13, height=11, class_=f"part {name}"), _text(x + 18, y, name)]
        x += wide
    top = y + 12
    height = top + 24 * len(rows) + _BOTTOM
    most = max(sum(size for _, size in parts) for _, parts in rows)
    across = _Scale(*_widened(0.0, most, 0.02, keep_low=True), left, _WIDTH - _RIGHT)
    drawn += _x_axis(across, top, height - _BOTTOM, x_label, significant, most=6)
    for (name, parts), at in zip(rows, count(top + 4, 24)):
        drawn.append(_text(left - 8, at + 13, name, anchor="end"))
        reached = 0.0
        for part, size in parts:
            begin, end = across(reached), across(reached + size)
            tip = element("title", f"{name}, {part}: {significant(size)}")
            drawn.append(
                element("rect", tip, x=_at(begin), y=at, width=_at(end - begin), height=18, class_=f"part {part}")
            )
            reached += size
    return figure(joined(drawn), title=title, summary=summary, height=height)


def figure(content: Markup, *, title: str, summary: str, height: float) -> Markup:
    """A drawing with its title above it and what it shows below it, which is also read to those who cannot see it."""
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


class _Scale:
    """Numbers to places."""

    def __init__(self, low: float, high: float, begin: float, end: float):
        self.low, self.high = low, high
        self._begin, self._per_unit = begin, (end - begin) / (high - low)

    def __call__(self, value: float) -> float:
        return self._begin + (value - self.low) * self._per_unit


def _widened(low: float, high: float, margin: float, *, keep_low: bool = False) -> tuple[float, float]:
    """A range with some room around it; never empty."""
    wide = high - low
    if wide <= 1e-12 * max(abs(low), abs(high)):
        half = abs(high) / 2 or 0.5
        return (low if keep_low else low - half), high + half
    return (low if keep_low else low - margin * wide), high + margin * wide


def _grid(across: _Scale, up: _Scale, plot: LinePlot) -> list[Markup]:
    top, bottom = up(up.high), up(up.low)
    found = [_text(4, top - 10, plot.y_label, kind="axis")]
    for value in ticks(up.low, up.high, most=6):
        y = _at(up(value))
        found.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        found.append(_text(_LEFT - 6, up(value) + 4, plot.show(value), anchor="end"))
    return [*found, *_x_axis(across, top, bottom, plot.x_label, significant, most=6)]


def _x_axis(
    across: _Scale, top: float, bottom: float, label: str, show: Callable[[float], str], *, most: int
) -> list[Markup]:
    found = [
        element(
            "line",
            x1=_at(across(across.low)),
            x2=_at(across(across.high)),
            y1=_at(bottom),
            y2=_at(bottom),
            class_="base",
        )
    ]
    for value in ticks(across.low, across.high, most=most):
        x = _at(across(value))
        found.append(element("line", x1=x, x2=x, y1=_at(top), y2=_at(bottom + 4), class_="grid"))
        found.append(_text(across(value), bottom + 16, show(value), anchor="middle"))
    return [
        *found,
        _text((across(across.low) + across(across.high)) / 2, bottom + 32, label, anchor="middle", kind="axis"),
    ]


def _line(one: Series, across: _Scale, up: _Scale, style: int) -> list[Markup]:
    points, band = _thinned(one.points)
    found = []
    if band:
        edge = [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]
        found.append(element("polygon", points=_path(edge, across, up), class_=f"band s{style}"))
    found.append(element("polyline", points=_path(points, across, up), class_=f"line s{style}"))
    if len(points) <= _MOST_DOTS:
        found += [
            element(
                "circle",
                element("title", f"{one.name}: {significant(y)} at {significant(x)}"),
                cx=_at(across(x)),
                cy=_at(up(y)),
                r=2.6,
                class_=f"dot s{style}",
            )
            for x, y in points
        ]
    return found


def _thinned(
    points: Sequence[tuple[float, float]],
) -> tuple[Sequence[tuple[float, float]], list[tuple[float, float, float]]]:
    """At most so many points, as means of neighbours with their lowest and highest; all of them if they are few."""
    if len(points) <= _MOST_POINTS:
        return points, []
    size = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return means, [
        (x, min(y for _, y in group), max(y for _, y in group)) for (x, _), group in zip(means, groups, strict=True)
    ]


def _legend(names: Sequence[str]) -> tuple[list[Markup], int]:
    """Samples of the lines in rows above the plot, and the number of rows; none for a single line."""
    if len(names) < 2:
        return [], 0
    found, x, row = list[Markup](), float(_LEFT), 0
    for number, name in enumerate(names):
        wide = 32 + _LETTER * len(name) + 10
        if x + wide > _WIDTH and x > _LEFT:
            x, row = float(_LEFT), row + 1
        y = 12 + 18 * row
        found.append(element("line", x1=_at(x), x2=_at(x + 26), y1=y - 4, y2=y - 4, class_=f"line s{number % _STYLES}"))
        found.append(_text(x + 32, y, name))
        x += wide
    return found, row + 1


def _interval(row: IntervalRow, across: _Scale, y: float) -> list[Markup]:
    found = []
    if row.low is not None and row.high is not None:
        low, high = _at(across(row.low)), _at(across(row.high))
        found.append(element("line", x1=low, x2=high, y1=y, y2=y, class_="range"))
        found += [element("line", x1=x, x2=x, y1=y - 4, y2=y + 4, class_="range") for x in (low, high)]
    found.append(element("circle", cx=_at(across(row.mean)), cy=y, r=4, class_="dot s0"))
    if row.floor is not None:
        found.append(_diamond(across(row.floor), y))
    return found


def _marks_legend(floor: str | None, left: float) -> tuple[list[Markup], int]:
    if floor is None:
        return [], 0
    return [
        element("circle", cx=left + 4, cy=9, r=4, class_="dot s0"),
        _text(left + 14, 13, "this run"),
        _diamond(left + 86, 9),
        _text(left + 96, 13, floor),
    ], 18


def _diamond(x: float, y: float) -> Markup:
    return element("path", d=f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z", class_="floor")


def _path(points: Sequence[tuple[float, float]], across: _Scale, up: _Scale) -> str:
    return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)


def _text(x: float, y: float, text: str, *, anchor: str | None = None, kind: str | None = None) -> Markup:
    return element("text", text, x=_at(x), y=_at(y), text_anchor=anchor, class_=kind)


def _at(place: float) -> str:
    return f"{place:.1f}"
