"""A user's prefix: keys and values of all events but the last, under a key that says exactly what they were made of.

A prefix is never found by the user alone: an edited history, a window that slid, other weights, another number type or
another model give another key, and `require` refuses what does not fit, naming the difference.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from nestpipe.errors import PrefixError
from nestpipe.jagged import Batch, Jagged


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKey:
    """What keys and values depend on."""

    model: str  # its configuration
    weights: str  # digest or name of the weights, rows included
    schema: str  # the features it reads, with the statistics that transform them
    user: int
    digest: str  # of the exact inputs of the prefix: items, times, features, actions
    length: int
    anchor: str  # what the rows know of the request; empty unless the model is anchored
    dtype: str

    def require(self, wanted: PrefixKey) -> None:
        """Raises PrefixError unless this is the key that a request needs."""
        if self == wanted:
            return
        have, want = dataclasses.asdict(self), dataclasses.asdict(wanted)
        names = [name for name in have if have[name] != want[name]]
        lines = [f"{name}: kept {have[name]!r}, needed {want[name]!r}" for name in names if name != "user"]
        lines += ["another user"] if "user" in names else []  # who it is must not reach a log
        raise PrefixError(
            f"the kept prefix is not that of the request; its scores would be wrong ({'; '.join(lines)}). "
            "Fill it again, or score in full."
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KVPrefix:
    """Keys [P, H, Q] and values [P, H, V] of each block, the times [P] of the events, and how to go on from here."""

    key: PrefixKey
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    times: Tensor | None
    next_time: int | None  # the time for which the last row answers: that of the event behind the prefix
    digest: InputDigest

    def __post_init__(self) -> None:
        if any(len(one) != self.key.length for one in (*self.keys, *self.values)):
            raise PrefixError(
                f"the prefix has {len(self.keys[0])} keys for {self.key.length} events; keys and values "
                "are never sliced, because each row knows the rows before it. Fill it again from the shorter history."
            )

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in (*self.keys, *self.values)) + (0 if self.times is None else self.times.nbytes)


class InputDigest:
    """A running digest of events: that of a longer history goes on from that of a shorter one."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def then(self, batch: Batch, row: int) -> InputDigest:
        """The digest with the events of one sample added."""
        longer = InputDigest()
        longer._hash = self._hash.copy()
        first, last = batch.items.offsets[row : row + 2].tolist()
        longer._hash.update(_records(batch, first, last).tobytes())
        return longer

    def text(self) -> str:
        return self._hash.hexdigest()


def digest_of(content: object) -> str:
    """A short digest of anything with a stable text."""
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def _records(batch: Batch, first: int, last: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Everything that is known of the events first .. last - 1, one after the other, as 64-bit words."""
    columns: dict[str, Jagged] = {"item": _singles(batch.items)}
    if batch.times is not None and batch.query_times is not None:
        columns |= {"time": _singles(batch.times), "query_time": _singles(batch.query_times)}
    columns |= dict(sorted(batch.event_features.items()))
    parts = [one.slice(first, last) for one in columns.values()]
    bags = [(part.lengths().numpy(), _words(part.values)) for part in parts]
    widths = [lengths * (words.shape[1] if words.ndim > 1 else 1) + 1 for lengths, words in bags]
    out = np.empty(int(sum(width.sum() for width in widths)), dtype=np.int64)
    total = np.sum(widths, axis=0) if last > first else np.zeros(0, dtype=np.int64)
    place = np.cumsum(total) - total  # where each event's record begins
    for (lengths, words), width in zip(bags, widths, strict=True):
        out[place] = lengths
        inside = np.arange(int((width - 1).sum())) - np.repeat(np.cumsum(width - 1) - (width - 1), width - 1)
        out[np.repeat(place + 1, width - 1) + inside] = words.reshape(-1)
        place = place + width
    return out


def _singles(jagged: Jagged) -> Jagged:
    return Jagged.singles(jagged.values)


def _words(values: Tensor) -> np.ndarray[Any, Any]:
    """The bits of values, as integers."""
    array = values.numpy()
    return array.view(np.int32) if array.dtype == np.float32 else array


def describe_statistics(statistics: Mapping[str, Any]) -> str:
    """Statistics by name, in a stable order."""
    return repr(sorted((name, repr(one)) for name, one in statistics.items()))
