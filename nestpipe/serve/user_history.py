"""Histories of users: the events of the sequence folder, then those of the event log; or the events that a caller sends.

A history is a `Sequences` of one user, which training's batch builder reads, so training and serving see the same inputs. It is
not truncated: each model truncates it as in training.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.data.array_files import folder_version
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.jagged import ranges
from nestpipe.serve.event_log import Event, EventLog
from nestpipe.serve.event_parser import Ints, parse_events, parse_feature


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
    """Thread-safe; on one machine several instances of a run may share the event log."""

    def __init__(self, sequences: Sequences, log: EventLog):
        self.sequences, self._log = sequences, log
        self._writers = threading.Lock()  # serialises writers; readers do not wait for it
        self._lock = threading.Lock()
        self._new: dict[int, UserEvents] = {}
        self._ids: set[bytes] = set()
        self._folder = folder_version(sequences.path)
        self.num_removals = 0
        self.refresh()

    @property
    def folder(self) -> Path:
        """Where events are written."""
        return self._log.path.parent

    def of(self, user: int) -> Sequences:
        """The history of a user; empty for an unknown one."""
        with self._lock:
            own, new = self.sequences, self._new.get(user)
        old = _rows(own, user)
        events = stored(own, np.arange(old.start, old.stop))
        return of_user(own, user, events if new is None else events.then(new).in_time_order())

    def num_events(self, user: int) -> int:
        """The length of a history, without reading it."""
        with self._lock:
            own, new = self.sequences, self._new.get(user)
        return len(_rows(own, user)) + (len(new) if new else 0)

    def given(self, user: int, events: Sequence[Mapping[str, Any]]) -> Sequences:
        """The history that a caller sends; raises DataError."""
        own = self.sequences
        return of_user(own, user, UserEvents(*parse_events(own.schema, events)).in_time_order())

    def sample(self, num_events: int) -> Sequences:
        """A history made of the folder's events, to measure costs with."""
        own = self.sequences
        return of_user(own, -1, stored(own, np.arange(num_events) % len(own.items)).in_time_order())

    def add(self, events: Sequence[Event], check: Callable[[Sequences], object]) -> tuple[int, int]:
        """Logs events, each id once; returns how many are new and how many known. Raises DataError and logs none if `check` does."""
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
        """Reads new events. `num_removals` counts removals, after which nothing derived from histories may be kept.

        Atomic: what fails is tried again by the next call.
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
    """The history of a user, with the user features of the folder."""
    place = _place(own, user)
    known = {
        feature.name: parse_feature(feature, [{}])
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


def without_event(events: Sequences, place: int) -> Sequences:
    """A history without one of its events."""
    kept = np.delete(np.arange(len(events.items)), place)
    left = UserEvents(events.items, events.times, events.event_features).take(kept)
    return replace(
        events,
        offsets=np.array([0, len(kept)]),
        items=left.items,
        times=left.times,
        event_features=left.features,
    )


def _place(own: Sequences, user: int) -> int | None:
    """The user's place in the folder."""
    place = int(np.searchsorted(own.users, user))
    return place if place < len(own.users) and own.users[place] == user else None


def _rows(own: Sequences, user: int) -> range:
    """The rows of the user's events in the folder."""
    place = _place(own, user)
    return range(0) if place is None else range(*own.offsets[place : place + 2].tolist())


def _parsed(schema: Schema, events: Collection[Event]) -> dict[int, UserEvents]:
    """Logged events by user."""
    by_user: dict[int, list[Event]] = {}
    for event in events:
        by_user.setdefault(event["user"], []).append({k: v for k, v in event.items() if k not in {"id", "user"}})
    return {user: UserEvents(*parse_events(schema, own)) for user, own in by_user.items()}


def id_of(event: Event) -> bytes:
    """Digest of an event's id."""
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
