"""Scenarios: what one model does differently from place to place.

A record says where the trigger item comes from, which items may be shown, what a behaviour and a reward are worth, how wide the
search is and how long it may take. Its number is its place in the file: the model has a vector for each, so records are only added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nestpipe.errors import ConfigError, DataError

Trigger = Literal["none", "given", "last"]
REWARDS = ("format", "relative", "ranking", "diversity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One place where the model recommends."""

    name: str
    """How requests call it."""
    trigger: Trigger = "none"
    """The item that the scenario is about: there is none, the request names it, or it is the newest of the history."""
    pool: str = "all"
    """Name of the pool of items that may be shown; 'all' is the whole catalogue."""
    behaviour_weights: tuple[float, ...] = (1.0, 1.5, 2.0)
    """What a click, a cart and an order are worth as training targets."""
    reward_weights: Mapping[str, float] = field(
        default_factory=lambda: {"format": 1.0, "relative": 1.0, "ranking": 1.0, "diversity": 0.0}
    )
    """What each reward is worth to the policy."""
    beam: int = 50
    """Width of the search."""
    latency_ms: float = 100.0
    """How long an answer may take."""

    def problems(self) -> Iterator[str]:
        if not self.name or self.name == "*" or self.name != self.name.strip():
            yield f"name is {self.name!r}; it must be a word ('*' means every scenario in stores)"
        if not self.pool:
            yield "pool is empty; name one, or 'all'"
        if self.trigger not in get_args(Trigger):
            yield f"trigger is {self.trigger!r}; it must be one of {', '.join(get_args(Trigger))}"
        if not self.behaviour_weights or min(self.behaviour_weights) <= 0:
            yield f"behaviour_weights is {self.behaviour_weights}; each must be above 0"
        if unknown := sorted(set(self.reward_weights) - set(REWARDS)):
            yield f"reward_weights has {', '.join(unknown)}; there are {', '.join(REWARDS)}"
        worth = self.reward_weights.values()
        if not (min(worth, default=0) >= 0 and max(worth, default=0) > 0):
            yield f"reward_weights is {dict(self.reward_weights)}; none may be below 0 and one must be above"
        if self.beam < 1:
            yield f"beam is {self.beam}; it must be at least 1"
        if not 0 < self.latency_ms < float("inf"):
            yield f"latency_ms is {self.latency_ms}; it must be above 0"

    def trigger_of(self, given: int | None, history: Sequence[int]) -> int | None:
        """The trigger item of a request; raises DataError if the rule asks for one that is missing, or the other way round."""
        if self.trigger == "given" and given is None:
            raise DataError(f"scenario '{self.name}' is about an item, but the request names no trigger.")
        if self.trigger != "given" and given is not None:
            raise DataError(f"scenario '{self.name}' takes no trigger from requests, but one names item {given}.")
        if self.trigger == "last":
            return history[-1] if history else None
        return given


class Scenarios:
    """The scenarios of a model, by name and by number."""

    def __init__(self, records: Sequence[Scenario]):
        """Raises ConfigError with every problem at once."""
        problems = [f"scenario {one.name!r}: {problem}" for one in records for problem in one.problems()]
        names = [one.name for one in records]
        problems += [f"there are several scenarios {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
        if not records:
            problems.append("there is no scenario")
        if problems:
            raise ConfigError("the scenarios have problems:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self._records = {one.name: one for one in records}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Scenario]:
        return iter(self._records.values())

    def __getitem__(self, name: str) -> Scenario:
        """Raises DataError for a scenario that does not exist."""
        if name not in self._records:
            raise DataError(f"there is no scenario '{name}'; there are {', '.join(self._records)}.")
        return self._records[name]

    def number(self, name: str) -> int:
        """What the model knows it by."""
        return list(self._records).index(self[name].name)

    def to_json(self) -> str:
        return json.dumps([asdict(one) for one in self], indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Scenarios:
        """Raises ConfigError for what is not a list of scenario records."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the scenarios are not JSON: {error}.") from None
        if not isinstance(content, list):
            raise ConfigError(f"the scenarios must be a list of records, got {type(content).__name__}.")
        return Scenarios([_record(number, one) for number, one in enumerate(content)])

    @staticmethod
    def load(path: Path) -> Scenarios:
        try:
            return Scenarios.from_json(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; it should hold the scenarios.") from None


def _record(number: int, content: Any) -> Scenario:
    hints = get_type_hints(Scenario)
    if not isinstance(content, dict) or "name" not in content:
        raise ConfigError(f"record {number} of the scenarios must be an object with a name, got {content!r}.")
    known = [one.name for one in fields(Scenario)]
    if unknown := sorted(set(content) - set(known)):
        raise ConfigError(
            f"scenario {content['name']!r} has unknown keys {', '.join(unknown)}; there are {', '.join(known)}."
        )
    values: dict[str, Any] = {}
    for key, value in content.items():
        values[key] = tuple(value) if get_origin(hints[key]) is tuple and isinstance(value, list) else value
        if not _fits(hints[key], values[key]):
            raise ConfigError(f"scenario {content['name']!r}: {key} is {value!r}, which is no {hints[key]}.")
    return Scenario(**values)


def _fits(hint: Any, value: Any) -> bool:
    def is_number(one: Any) -> bool:
        return isinstance(one, int | float) and not isinstance(one, bool)

    origin = get_origin(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(map(is_number, value))
    if origin is Literal:
        return isinstance(value, str)
    if isinstance(hint, type):
        return is_number(value) if hint is float else isinstance(value, hint) and not isinstance(value, bool)
    return isinstance(value, dict) and all(map(is_number, value.values()))
