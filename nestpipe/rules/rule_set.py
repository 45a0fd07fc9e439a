"""Rules as a caller writes them: in a request, in Python, on the command line or in a file of named sets.

    {"filter": {"category": ["lamp", "sofa"], "price": {"lte": 50}},     items that may be shown
     "exclude": ["p7"], "unseen": true,                                  items that may not
     "boost": [{"filter": {"brand": "own"}, "add": 0.5}],                added to the score
     "max_per": {"brand": 2}, "diversity": 0.3,                          how the list is made
     "pin": ["p1"]}                                                      these stand first

Ids and values are those of the log. Whether fields and values exist is checked where they are compiled (compiled_rules.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import ConfigError, DataError

Scalar = int | float | str
_MAX_FIELDS, _MAX_BOOSTS = 32, 32  # of one request: each costs a pass over the catalogue


class RuleError(DataError):
    """A rule is not understood, or names what does not exist; `field` is the rule."""

    def __init__(self, where: str, problem: str):
        super().__init__(f"{where} {problem}")
        self.field = where.partition(".")[0].partition("[")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """Numbers from `gte` to `lte`, both included; None is open."""

    gte: float | None = None
    lte: float | None = None


FieldFilter = tuple[Scalar, ...] | ValueRange
"""Some values, one of which an item must have, or a range."""
Filters = Mapping[str, FieldFilter]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBoost:
    """What is added to the scores of the items that pass a filter."""

    filter: Filters
    add: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of one request; the defaults change nothing. `unseen` None is the run's own choice."""

    filter: Filters = field(default_factory=dict)
    exclude: tuple[OwnId, ...] = ()
    max_per: Mapping[str, int] = field(default_factory=dict)
    boost: tuple[ScoreBoost, ...] = ()
    pin: tuple[OwnId, ...] = ()
    diversity: float | None = None
    unseen: bool | None = None

    def over(self, base: Rules) -> Rules:
        """These rules on top of others: objects are merged by key, lists are joined, the rest is replaced."""
        return Rules(
            filter={**base.filter, **self.filter},
            exclude=self.exclude + base.exclude,
            max_per={**base.max_per, **self.max_per},
            boost=self.boost + base.boost,
            pin=self.pin + base.pin,
            diversity=base.diversity if self.diversity is None else self.diversity,
            unseen=base.unseen if self.unseen is None else self.unseen,
        )


RULE_FIELDS = tuple(one.name for one in fields(Rules))


def parse_rules(content: Any) -> Rules:
    """Rules from plain JSON values; raises RuleError that names the field, what was seen and what is wanted."""
    if not isinstance(content, Mapping):
        raise RuleError("rules", f"are {_seen(content)}; they must be an object with {', '.join(RULE_FIELDS)}.")
    if unknown := sorted(str(name) for name in content if name not in RULE_FIELDS):
        raise RuleError(unknown[0][:60], f"is no rule; there are: {', '.join(RULE_FIELDS)}.")
    return Rules(
        filter=_filters("filter", content.get("filter") or {}),
        exclude=_ids("exclude", content.get("exclude") or ()),
        max_per=_max_per(content.get("max_per") or {}),
        boost=_boosts(_list("boost", content.get("boost") or ())),
        pin=_ids("pin", content.get("pin") or ()),
        diversity=_diversity(content.get("diversity")),
        unseen=_flag("unseen", content.get("unseen")),
    )


def as_rules(rules: Rules | Mapping[str, Any] | None) -> Rules:
    """Rules as a Python caller gives them."""
    return rules if isinstance(rules, Rules) else parse_rules(rules or {})


