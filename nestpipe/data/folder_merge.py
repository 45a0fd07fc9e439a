"""Joins parts of a log, each sorted by (user, time), into one set of event files.

    part 0   ann: 1 4 9   bob: 3          ->   ann: 1 4 5 9   bob: 3   cid: 2 7
    part 1   ann: 5       cid: 2 7             equal times: part 0 before part 1

The rows of a later part are inserted behind the earlier ones of equal time, which is where a sort of the whole log would put
them. Only their places are searched; all other rows are copied, one range of users at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.array_files import ArrayFile, FeatureFiles, save_array
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import StoredFeature

Ints = NDArray[np.int64]
_RANGE_ROWS = (
    1 << 17
)  # of a range: its arrays stay in the processor's cache and in reused memory, which is 3 times faster


@dataclass(frozen=True, slots=True, eq=False)
class EventPart:
    """The events of one part; `numbers` gives the final number by the part's own, for columns that are renumbered."""

    users: Ints
    offsets: Ints
    items: Ints
    times: Ints | None
    features: Mapping[str, StoredFeature]
    numbers: Mapping[str, Ints] = field(default_factory=dict)

    def slice(self, first_user: int, last_user: int) -> EventPart:
        """The events of the users from the first to the last id, with final numbers."""
        low, high = np.searchsorted(self.users, first_user), np.searchsorted(self.users, last_user, side="right")
        rows = slice(int(self.offsets[low]), int(self.offsets[high]))
        features = {}
        for name, stored in self.features.items():
            own = stored.between(rows.start, rows.stop)
            features[name] = replace(own, values=_renumbered(own.values, self.numbers.get(name)))
        return EventPart(
            users=self.users[low:high],
            offsets=self.offsets[low : high + 1] - self.offsets[low],
            items=_renumbered(self.items[rows], self.numbers.get("item")),
            times=None if self.times is None else self.times[rows],
            features=features,
        )


def _renumbered(values: NDArray[Any], numbers: Ints | None) -> NDArray[Any]:
    return values if numbers is None else numbers[values]


@dataclass(slots=True)
class MergedEvents:
    """What was written."""

    users: Ints
    num_events: int = 0
    num_duplicates: int = 0


def merge_events(
    draft: Path,
    schema: Schema,
    parts: Sequence[EventPart],
    *,
    dedupe: bool,
    range_rows: int = _RANGE_ROWS,
    progress: Callable[[str, int], None] = lambda phase, num_rows: None,
) -> MergedEvents:
    """Writes the event files of all parts together; the users of all parts have final numbers already."""
    files = {"item": ArrayFile(draft / "items.npy", dtype=np.int64)}
    if schema.time is not None:
        files["time"] = ArrayFile(draft / "times.npy", dtype=np.int64)
    features = {feature.name: FeatureFiles(draft, feature) for feature in schema.of_scope("event")}
    merged = MergedEvents(reduce(union, [part.users for part in parts]))
    lengths = []
    for users in _user_ranges(merged.users, parts, range_rows):
        own = [part.slice(int(users[0]), int(users[-1])) for part in parts]
        order = MergeOrder.of(users, own)
        if dedupe:
            merged.num_duplicates += order.drop_duplicates(own)
        files["item"].append(gather([part.items for part in own], order.rows))
        if "time" in files:
            files["time"].append(order.times)
        for name, file in features.items():
            file.append_rows(*gather_feature([part.features[name] for part in own], order.rows))
        lengths.append(np.diff(order.offsets))
        merged.num_events += len(order.rows)
        progress("merging events", merged.num_events)
    for array in files.values():
        array.close()
    for feature in features.values():
        feature.close()
    save_array(draft / "users.npy", merged.users)
    save_array(draft / "offsets.npy", np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64))
    return merged


def _user_ranges(users: Ints, parts: Sequence[EventPart], range_rows: int) -> Iterator[Ints]:
    """The users in ranges of about `range_rows` events."""
    total = np.zeros(len(users), np.int64)
    for part in parts:
        total[np.searchsorted(users, part.users)] += np.diff(part.offsets)
    number = (np.cumsum(total) - 1) // range_rows
    yield from np.split(users, np.flatnonzero(np.diff(number)) + 1)


