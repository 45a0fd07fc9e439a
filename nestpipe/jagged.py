"""`Jagged` and `Batch`: the only types that cross the borders between modules.

    values   a0 a1 a2 | b0 | | d0 d1        rows of different length, back to back, no padding
    offsets  0          3    4 4       6    row i is values[offsets[i]:offsets[i+1]]; empty rows are legal

Invariants: offsets start at 0, never decrease and end at len(values); no row is longer than `max_len`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nestpipe.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Rows of different length: values [T, ...], offsets [B + 1], and a host-side bound on the row length."""

    values: Tensor
    offsets: Tensor
    max_len: int

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int]]) -> Jagged:
        """Integer rows given as lists."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
        return Jagged(values, offsets_of(lengths), max(map(len, rows), default=0))

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """The rows of several, one after the other."""
        offsets = offsets_of(torch.cat([part.lengths() for part in parts]))
        return Jagged(torch.cat([part.values for part in parts]), offsets, max(part.max_len for part in parts))

    @staticmethod
    def singles(values: Tensor) -> Jagged:
        """One value per row."""
        return Jagged(values, torch.arange(len(values) + 1, device=values.device), 1)

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def row_of_value(self) -> Tensor:
        """For each value the row it is in, [T]."""
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        return rows.repeat_interleave(self.lengths(), output_size=len(self.values))

    def positions(self) -> Tensor:
        """For each value its place in its row, [T]."""
        places = torch.arange(len(self.values), device=self.offsets.device)
        return places - self.offsets.index_select(0, self.row_of_value())

    def with_values(self, values: Tensor) -> Jagged:
        """The same rows with other values."""
        return Jagged(values, self.offsets, self.max_len)

    def select(self, rows: Tensor) -> Jagged:
        """The given rows, in the given order."""
        lengths = self.lengths().index_select(0, rows)
        offsets = offsets_of(lengths)
        places = ranges(self.offsets.index_select(0, rows), lengths)
        return Jagged(self.values.index_select(0, places), offsets, self.max_len)

    def slice(self, begin: int, end: int) -> Jagged:
        """Rows begin … end - 1, without copying values."""
        first, last = int(self.offsets[begin]), int(self.offsets[end])
        return Jagged(self.values[first:last], self.offsets[begin : end + 1] - first, self.max_len)

    def check(self, name: str) -> None:
        """Raises DataError if an invariant of the module's docstring does not hold."""
        lengths = self.lengths()
        problem = None
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1 or not len(self.offsets):
            problem = f"offsets must be a non-empty int64 vector, got {self.offsets.dtype} {list(self.offsets.shape)}"
        elif int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.values):
            problem = f"offsets run from {int(self.offsets[0])} to {int(self.offsets[-1])}, but there are {len(self.values)} values"
        elif len(lengths) and int(lengths.min()) < 0:
            problem = f"offsets decrease at row {int(lengths.argmin())}"
        elif len(lengths) and int(lengths.max()) > self.max_len:
            problem = f"row {int(lengths.argmax())} has {int(lengths.max())} values, but max_len is {self.max_len}"
        if problem:
            raise DataError(f"{name} is not a legal Jagged: {problem}.")


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets [B + 1] of rows with these lengths [B]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, … for each (start, length), back to back."""
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    shift = (starts - offsets[:-1]).repeat_interleave(lengths, output_size=total)
    return shift + torch.arange(total, device=starts.device)


class Cursor(NamedTuple):
    """A position in the data: batch `number` of `epoch`. It rides on the batch, so reading ahead never moves it."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Samples (users) with their events, as the loader hands them to the model.

    `items`, `times`, `query_times` and `targets` have one row per sample and one value per event, in time order.
    `event_features` have one row per event, `sample_features` one row per sample; a missing id is an empty row.
    `target_features` have one row per target. Labels stand among the features by their name: NaN where unobserved.
    Times are in seconds. `query_times` is the time for which an event's row answers: that of the next event, or of
    the request for the last one. Order-only logs have no times; batches for inference have no targets. `groups` numbers the
    samples that a loss may mix with each other; a group is never divided over ranks or parts.
    """

    cursor: Cursor
    sample_ids: Tensor
    items: Jagged
    times: Jagged | None = None
    query_times: Jagged | None = None
    targets: Jagged | None = None
    event_features: Mapping[str, Jagged] = field(default_factory=dict)
    sample_features: Mapping[str, Jagged] = field(default_factory=dict)
    target_features: Mapping[str, Jagged] = field(default_factory=dict)
    groups: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.items.values)

    def sample_of_token(self) -> Tensor:
        """The global sample id of each event, [T]."""
        return self.sample_ids.index_select(0, self.items.row_of_value())

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """The samples of several batches for prediction, one after the other; all have the same features."""
        first = parts[0]
        if len(parts) == 1:
            return first

        def joined(field: Callable[[Batch], Jagged | None]) -> Jagged | None:
            found = [one for one in map(field, parts) if one is not None]
            return Jagged.concat(found) if found else None

        return Batch(
            cursor=first.cursor,
            sample_ids=torch.cat([part.sample_ids for part in parts]),
            items=Jagged.concat([part.items for part in parts]),
            times=joined(lambda part: part.times),
            query_times=joined(lambda part: part.query_times),
            event_features={
                name: Jagged.concat([part.event_features[name] for part in parts]) for name in first.event_features
            },
            sample_features={
                name: Jagged.concat([part.sample_features[name] for part in parts]) for name in first.sample_features
            },
        )

    def select(self, rows: Tensor) -> Batch:
        """The samples at the given places, in the given order."""
        events = ranges(self.items.offsets.index_select(0, rows), self.items.lengths().index_select(0, rows))

        def pick(jagged: Jagged | None) -> Jagged | None:
            return None if jagged is None else jagged.select(rows)

        return Batch(
            cursor=self.cursor,
            sample_ids=self.sample_ids.index_select(0, rows),
            items=self.items.select(rows),
            times=pick(self.times),
            query_times=pick(self.query_times),
            targets=pick(self.targets),
            event_features={name: jagged.select(events) for name, jagged in self.event_features.items()},
            sample_features={name: jagged.select(rows) for name, jagged in self.sample_features.items()},
            target_features={name: jagged.select(events) for name, jagged in self.target_features.items()},
            groups=None if self.groups is None else self.groups.index_select(0, rows),
        )

    def slice(self, begin: int, end: int) -> Batch:
        """Samples begin … end - 1, without copying values."""
        first, last = int(self.items.offsets[begin]), int(self.items.offsets[end])

        def cut(jagged: Jagged | None) -> Jagged | None:
            return None if jagged is None else jagged.slice(begin, end)

        return Batch(
            cursor=self.cursor,
            sample_ids=self.sample_ids[begin:end],
            items=self.items.slice(begin, end),
            times=cut(self.times),
            query_times=cut(self.query_times),
            targets=cut(self.targets),
            event_features={name: jagged.slice(first, last) for name, jagged in self.event_features.items()},
            sample_features={name: jagged.slice(begin, end) for name, jagged in self.sample_features.items()},
            target_features={name: jagged.slice(first, last) for name, jagged in self.target_features.items()},
            groups=None if self.groups is None else self.groups[begin:end],
        )
