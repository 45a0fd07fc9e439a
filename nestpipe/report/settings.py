"""Sections: the configuration, marked where it differs from the recipe, and the environment."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from nestpipe.errors import ConfigError
from nestpipe.profiling.svg import Markup, element, joined
from nestpipe.recipes import RECIPES
from nestpipe.registry import find
from nestpipe.report.html import note, paragraph, table
from nestpipe.report.inputs import Missing, RunFacts, flattened

_NOTHING = object()


def settings(facts: RunFacts) -> Iterator[Markup]:
    """All settings; one that differs from the recipe is marked and followed by the recipe's value."""
    if isinstance(facts.settings, Missing):
        yield note(facts.settings.text)
        return
    recipe, is_known = recipe_of(facts)
    usual = settings_of(recipe)
    changed = {key for key, value in facts.settings.items() if _differs(key, value, usual.get(key, _NOTHING))}
    origin = f"the recipe {recipe}" if is_known else f"{recipe}, the nearest recipe (the recipe used is not recorded)"
    yield paragraph(
        f"{len(facts.settings):,} settings; {len(changed):,} differ from {origin} and are marked ",
        element("b", "●", class_="mark"),
        ".",
    )
    sections: dict[str, list[str]] = {}
    for key in facts.settings:
        section, _, name = key.rpartition(".")
        sections.setdefault(section or "run", []).append(name)
    boxes = []
    for section, names in sections.items():
        prefix = "" if section == "run" else f"{section}."
        rows = [
            _setting(name, facts.settings[prefix + name], usual.get(prefix + name, _NOTHING), prefix + name in changed)
            for name in names
        ]
        boxes.append(element("div", element("h3", section), element("dl", *rows), class_="box"))
    yield element("div", *boxes, class_="boxes")


def recipe_of(facts: RunFacts) -> tuple[str, bool]:
    """The recipe to compare with, and whether it is the recorded one; else the recipe with the fewest differences."""
    known = str(facts.about.get("recipe"))
    with contextlib.suppress(ConfigError, ImportError):  # a recipe of the user's own, whose module may be elsewhere
        settings_of(known)
        return known, True
    own = {} if isinstance(facts.settings, Missing) else facts.settings

    def distance(name: str) -> int:
        usual = settings_of(name)
        return sum(_differs(key, own.get(key, _NOTHING), usual.get(key, _NOTHING)) for key in own | usual)

    return min(RECIPES, key=distance), False


@cache
def settings_of(recipe: str) -> dict[str, Any]:
    """All settings of a recipe. Raises ConfigError if there is none of this name."""
    config = RECIPES[recipe] if recipe in RECIPES else find(recipe)
    return flattened(json.loads(config().to_json()))


def environment(facts: RunFacts) -> Iterator[Markup]:
    about = facts.about
    if not about:
        yield note("There is no run.json, so versions and machine are unknown.")
        return
    rows = [(str(name), str(value)) for name, value in _entries(about.get("environment"))]
    if not rows:
        yield note("The machine is not recorded; earlier versions stored only the versions.")
    rows += [(str(name), str(value)) for name, value in _entries(about.get("versions"))]
    rows.append(("data digest", str(about.get("data_digest"))))
    if origin := about.get("init_from"):
        rows.append(("initialised from", str(origin.get("source", origin) if isinstance(origin, dict) else origin)))
    yield table(("name", "at the start of training"), rows, caption="Machine and versions")


def _entries(content: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(content, dict):
        yield from content.items()


def _setting(name: str, value: Any, usual: Any, changed: bool) -> Markup:
    shown = [joined([_shown(value)])]
    if changed:
        note_text = "not a setting of the recipe" if usual is _NOTHING else f"recipe: {_shown(usual)}"
        shown = [element("b", "● ", class_="mark"), element("b", _shown(value)), element("small", f" {note_text}")]
    return joined([element("dt", name), element("dd", *shown)])


def _differs(key: str, value: Any, usual: Any) -> bool:
    if key == "data.path":  # absolute in a run, relative in a recipe
        return not f"/{value}".endswith(f"/{usual}")
    return bool(value != usual)


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.12g}"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(one) for one in value) or "none"
    return str(value) if value != "" else "none"
