"""KV prefix: keys and values of all events of a user but the last, with a key that identifies their exact inputs.

The key is more than the user. An edited or truncated history, other weights, another dtype or another model give another key,
and `PrefixKey.require` rejects a prefix whose key differs, naming the fields that do.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.errors import PrefixError
from nestpipe.jagged import Batch, Jagged
from nestpipe.ops.device_memory import download_all, upload

_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}  # by the bytes of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKey:
    """Everything that the keys and values depend on."""

    model: str  # digest of the model's configuration
    weights: str  # digest or name of the weights, rows included
    schema: str  # digest of the features it reads, with the statistics that transform them
    user: int
    digest: str  # of the inputs: items, times, features, actions
    length: int
    anchor: str  # what the rows depend on in the request; empty unless the model is anchored
    dtype: str

    @property
    def made_by(self) -> tuple[str, ...]:
        """What identifies the model, with its weights, features and number type."""
        return self.model, self.weights, self.schema, self.dtype

    def require(self, wanted: PrefixKey) -> None:
        """Raises PrefixError unless this is the wanted key."""
        if self == wanted:
            return
        have, want = dataclasses.asdict(self), dataclasses.asdict(wanted)
        names = [name for name in have if have[name] != want[name]]
        lines = [f"{name}: cached {have[name]!r}, needed {want[name]!r}" for name in names if name != "user"]
        lines += ["another user"] if "user" in names else []  # user ids must not reach a log
        raise PrefixError(
            f"the cached KV prefix does not belong to the request; its scores would be wrong ({'; '.join(lines)}). "
            "Prefill it again, or score in full."
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KVPrefix:
    """Keys [P, H, Q] and values [P, H, V] of each block, the times [P] of the events, and the state to extend it."""

    key: PrefixKey
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    times: Tensor | None
    next_time: int | None  # query time of the last row: the time of the event behind the prefix
    digest: InputDigest

    def __post_init__(self) -> None:
        if any(len(one) != self.key.length for one in (*self.keys, *self.values)):
            raise PrefixError(
                f"the KV prefix has {len(self.keys[0])} keys for {self.key.length} events. It cannot be shortened, because "
                "each row depends on the rows before it; prefill it again from the shorter history."
            )

    def moved(self, device: torch.device) -> KVPrefix:
        """The prefix with keys and values on a device; itself if they are there. Times stay on the host."""
        if not self.keys or self.keys[0].device.type == device.type:
            return self
        rows = [*self.keys, *self.values]
        there = download_all(rows) if device.type == "cpu" else [upload(one, device) for one in rows]
        return dataclasses.replace(self, keys=tuple(there[: len(self.keys)]), values=tuple(there[len(self.keys) :]))

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in (*self.keys, *self.values)) + (0 if self.times is None else self.times.nbytes)


class InputDigest:
    """A running digest of events: `then` continues it for a longer history."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def then(self, batch: Batch, row: int) -> InputDigest:
        """The digest after the events of one sample."""
        first, last = batch.items.offsets[row : row + 2].tolist()
        return self.over(batch, first, last)

    def over(self, batch: Batch, first: int, last: int) -> InputDigest:
        """The digest after the events first .. last - 1 of a batch."""
        longer = InputDigest()
        longer._hash = self._hash.copy()
        longer._hash.update(_records(batch, first, last).tobytes())
        return longer

    def text(self) -> str:
        return self._hash.hexdigest()


def digest_of(content: object) -> str:
    """A short digest of an object with a stable repr."""
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def same_events(a: Batch, b: Batch) -> bool:
    """Whether two requests of one user have the same events, whatever their own times: a tenth of the cost of a digest."""
    if not torch.equal(a.sample_ids, b.sample_ids) or a.event_features.keys() != b.event_features.keys():
        return False
    pairs = [(a.items, b.items), (a.times, b.times)]
    pairs += [(one, b.event_features[name]) for name, one in a.event_features.items()]
    return torch.equal(_past_query_times(a), _past_query_times(b)) and all(_is_same(*pair) for pair in pairs)


def _past_query_times(batch: Batch) -> Tensor:
    """Without that of the last event, which is the request's and no part of the prefix."""
    return batch.sample_ids[:0] if batch.query_times is None else batch.query_times.values[:-1]


def _is_same(a: Jagged | None, b: Jagged | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.offsets, b.offsets) and np.array_equal(_words(a.values), _words(b.values))


def _columns(batch: Batch) -> dict[str, Jagged]:
    """All that keys and values depend on, event by event."""
    columns = {name: Jagged.singles(values) for name, values in _own_columns(batch).items()}
    return columns | dict(sorted(batch.event_features.items()))


def _own_columns(batch: Batch) -> dict[str, Tensor]:
    """Those with one value per event in every log."""
    columns = {"item": batch.items.values}
    if batch.times is not None and batch.query_times is not None:
        columns |= {"time": batch.times.values, "query_time": batch.query_times.values}
    return columns


def _records(batch: Batch, first: int, last: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """All columns of the events first .. last - 1, event by event, as 64-bit words: each value, or values, after their number.

    Where every column has one value per event, as `_mixed_records` at a tenth of its cost.
    """
    columns = list(_own_columns(batch).values())
    for _, one in sorted(batch.event_features.items()):
        # No row is longer than `max_len`: as many values as rows are one per row.
        if one.max_len != 1 or one.values.dim() != 1 or len(one.values) != one.num_rows:
            return _mixed_records(batch, first, last)
        columns.append(one.values)
    out = np.ones((last - first, 2 * len(columns)), dtype=np.int64)
    for number, column in enumerate(columns):
        out[:, 2 * number + 1] = _words(column)[first:last]
    return out


def _mixed_records(batch: Batch, first: int, last: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`_records` for any number of values per event."""
    own = [one.slice(first, last) for one in _columns(batch).values()]
    bags = [(one.lengths().numpy(), _words(one.values)) for one in own]
    widths = [lengths * (words.shape[1] if words.ndim > 1 else 1) + 1 for lengths, words in bags]
    out = np.empty(int(sum(width.sum() for width in widths)), dtype=np.int64)
    total = np.sum(widths, axis=0) if last > first else np.zeros(0, dtype=np.int64)
    place = np.cumsum(total) - total  # start of each event's record
    for (lengths, words), width in zip(bags, widths, strict=True):
        out[place] = lengths
        inside = np.arange(int((width - 1).sum())) - np.repeat(np.cumsum(width - 1) - (width - 1), width - 1)
        out[np.repeat(place + 1, width - 1) + inside] = words.reshape(-1)
        place = place + width
    return out


def _words(values: Tensor) -> np.ndarray[Any, Any]:
    """The values reinterpreted as integers."""
    array = values.numpy()
    return array.view(_INTEGERS[array.dtype.itemsize]) if array.dtype.kind == "f" else array


def describe_statistics(statistics: Mapping[str, Any]) -> str:
    """A stable text of the statistics, sorted by name."""
    return repr(sorted((name, repr(one)) for name, one in statistics.items()))