def read_rule_sets(path: Path) -> dict[str, Rules]:
    """The named sets of a file, {"front_page": {"filter": ...}, ...}; raises ConfigError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; it should hold named sets of rules.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}.") from None
    if not isinstance(content, dict) or not all(isinstance(one, dict) for one in content.values()):
        raise ConfigError(f'{path} must hold an object of named sets: {{"front_page": {{"filter": {{...}}}}, ...}}.')
    try:
        return {name: parse_rules(one) for name, one in content.items()}
    except RuleError as error:
        raise ConfigError(f"{path}: {error}") from None


def named_rules(sets: Mapping[str, Rules], name: str) -> Rules:
    """A named set; raises RuleError for a name that does not exist."""
    if name not in sets:
        raise RuleError("rules", f"is {name[:80]!r}, which is no named set; there are: {', '.join(sets) or 'none'}.")
    return sets[name]


def _filters(where: str, content: Any) -> dict[str, FieldFilter]:
    if not isinstance(content, Mapping):
        raise RuleError(where, f"is {_seen(content)}; it must be an object of fields and values.")
    _check_size(where, content, _MAX_FIELDS)
    return {str(name): _field_filter(f"{where}.{str(name)[:60]}", one) for name, one in content.items()}


def _field_filter(where: str, content: Any) -> FieldFilter:
    if isinstance(content, Mapping):
        if not content or set(content) - {"gte", "lte"}:
            raise RuleError(where, f'has {sorted(map(str, content))}; a range has "gte", "lte" or both.')
        return ValueRange(**{name: _number(f"{where}.{name}", one) for name, one in content.items() if one is not None})
    values = content if isinstance(content, Sequence) and not isinstance(content, str) else [content]
    if not values:
        raise RuleError(where, "is an empty list, which no item passes; name a value, or leave the field out.")
    return tuple(_scalar(where, one) for one in values)


def _scalar(where: str, content: Any) -> Scalar:
    if isinstance(content, bool):
        return int(content)
    if isinstance(content, str) or (isinstance(content, int | float) and math.isfinite(content)):
        return content
    raise RuleError(where, f'is {_seen(content)}; it must be a value, a list of values or {{"gte", "lte"}}.')


def _number(where: str, content: Any) -> float:
    if isinstance(content, bool) or not isinstance(content, int | float) or not math.isfinite(content):
        raise RuleError(where, f"is {_seen(content)}; it must be a finite number.")
    return float(content)


def _list(where: str, content: Any) -> Sequence[Any]:
    if isinstance(content, str) or not isinstance(content, Sequence):
        raise RuleError(where, f"is {_seen(content)}; it must be a list.")
    return content


def _ids(where: str, content: Any) -> tuple[OwnId, ...]:
    for one in _list(where, content):
        if isinstance(one, bool) or not isinstance(one, int | str):
            raise RuleError(where, f"has {_seen(one)}; ids of items are whole numbers or texts, as in the log.")
    return tuple(content)


def _max_per(content: Any) -> dict[str, int]:
    if not isinstance(content, Mapping):
        raise RuleError("max_per", f"is {_seen(content)}; it must be an object of fields and counts.")
    _check_size("max_per", content, _MAX_FIELDS)
    for name, most in content.items():
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise RuleError(f"max_per.{str(name)[:60]}", f"is {_seen(most)}; it must be an integer of 1 or more.")
    return {str(name): most for name, most in content.items()}


def _boosts(content: Sequence[Any]) -> tuple[ScoreBoost, ...]:
    _check_size("boost", content, _MAX_BOOSTS)
    return tuple(_boost(place, one) for place, one in enumerate(content))


def _boost(place: int, content: Any) -> ScoreBoost:
    where = f"boost[{place}]"
    if not isinstance(content, Mapping) or set(content) != {"filter", "add"}:
        raise RuleError(where, f'is {_seen(content)}; it must be {{"filter": {{...}}, "add": a number}}.')
    return ScoreBoost(
        filter=_filters(f"{where}.filter", content["filter"]), add=_number(f"{where}.add", content["add"])
    )


def _diversity(content: Any) -> float | None:
    if content is None:
        return None
    if not 0 <= (found := _number("diversity", content)) <= 1:
        raise RuleError("diversity", f"is {found:g}; it must be in 0 .. 1.")
    return found


def _flag(where: str, content: Any) -> bool | None:
    if content is not None and not isinstance(content, bool):
        raise RuleError(where, f"is {_seen(content)}; it must be true or false.")
    return content


def _check_size(where: str, content: Any, most: int) -> None:
    if len(content) > most:
        raise RuleError(where, f"has {len(content):,} entries; there may be {most}.")


def _seen(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"an object of {len(content)} fields"
    return f"a list of {len(content)}" if isinstance(content, list | tuple) else repr(content)[:60]
