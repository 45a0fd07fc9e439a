"""Splits events into training, validation and test, and training events into windows.

A split is a few numbers per user, computed when a run starts; the sequence folder does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.config import DataConfig
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.errors import ConfigError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Positions per user [U], from the user's first event: training events are before `train_end`; -1 means no target.

    Retrieval has one target per user. Ranking is tested on every event from `test_start` on.
    """

    train_end: Ints
    validation: Ints
    test: Ints
    test_start: Ints


def make_split(sequences: Sequences, config: DataConfig) -> Split:
    """The configured split. A target has at least one event before it."""
    lengths = np.diff(sequences.offsets)
    test = lengths - 1 if config.split == "last" else _first_since(sequences, config.split_time or "")
    # Users without events after the split time are trained on in full.
    end = np.where(test < 0, lengths, test)
    test_start = end
    test = np.where((test >= 1) & (test < lengths), test, -1)
    validation = np.full_like(end, -1)
    if config.validation:
        validation = np.where(end >= 2, end - 1, -1)
        end = np.where(validation >= 0, validation, end)
    return Split(end, validation, test, test_start)


def _first_since(sequences: Sequences, text: str) -> Ints:
    """The first event of each user at or after the time, -1 if there is none."""
    if sequences.times is None:
        raise ConfigError(
            f"data.split 'time' needs times, but {sequences.path} is an order-only log. Use --data.split last."
        )
    at, first, last = parse_time_ms(text), int(sequences.times.min()), int(sequences.times.max())
    if not first <= at <= last:
        raise ConfigError(
            f"data.split_time is {_date(at)}, but {sequences.path} has events from {_date(first)} to {_date(last)}: "
            "one side of the split would be empty. Choose a time in between."
        )
    late = np.asarray(sequences.times >= at)
    # With n late events before a user, its first late event is late event number n, if that is the user's.
    before = np.concatenate([[0], np.cumsum(late)])
    positions = np.concatenate([np.flatnonzero(late), [len(late)]])
    place = positions[before[sequences.offsets[:-1]]]
    return np.where(place < sequences.offsets[1:], place - sequences.offsets[:-1], -1)


def _date(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def parse_time_ms(text: str) -> int:
    """Milliseconds since 1970 from an ISO date (UTC unless it says otherwise) or from seconds."""
    try:
        return round(float(text) * 1000)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"data.split_time {text!r} is neither seconds since 1970 nor an ISO date. Write for example 2003-01-01."
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def train_mask(sequences: Sequences, split: Split) -> NDArray[np.bool_]:
    """Which events are training events [E]."""
    users: Any = np.repeat(np.arange(len(sequences.users)), np.diff(sequences.offsets))
    places = np.arange(len(users)) - sequences.offsets[users]
    return np.asarray(places < split.train_end[users])


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Events start .. end - 1 of each user (index in the folder); events before `counted` are context only."""

    user: Ints
    start: Ints
    counted: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.user)

    def pick(self, places: Ints) -> Windows:
        return Windows(self.user[places], self.start[places], self.counted[places], self.end[places])


def overlapping_windows(first: Ints, end: Ints, *, max_len: int, block: int) -> Windows:
    """Windows with context in which events first[u] .. end[u] - 1 of each user count exactly once."""
    users = np.flatnonzero(end > first)
    start = truncate(first[users] + 1, max_len, block)
    beyond = np.maximum(end[users] - (start + max_len), 0)
    num = 1 + -(-beyond // block)
    number = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    user = np.repeat(users, num)
    starts = np.repeat(start, num) + number * block
    counted = np.where(number == 0, first[user], starts + max_len - block)
    return Windows(user, starts, counted, np.minimum(starts + max_len, end[user]))


def disjoint_windows(first: Ints, end: Ints, *, max_len: int) -> Windows:
    """Windows without context: events first[u] .. end[u] - 1 of each user, for models that read no history."""
    windows = overlapping_windows(np.zeros_like(first), end - first, max_len=max_len, block=max_len)
    shift = first[windows.user]
    return Windows(windows.user, windows.start + shift, windows.counted + shift, windows.end + shift)
