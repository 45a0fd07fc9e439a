"""Own ids at the edge of a service: requests name users, items and id features as the log does, inside everything is int64.

A user whom the vocabulary does not have is a user without history. They get a number that no user of the log has, so that
everything behind this file works with numbers. Unknown items cannot be served yet, so they are refused or listed by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences
from nestpipe.data.vocabulary import OwnId, Vocabulary
from nestpipe.errors import DataError
from nestpipe.rng import hash_text

Ints = NDArray[np.int64]
_LISTED = 10  # values that a message names


class ServiceIds:
    """Translates the ids of requests and answers. `sequences` returns the folder as it is now: users may be forgotten."""

    def __init__(self, sequences: Callable[[], Sequences]):
        self._sequences = sequences
        self._known: tuple[str, dict[str, Vocabulary]] = ("", {})
        for name in ("user", "item"):  # before the service says that it is ready
            self._vocabulary(name)

    @property
    def sequences(self) -> Sequences:
        """The folder as it is now."""
        return self._sequences()

    def user(self, own: OwnId) -> int:
        """The number of a user; one that no user of the log has for an unknown one."""
        numbers, known = self._vocabulary("user").numbers_of([own])
        return int(numbers[0]) if known[0] else -1 - (hash_text(str(own)) & (2**62 - 1))

    def item(self, own: OwnId) -> int:
        """The number of an item; raises DataError if the catalogue does not have it."""
        numbers, unknown = self.items([own])
        if unknown:
            raise DataError(
                f"item {own!r} is not in the catalogue, which has {len(self._sequences().catalogue):,} items."
            )
        return int(numbers[0])

    def items(self, own: Sequence[OwnId]) -> tuple[Ints, list[OwnId]]:
        """The numbers of the items that the catalogue has, in their order, and the others."""
        numbers, known = self._vocabulary("item").numbers_of(own)
        catalogue = self._sequences().catalogue
        places = np.minimum(np.searchsorted(catalogue, numbers), len(catalogue) - 1)
        known &= catalogue[places] == numbers
        return numbers[known], [one for one, is_known in zip(own, known.tolist(), strict=True) if not is_known]

    def own_users(self, numbers: Ints | Sequence[int]) -> list[OwnId]:
        """The own ids of users of the log."""
        return self._vocabulary("user").own_ids(numbers)

    def own_items(self, numbers: Ints | Sequence[int]) -> list[OwnId]:
        """The own ids of items of the catalogue."""
        return self._vocabulary("item").own_ids(numbers)

    def event(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """An event with numbers in the place of own ids; raises DataError for a text that nothing stands for."""
        found = dict(event)
        if "user" in found:
            found["user"] = self._known_user(found["user"])
        found["item"] = self.item(found["item"])
        for feature in self._coded_features:
            value = found.get(feature.name)
            if isinstance(value, list) and feature.kind == "ids":
                found[feature.name] = [self._feature(feature, one) for one in value]
            elif value is not None and not isinstance(value, list):  # a list where one value belongs is refused later
                found[feature.name] = self._feature(feature, value)
        return found

    def _known_user(self, own: OwnId) -> int:
        numbers, known = self._vocabulary("user").numbers_of([own])
        if not known[0]:
            raise DataError(
                f"user {own!r} is not in the log, so their events cannot be stored yet. Ingest a log that has them."
            )
        return int(numbers[0])

    def _feature(self, feature: Feature, own: Any) -> int | None:
        """The number of a value of an id feature, read as ingest reads it; None for an empty text, which is missing."""
        name = feature.name
        if isinstance(own, bool) or not isinstance(own, int | str):
            raise DataError(f"{name} is {str(own)[:60]!r}; it must be a whole number or a text, as in the log.")
        text = str(own).strip()
        if text and feature.encoding == "item":
            return self.item(text)
        number = self._vocabulary(name).number_of(text) if text else None
        if text and number is None:
            known = self._vocabulary(name).table["text"]
            listed = f": {', '.join(known.to_list())}" if len(known) <= _LISTED else ""
            raise DataError(f"{name} {text[:80]!r} is not among the {len(known):,} values of the log{listed}.")
        return number

    @property
    def _coded_features(self) -> list[Feature]:
        features = self._sequences().schema.of_scope("event", "request")
        return [one for one in features if one.kind in {"id", "ids"} and one.encoding != "int64"]

    def _vocabulary(self, name: str) -> Vocabulary:
        sequences = self._sequences()
        digest, known = self._known
        if digest != sequences.digest:
            known = {}
            self._known = (sequences.digest, known)
        if name not in known:
            known[name] = sequences.vocabulary(name)
        return known[name]
