"""Which events are trained on, which are targets. A split is three numbers per user, made when a run starts."""

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
    """Per user, counted from its first event: events before `train_end` are trained on; targets are -1 if there is none.

    Retrieval has one target per user; ranking is tested on every event from `test_start` on.
    """

    train_end: Ints
    validation: Ints
    test: Ints
    test_start: Ints


def make_split(sequences: Sequences, config: DataConfig) -> Split:
    """The split that the configuration asks for. A target has at least one event before it."""
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
    """For each user its first event at or after the time, -1 if there is none."""
    if sequences.times is None:
        raise ConfigError(
            f"data.split 'time' needs times, but {sequences.path} is an order-only log; use --data.split last."
        )
    late = np.asarray(sequences.times >= parse_time_ms(text))
    # The first late event of a user stands where the count of late events up to it leaves the count before the user.
    before = np.concatenate([[0], np.cumsum(late)])
    positions = np.concatenate([np.flatnonzero(late), [len(late)]])
    first = positions[before[sequences.offsets[:-1]]]
    return np.where(first < sequences.offsets[1:], first - sequences.offsets[:-1], -1)


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
            f"data.split_time {text!r} is neither seconds since 1970 nor an ISO date such as 2003-01-01."
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def train_mask(sequences: Sequences, split: Split) -> NDArray[np.bool_]:
    """For each event whether it is trained on."""
    users: Any = np.repeat(np.arange(len(sequences.users)), np.diff(sequences.offsets))
    places = np.arange(len(users)) - sequences.offsets[users]
    return np.asarray(places < split.train_end[users])


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Rows start .. end - 1 of a user (its place in the folder); those from `counted` on count."""

    user: Ints
    start: Ints
    counted: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.user)

    def pick(self, places: Ints) -> Windows:
        return Windows(self.user[places], self.start[places], self.counted[places], self.end[places])


def cover(first: Ints, end: Ints, *, max_len: int, block: int) -> Windows:
    """The windows in which rows first[u] .. end[u] - 1 of each user count exactly once; none where there are no rows."""
    users = np.flatnonzero(end > first)
    start = truncate(first[users] + 1, max_len, block)
    beyond = np.maximum(end[users] - (start + max_len), 0)
    num = 1 + -(-beyond // block)
    number = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    user = np.repeat(users, num)
    starts = np.repeat(start, num) + number * block
    counted = np.where(number == 0, first[user], starts + max_len - block)
    return Windows(user, starts, counted, np.minimum(starts + max_len, end[user]))


def alone(first: Ints, end: Ints, *, max_len: int) -> Windows:
    """Windows for events that need none before them: rows first[u] .. end[u] - 1 of each user, without overlap."""
    found = cover(np.zeros_like(first), end - first, max_len=max_len, block=max_len)
    shift = first[found.user]
    return Windows(found.user, found.start + shift, found.counted + shift, found.end + shift)
