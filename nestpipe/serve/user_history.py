"""The events of a user: those of the sequence folder, then those of the event log; or what the caller sends.

A history is handed out as `Sequences` of one user, which the batch builder of training reads, so training and serving see
the same inputs. It is whole: each model cuts it as it was trained.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.array_files import folder_version
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.errors import DataError
from nestpipe.jagged import ranges
from nestpipe.serve.event_log import Event, EventLog

Ints = NDArray[np.int64]
_LATEST_S = 2**43  # in milliseconds still far from the end of 64 bits
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True, eq=False)
class UserEvents:
    """Events in time order: items [n], milliseconds [n] if the log has times, features by name."""

    items: Ints
    times: Ints | None
    features: dict[str, StoredFeature]

    def __len__(self) -> int:
        return len(self.items)

    def take(self, rows: Ints) -> UserEvents:
        times = None if self.times is None else self.times[rows]
        return UserEvents(self.items[rows], times, {name: _take(one, rows) for name, one in self.features.items()})

    def then(self, other: UserEvents) -> UserEvents:
        times = None if self.times is None or other.times is None else np.concatenate([self.times, other.times])
        features = {name: _join(one, other.features[name]) for name, one in self.features.items()}
        return UserEvents(np.concatenate([self.items, other.items]), times, features)

    def in_time_order(self) -> UserEvents:
        """Equal times keep their order."""
        if self.times is None or bool((np.diff(self.times) >= 0).all()):
            return self
        return self.take(np.argsort(self.times, kind="stable"))


class UserHistories:
    """Safe to use from several threads and, on one machine, from several instances of a run."""

    def __init__(self, sequences: Sequences, log: EventLog):
        self.sequences, self._log = sequences, log
        self._writers = threading.Lock()  # held while something is written, for which no reader waits
        self._lock = threading.Lock()
        self._new: dict[int, UserEvents] = {}
        self._ids: set[bytes] = set()
        self._folder = folder_version(sequences.path)
        self.num_removals = 0
        self.refresh()

    def of(self, user: int) -> Sequences:
        """What is known of a user; no events for one that nobody knows."""
        with self._lock:
            own, new = self.sequences, self._new.get(user)
        old = _rows(own, user)
        events = stored(own, np.arange(old.start, old.stop))
        return of_user(own, user, events if new is None else events.then(new).in_time_order())

    def num_events(self, user: int) -> int:
        """How many of them there are, without looking at any."""
        with self._lock:
            own, new = self.sequences, self._new.get(user)
        return len(_rows(own, user)) + (len(new) if new else 0)

    def given(self, user: int, events: Sequence[Mapping[str, Any]]) -> Sequences:
        """The same of a history that the caller sends, from its first event on; raises DataError."""
        own = self.sequences
        return of_user(own, user, _parse(own.schema, events).in_time_order())

    def sample(self, num_events: int) -> Sequences:
        """Some events of the folder as those of one user, to measure with."""
        own = self.sequences
        return of_user(own, -1, stored(own, np.arange(num_events) % len(own.items)).in_time_order())

    def add(self, events: Sequence[Event], check: Callable[[Sequences], object]) -> tuple[int, int]:
        """Keeps events, each id once: how many are new, how many known. Raises DataError, keeping none, if `check` does."""
        with self._writers, self._log.writing():
            self.refresh()
            own, fresh = self.sequences, dict[bytes, Event]()
            for event in events:
                if (name := id_of(event)) not in self._ids:
                    fresh.setdefault(name, event)
            for user, new in _parsed(own.schema, fresh.values()).items():
                check(of_user(own, user, new))
            if fresh:
                self._log.append(list(fresh.values()))
                self.refresh()
            return len(fresh), len(events) - len(fresh)

    def refresh(self) -> None:
        """Takes in what was written. If something was taken away, nothing derived from histories may be kept.

        All of it or nothing: what fails is tried again by the next call.
        """
        with self._lock, self._log.news() as (is_other, events):
            folder = folder_version(self.sequences.path) or self._folder
            has_moved = folder != self._folder
            own = Sequences.open(self.sequences.path) if has_moved else self.sequences
            parsed, ids = _parsed(own.schema, events), {id_of(event) for event in events}
            if is_other:
                self._new, self._ids = {}, set()
            self.sequences, self._folder = own, folder
            self.num_removals += is_other + has_moved
            self._ids |= ids
            for user, new in parsed.items():
                self._new[user] = self._new[user].then(new) if user in self._new else new


def stored(own: Sequences, rows: Ints) -> UserEvents:
    """Events of a folder."""
    return UserEvents(own.items, own.times, own.event_features).take(rows)


def of_user(own: Sequences, user: int, events: UserEvents) -> Sequences:
    """Events as all that a user has, with what the folder knows of the user."""
    place = _place(own, user)
    known = {
        feature.name: _make(feature, [{}])
        if place is None
        else _take(own.user_features[feature.name], np.array([place]))
        for feature in own.schema.of_scope("user")
    }
    return replace(
        own,
        users=np.array([user]),
        offsets=np.array([0, len(events)]),
        items=events.items,
        times=events.times,
        event_features=events.features,
        user_features=known,
    )


def _place(own: Sequences, user: int) -> int | None:
    """The user's place in the folder."""
    place = int(np.searchsorted(own.users, user))
    return place if place < len(own.users) and own.users[place] == user else None


