"""`Jagged` and `Batch`: the data types that packages exchange.

    values   a0 a1 a2 | b0 | | d0 d1        rows of different length, back to back, without padding
    offsets  0          3    4 4       6    row i is values[offsets[i]:offsets[i+1]]; empty rows are legal

Invariants: offsets start at 0, never decrease and end at len(values); no row is longer than
`max_len`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nestpipe.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Rows of different length: values [T, ...], offsets [B + 1], and a bound on the row length, known on the host."""

    values: Tensor
    offsets: Tensor
    max_len: int
    host: Jagged | None = None  # of rows on a device: the same rows on the host, where sizes are decided

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int]]) -> Jagged:
        """Integer rows given as lists."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
        return Jagged(values, offsets_of(lengths), max(map(len, rows), default=0))

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """The rows of several, one after the other."""
        offsets = offsets_of(torch.cat([one.lengths() for one in parts]))
        return Jagged(torch.cat([one.values for one in parts]), offsets, max(one.max_len for one in parts))

    @staticmethod
    def singles(values: Tensor) -> Jagged:
        """One value per row."""
        return Jagged(values, torch.arange(len(values) + 1, device=values.device), 1)

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def host_offsets(self) -> Tensor:
        """The offsets on the host, without waiting for a device."""
        return self.offsets if self.host is None else self.host.offsets

    def moved(self, move: Callable[[Tensor], Tensor]) -> Jagged:
        """The rows on a device, which remember those on the host."""
        return Jagged(move(self.values), move(self.offsets), self.max_len, self)

    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def row_of_value(self) -> Tensor:
        """The row of each value, [T]."""
        if self.num_rows == 1:  # a request, without kernels
            return torch.zeros(len(self.values), dtype=torch.int64, device=self.offsets.device)
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        return rows.repeat_interleave(self.lengths(), output_size=len(self.values))

    def positions(self) -> Tensor:
        """The position of each value in its row, [T]."""
        places = torch.arange(len(self.values), device=self.offsets.device)
        return places if self.num_rows == 1 else places - self.offsets.index_select(0, self.row_of_value())

    def with_values(self, values: Tensor) -> Jagged:
        """The same rows with other values."""
        return Jagged(values, self.offsets, self.max_len, self.host)

    def select(self, rows: Tensor) -> Jagged:
        """The given rows, in the given order."""
        lengths = self.lengths().index_select(0, rows)
        offsets = offsets_of(lengths)
        places = ranges(self.offsets.index_select(0, rows), lengths)
        return Jagged(self.values.index_select(0, places), offsets, self.max_len)

    def slice(self, begin: int, end: int) -> Jagged:
        """Rows begin … end - 1, without copying values."""
        if self.max_len == 1 and len(self.values) == self.num_rows:  # one value each
            return Jagged(self.values[begin:end], self.offsets[: end - begin + 1], 1)
        first, last = int(self.offsets[begin]), int(self.offsets[end])
        return Jagged(self.values[first:last], self.offsets[begin : end + 1] - first, self.max_len)

    def check(self, name: str) -> None:
        """Raises DataError if an invariant (see the module) does not hold."""
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
    """A position in the data: batch `number` of `epoch`. It rides on the batch, so look-ahead never moves it."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Samples (users) with their events, as the loader hands them to the model.

    `items`, `times`, `query_times` and `targets` have one row per sample and one value per event, in time order.
    `event_features` have one row per event, `target_features` one per target, `sample_features` one per sample; a missing
    id is an empty row. Labels are features; NaN where unobserved. Times are in seconds. `query_times` is the time of the
    prediction at an event: that of the next event, or of the request after the last one. Order-only logs have no times;
    batches for inference have no targets. `groups` numbers the samples that a loss may mix; a group is never divided over
    ranks or micro-batches.
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
    host: Batch | None = None  # of a batch on a device: the same on the host

    @property
    def on_host(self) -> Batch:
        """The batch on the host, without waiting for a device."""
        return self.host or self

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.items.values)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The batch on a device; `move` copies a tensor there."""

        def rows(jagged: Jagged) -> Jagged:
            return jagged.moved(move)

        return replace(self._mapped(move, rows, rows), host=self)

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
            present = [jagged for jagged in map(field, parts) if jagged is not None]
            return Jagged.concat(present) if present else None

        return Batch(
            cursor=first.cursor,
            sample_ids=torch.cat([one.sample_ids for one in parts]),
            items=Jagged.concat([one.items for one in parts]),
            times=joined(lambda one: one.times),
            query_times=joined(lambda one: one.query_times),
            event_features={
                name: Jagged.concat([one.event_features[name] for one in parts]) for name in first.event_features
            },
            sample_features={
                name: Jagged.concat([one.sample_features[name] for one in parts]) for name in first.sample_features
            },
        )

    def select(self, rows: Tensor) -> Batch:
        """The samples at the given places, in the given order."""
        events = ranges(self.items.offsets.index_select(0, rows), self.items.lengths().index_select(0, rows))
        return self._mapped(
            lambda values: values.index_select(0, rows),
            lambda by_sample: by_sample.select(rows),
            lambda by_event: by_event.select(events),
        )

    def slice(self, begin: int, end: int) -> Batch:
        """Samples begin … end - 1, without copying values."""
        first, last = int(self.items.offsets[begin]), int(self.items.offsets[end])
        return self._mapped(
            lambda values: values[begin:end],
            lambda by_sample: by_sample.slice(begin, end),
            lambda by_event: by_event.slice(first, last),
        )

    def _mapped(
        self,
        values: Callable[[Tensor], Tensor],
        by_sample: Callable[[Jagged], Jagged],
        by_event: Callable[[Jagged], Jagged],
    ) -> Batch:
        """The batch with functions applied to tensors per sample, and to rows per sample and per event."""

        def optional(jagged: Jagged | None) -> Jagged | None:
            return None if jagged is None else by_sample(jagged)

        return Batch(
            cursor=self.cursor,
            sample_ids=values(self.sample_ids),
            items=by_sample(self.items),
            times=optional(self.times),
            query_times=optional(self.query_times),
            targets=optional(self.targets),
            event_features={name: by_event(jagged) for name, jagged in self.event_features.items()},
            sample_features={name: by_sample(jagged) for name, jagged in self.sample_features.items()},
            target_features={name: by_event(jagged) for name, jagged in self.target_features.items()},
            groups=None if self.groups is None else values(self.groups),
        )
