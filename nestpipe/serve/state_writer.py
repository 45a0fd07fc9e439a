"""Reads and writes the state of a service in own ids: items, users, posted events.

One write holds the writer lock once, however many elements it has. Numbers of new ids and what uses them are appended together,
numbers first. An element that cannot be read gets an error and spoils no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from nestpipe.data.schema import Feature, Scope
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.errors import DataError
from nestpipe.serve.event_parser import parse_feature
from nestpipe.serve.new_ids import NewIds
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.request_errors import BadRequestError, explained
from nestpipe.serve.schemas import OwnId, PostedEvent, Problem
from nestpipe.serve.state_schemas import (
    Element,
    ElementResult,
    ElementsReply,
    EventsReply,
    ForgottenReply,
    ItemsPage,
)
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.catalogue import ItemRecord
from nestpipe.state.service_state import Entry

_MAX_TEXT = 20_000  # characters of an item's text
_ITEM_FIELDS = frozenset({"text", "available"})
Written = Literal["created", "updated"]


class StateWriter:
    """The writes of one process, and what it shows of its state. From any thread."""

    def __init__(self, histories: UserHistories, ids: ServiceIds):
        self._histories, self._ids = histories, ids

    # Writes.

    def add_events(self, events: Sequence[Any], check: Callable[[Sequences], object]) -> EventsReply:
        """Stores events, each id once; users and items that nobody knows get their numbers here."""
        problems, sent = dict[int, Problem](), dict[int, Mapping[str, Any]]()
        for place, event in enumerate(events):
            try:
                if not isinstance(event, Mapping):
                    raise DataError(
                        f"an event must be an object with id, user and item; this is {type(event).__name__}."
                    )
                msgspec.convert(event, PostedEvent)
                if not event["id"].isprintable():
                    raise DataError("the event: 'id' must be a printable text.")
                sent[place] = event
            except msgspec.ValidationError as error:
                problems[place] = _problem(explained(str(error), event, PostedEvent))
            except DataError as error:
                problems[place] = _problem(error)
        numbers = NewIds(self._ids, self._histories.state)
        found = dict(zip(sent, self._histories.add(list(sent.values()), check, ids=numbers), strict=True))
        for place, result in found.items():
            if isinstance(result, DataError):
                problems[place] = _problem(result)
        return EventsReply(
            results=[_result(problems.get(place) or str(found[place])) for place in range(len(events))],
            accepted=sum(one == "stored" for one in found.values()),
            duplicates=sum(one == "duplicate" for one in found.values()),
        )

    def put_items(self, elements: Sequence[Any]) -> ElementsReply:
        """Stores items; each is created, updated or refused."""

        def read(element: Element, numbers: NewIds) -> tuple[Entry, Written]:
            number, content = self._read(element, "item", numbers)
            record = _item_record(number, element, content)
            is_new = not self._has_item(number) or numbers.is_new("item", element["id"])
            return record.entry(), "created" if is_new else "updated"

        return self._put(elements, read, key="item")

    def put_users(self, elements: Sequence[Any]) -> ElementsReply:
        """Stores the features of users; each is created, updated or refused."""

        def read(element: Element, numbers: NewIds) -> tuple[Entry, Written]:
            number, content = self._read(element, "user", numbers)
            living, own = self._histories.living, self._histories.sequences
            place = int(np.searchsorted(own.users, number))
            is_known = number in living.users or (place < len(own.users) and own.users[place] == number)
            return {"user": number, "features": content}, "updated" if is_known else "created"

        return self._put(elements, read, key="user")

    def _put(
        self, elements: Sequence[Any], read: Callable[[Element, NewIds], tuple[Entry, Written]], *, key: str
    ) -> ElementsReply:
        results, entries, seen = list[ElementResult](), dict[int, Entry](), set[int]()
        with self._histories.writing():
            numbers = NewIds(self._ids, self._histories.state)
            for place, element in enumerate(elements):
                try:
                    entry, written = read(element, numbers.at(place))
                except DataError as error:
                    results.append(_result(_problem(error)))
                    continue
                entries[place] = entry
                results.append(_result("updated" if entry[key] in seen else written))
                seen.add(entry[key])
            if entries:
                self._histories.state.changes.append([*numbers.entries(entries), *entries.values()])
        return ElementsReply(results=results)

    def change_item(self, own: OwnId, change: Element) -> dict[str, Any]:
        """Changes some fields of an item and returns it; raises BadRequestError for an unknown one, DataError for a bad change."""
        with self._histories.writing():
            number, numbers = self._item_number(own), NewIds(self._ids, self._histories.state)
            before = self._record(number)
            _, content = self._read({**change, "id": own}, "item", numbers)
            given = {name: value for name, value in content.items() if name in change}
            merged = {**before.content, **given}
            text, available = change.get("text", before.text), change.get("available", before.available)
            record = _item_record(number, {"text": text, "available": available}, merged)
            self._histories.state.changes.append([*numbers.entries({0}), record.entry()])
        return self.item(own)

    def withdraw(self, own: OwnId) -> dict[str, Any]:
        """Takes an item out of every answer; its record stays. Raises BadRequestError for an unknown one."""
        return self.change_item(own, {"available": False})

    def forget(self, own: OwnId) -> ForgottenReply:
        """Erases a user from the state for good; the events of the sequence folder no longer count."""
        number = self._ids.number_of("user", own, lenient=True)
        if number is None:
            return ForgottenReply(erased=0, masked=0)
        before = self._histories.num_events(number)
        erased = self._histories.forget(number)
        return ForgottenReply(erased=erased, masked=max(before - erased, 0))

    # What is known.

    def item(self, own: OwnId) -> dict[str, Any]:
        """The record of an item in own ids; raises BadRequestError for an unknown one."""
        return self._shown(self._record(self._item_number(own)))

    def page(self, cursor: str | None, limit: int) -> ItemsPage:
        """Items in the order of their numbers; raises BadRequestError for a cursor that is none."""
        try:
            after = -(2**63) if cursor is None else int(cursor) + 1
        except ValueError:
            raise BadRequestError("field 'cursor' is not one that a page gave.", code="bad_cursor") from None
        known, grown = self._histories.sequences.catalogue, self._histories.living.catalogue.changed()
        first = [numbers[np.searchsorted(numbers, after) :][: limit + 1] for numbers in (known, grown)]
        found = np.union1d(*first)[: limit + 1].tolist()
        shown = [self._shown(self._record(number)) for number in found[:limit]]
        return ItemsPage(items=shown, cursor=str(found[limit - 1]) if len(found) > limit else None)

    def _item_number(self, own: OwnId) -> int:
        number = self._ids.number_of("item", own, lenient=True)
        if number is None or not self._has_item(number):
            raise BadRequestError(f"item {str(own)[:80]!r} is not in the catalogue.", status=404, code="unknown_item")
        return number

    def _has_item(self, number: int) -> bool:
        known = self._histories.sequences.catalogue
        place = int(np.searchsorted(known, number))
        return number in self._histories.living.catalogue.records or (place < len(known) and known[place] == number)

    def _record(self, number: int) -> ItemRecord:
        """As it was last stored, or as the sequence folder has it."""
        if (record := self._histories.living.catalogue.records.get(number)) is not None:
            return record
        own = self._histories.sequences
        place = int(np.searchsorted(own.catalogue, number))
        content: dict[str, Any] = {}
        for feature in own.schema.of_scope("item"):
            content |= _values(feature, own.item_features[feature.name], place)
        return ItemRecord(number, content)

    def _shown(self, record: ItemRecord) -> dict[str, Any]:
        features = self._histories.sequences.schema.of_scope("item")
        values = self._ids.own_values(record.content, features)
        (own,) = self._ids.own_items([record.number])
        return {"id": own, **values, "text": record.text, "available": record.available}

    def _read(self, element: Any, scope: Scope, numbers: NewIds) -> tuple[int, dict[str, Any]]:
        """The number of an element and its attributes in numbers, every one of the schema; raises DataError."""
        if not isinstance(element, Mapping):
            raise DataError(f"an {scope} must be an object with an 'id'; this is {type(element).__name__}.")
        features = self._histories.sequences.schema.of_scope(scope)
        names = {one.name for one in features} | {f"{one.name}.weights" for one in features if one.weights is not None}
        fields = names | {"id"} | (_ITEM_FIELDS if scope == "item" else set())
        if unknown := sorted(set(element) - fields):
            raise DataError(
                f"{unknown[0][:40]!r} is not an attribute of the log's {scope}s; there are {sorted(fields)}."
            )
        own = element.get("id")
        if isinstance(own, bool) or not isinstance(own, int | str) or not 0 < len(str(own)) <= 512:
            raise DataError(f"'id' is {str(own)[:60]!r}; it must be a whole number or a text of 1 .. 512 characters.")
        content = {name: element.get(name) for name in sorted(names)}
        coded = [one for one in features if one.kind in {"id", "ids"} and one.encoding != "int64"]
        content = self._ids.coded(content, coded, numbers.number)
        for feature in features:
            try:
                parse_feature(feature, [content])
            except DataError as error:
                raise DataError(str(error).replace("event 0: ", "").replace("an event has", "this is")) from None
        return numbers.number("item" if scope == "item" else "user", own), content


def _item_record(number: int, element: Element, content: Mapping[str, Any]) -> ItemRecord:
    """Raises DataError for a bad text or flag."""
    text, available = element.get("text"), element.get("available", True)
    if text is not None and (not isinstance(text, str) or len(text) > _MAX_TEXT):
        raise DataError(f"'text' must be a text of at most {_MAX_TEXT:,} characters, or null.")
    if not isinstance(available, bool):
        raise DataError(f"'available' is {str(available)[:60]!r}; it must be true or false.")
    return ItemRecord(number, content, text, available)


def _values(feature: Feature, stored: StoredFeature, row: int) -> dict[str, Any]:
    """One row of a folder's feature as JSON; null if it is missing."""
    if stored.offsets is None:
        values = stored.values[row]
        if feature.kind == "number":
            return {feature.name: None if math.isnan(values) else float(values)}
        return {feature.name: None if np.isnan(values).any() else [float(one) for one in values]}
    own = slice(int(stored.offsets[row]), int(stored.offsets[row + 1]))
    bag = [int(one) for one in stored.values[own]]
    found: dict[str, Any] = {feature.name: bag if feature.kind == "ids" else bag[0] if bag else None}
    if feature.weights is not None and stored.weights is not None:
        found[f"{feature.name}.weights"] = [float(one) for one in stored.weights[own]]
    return found


def _result(outcome: Any) -> ElementResult:
    return (
        ElementResult(result="error", error=outcome) if isinstance(outcome, Problem) else ElementResult(result=outcome)
    )


def _problem(error: Exception) -> Problem:
    return Problem(getattr(error, "code", "bad_data"), str(error))
