"""HTML of the report's sections: paragraphs, notes, tables, boxes that scroll."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nestpipe.profiling.svg import Markup, element


def paragraph(*content: str, kind: str | None = None) -> Markup:
    return element("p", *content, class_=kind)


def note(text: str) -> Markup:
    """One line about something missing, or a caveat."""
    return paragraph(text, kind="note")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str) -> Markup:
    """A table in its own scroll box; the first cell of a row is its header."""
    head = element("tr", *(element("th", text, scope="col") for text in heads))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in rest))
        for first, *rest in rows
    ]
    inner = element("table", element("thead", head), element("tbody", *body))
    return element("div", element("h3", caption), scrolled(inner, about=caption), class_="block")


def side_by_side(drawings: Iterable[Markup]) -> Markup:
    """Drawings and small tables in a row that wraps; two share the width equally."""
    content = list(drawings)
    return element("div", *content, class_="plots two" if len(content) == 2 else "plots")


def scrolled(content: Markup, *, about: str) -> Markup:
    """Content that may be wider than the screen, in a box that the keyboard can scroll too."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=about)
