"""Order of rows in prefix inference: kind by kind as they are computed, user by user as attention needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nestpipe.jagged import Jagged, offsets_of, ranges
from nestpipe.ops.device_memory import upload


class RowOrder:
    """Permutes rows from kind by kind (cached | events | candidates) to user by user, as attention needs them.

    For a single user both orders are the same, and nothing is copied.
    """

    def __init__(self, cached: Tensor, events: Tensor, candidates: Tensor):
        self.num_cached, self.num_events, self.num_candidates = cached, events, candidates
        self._keys = _interleave([cached, events, candidates])
        self._queries = _interleave([events, candidates])
        self._is_single, self._num_events = len(events) == 1, int(events.sum())
        self._inverse = torch.empty_like(self._queries).index_copy_(0, self._queries, torch.arange(len(self._queries)))

    def queries(self, events: Tensor, candidates: Tensor) -> Tensor:
        rows = torch.cat([events, candidates])
        return rows if self._is_single else rows.index_select(0, upload(self._queries, rows.device))

    def keys(self, cached: Iterable[Tensor], events: Tensor, candidates: Tensor) -> Tensor:
        rows = torch.cat([*cached, events, candidates])
        return rows if self._is_single else rows.index_select(0, upload(self._keys, rows.device))

    def split(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of events and of candidates, from rows in query order."""
        if self._is_single:
            return queries[: self._num_events], queries[self._num_events :]
        inverse = upload(self._inverse, queries.device)
        return (
            queries.index_select(0, inverse[: self._num_events]),
            queries.index_select(0, inverse[self._num_events :]),
        )

    def query_rows(self, values: Tensor | None = None) -> Jagged:
        """Values in query order, or their indices, as one row per user."""
        lengths = self.num_events + self.num_candidates
        return _rows_of(self._queries if values is None else values, lengths)

    def key_rows(self, values: Tensor | None = None) -> Jagged:
        """Values in key order, or their indices, as one row per user."""
        lengths = self.num_cached + self.num_events + self.num_candidates
        return _rows_of(self._keys if values is None else values, lengths)


def _rows_of(values: Tensor, lengths: Tensor) -> Jagged:
    return Jagged(values, offsets_of(lengths), int(lengths.max()) if len(lengths) else 0)


def _interleave(lengths: Sequence[Tensor]) -> Tensor:
    """Indices that reorder rows from kind by kind (one length vector [B] each) to user by user."""
    counts = torch.stack(list(lengths), dim=1)  # [B, kinds]
    if len(counts) == 1:
        return torch.arange(int(counts.sum()))
    starts = offsets_of(counts.T.flatten())[:-1].reshape(counts.T.shape).T
    return ranges(starts.flatten(), counts.flatten())
