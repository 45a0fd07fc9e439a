"""Writes SVG and HTML elements with all text escaped; scales and axis ticks for drawings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: object) -> Markup:
    """An element. Plain text inside is escaped; `text_anchor` becomes text-anchor, `class_` class; None omits an attribute."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>{joined(content)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Concatenates, with plain text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def label(x: float, y: float, text: str, *, anchor: str = "start", kind: str | None = None) -> Markup:
    """Text at a place; `kind` is its CSS class."""
    return element("text", text, x=pixel(x), y=pixel(y), text_anchor=anchor, class_=kind)


def pixel(place: float) -> str:
    return f"{place:.1f}"


def drawing(*content: str, kind: str, width: int, height: int, about: str) -> str:
    """A whole SVG file. `kind` is the CSS class of its style rules, `about` is read out by screen readers."""
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    root = element(
        "svg", *content, xmlns="http://www.w3.org/2000/svg", class_=kind, **size, role="img", aria_label=about
    )
    return f"{root}\n"


class LinearScale:
    """Maps values from low .. high to places from begin .. end."""

    def __init__(self, low: float, high: float, begin: float, end: float):
        self.low, self.high = low, high
        self._begin, self._per_unit = begin, (end - begin) / ((high - low) or 1.0)

    def __call__(self, value: float) -> float:
        return self._begin + (value - self.low) * self._per_unit


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """At most `most` round numbers from `low` to `high`. Raises ValueError unless low < high."""
    if not low < high:
        raise ValueError(f"an axis from {low} to {high} has no ticks")
    power = math.floor(math.log10((high - low) / most))
    sizes = (digit * 10.0**exponent for exponent in (power, power + 1) for digit in (1, 2, 5))
    for size in sizes:
        first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
        if last - first < most:
            return [round(number * size, 12 - power) for number in range(first, last + 1)]
    raise ValueError(f"an axis from {low} to {high} has no ticks")
