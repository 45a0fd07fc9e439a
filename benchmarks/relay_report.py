"""What the blocks of relay.py amount to: ratios with their range and verdict, records, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import measure
import numpy as np
from relay_cells import CELLS, Cell, hit_share
from relay_worlds import SEED

from nestpipe.atomic_files import replace_file
from nestpipe.profiling.svg import LinearScale, Markup, drawing, element, joined, label, pixel, ticks

Blocks = Sequence[Mapping[str, Any]]
PICTURE = measure.ROOT / "docs" / "images" / "relay.svg"
AT_LEAST = {"goodput": 3.6, "history": 1.5}
AT_MOST_CPU, USEFUL = 1.05, 0.7
_COLOURS = {"full": "#1f6bb0", "everything": "#b3402f"}


def spread_of(cell: Cell, blocks: Blocks) -> measure.Spread | None:
    """The relay over full inference, block by block; None where full inference keeps the budget at no rate."""
    own = [
        block["everything"]["per_s"] if cell.kind in {"goodput", "length"} else block["everything"] for block in blocks
    ]
    base = [block["full"]["per_s"] if cell.kind in {"goodput", "length"} else block["full"] for block in blocks]
    if not blocks or min(base) <= 0:
        return None
    ratios = [a / b for a, b in zip(own, base, strict=True)]
    return measure.Spread.of(ratios) if len(ratios) > 1 else measure.Spread(ratios[0], ratios[0], ratios[0])


def summarise(found: Mapping[str, Blocks]) -> dict[str, Any]:
    """Prints a table, and returns the figures of all cells that have blocks."""
    figures: dict[str, Any] = {}
    rows = []
    for name, blocks in found.items():
        cell = CELLS[name]
        if not blocks:
            continue
        if cell.kind == "overload":
            useful = float(np.median([one["useful_over_capacity"] for one in blocks]))
            p99 = float(np.median([one["useful_p99_over_budget"] for one in blocks]))
            figures |= {"overload_useful_over_capacity": useful, "overload_useful_p99_over_budget": p99}
            is_met = min(one["useful_over_capacity"] for one in blocks) >= USEFUL and p99 <= 1
            rows.append(
                [
                    name,
                    str(len(blocks)),
                    f"useful {useful:.2f} of capacity, P99 {p99:.2f} of budget",
                    "met" if is_met else "missed",
                ]
            )
            continue
        if cell.kind == "share":
            shares = {arm: blocks[-1][arm]["share"] for arm in ("full", "everything")}
            figures[f"{name}"] = shares
            text = f"good: full {shares['full']:.1%}, relay {shares['everything']:.1%} at {blocks[-1]['rate']:.1f}/s"
            rows.append([name, str(len(blocks)), text, ""])
            continue
        spread = spread_of(cell, blocks)
        if spread is None:
            rows.append([name, str(len(blocks)), "full inference keeps the budget at no rate", ""])
            continue
        figures |= {f"{name}": round(spread.median, 3), f"{name}_range": spread.range}
        rows.append([name, str(len(blocks)), str(spread), _verdict(cell, spread) if len(blocks) > 1 else ""])
    print(measure.table(["cell", "blocks", "relay over full inference", "limit"], rows) if rows else "no blocks yet")
    return figures


def _verdict(cell: Cell, spread: measure.Spread) -> str:
    if cell.kind == "ml1m":
        # The limit is on the median.
        return f"{'met' if spread.median <= AT_MOST_CPU else 'missed'} (median at most {AT_MOST_CPU})"
    if cell.kind == "goodput":
        is_met = spread.median >= AT_LEAST["goodput"] and spread.low > 3.0
        return f"{'met' if is_met else 'missed'} (median at least 3.6, range above 3.0)"
    return f"{measure.verdict(spread, at_least=AT_LEAST[cell.kind])} (at least {AT_LEAST[cell.kind]})"


def record(found: Mapping[str, Blocks], *, commits: Sequence[str]) -> None:
    """Appends the records that the scoreboard reads, and draws the picture."""
    for workload, mode, figures in _records(found):
        settings = {"workload": workload, "overload": False, "curve": False, "history": False, "commits": commits}
        measure.append("relay", measure.record(seed=SEED, figures=figures, settings=settings | mode))
    if any(found.get(f"length-{length}") for length in (1024, 2048, 4096)) or found.get("goodput-2.0-cold10"):
        replace_file(PICTURE, draw(found).encode())
        print(f"picture: {PICTURE}")


def _records(found: Mapping[str, Blocks]) -> Iterator[tuple[str, dict[str, bool], dict[str, Any]]]:
    cell, blocks = CELLS["goodput-2.0-cold10"], found["goodput-2.0-cold10"]
    if len(blocks) > 1 and (spread := spread_of(cell, blocks)):
        figures: dict[str, Any] = {
            "goodput_ratio": round(spread.median, 3),
            "goodput_ratio_range": spread.range,
            "cold_share": cell.cold,
            "budget_ms": blocks[-1]["budget_ms"],
        }
        for arm in ("full", "everything"):
            figures[f"goodput_per_s {arm}"] = [block[arm]["per_s"] for block in blocks]
            figures[f"hit_share {arm}"] = round(hit_share(blocks, arm), 3)
            figures[f"cpu_ms_per_answer {arm}"] = float(np.median([block[arm]["cpu_ms"] for block in blocks]))
        yield "relay-long", {}, figures
    cell, blocks = CELLS["history-2.0-cold10"], found["history-2.0-cold10"]
    if len(blocks) > 1 and (spread := spread_of(cell, blocks)):
        events = {arm: [block[arm] for block in blocks] for arm in ("full", "everything")}
        yield (
            "relay-long",
            {"history": True},
            {
                "history_ratio": round(spread.median, 3),
                "history_ratio_range": spread.range,
                "history_events": events,
                "cold_share": cell.cold,
            },
        )
    if blocks := found["overload"]:
        keys = {"useful_p99_over_budget": "ranked_p99_over_budget", "useful_over_capacity": "good_over_capacity"}
        keys |= {"share_refused": "share_refused", "refused_p99_over_budget": "refused_p99_over_budget"}
        figures = {f"overload_{new}": float(np.median([one[old] for one in blocks])) for old, new in keys.items()}
        figures["overload_failed"] = sum(one["num_failed"] for one in blocks)
        figures["recovered_after_s"] = max(one["recovered_after_s"] for one in blocks)
        yield "relay-long", {"overload": True}, figures
    if len(blocks := found["ml1m"]) > 1 and (spread := spread_of(CELLS["ml1m"], blocks)):
        yield (
            "relay-ml1m",
            {},
            {
                "idle_cpu_overhead": round(spread.median - 1, 4),
                "idle_cpu_overhead_range": [round(one - 1, 4) for one in spread.range],
                "signals everything": blocks[-1]["signals"],
            },
        )


def draw(found: Mapping[str, Blocks]) -> str:
    """Goodput over budgets and over the length of histories, of both arms, side by side."""
    budgets = {
        float(cell.budget): found.get(name, ())
        for name, cell in CELLS.items()
        if cell.kind in {"goodput", "share"} and cell.cold == 0.1 and not cell.budget.startswith("max")
    }
    lengths = {float(cell.length): found.get(name, ()) for name, cell in CELLS.items() if cell.kind == "length"}
    width, height = 720, 330
    panels = [
        _panel(_points(budgets), left=56, right=350, title="by budget (of full inference at P90)"),
        _panel(_points(lengths), left=410, right=704, title="by events of a history"),
    ]
    legend = [
        joined(
            [
                element("line", x1=12 + 180 * place, x2=34 + 180 * place, y1=44, y2=44, stroke=colour, stroke_width=2),
                label(40 + 180 * place, 48, {"full": "full inference", "everything": "relay"}[arm]),
            ]
        )
        for place, (arm, colour) in enumerate(_COLOURS.items())
    ]
    head = [
        element("rect", width=width, height=height, fill="#ffffff"),
        label(12, 20, "Good answers per second of one core, 10 % cold users", kind="head"),
    ]
    about = "goodput of full inference and of the relay over budgets and over history lengths"
    return drawing(*head, *legend, *panels, kind="relay", width=width, height=height, about=about)


def _points(cells: Mapping[float, Blocks]) -> dict[str, list[tuple[float, float]]]:
    """The median of good answers per second by arm, in the order of x."""
    return {
        arm: [
            (x, float(np.median([one[arm]["per_s"] for one in blocks])))
            for x, blocks in sorted(cells.items())
            if blocks
        ]
        for arm in _COLOURS
    }


def _panel(points: Mapping[str, list[tuple[float, float]]], *, left: float, right: float, title: str) -> Markup:
    top, bottom = 78, 282
    xs = sorted({x for own in points.values() for x, _ in own})
    if not xs:
        return label(left, top + 40, f"{title}: not measured")
    highest = max([y for own in points.values() for _, y in own] + [1e-9]) * 1.08
    across = LinearScale(0, max(len(xs) - 1, 1), left, right)
    up = LinearScale(0.0, highest, bottom, top)
    parts = [label((left + right) / 2, bottom + 38, title, anchor="middle")]
    for value in ticks(0.0, highest, most=6):
        y = pixel(up(value))
        parts.append(element("line", x1=left, x2=right, y1=y, y2=y, stroke="#dfe2e6"))
        parts.append(label(left - 6, up(value) + 4, f"{value:g}", anchor="end"))
    parts += [label(across(place), bottom + 18, f"{x:,g}", anchor="middle") for place, x in enumerate(xs)]
    for arm, own in points.items():
        path = " ".join(f"{across(xs.index(x)):.1f},{up(y):.1f}" for x, y in own)
        parts.append(element("polyline", points=path, fill="none", stroke=_COLOURS[arm], stroke_width=2))
        parts += [
            element("circle", cx=pixel(across(xs.index(x))), cy=pixel(up(y)), r=3, fill=_COLOURS[arm]) for x, y in own
        ]
    return joined(parts)
