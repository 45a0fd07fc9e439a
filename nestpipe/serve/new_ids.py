"""Lasting numbers for own ids that come while serving: taken under the writer lock, stored before what uses them.

`int64` columns need none. A hash is its own number, but its text is stored, because own ids come back out. A dictionary's next
number follows those of the folder and those given since; a number is never given out twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import DataError
from nestpipe.rng import hash_text
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.state.service_state import Entry, ServiceState

_BLOCK = 64  # numbers that are taken together; what is left of them is never used


class NewIds:
    """The new ids of one write; use it inside `writing`. Only those of elements that are accepted are stored."""

    def __init__(self, ids: ServiceIds, state: ServiceState):
        self._ids, self._state = ids, state
        self._given: dict[tuple[str, str], int] = {}
        self._left: dict[str, range] = {}
        self._users: dict[tuple[str, str], set[int]] = {}  # the elements that use each new id
        self._place = 0

    def event(self, place: int, event: Mapping[str, Any]) -> dict[str, Any]:
        """An event in numbers; raises DataError."""
        self._place = place
        return self._ids.event(event, self.number)

    def at(self, place: int) -> NewIds:
        """The element whose ids are numbered next."""
        self._place = place
        return self

    def number(self, name: str, own: OwnId) -> int:
        """The number of an own id, a new one if it has none."""
        if isinstance(own, bool) or not isinstance(own, int | str) or str(own) == "":
            raise DataError(f"{name} is {str(own)[:60]!r}; it must be a whole number or a text, as in the log.")
        known = self._ids.number_of(name, own)
        if known is not None and self._ids.has_text(name, own):
            return known
        key = name, str(own)
        if key not in self._given:
            self._given[key] = hash_text(key[1]) if self._ids.encoding(name) == "hash" else self._take(name)
        self._users.setdefault(key, set()).add(self._place)
        return self._given[key]

    def is_new(self, name: str, own: OwnId) -> bool:
        return (name, str(own)) in self._given

    def store(self, places: Collection[int]) -> None:
        """Appends the new ids of the elements at some places to the state."""
        if entries := self.entries(places):
            self._state.changes.append(entries)

    def entries(self, places: Collection[int]) -> list[Entry]:
        kept = set(places)
        return [
            {"of": name, "number": number, "text": text, "counted": self._ids.encoding(name) == "dictionary"}
            for (name, text), number in self._given.items()
            if self._users[name, text] & kept
        ]

    def _take(self, name: str) -> int:
        left = self._left.get(name, range(0))
        if not left:
            least = max([self._ids.next_number(name), *(one + 1 for (of, _), one in self._given.items() if of == name)])
            first = self._state.take_numbers(name, at_least=least, count=_BLOCK)
            left = range(first, first + _BLOCK)
        self._left[name] = left[1:]
        return left[0]
