"""Step time and efficiency of all cases over the number of workers: a self-contained SVG, for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nestpipe.profiling.svg import LinearScale, Markup, drawing, element, label, pixel, ticks
from nestpipe.report.number_format import significant
from nestpipe.simulate.cases import CaseResult

_PANEL, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 470, 380, 58, 16, 78, 44
_LETTER = 6.4  # width of a letter at 11 px
_SERIES = (  # colour on light, on dark, dashes
    ("#b3402f", "#f08a78", "none"),
    ("#b36b00", "#eeb45a", "7 4"),
    ("#7a7f87", "#a9b0ba", "2 3"),
    ("#7a4fb3", "#b99af0", "9 3 2 3"),
    ("#1f7a45", "#6cc28a", "none"),
    ("#1f6bb0", "#7dbcf2", "5 3"),
)
_STYLE = """
.simulated text{font:11px ui-sans-serif,system-ui,"DejaVu Sans",sans-serif;fill:#1c1e21}
.simulated .head{font-weight:600;font-size:12px}.simulated .soft{fill:#5b616a}
.simulated .back{fill:#fff}.simulated .grid{stroke:#dfe2e6;stroke-width:1}.simulated .line{fill:none;stroke-width:2}
"""
_DARK = """.simulated text{fill:#e4e6ea}.simulated .soft{fill:#a2a9b3}.simulated .back{fill:#15181c}.simulated .grid{stroke:#3a4048}"""


def draw(series: Sequence[Sequence[CaseResult]], *, title: str) -> str:
    """One line per case (one sequence of results each), titled as a model and not a measurement."""
    steps = [[(one.workers, 1e3 * one.step_s) for one in own] for own in series]
    shares = [[(one.workers, 100 * one.efficiency) for one in own] for own in series]
    names = [own[0].case.title for own in series]
    content = [
        element("style", Markup(_style())),
        element("rect", class_="back", width=2 * _PANEL, height=_HEIGHT),
        label(12, 18, f"model, not measured: {title}", kind="head"),
        *_legend(names),
        *_panel(steps, names, 0, "step, ms"),
        *_panel(shares, names, _PANEL, "scaling efficiency, %"),
    ]
    first, last = series[0][0].workers, series[0][-1].workers
    about = f"model of {', '.join(names)} on {first:,} to {last:,} workers: {title}"
    return drawing(*content, kind="simulated", width=2 * _PANEL, height=_HEIGHT, about=about)


def _style() -> str:
    light = "".join(f".simulated .s{n}{{stroke:{one[0]};stroke-dasharray:{one[2]}}}" for n, one in enumerate(_SERIES))
    dark = "".join(f".simulated .s{n}{{stroke:{one[1]}}}" for n, one in enumerate(_SERIES))
    return f"{_STYLE}{light}\n@media screen and (prefers-color-scheme:dark){{{_DARK}{dark}}}\n"


def _legend(names: Sequence[str]) -> Iterator[Markup]:
    x = 12.0
    for number, name in enumerate(names):
        yield element("line", x1=f"{x:.0f}", x2=f"{x + 26:.0f}", y1=36, y2=36, class_=f"line s{number % len(_SERIES)}")
        yield label(x + 32, 40, name)
        x += 32 + _LETTER * len(name) + 18


def _panel(
    lines: Sequence[Sequence[tuple[int, float]]], names: Sequence[str], left: float, title: str
) -> Iterator[Markup]:
    """Lines over the number of workers on a logarithmic axis; values from zero."""
    workers = [number for number, _ in lines[0]]
    highest = 1.05 * max(value for line in lines for _, value in line)
    bottom = _HEIGHT - _BOTTOM
    across = LinearScale(math.log2(workers[0]), math.log2(workers[-1]), left + _LEFT, left + _PANEL - _RIGHT)
    up = LinearScale(0.0, highest, bottom, _TOP)
    yield label(left + 12, _TOP - 14, title, kind="head")
    for value in ticks(0.0, highest, most=7):
        y = pixel(up(value))
        yield element("line", x1=left + _LEFT, x2=left + _PANEL - _RIGHT, y1=y, y2=y, class_="grid")
        yield label(left + _LEFT - 6, up(value) + 4, significant(value), anchor="end", kind="soft")
    for number in workers:
        yield label(across(math.log2(number)), bottom + 16, f"{number:,}", anchor="middle", kind="soft")
    yield label(left + (_LEFT + _PANEL - _RIGHT) / 2, bottom + 34, "workers", anchor="middle", kind="soft")
    for number, (line, name) in enumerate(zip(lines, names, strict=True)):
        path = " ".join(f"{across(math.log2(one)):.1f},{up(value):.1f}" for one, value in line)
        yield element("polyline", element("title", name), points=path, class_=f"line s{number % len(_SERIES)}")
