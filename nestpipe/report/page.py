"""The report as one file: headline figures, then the sections; nothing to load, nothing to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from typing import NamedTuple

from nestpipe.data.tie_order import NO_TIMES
from nestpipe.profiling.svg import Markup, element, joined
from nestpipe.report.balance import balance, of_ranks
from nestpipe.report.curves import curves, series_of
from nestpipe.report.html import note
from nestpipe.report.inputs import Evaluation, Missing, RunFacts, SavedCheckpoint, TracedSteps, attempt
from nestpipe.report.number_format import count, duration, metric, num_bytes, share, significant
from nestpipe.report.quality import quality
from nestpipe.report.recommendations import recommendations
from nestpipe.report.settings import environment, recipe_of, settings
from nestpipe.report.steps import steps

SECTIONS: dict[str, tuple[str, Callable[[RunFacts], Iterator[Markup]]]] = {
    "quality": ("Quality", quality),
    "recommendations": ("Recommendations", recommendations),
    "curves": ("Curves", curves),
    "steps": ("Pipeline", steps),
    "balance": ("Balance and memory", balance),
    "settings": ("Configuration", settings),
    "environment": ("Environment", environment),
}
# Makes the browser refuse scripts and requests.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(facts: RunFacts, *, now: datetime | None = None) -> str:
    """The report of a run as HTML."""
    style = files("nestpipe.report").joinpath("style.css").read_text()
    title = f"{facts.name} · nestpipe report"
    head = joined(
        [
            Markup('<meta charset="utf-8">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup('<meta name="color-scheme" content="light dark">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Markup('<link rel="icon" href="data:,">'),
            element("title", title),
            Markup(f"<style>{style}</style>"),
        ]
    )
    links = [element("a", name, href=f"#{key}") for key, (name, _) in SECTIONS.items()]
    body = joined(
        [
            element("header", *_top(facts), element("nav", *links, aria_label="sections")),
            element("main", *(_section(key, facts) for key in SECTIONS)),
            element("footer", _origin(facts, now or datetime.now(UTC))),
        ]
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _top(facts: RunFacts) -> Iterator[Markup]:
    yield element("p", "nestpipe run report", class_="soft")
    yield element("h1", facts.name)
    yield element("p", element("b", facts.state.word, class_=f"state {facts.state.word}"), f" {facts.state.text}")
    if not isinstance(facts.settings, Missing):
        recipe, is_known = recipe_of(facts)
        model = facts.settings.get("model.kind")
        yield element(
            "p",
            f"{model} on {facts.settings.get('data.path')}; {'recipe' if is_known else 'nearest recipe'} {recipe}",
            class_="soft",
        )
    tiles = attempt("the headline", lambda: _headline(facts))
    yield note(tiles.text) if isinstance(tiles, Missing) else tiles


def _section(key: str, facts: RunFacts) -> Markup:
    """A section, or a note if it cannot be made from the run's files."""
    name, build = SECTIONS[key]
    content = attempt(f"the section {name}", lambda: list(build(facts)))
    shown = [note(content.text)] if isinstance(content, Missing) else content
    return element("section", element("h2", name), *shown, id=key)


def _origin(facts: RunFacts, now: datetime) -> str:
    return f"Made by nestpipe {version('nestpipe')} from {facts.folder} at {now:%Y-%m-%d %H:%M} UTC. No scripts, no requests."


class HeadlineFigure(NamedTuple):
    """A number of the headline with its label and a remark."""

    label: str
    value: str
    about: str = ""


def _headline(facts: RunFacts) -> Markup:
    """The headline figures that are known, as tiles."""
    figures = (*_quality_figures(facts), *_training_figures(facts), *_machine_figures(facts))
    tiles = [
        element("div", element("dt", one.label), element("dd", one.value), element("dd", one.about, class_="soft"))
        for one in figures
    ]
    return element("dl", *tiles, class_="tiles")


def _quality_figures(facts: RunFacts) -> Iterator[HeadlineFigure]:
    for target, found in facts.evaluations.items():
        if isinstance(found, Evaluation) and (line := found.headline):
            low, high = line.overall.low, line.overall.high
            details = [f"95 % in {metric(low)} – {metric(high)}"] if low is not None and high is not None else []
            details += [f"{found.baseline} {metric(line.baselines[found.baseline].mean)}"] if found.baseline else []
            if found.protocol is not None and found.protocol.ties != NO_TIMES:
                details.append(f"equal times: {found.protocol.ties}")
            yield HeadlineFigure(f"{line.name}, {target}", metric(line.overall.mean), "; ".join(details))
    best = facts.summary.get("best")
    if isinstance(best, dict):
        name = "ndcg@10" if isinstance(facts.settings, Missing) else str(facts.settings.get("train.metric"))
        yield HeadlineFigure(f"best validation {name}", metric(best["value"]), f"at step {best['step']:,}")


def _training_figures(facts: RunFacts) -> Iterator[HeadlineFigure]:
    series = series_of(facts.records)
    if losses := series.get("loss"):
        yield HeadlineFigure("training loss", significant(losses[-1][1]), f"from {significant(losses[0][1])}")
    epoch = facts.summary.get("epoch", max((record.get("epoch", 0) for record in facts.records), default=0))
    if facts.num_steps is not None:
        yield HeadlineFigure(
            "steps", count(facts.num_steps), f"{count(epoch)} epochs done" if epoch else "in the first epoch"
        )
    if facts.seconds:
        rate = f"{significant(facts.num_steps / facts.seconds)} steps/s" if facts.num_steps else ""
        yield HeadlineFigure("training time", duration(facts.seconds), rate)
    if tokens := series.get("tokens_per_s"):
        yield HeadlineFigure("tokens per second", count(tokens[-1][1]), "rank 0, mean since its start")


def _machine_figures(facts: RunFacts) -> Iterator[HeadlineFigure]:
    number = facts.num_ranks
    if number is not None:
        mode = "" if isinstance(facts.settings, Missing) else str(facts.settings.get("pipeline.mode", ""))
        chosen = facts.about.get("pipelines", {}).get(str(number), {}) if mode == "auto" else {}
        mode = f"auto: {chosen['mode']}" if chosen else mode
        yield HeadlineFigure("ranks", count(number), mode)
    if isinstance(facts.traced, TracedSteps):
        report = facts.traced.report
        about = f"slowest rank; step {significant(report.slowest.step_ms.median)} ms"
        yield HeadlineFigure("busy", share(report.busy_share), about)
    if number is not None and (own := of_ranks(facts, number)):
        most = max(one["memory_bytes"] for one in own)
        yield HeadlineFigure("peak memory", num_bytes(most), "largest rank" if number > 1 else "")
    if isinstance(facts.saved, SavedCheckpoint):
        rows = sum(sum(one.rows_per_bucket) for one in facts.saved.tables)
        yield HeadlineFigure("embedding rows", count(rows), f"{count(facts.saved.num_dense)} dense weights")
