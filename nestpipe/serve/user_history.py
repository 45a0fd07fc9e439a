"""Histories of users: the events of the sequence folder, then those of the event log; or the events that a caller sends.

A history is a `Sequences` of one user, which training's batch builder reads, so training and serving see the same inputs. It is
not truncated: each model truncates it as in training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from nestpipe.data.array_files import FolderVersion, folder_version
from nestpipe.data.event_ids import HeldEvents, event_digest
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.errors import DataError
from nestpipe.jagged import ranges
from nestpipe.serve.event_log import Event
from nestpipe.serve.event_parser import Ints, parse_events, parse_feature
from nestpipe.state.living_data import LivingData
from nestpipe.state.service_state import Entry, ServiceState

NOBODY = -1
"""The user of requests that name none: a number that no user of a log has. Each has another history, so nothing is kept of it."""
EventResult = Literal["stored", "duplicate"] | DataError
"""What became of a posted event."""


class EventNumbers(Protocol):
    """Gives the own ids of events their numbers, new ones where they are new."""

    def event(self, place: int, event: Event) -> Event:
        """The event in numbers; raises DataError."""
        ...

    def store(self, places: Collection[int]) -> None:
        """Appends the new numbers of the events at some places to the state."""
        ...


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

    def between(self, first: int, last: int) -> UserEvents:
        """Events first .. last - 1, in their own memory: a tensor must not share that of a mapped file."""
        features = {name: one.between(first, last).copied() for name, one in self.features.items()}
        times = None if self.times is None else self.times[first:last].copy()
        return UserEvents(self.items[first:last].copy(), times, features)

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
    """Thread-safe; the instances of a run share its state."""

    def __init__(self, sequences: Sequences, state: ServiceState):
        self.state, self.living = state, LivingData(state.changes)
        self.sequences = self._alive(sequences)
        self._writers = threading.Lock()  # serialises writers; readers do not wait for it
        self._lock = threading.Lock()
        self._new: dict[int, UserEvents] = {}
        self._names: dict[int, list[bytes]] = {}  # digests of the ids of these events, in their order
        self._ids: set[bytes] = set()
        self._held = HeldEvents.of(sequences.path)  # events of the log that the folder has too
        self._folder = folder_version(sequences.path)
        self._num_removals = 0
        self._changed: set[int] | None = None
        self.refresh()

    @property
    def num_removals(self) -> int:
        """Counts removals, after which nothing derived from histories may be kept."""
        return self._num_removals + self.living.num_removals

    def of(self, user: int) -> Sequences:
        """The history of a user; empty for an unknown one."""
        with self._lock:
            own, new = self.sequences, self._new.get(user)
        old = self._rows(own, user)
        events = UserEvents(own.items, own.times, own.event_features).between(old.start, old.stop)
        events = events if new is None else events.then(new).in_time_order()
        return of_user(own, user, events, features=self.living.users.get(user))

    def num_events(self, user: int) -> int:
        """The length of a history, without reading it."""
        with self._lock:
            own, new = self.sequences, self._new.get(user)
        return len(self._rows(own, user)) + (len(new) if new else 0)

    def given(self, user: int, events: Sequence[Mapping[str, Any]]) -> Sequences:
        """The history that a caller sends; raises DataError."""
        own = self.sequences
        parsed = UserEvents(*parse_events(own.schema, events)).in_time_order()
        return of_user(own, user, parsed, features=self.living.users.get(user))

    def sample(self, num_events: int) -> Sequences:
        """A history made of the folder's events, to measure costs with."""
        own = self.sequences
        return of_user(own, NOBODY, stored(own, np.arange(num_events) % len(own.items)).in_time_order())

    def take_changed(self) -> set[int]:
        """Users with new events in the log since the last call, which the first call begins to note."""
        with self._lock:
            changed, self._changed = self._changed or set(), set()
            return changed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the writer lock with everything read; what the body appends to the state is read after it."""
        with self._writers:
            with self.state.writing():
                self.refresh()
                yield
            self.refresh()

    def add(
        self, events: Sequence[Event], check: Callable[[Sequences], object], *, ids: EventNumbers | None = None
    ) -> list[EventResult]:
        """Stores events, each id once, and says of each what became of it: one that cannot be read spoils no other.

        `ids` gives own ids their numbers; without it events have numbers already.
        """
        results: list[EventResult] = ["duplicate"] * len(events)
        with self.writing():
            first, numbered = dict[bytes, int](), dict[int, Event]()  # the place of each new id, and its event
            repeated = dict[int, int]()  # places with an id that stands before, and where
            for place, event in enumerate(events):
                name = id_of(event)
                if name in self._ids or name in self._held or name in self.living.forgotten_ids:
                    continue
                if name in first:
                    repeated[place] = first[name]
                    continue
                first[name] = place
                try:
                    numbered[place] = event if ids is None else ids.event(place, event)
                except DataError as error:
                    results[place] = error
            self._refuse_unreadable(numbered, check, results)
            for place in (kept := {one: numbered[one] for one in numbered if results[one] == "duplicate"}):
                results[place] = "stored"
            for place, before in repeated.items():
                results[place] = "duplicate" if results[before] == "stored" else results[before]
            if kept:
                if ids is not None:
                    ids.store(kept)
                self.state.events.append(list(kept.values()))
        return results

    def _refuse_unreadable(
        self, events: Mapping[int, Event], check: Callable[[Sequences], object], results: list[EventResult]
    ) -> None:
        """Notes the errors of events that cannot be read, or that a model cannot read; all at once if there are none."""
        try:
            self._read_all(list(events.values()), check)
        except DataError:
            for place, event in events.items():
                try:
                    self._read_all([event], check)
                except DataError as error:  # which counts events, and there is one
                    results[place] = DataError(str(error).replace("event 0", "the event", 1))

    def _read_all(self, events: Collection[Event], check: Callable[[Sequences], object]) -> None:
        for user, new in _parsed(self.sequences.schema, events).items():
            check(of_user(self.sequences, user, new))

    def forget(self, user: int) -> int:
        """Erases the events, features and text of a user from the state, for good, and masks the events of the folder.

        Returns how many events the state had. Their ids stay known, so that a late copy of one is not stored again.
        """
        gone: list[str] = []

        def keep(entry: Entry) -> bool:
            if entry.get("user") != user:
                return True
            gone.append(id_of(entry).hex())
            return False

        self.refresh()
        is_named = user in self.living.users or self.living.ids.text_of("user", user) is not None
        if user in self._new:
            self.state.events.rewrite(keep)
        with self.writing():
            last = {"of": "user", "number": user, "text": None}
            self.state.changes.append([last, {"forgotten": user, "ids": gone}])
        if is_named:
            named = ("user", user)
            self.state.changes.rewrite(
                lambda one: one.get("user") != user and ((one.get("of"), one.get("number")) != named or not one["text"])
            )
        self.refresh()
        return len(gone)

    def refresh(self) -> None:
        """Reads new events and changes. Atomic: what fails is tried again by the next call."""
        if self.state.events.has_news() or folder_version(self.sequences.path) not in {None, self._folder}:
            with self._lock, self.state.events.news() as (is_other, events):
                folder = folder_version(self.sequences.path) or self._folder
                has_moved = folder != self._folder
                own = self._alive(Sequences.open(self.sequences.path)) if has_moved else self.sequences
                self._take(own, folder, events, anew=is_other)
                self._num_removals += is_other + has_moved
        self.living.refresh()  # after the events: a number is stored before the event that uses it

    def move_to(self, sequences: Sequences) -> None:
        """From now on the histories are those of another folder that has grown from this one, and of the same log."""
        with self._lock:
            self._take(self._alive(sequences), folder_version(sequences.path), [], anew=False)
            self._num_removals += 1

    def _take(self, own: Sequences, folder: FolderVersion, events: Sequence[Event], *, anew: bool) -> None:
        """Takes a folder and new events, without those that the folder has: each event counts once. Under the lock."""
        is_other_folder = folder != self._folder or own is not self.sequences
        held = HeldEvents.of(own.path) if is_other_folder else self._held
        ids = {id_of(event) for event in events}
        fresh = [event for event in events if id_of(event) not in held]
        parsed = _parsed(own.schema, fresh)
        names: dict[int, list[bytes]] = {}
        for event in fresh:
            names.setdefault(event["user"], []).append(id_of(event))
        if anew:
            self._new, self._names, self._ids = {}, {}, set()
        elif is_other_folder:
            self._drop(held)
        self.sequences, self._folder, self._held = own, folder, held
        self._ids |= ids
        if self._changed is not None:
            self._changed |= parsed.keys()
        for user, new in parsed.items():
            self._new[user] = self._new[user].then(new) if user in self._new else new
            self._names.setdefault(user, []).extend(names[user])

    def _drop(self, held: HeldEvents) -> None:
        """Drops the logged events that the folder has now."""
        for user, names in list(self._names.items()):
            kept = [place for place, name in enumerate(names) if name not in held]
            if not kept:
                del self._new[user], self._names[user]
            elif len(kept) < len(names):
                self._new[user] = self._new[user].take(np.array(kept))
                self._names[user] = [names[place] for place in kept]

    def _alive(self, sequences: Sequences) -> Sequences:
        return replace(sequences, live=self.living.catalogue)

    def _rows(self, own: Sequences, user: int) -> range:
        """The rows of the user's events in the folder; none of a user who was forgotten."""
        return range(0) if user in self.living.forgotten else _rows(own, user)


def stored(own: Sequences, rows: Ints) -> UserEvents:
    """Events of a folder."""
    return UserEvents(own.items, own.times, own.event_features).take(rows)


def of_user(own: Sequences, user: int, events: UserEvents, *, features: Mapping[str, Any] | None = None) -> Sequences:
    """The history of a user, with their features as they were stored since, or else those of the folder."""
    place = _place(own, user) if features is None and own.user_features else None
    known = {
        feature.name: parse_feature(feature, [features or {}])
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
    return only_events(events, np.delete(np.arange(len(events.items)), place))


def only_events(events: Sequences, kept: Ints) -> Sequences:
    """A history with some of its events."""
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
    return event_digest(event["id"])


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
