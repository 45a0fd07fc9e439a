"""Section: what the run recommends to some users after which history, and the most popular items, in the ids of the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nestpipe.eval.example_lists import ExampleUser, NamedItem
from nestpipe.profiling.svg import Markup, element
from nestpipe.report.html import note, paragraph, table
from nestpipe.report.inputs import Missing, RunFacts
from nestpipe.report.number_format import count, significant


def recommendations(facts: RunFacts) -> Iterator[Markup]:
    found = facts.examples
    if isinstance(found, Missing):
        yield note(f"No examples are recorded; 'nestpipe eval {facts.folder}' computes and stores them.")
        return
    if found.users:
        yield paragraph(
            "Best items that the user has not had, as ",
            element("code", f"nestpipe recommend {facts.folder} --user …"),
            " answers.",
        )
        yield element("div", *(_user(one) for one in found.users), class_="examples")
    else:
        yield note("No lists: a ranker scores every item for every user, and this catalogue is large.")
    rows = [(str(one.item), one.title, count(one.number or 0)) for one in found.popular]
    heads: tuple[str, ...] = ("item", "title", "training events")
    if not any(one.title for one in found.popular):
        heads, rows = (heads[0], heads[2]), [(first, last) for first, _, last in rows]  # type: ignore[misc]
    yield table(heads, rows, caption="Most popular items")


def _user(one: ExampleUser) -> Markup:
    left = one.num_events - len(one.history)
    earlier = [element("li", f"{left:,} earlier event{'s' * (left > 1)}", class_="soft")] if left else []
    return element(
        "article",
        element("h3", str(one.user)),
        element("p", "history, oldest first", class_="soft"),
        element("ol", *earlier, *_lines(one.history), class_="history"),
        element("p", "recommended", class_="soft"),
        element("ol", *_lines(one.items), class_="best"),
        class_="example",
    )


def _lines(items: Sequence[NamedItem]) -> Iterator[Markup]:
    for one in items:
        parts = [element("b", str(one.item))]
        parts += [element("span", one.title)] if one.title else []
        parts += [element("span", significant(one.number), class_="score")] if one.number is not None else []
        yield element("li", *parts)
