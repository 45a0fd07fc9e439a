"""Section: causes of step time, bytes sent, and a timeline of the streams."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.profiling.overlap import CAUSES
from nestpipe.profiling.overlap_report import NAMES
from nestpipe.profiling.svg import Markup, element
from nestpipe.profiling.timeline import draw, middle
from nestpipe.report.html import note, paragraph, scrolled, side_by_side, table
from nestpipe.report.inputs import Missing, RunFacts, TracedSteps
from nestpipe.report.number_format import count, milliseconds, num_bytes, share, significant
from nestpipe.report.plots import draw_shares

_DRAWN_STEPS = 3
_DRAWN_RANKS = 4
_MOST_BARS = 32


def steps(facts: RunFacts) -> Iterator[Markup]:
    if isinstance(facts.traced, Missing):
        yield note(facts.traced.text)
        return
    report = facts.traced.report
    batches = f"batches {report.first_batch:,} to {report.last_batch:,}"
    yield paragraph(
        f"{report.num_steps:,} steps were recorded completely, {batches}, on {_ranks(len(facts.traced.traces))}."
    )
    yield side_by_side([_bars(facts.traced), _division(facts.traced), _traffic(facts.traced)])
    yield _exposed(facts.traced)
    yield from _timeline(facts.traced)
    if report.num_dropped:
        yield paragraph(f"A trace keeps the last steps; {report.num_dropped:,} older spans were dropped.", kind="soft")


def _bars(traced: TracedSteps) -> Markup:
    """The median step of each rank, with the shares of causes over all its steps."""
    ranks = list(traced.report.ranks.items())[:_MOST_BARS]
    rows = [
        (f"rank {rank}", [(cause, one.step_ms.median * one.share[cause]) for cause in CAUSES]) for rank, one in ranks
    ]
    hidden = len(traced.report.ranks) - len(ranks)
    summary = "; ".join(
        f"rank {rank}: median {milliseconds(one.step_ms.median)} ms, busy {share(one.share['busy'])}"
        for rank, one in ranks[:8]
    )
    rest = f"; {hidden:,} more ranks are not drawn" if hidden else ""
    return draw_shares(
        rows, title="A step of each rank", x_label="median time of a step, ms", summary=f"{summary}{rest}."
    )


def _division(traced: TracedSteps) -> Markup:
    slowest = traced.report.slowest
    rows = [("step", slowest.step_ms, 1.0)]
    rows += [(name, slowest.ms[cause], slowest.share[cause]) for cause, name in NAMES.items()]
    cells = [
        (
            name,
            milliseconds(spread.median),
            f"{milliseconds(spread.low)} – {milliseconds(spread.high)}",
            share(part_share),
        )
        for name, spread, part_share in rows
    ]
    heads = ("slowest rank", "median", "10–90 %", "of all")
    return table(heads, cells, caption="Causes of step time, ms")


def _traffic(traced: TracedSteps) -> Markup:
    rows = [
        (kind, num_bytes(spread.median), f"{num_bytes(spread.low)} – {num_bytes(spread.high)}")
        for kind, spread in traced.report.num_bytes.items()
    ]
    if not rows:
        return paragraph("Nothing was sent to another rank.")
    return table(("kind of message", "median", "10–90 %"), rows, caption="Bytes sent per step, all ranks together")


def _exposed(traced: TracedSteps) -> Markup:
    report = traced.report
    ratios = ", ".join(f"{kind} {significant(ratio)}" for kind, ratio in report.rows_sent_ratio.items())
    return paragraph(
        f"Exposed: {share(report.exposed_lookup)} of lookup time and {share(report.exposed_communication)} of communication time was "
        "not hidden behind compute. These are upper bounds; 'nestpipe trace --sequential RUN' measures them against a run in "
        f"which nothing is hidden. Rows sent per unique key: {ratios or 'not counted'}; 1 is the lower bound."
    )


def _timeline(traced: TracedSteps) -> Iterator[Markup]:
    shown = traced.traces[:_DRAWN_RANKS]
    drawn = middle(traced.steps[: len(shown)], _DRAWN_STEPS)
    what = f"Streams of {_ranks(len(shown))} over {len(drawn[0])} steps"
    if len(shown) < len(traced.traces):
        what += f", the first of {count(len(traced.traces))}"
    caption = f"{what}. Hatched: an event blocked on messages. Pale: the compute stream is idle, by cause. 'nestpipe trace' draws other steps."
    drawing = scrolled(Markup(draw(shown, drawn)), about=what)
    yield element("figure", element("h3", "Timeline"), drawing, element("figcaption", caption), class_="wide")


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number:,} ranks"
