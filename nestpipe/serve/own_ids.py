"""Own ids at the edge of a service: requests name users, items and id features as the log does, inside everything is int64.

    folder's vocabulary  ->  numbers given since (nestpipe.state)  ->  a passing number, for what nobody has stored

A user whom nobody knows is a user without history, and an unknown item of a request's history one that no model has a row for. They
get numbers that nothing of the log has, so that everything behind this file works with numbers. `NewIds` gives lasting ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.folder_merge import is_among
from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences
from nestpipe.data.vocabulary import OwnId, Vocabulary
from nestpipe.errors import ConfigError, DataError
from nestpipe.rng import hash_text
from nestpipe.state.living_data import LivingData

Ints = NDArray[np.int64]
_LISTED = 10  # values that a message names
_PASSING = 10_000  # names of unknown items that are remembered for explanations
Number = Callable[[str, OwnId], int]
"""The number of an own id of a column."""


class ServiceIds:
    """Translates the ids of requests and answers. `sequences` returns the folder as it is now: users may be forgotten."""

    def __init__(self, sequences: Callable[[], Sequences], living: LivingData | None = None):
        self._sequences, self._living = sequences, living
        self._known: tuple[str, dict[str, Vocabulary]] = ("", {})
        self._passing: OrderedDict[int, OwnId] = OrderedDict()
        for name in ("user", "item"):  # before the service says that it is ready
            self._vocabulary(name)
        self._check_numbers()

    @property
    def sequences(self) -> Sequences:
        """The folder as it is now."""
        return self._sequences()

    def user(self, own: OwnId) -> int:
        """The number of a user; one that no user of the log has for an unknown one."""
        number = self.number_of("user", own, lenient=True)
        return _passing_number(own) if number is None else number

    def number_of(self, name: str, own: OwnId, *, lenient: bool = False) -> int | None:
        """The number of an own id, of the folder or given since; None for a text that has none. Raises DataError for no int64."""
        vocabulary = self._vocabulary(name)
        if vocabulary.encoding == "int64" and lenient:
            if type(own) is int and -(2**63) <= own < 2**63:  # as most requests have it
                return own
            numbers, known = vocabulary.numbers_of([own])
            return int(numbers[0]) if known[0] else None
        number = vocabulary.number_of(own)
        if number is None and self._living is not None:
            number = self._living.ids.number_of(name, str(own))
        return number

    def has_text(self, name: str, own: OwnId) -> bool:
        """Whether the number of an own id leads back to it."""
        vocabulary = self._vocabulary(name)
        if vocabulary.encoding == "hash":
            number = hash_text(str(own))
            known = None if self._living is None else self._living.ids.text_of(name, number)
            return known is not None or vocabulary.texts_of([number])[0] is not None
        return vocabulary.encoding == "int64" or self.number_of(name, own) is not None

    def next_number(self, name: str) -> int:
        """The first number that a new own id of a dictionary may get."""
        grown = 0 if self._living is None else self._living.ids.next_number(name)
        return max(self._vocabulary(name).next_id, grown)

    def encoding(self, name: str) -> str:
        return self._vocabulary(name).encoding

    def item(self, own: OwnId) -> int:
        """The number of an item; raises DataError if the catalogue does not have it."""
        numbers, unknown = self.items([own])
        if unknown:
            raise DataError(
                f"item {own!r} is not in the catalogue, which has {len(self._sequences().catalogue):,} items."
            )
        return int(numbers[0])

    def items(self, own: Sequence[OwnId]) -> tuple[Ints, list[OwnId]]:
        """The numbers of the items that the catalogue has, also as it grew, in their order, and the others."""
        vocabulary = self._vocabulary("item")
        numbers, known = vocabulary.numbers_of(own)
        catalogue = self._sequences().catalogue
        grown = None if self._living is None else self._living.catalogue.changed()
        if self._living is not None and vocabulary.encoding == "dictionary":
            for place in np.flatnonzero(~known).tolist():
                if (number := self._living.ids.number_of("item", str(own[place]))) is not None:
                    numbers[place], known[place] = number, True
        has = is_among(numbers, catalogue)
        known &= has if grown is None or not len(grown) else has | is_among(numbers, grown)
        if np.count_nonzero(known) == len(known):  # `all` costs twice as much
            return numbers, []
        return numbers[known], [one for one, is_known in zip(own, known.tolist(), strict=True) if not is_known]

    def withdrawn(self) -> list[int]:
        """Numbers of the items that must not be shown."""
        return [] if self._living is None else self._living.catalogue.withdrawn().tolist()

    def own_users(self, numbers: Ints | Sequence[int]) -> list[OwnId]:
        """The own ids of users."""
        return self._own("user", numbers)

    def own_items(self, numbers: Ints | Sequence[int]) -> list[OwnId]:
        """The own ids of items."""
        return self._own("item", numbers)

    def _own(self, name: str, numbers: Ints | Sequence[int]) -> list[OwnId]:
        vocabulary = self._vocabulary(name)
        if vocabulary.encoding == "int64":
            return vocabulary.own_ids(numbers)
        found: list[OwnId | None] = list(vocabulary.texts_of([int(one) for one in numbers]))
        for place, number in enumerate(numbers):
            if found[place] is None:
                text = None if self._living is None else self._living.ids.text_of(name, int(number))
                found[place] = text if text is not None else self._passing.get(int(number))
        if missing := [number for number, one in zip(numbers, found, strict=True) if one is None]:
            return vocabulary.own_ids([int(one) for one in missing])  # which says what is wrong
        return [one for one in found if one is not None]

    def event(self, event: Mapping[str, Any], number: Number | None = None) -> dict[str, Any]:
        """An event with numbers in the place of own ids. `number` gives new ones; without it unknown items get passing ones.

        Raises DataError for a value of an id feature that nothing stands for.
        """
        found = dict(event)
        if "user" in found:
            found["user"] = self.user(found["user"]) if number is None else number("user", found["user"])
        found["item"] = self._passing_item(found["item"]) if number is None else number("item", found["item"])
        return self.coded(found, self._coded("event", "request"), number)

    def coded(self, found: dict[str, Any], features: Sequence[Feature], number: Number | None = None) -> dict[str, Any]:
        """Replaces the values of id features by numbers."""
        for feature in features:
            value = found.get(feature.name)
            if isinstance(value, list) and feature.kind == "ids":
                found[feature.name] = [self._feature(feature, one, number) for one in value]
            elif value is not None and not isinstance(value, list):  # a list where one value belongs is refused later
                found[feature.name] = self._feature(feature, value, number)
        return found

    def own_values(self, content: Mapping[str, Any], features: Sequence[Feature]) -> dict[str, Any]:
        """The reverse of `coded`, for records that are shown."""
        found = dict(content)
        for feature in features:
            if (value := found.get(feature.name)) is None or feature.kind not in {"id", "ids"}:
                continue
            name = "item" if feature.encoding == "item" else feature.name
            own = self._own(name, value if isinstance(value, list) else [value])
            found[feature.name] = own if isinstance(value, list) else own[0]
        return found

    def _passing_item(self, own: OwnId) -> int:
        number = self.number_of("item", own)
        if number is None:
            number = _passing_number(own)
        if not self.has_text("item", own):
            self._passing[number] = own
            while len(self._passing) > _PASSING:
                self._passing.popitem(last=False)
        return number

    def _feature(self, feature: Feature, own: Any, number: Number | None) -> int | None:
        """The number of a value of an id feature, read as ingest reads it; None for an empty text, which is missing."""
        name = feature.name
        if isinstance(own, bool) or not isinstance(own, int | str):
            raise DataError(f"{name} is {str(own)[:60]!r}; it must be a whole number or a text, as in the log.")
        if not (text := str(own).strip()):
            return None
        if number is not None:
            return number("item" if feature.encoding == "item" else name, text)
        if feature.encoding == "item":
            return self._passing_item(text)
        if (found := self.number_of(name, text)) is None:
            known = self._vocabulary(name).table["text"]
            listed = f": {', '.join(known.to_list())}" if len(known) <= _LISTED else ""
            raise DataError(f"{name} {text[:80]!r} is not among the {len(known):,} values of the log{listed}.")
        return found

    def _coded(self, *scopes: Any) -> list[Feature]:
        features = self._sequences().schema.of_scope(*scopes)
        return [one for one in features if one.kind in {"id", "ids"} and one.encoding != "int64"]

    def _check_numbers(self) -> None:
        """Raises ConfigError if a number stands for one text in the folder and for another in the state."""
        for name, own in {} if self._living is None else self._living.ids.tables().items():
            stored = self._vocabulary(name).texts_of(list(own))
            for (number, text), other in zip(own.items(), stored, strict=True):
                if other is not None and other != text:
                    raise ConfigError(
                        f"number {number} of '{name}' is {other[:40]!r} in {self._sequences().path}, but {text[:40]!r} in the state "
                        "of the service: a log was appended before what the service has stored. Use the folder from before, "
                        "append the state first, then the log."
                    )

    def _vocabulary(self, name: str) -> Vocabulary:
        sequences = self._sequences()
        digest, known = self._known
        if digest != sequences.digest:
            known = {}
            self._known = (sequences.digest, known)
        if name not in known:
            known[name] = sequences.vocabulary(name)
        return known[name]


def _passing_number(own: OwnId) -> int:
    return -1 - (hash_text(str(own)) & (2**62 - 1))