def _rows(own: Sequences, user: int) -> range:
    """Where the folder has the user's events."""
    place = _place(own, user)
    return range(0) if place is None else range(*own.offsets[place : place + 2].tolist())


def _parsed(schema: Schema, events: Collection[Event]) -> dict[int, UserEvents]:
    """Events of the log by user."""
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event["user"], []).append({k: v for k, v in event.items() if k not in {"id", "user"}})
    return {user: _parse(schema, own) for user, own in found.items()}


def _parse(schema: Schema, events: Sequence[Mapping[str, Any]]) -> UserEvents:
    """Events as they come in JSON, times in seconds; raises DataError that names the event and the field."""
    features = schema.of_scope("event")
    names = {"item", *(["time"] if schema.time else []), *(one.name for one in features)}
    names |= {f"{one.name}.weights" for one in features if one.weights is not None}
    for place, event in enumerate(events):
        if unknown := sorted(set(event) - names):
            raise DataError(f"event {place} has {unknown[0]!r}, which the log does not have; it has {sorted(names)}.")
        _whole(event, "item", place, _INT64)
        if schema.time:
            _whole(event, "time", place, range(_LATEST_S))
    times = [event["time"] * 1000 for event in events] if schema.time else None
    return UserEvents(
        np.array([event["item"] for event in events], np.int64),
        None if times is None else np.array(times, np.int64),
        {feature.name: _make(feature, events) for feature in features},
    )


def _make(feature: Feature, events: Sequence[Mapping[str, Any]]) -> StoredFeature:
    """One feature of some events, as the sequence folder has it; a missing value is null or not there."""
    values = [event.get(feature.name) for event in events]
    if feature.kind == "number":
        return StoredFeature(np.array([_float(one, feature, n) for n, one in enumerate(values)], np.float32))
    if feature.kind == "vector":
        rows = [[None] * feature.dim if one is None else one for one in values]
        if any(not isinstance(row, list) or len(row) != feature.dim for row in rows):
            raise DataError(f"'{feature.name}' is a vector of {feature.dim} numbers; an event has something else.")
        flat = [[_float(one, feature, n) for one in row] for n, row in enumerate(rows)]
        return StoredFeature(np.array(flat, np.float32).reshape(len(rows), feature.dim))
    bags = [[] if one is None else [one] if feature.kind == "id" else one for one in values]
    for place, bag in enumerate(bags):
        if not isinstance(bag, list) or not all(type(one) is int and one in _INT64 for one in bag):
            raise DataError(
                f"event {place}: '{feature.name}' is {values[place]!r}; it takes {feature.kind} as whole numbers."
            )
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in bags], dtype=np.int64)]).astype(np.int64)
    weights = None
    if feature.weights is not None:
        given = [
            event.get(f"{feature.name}.weights") or [1.0] * len(bag) for event, bag in zip(events, bags, strict=True)
        ]
        if any(not isinstance(own, list) or len(own) != len(bag) for own, bag in zip(given, bags, strict=True)):
            raise DataError(f"'{feature.name}.weights' must have one number for each of '{feature.name}'.")
        weights = np.array([_float(one, feature, n) for n, own in enumerate(given) for one in own], np.float32)
    return StoredFeature(np.array([one for bag in bags for one in bag], np.int64), offsets, weights)


def _float(value: Any, feature: Feature, place: int) -> float:
    if value is None:
        return math.nan
    if type(value) not in {int, float} or not abs(value) < 1e38:
        raise DataError(f"event {place}: '{feature.name}' has {value!r}; it takes finite numbers of 32 bits.")
    return float(value)


def _whole(event: Mapping[str, Any], name: str, place: int, legal: range) -> None:
    value = event.get(name)
    if type(value) is not int or value not in legal:
        raise DataError(
            f"event {place}: '{name}' is {value!r}; it must be a whole number in {legal.start} .. {legal.stop - 1}."
        )


def id_of(event: Event) -> bytes:
    """A digest of what the caller calls the event."""
    return hashlib.blake2b(event["id"].encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _take(stored: StoredFeature, rows: Ints) -> StoredFeature:
    if stored.offsets is None:
        return StoredFeature(stored.values[rows])
    first = stored.offsets[rows]
    lengths = stored.offsets[rows + 1] - first
    places = ranges(torch.from_numpy(first), torch.from_numpy(lengths)).numpy()
    weights = None if stored.weights is None else stored.weights[places]
    return StoredFeature(stored.values[places], np.concatenate([[0], np.cumsum(lengths)]), weights)


def _join(a: StoredFeature, b: StoredFeature) -> StoredFeature:
    values = np.concatenate([a.values, b.values])
    if a.offsets is None or b.offsets is None:
        return StoredFeature(values)
    weights = None if a.weights is None or b.weights is None else np.concatenate([a.weights, b.weights])
    return StoredFeature(values, np.concatenate([a.offsets, a.offsets[-1] + b.offsets[1:]]), weights)