@dataclass(slots=True)
class MergeOrder:
    """The order of the rows of several parts, which are numbered one part after the other."""

    rows: Ints
    times: Ints
    offsets: Ints  # of each user's rows, all users of the range
    starts: Ints  # the number of each part's first row

    @staticmethod
    def of(users: Ints, parts: Sequence[EventPart]) -> MergeOrder:
        """The order of the parts' rows for users that include all of theirs."""
        sizes = [len(part.items) for part in parts]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        empty = np.empty(0, np.int64)
        order = MergeOrder(empty, empty, np.zeros(len(users) + 1, np.int64), starts)
        for part, start in zip(parts, starts, strict=False):
            order._insert(users, part, int(start))
        return order

    def _insert(self, users: Ints, part: EventPart, start: int) -> None:
        if not len(part.items):
            return
        counts = np.zeros(len(users), np.int64)
        counts[np.searchsorted(users, part.users)] = np.diff(part.offsets)
        rows = np.arange(start, start + len(part.items))
        grown = self.offsets + np.concatenate([[0], np.cumsum(counts)])
        if not len(self.rows):
            self.rows, self.offsets = rows, grown
            self.times = self.times if part.times is None else np.asarray(part.times)
            return
        user = np.repeat(np.arange(len(users)), counts)
        places = self.offsets[user + 1]
        if part.times is not None:
            places = first_after(self.times, self.offsets[user], places, np.asarray(part.times))
            self.times = _inserted(self.times, places, np.asarray(part.times))
        self.rows, self.offsets = _inserted(self.rows, places, rows), grown

    def drop_duplicates(self, parts: Sequence[EventPart]) -> int:
        """Drops rows that equal an earlier one of another part in every column; returns their number."""
        candidates, run = self._equal_times()
        if not len(candidates):
            return 0
        rows = self.rows[candidates]
        columns: list[list[Any]] = [run.tolist(), gather([part.items for part in parts], rows).tolist()]
        for name in parts[0].features:
            columns += _comparable(*gather_feature([part.features[name] for part in parts], rows))
        seen: set[tuple[Any, ...]] = set()
        again = []
        for place, key in zip(candidates.tolist(), zip(*columns, strict=True), strict=True):
            if key in seen:
                again.append(place)
            seen.add(key)
        lost = np.bincount(np.searchsorted(self.offsets, again, side="right") - 1, minlength=len(self.offsets) - 1)
        self.rows, self.times = np.delete(self.rows, again), np.delete(self.times, again)
        self.offsets = self.offsets - np.concatenate([[0], np.cumsum(lost)])
        return len(again)

    def _equal_times(self) -> tuple[Ints, Ints]:
        """Places of rows of several parts with the same user and time, and a number for each such run of rows."""
        same = np.zeros(len(self.rows) + 1, np.bool_)
        same[1:-1] = self.times[1:] == self.times[:-1]
        same[self.offsets] = False
        places: Ints = np.flatnonzero(same[:-1] | same[1:]).astype(np.int64)
        run = np.cumsum(~same[:-1][places], dtype=np.int64)
        part = np.searchsorted(self.starts, self.rows[places], side="right")
        lowest, highest = np.full(len(places) + 1, len(self.starts) + 1), np.zeros(len(places) + 1, np.int64)
        np.minimum.at(lowest, run, part)
        np.maximum.at(highest, run, part)
        is_mixed = (lowest < highest)[run]
        return places[is_mixed], run[is_mixed]


def is_among(wanted: Ints, known: Ints) -> NDArray[np.bool_]:
    """Which wanted ids are among the known ones, which ascend and are distinct; fast if few are wanted."""
    if not len(known):
        return np.zeros(len(wanted), np.bool_)
    first, last = int(known[0]), int(known[-1])
    if last - first == len(known) - 1:  # without gaps, as dictionaries number a catalogue
        return np.asarray((wanted >= first) & (wanted <= last))
    places = np.searchsorted(known, wanted)
    return np.asarray(known[np.minimum(places, len(known) - 1)] == wanted)


def union(known: Ints, more: Ints) -> Ints:
    """All ids of two ascending lists, ascending; fast if the second one is short."""
    new = more[~is_among(more, known)]
    return _inserted(known, np.searchsorted(known, new), new)


def first_after(times: Ints, low: Ints, high: Ints, wanted: Ints) -> Ints:
    """For each wanted time the first place in low .. high of a later time, or high; times ascend there."""
    places = high.copy()
    open_rows = np.flatnonzero((high > low) & (times[np.maximum(high - 1, 0)] > wanted))
    low, high, wanted = low[open_rows], high[open_rows], wanted[open_rows]
    while (low < high).any():
        middle = (low + high) // 2
        is_later = times[np.minimum(middle, len(times) - 1)] > wanted
        high = np.where(is_later, middle, high)
        low = np.where(is_later, low, np.minimum(middle + 1, high))
    places[open_rows] = high
    return places


def _inserted(values: Ints, places: Ints, new: Ints) -> Ints:
    """Like np.insert, for places that do not fall; several times faster."""
    result = np.empty(len(values) + len(new), np.int64)
    at = places + np.arange(len(new))
    is_old = np.ones(len(result), np.bool_)
    is_old[at] = False
    result[at] = new
    result[is_old] = values
    return result


def gather(parts: Sequence[NDArray[Any]], rows: Ints) -> NDArray[Any]:
    """Rows of the parts, numbered one part after the other."""
    return np.concatenate(parts).take(rows, axis=0)


def gather_feature(parts: Sequence[StoredFeature], rows: Ints) -> tuple[NDArray[Any], Ints | None, NDArray[Any] | None]:
    """Values, lengths and weights of rows of the parts."""
    values = np.concatenate([part.values for part in parts])
    if parts[0].offsets is None:
        return values.take(rows, axis=0), None, None
    bases = np.cumsum([0, *(len(part.values) for part in parts)])
    starts, lengths = [], []
    for part, base in zip(parts, bases, strict=False):
        if part.offsets is None:
            raise AssertionError("a feature has offsets in one part and none in another")
        starts.append(part.offsets[:-1] + base)
        lengths.append(np.diff(part.offsets))
    first, count = gather(starts, rows), gather(lengths, rows)
    ends = np.cumsum(count)
    places = np.repeat(first - (ends - count), count) + np.arange(int(ends[-1]) if len(ends) else 0)
    weights = [part.weights for part in parts if part.weights is not None]
    return values.take(places), count, np.concatenate(weights).take(places) if weights else None


def _comparable(values: NDArray[Any], lengths: Ints | None, weights: NDArray[Any] | None) -> list[list[Any]]:
    """One hashable value per row; equal floats have equal bytes, and a missing one equals a missing one."""
    if lengths is None:
        return [[row.tobytes() for row in _canonical(values)]]
    ends = np.cumsum(lengths).tolist()
    arrays = [values] if weights is None else [values, _canonical(weights)]
    cuts = list(zip([0, *ends], ends, strict=False))
    return [[array[first:last].tobytes() for first, last in cuts] for array in arrays]


def _canonical(floats: NDArray[Any]) -> NDArray[Any]:
    return np.where(np.isnan(floats), np.nan, floats + 0.0).astype(np.float32)
