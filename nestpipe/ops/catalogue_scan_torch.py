"""Scan of the catalogue (catalogue_scan.py) in plain torch, for any type and device: the readable definition.

      items   0 ....... | ......... | ...... n
    queries  [ block ]  [ block ]   [ block ]    seen items are removed, then each block adds to the rank of its
             [ block ]  [ block ]   [ block ]    queries' targets and to their running top k

Every product has the same shape: the last block of items is padded, and so are fewer than `_MIN_ROWS` queries. A library may round
an element of a product differently at another shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

_BYTES_PER_SCORE = 20  # a score of up to 8 bytes, three masks, and the running count of ties with its cast
_MAX_ITEMS, _MAX_ROWS, _MIN_ROWS = 512, 256, 32

Pair = tuple[Tensor, Tensor]


def block_items(max_bytes: int) -> int:
    """Items of a block. Parts of the catalogue begin at multiples of it."""
    return min(max(max_bytes // _BYTES_PER_SCORE // _MIN_ROWS, 1), _MAX_ITEMS)


def _block_rows(max_bytes: int) -> int:
    return min(max(max_bytes // _BYTES_PER_SCORE // block_items(max_bytes), 1), _MAX_ROWS)


def run(
    queries: Tensor, items: Tensor, seen: Pair | None, targets: Pair | None, *, first: int, k: int, max_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`before`, positions, scores, `not_finite` as `scan` returns them."""
    parts = []
    for rows in _row_blocks(len(queries), max_bytes):
        own_seen = None if seen is None else _seen_of(seen, rows)
        own_targets = None if targets is None else (targets[0][rows], targets[1][rows])
        parts.append(_run(queries[rows], items, own_seen, own_targets, first=first, k=k, max_bytes=max_bytes))
    if not parts:
        return _run(queries, items[:0], None, None, first=first, k=k, max_bytes=max_bytes)
    before, positions, scores, not_finite = (torch.cat(column) for column in zip(*parts, strict=True))
    return before, positions, scores, not_finite


def _run(
    queries: Tensor, items: Tensor, seen: Pair | None, targets: Pair | None, *, first: int, k: int, max_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    before = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    not_finite = torch.zeros(len(queries), dtype=torch.bool, device=queries.device)
    best = queries.new_full((len(queries), k), -torch.inf)
    best_positions = torch.full_like(best, -1, dtype=torch.int64)
    for start, block in _scored_blocks(queries, items, max_bytes):
        # amin and amax propagate nan, and need no mask of the size of the block.
        not_finite |= ~(block.amin(1).isfinite() & block.amax(1).isfinite())
        # With such scores the caller refuses the result; comparisons must not fail.
        scores = block.nan_to_num(0.0, 0.0, 0.0) if bool(not_finite.any()) else block
        position = first + start
        if seen is not None:
            inside = (seen[1] >= position) & (seen[1] < position + scores.shape[1])
            scores[seen[0][inside], seen[1][inside] - position] = -torch.inf
        if targets is not None:
            before += _num_before(scores, targets[1], targets[0] - position)
        num_better = (scores > best[:, -1:]).sum(1, dtype=torch.int32)  # than the k-th so far: an equal one comes later
        if num_new := min(k, int(num_better.max())):
            columns = _top_columns(scores, num_new)
            best, order = torch.cat([best, scores.gather(1, columns)], 1).sort(dim=1, descending=True, stable=True)
            best = best[:, :k]
            best_positions = torch.cat([best_positions, columns + position], 1).gather(1, order[:, :k])
    return before, best_positions.masked_fill(best == -torch.inf, -1), best, not_finite


def scores(queries: Tensor, items: Tensor, rows: Tensor, places: Tensor, *, max_bytes: int) -> Tensor:
    """The score [m] of query rows[i] and item places[i], read from its block."""
    found = queries.new_empty(len(rows))
    for block in _row_blocks(len(queries), max_bytes):
        own = ((rows >= block.start) & (rows < block.stop)).nonzero().squeeze(1)
        for start in (places[own] // block_items(max_bytes)).unique().tolist():
            first = start * block_items(max_bytes)
            values = _product(queries[block], items, first, max_bytes)
            inside = own[places[own] // block_items(max_bytes) == start]
            found[inside] = values[rows[inside] - block.start, places[inside] - first]
    return found


def _row_blocks(num_queries: int, max_bytes: int) -> list[slice]:
    size = _block_rows(max_bytes)
    return [slice(first, min(first + size, num_queries)) for first in range(0, num_queries, size)]


def _scored_blocks(queries: Tensor, items: Tensor, max_bytes: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(items), block_items(max_bytes)):
        yield start, _product(queries, items, start, max_bytes)


def _product(queries: Tensor, items: Tensor, start: int, max_bytes: int) -> Tensor:
    """Scores [B, n] of a block of items; the product behind it has one shape for all blocks."""
    size = block_items(max_bytes)
    block = items[start : start + size]
    if len(block) < size:
        block = F.pad(block, (0, 0, 0, size - len(block)))
    num_rows = min(_MIN_ROWS, _block_rows(max_bytes))
    padded = F.pad(queries, (0, 0, 0, num_rows - len(queries))) if len(queries) < num_rows else queries
    return (padded @ block.T)[: len(queries), : min(size, len(items) - start)]


def _seen_of(seen: Pair, rows: slice) -> Pair:
    """Rows and positions of the seen items of some queries."""
    values, offsets = seen
    own = offsets[rows.start : rows.stop + 1]
    row = torch.arange(rows.stop - rows.start, device=values.device).repeat_interleave(own.diff())
    return row, values[int(own[0]) : int(own[-1])]


def _num_before(scores: Tensor, target_scores: Tensor, target_columns: Tensor) -> Tensor:
    """How many items of the block [B, n] rank before each row's target: higher score, or equal and lower position."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    before = scores == target_scores.unsqueeze(1)
    before &= columns < target_columns.unsqueeze(1)
    before |= scores > target_scores.unsqueeze(1)
    return before.sum(1, dtype=torch.int32)


def _top_columns(scores: Tensor, k: int) -> Tensor:
    """The columns of the k best of a block [B, n], ascending; `topk` alone breaks ties arbitrarily."""
    kth = scores.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    taken = scores >= kth
    if bool((taken.sum(1, dtype=torch.int32) > k).any()):
        taken = scores > kth
        tied = scores == kth
        room = k - taken.sum(1, keepdim=True, dtype=torch.int32)
        taken |= tied & (tied.cumsum(1, dtype=torch.int32) <= room)
    return taken.nonzero()[:, 1].reshape(-1, k)
