"""The whole report as one file: the sections in reading order, the style beside them, nothing to load and nothing to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files

from nestpipe.report.balance import balance
from nestpipe.report.curves import curves
from nestpipe.report.headline import headline
from nestpipe.report.inputs import Missing, RunFacts, attempt
from nestpipe.report.quality import quality
from nestpipe.report.settings import environment, recipe_of, settings
from nestpipe.report.steps import steps
from nestpipe.report.svg import Markup, element, joined, note

SECTIONS: dict[str, tuple[str, Callable[[RunFacts], Iterator[Markup]]]] = {
    "quality": ("Quality", quality),
    "curves": ("Curves", curves),
    "steps": ("Pipeline", steps),
    "balance": ("Balance and memory", balance),
    "settings": ("Configuration", settings),
    "environment": ("Environment", environment),
}
# The browser itself refuses scripts and anything from outside.
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
    tiles = attempt("the headline", lambda: headline(facts))
    yield note(tiles.text) if isinstance(tiles, Missing) else tiles


def _section(key: str, facts: RunFacts) -> Markup:
    """A section; if the run's files hold what nobody expects, a line that says so."""
    name, build = SECTIONS[key]
    content = attempt(f"the section {name}", lambda: list(build(facts)))
    shown = [note(content.text)] if isinstance(content, Missing) else content
    return element("section", element("h2", name), *shown, id=key)


def _origin(facts: RunFacts, now: datetime) -> str:
    return f"Made by nestpipe {version('nestpipe')} from {facts.folder} at {now:%Y-%m-%d %H:%M} UTC. No script, nothing is loaded from elsewhere."
