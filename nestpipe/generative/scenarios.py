"""Scenarios: per-surface settings of one generative model (home page, item page, cart, ...).

A record has the source of the trigger item, the pool of items that may be shown, the weights of behaviours and rewards, the
beam width, the latency budget and the instruction template. The file is a JSON object, {"version": 1, "scenarios": [record, ...]}. Records are found by
name: the number of a scenario in the model is that of its name in the log (`scenario_numbers`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import polars as pl

from nestpipe.config import read_object
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.instruction_template import template_problem

Trigger = Literal["optional", "none", "given", "last"]
REWARDS = ("format", "relative", "ranking", "diversity")  # others are columns of the log
FILE = "scenarios.json"  # in RUN
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One surface on which the model recommends."""

    name: str
    """Name in requests."""
    trigger: Trigger = "optional"
    """Source of the trigger item: given by the request or not (optional), none, always given by the request, or the last item
    of the history."""
    pool: str = "all"
    """Pool of items that may be shown; 'all' is the whole catalogue."""
    behaviour_weights: tuple[float, ...] = ()
    """Weights of clicks, carts and orders as training targets; empty: those of the model."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the rewards in alignment: format, relative, ranking, diversity, or a number column of the log or of its
    items; empty: 1 for each of relative, ranking and the behaviour that the run can compute."""
    beam: int = 50
    """Beam width."""
    latency_ms: float = 100.0
    """Latency budget of a response."""
    instruction: str = ""
    """Template of the instruction texts that 'nestpipe think' writes for this scenario; empty: the built-in one."""

    def problems(self) -> Iterator[str]:
        if not self.name or self.name == "*" or self.name != self.name.strip():
            yield f"name is {self.name!r}; it must be a word ('*' means every scenario in stores)"
        if not self.pool:
            yield "pool is empty; name one, or 'all'"
        if self.trigger not in get_args(Trigger):
            yield f"trigger is {self.trigger!r}; it must be one of {', '.join(get_args(Trigger))}"
        if self.behaviour_weights and min(self.behaviour_weights) <= 0:
            yield f"behaviour_weights is {self.behaviour_weights}; each must be above 0"
        weights = self.reward_weights.values()
        if weights and not (min(weights) >= 0 and max(weights) > 0):
            yield f"reward_weights is {dict(self.reward_weights)}; none may be below 0 and one must be above"
        if self.beam < 1:
            yield f"beam is {self.beam}; it must be at least 1"
        if not 0 < self.latency_ms < float("inf"):
            yield f"latency_ms is {self.latency_ms}; it must be above 0"
        if self.instruction and (problem := template_problem(self.instruction)):
            yield f"instruction {problem}"

    def trigger_of(self, given: int | None, history: Sequence[int]) -> int | None:
        """The trigger item of a request; raises DataError if a required one is missing or one is given that is not accepted."""
        if self.trigger == "given" and given is None:
            raise DataError(f"scenario '{self.name}' needs a trigger item, but the request has none.")
        if self.trigger in {"none", "last"} and given is not None:
            raise DataError(f"scenario '{self.name}' accepts no trigger item, but the request has item {given}.")
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

    @property
    def digest(self) -> str:
        """Of the records; part of the settings of a run."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def by_number(self, numbers: Mapping[str, int], where: str) -> list[Scenario]:
        """The record of each scenario of a log (`scenario_numbers`), or the only record of a log without scenarios.

        Raises ConfigError unless the file describes exactly the scenarios of the log.
        """
        if not numbers:
            if len(self) > 1:
                raise ConfigError(
                    f"there are {len(self)} scenarios ({', '.join(self._records)}), but {where} has none: ingest the log with "
                    "--feature scenario:id:event:encoding=dictionary, or describe one scenario."
                )
            return list(self)
        if unknown := [name for name in self._records if name not in numbers]:
            raise ConfigError(
                f"scenario '{unknown[0]}' is not in {where}, which has {', '.join(numbers)}: nothing was learned about it. "
                "Remove the record, or name it as the log does."
            )
        if missing := [name for name in numbers if name not in self._records]:
            raise ConfigError(
                f'{where} has the scenario \'{missing[0]}\', but no record describes it; add {{"name": "{missing[0]}"}} to the file.'
            )
        return [self[name] for name, _ in sorted(numbers.items(), key=lambda one: one[1])]

    def to_json(self) -> str:
        # A template that is not there stays out: the digest of a file is kept in runs.
        records = [
            {name: value for name, value in asdict(one).items() if name != "instruction" or value} for one in self
        ]
        return json.dumps({"version": VERSION, "scenarios": records}, indent=1) + "\n"

    @property
    def templates(self) -> dict[str, str]:
        """Instruction templates by scenario, of those that have one."""
        return {one.name: one.instruction for one in self if one.instruction}

    @staticmethod
    def from_json(text: str) -> Scenarios:
        """Raises ConfigError unless the text is a version and a list of valid scenario records."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the scenarios are not JSON: {error}.") from None
        if not isinstance(content, dict) or set(content) != {"version", "scenarios"}:
            raise ConfigError('the scenarios must be an object {"version": 1, "scenarios": [{"name": ...}, ...]}.')
        if content["version"] != VERSION:
            raise ConfigError(f"the scenarios have version {content['version']!r}; this nestpipe reads {VERSION}.")
        if not isinstance(content["scenarios"], list):
            raise ConfigError(f"the scenarios must be a list of records, got {type(content['scenarios']).__name__}.")
        return Scenarios([_record(number, one) for number, one in enumerate(content["scenarios"])])

    @staticmethod
    def load(path: Path) -> Scenarios:
        """Raises ConfigError that names the file."""
        try:
            return Scenarios.from_json(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; it should hold the scenarios.") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _record(number: int, content: Any) -> Scenario:
    if not isinstance(content, dict) or "name" not in content:
        raise ConfigError(f"record {number} of the scenarios must be an object with a name, got {content!r}.")
    record: Scenario = read_object(Scenario, content, f"{content['name']}.")
    return record


def scenario_numbers(sequences: Sequences, num_scenarios: int) -> dict[str, int]:
    """The scenarios of a model under their names in the log: texts, or numbers as texts if the log has numbers or none."""
    names = {str(number): number for number in range(num_scenarios)}
    if "scenario" not in sequences.meta["encodings"]:
        return names
    vocabulary = sequences.vocabulary("scenario")
    if vocabulary.encoding == "int64":
        return names
    rows = vocabulary.table.filter(pl.col("id").is_between(0, num_scenarios, closed="left"))
    return {str(text): int(number) for number, text in rows.iter_rows()}
