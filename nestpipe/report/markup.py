"""HTML and SVG as values. Text is escaped where it enters, so nothing that stands in a run's files can become markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


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
