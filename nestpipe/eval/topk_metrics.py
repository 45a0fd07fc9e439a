"""Full ranking of the catalogue in bounded memory: ranks of targets, top-k lists, per-user metrics, bootstrap intervals.

    queries [B, D]  x  item vectors [I, D]      scored in blocks; a block with its masks takes at most `max_bytes`

      items   0 ....... | ......... | ...... I
    samples  [ block ]  [ block ]   [ block ]    seen items are removed, then each block adds to the rank of its
             [ block ]  [ block ]   [ block ]    samples' targets and to their running top k

Ties, in ranks and in lists: the lower catalogue position goes first. Ties are bitwise, so a target's score is read from
the block of its neighbours: a separate dot product could round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.errors import DataError, TrainError
from nestpipe.jagged import Jagged

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

_BYTES_PER_SCORE = 20  # a score of up to 8 bytes, three masks, and the running count of ties with its cast
_MIN_ROWS = 32  # queries per product; with fewer, reading the item vectors takes longer than scoring them


class Top(NamedTuple):
    """Best items first: positions [B, k] and scores [B, k]; -1 and -inf where there are fewer candidates."""

    positions: Tensor
    scores: Tensor


class RankedTargets(NamedTuple):
    """Ranks of the targets [B], from 1; num_items + 1 if the target was removed. Best positions [B, top_k]."""

    ranks: Tensor
    top: Tensor


@torch.no_grad()
def rank_targets(
    queries: Tensor, item_vectors: Tensor, targets: Tensor, seen: Jagged | None, *, top_k: int, max_bytes: int
) -> RankedTargets:
    """Ranks catalogue positions `targets` [B] among all items but those in `seen`; also the top-k lists.

    Raises TrainError if a score is not finite and DataError if a position is outside of the catalogue.
    """
    _check_positions("target", targets, len(item_vectors))
    ranks, tops = [], []
    for scorer in _scorers(queries, item_vectors, seen, max_bytes):
        chunk = targets[scorer.rows].to(queries.device)
        target_scores = _target_scores(scorer, chunk)
        before = torch.zeros_like(chunk)
        top = _no_items(scorer.queries)
        for span in scorer.spans:
            scores = scorer.block(span)
            before += _num_before(scores, target_scores, chunk - span.start)
            top = _merge(top, _top_of_block(scores, span.start, top_k), top_k)
        removed = target_scores == -torch.inf
        ranks.append(torch.where(removed, len(item_vectors) + 1, before + 1))
        tops.append(_padded(top, top_k).positions)
    return RankedTargets(torch.cat(ranks), torch.cat(tops))


@torch.no_grad()
def top_items(queries: Tensor, item_vectors: Tensor, seen: Jagged | None, k: int, max_bytes: int) -> Top:
    """The k best items for each query [B, D], without those in `seen`; raises like `rank_targets`."""
    tops = []
    for scorer in _scorers(queries, item_vectors, seen, max_bytes):
        top = _no_items(scorer.queries)
        for span in scorer.spans:
            top = _merge(top, _top_of_block(scorer.block(span), span.start, k), k)
        tops.append(_padded(top, k))
    return Top(torch.cat([top.positions for top in tops]), torch.cat([top.scores for top in tops]))


class _BlockScorer:
    """Scores some samples against spans of the catalogue; a single span is scored once and kept."""

    def __init__(
        self, rows: slice, queries: Tensor, item_vectors: Tensor, seen: Jagged | None, spans: Sequence[slice]
    ) -> None:
        self.rows, self.queries, self.item_vectors, self.spans = rows, queries[rows], item_vectors, spans
        self._seen_rows = self._seen_items = torch.empty(0, dtype=torch.int64, device=queries.device)
        if seen is not None:
            chunk = seen.select(torch.arange(rows.start, rows.stop, device=seen.offsets.device))
            self._seen_rows = chunk.row_of_value().to(queries.device)
            self._seen_items = chunk.values.to(queries.device)
        self._kept: Tensor | None = None

    def block(self, span: slice) -> Tensor:
        """Scores [rows, items of the span]; -inf for seen items."""
        if self._kept is not None:
            return self._kept
        scores = self.queries @ self.item_vectors[span].T
        self._check_finite(scores, span.start)
        inside = (self._seen_items >= span.start) & (self._seen_items < span.stop)
        scores[self._seen_rows[inside], self._seen_items[inside] - span.start] = -torch.inf
        if len(self.spans) == 1:
            self._kept = scores
        return scores

    def _check_finite(self, scores: Tensor, first_item: int) -> None:
        # amin and amax propagate nan, and need no mask of the size of the block.
        finite = scores.amin(1).isfinite() & scores.amax(1).isfinite()
        if not bool(finite.all()):
            row = int(finite.logical_not().nonzero()[0])
            column = int(scores[row].isfinite().logical_not().nonzero()[0])
            raise TrainError(
                f"score of sample {self.rows.start + row} for the item at catalogue position {first_item + column} is "
                f"{float(scores[row, column])}; it cannot be ranked. The model has diverged: use an earlier "
                "checkpoint, or lower the learning rate."
            )


def _scorers(queries: Tensor, item_vectors: Tensor, seen: Jagged | None, max_bytes: int) -> Iterator[_BlockScorer]:
    """One scorer per chunk of samples, with blocks of at most max_bytes; an empty one if there are no samples."""
    num_samples, num_items = len(queries), len(item_vectors)
    if seen is not None:
        if seen.num_rows != num_samples:
            raise DataError(
                f"there are {num_samples} queries but {seen.num_rows} rows of seen items. Pass one row per query."
            )
        _check_positions("seen item", seen.values, num_items)
    num_scores = max(1, max_bytes // _BYTES_PER_SCORE)
    num_rows = min(max(num_scores // max(1, num_items), _MIN_ROWS), num_scores)
    spans = _spans(num_items, max(1, num_scores // num_rows))
    for rows in _spans(num_samples, num_rows) or [slice(0, 0)]:
        yield _BlockScorer(rows, queries, item_vectors, seen, spans)


def _spans(size: int, width: int) -> list[slice]:
    """Divides 0 .. size into the fewest spans of at most `width`, as equal as possible."""
    num_spans = -(-size // width)
    edges = [size * index // num_spans for index in range(num_spans + 1)] if num_spans else [0]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _target_scores(scorer: _BlockScorer, targets: Tensor) -> Tensor:
    """The score of each target [B], read from its block; -inf if it was removed."""
    target_scores = scorer.queries.new_empty(len(targets))
    for span in scorer.spans:
        rows = ((targets >= span.start) & (targets < span.stop)).nonzero().squeeze(1)
        if len(rows):
            target_scores[rows] = scorer.block(span)[rows, targets[rows] - span.start]
    return target_scores


def _num_before(scores: Tensor, target_scores: Tensor, target_columns: Tensor) -> Tensor:
    """How many items of the block [B, n] rank before each row's target: higher score, or equal and lower position."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    before = scores == target_scores.unsqueeze(1)
    before &= columns < target_columns.unsqueeze(1)
    before |= scores > target_scores.unsqueeze(1)
    return before.sum(1, dtype=torch.int32)


def _top_of_block(scores: Tensor, first_item: int, k: int) -> Top:
    """The k best of a block [B, n] by position; `topk` alone breaks ties arbitrarily."""
    k = min(k, scores.shape[1])
    kth = scores.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    taken = scores >= kth
    if bool((taken.sum(1, dtype=torch.int32) > k).any()):
        taken = scores > kth
        tied = scores == kth
        room = k - taken.sum(1, keepdim=True, dtype=torch.int32)
        taken |= tied & (tied.cumsum(1, dtype=torch.int32) <= room)
    columns = taken.nonzero()[:, 1].reshape(-1, k)
    return Top(columns + first_item, scores.gather(1, columns))


def _no_items(queries: Tensor) -> Top:
    empty = queries.new_empty(len(queries), 0)
    return Top(empty.to(torch.int64), empty)


def _merge(top: Top, later: Top, k: int) -> Top:
    """The k best of both, best first; positions of `later` are higher, so a stable sort breaks ties correctly."""
    scores, order = torch.cat([top.scores, later.scores], 1).sort(dim=1, descending=True, stable=True)
    positions = torch.cat([top.positions, later.positions], 1).gather(1, order)
    return Top(positions[:, :k], scores[:, :k])


def _padded(top: Top, k: int) -> Top:
    """Pads to k columns, with position -1 where there are no candidates."""
    missing = (0, k - top.scores.shape[1])
    scores = torch.nn.functional.pad(top.scores, missing, value=-torch.inf)
    positions = torch.nn.functional.pad(top.positions, missing, value=-1)
    return Top(positions.masked_fill(scores == -torch.inf, -1), scores)


def _check_positions(what: str, positions: Tensor, num_items: int) -> None:
    wrong = (positions < 0) | (positions >= num_items)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise DataError(
            f"{what} {place} has catalogue position {int(positions[place])}, but the catalogue has {num_items:,} items. "
            "Leave out items that are not in the catalogue; positions start at 0."
        )


class Coverage:
    """The best rank of each item in any top list; 4 bytes per item, for any number of users."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._best = torch.full((num_items + 1,), torch.iinfo(torch.int32).max, dtype=torch.int32)

    def add(self, top: Tensor) -> None:
        """Adds lists [B, k]; padding (-1) goes to the spare last entry."""
        places = torch.arange(1, top.shape[1] + 1, dtype=torch.int32).expand(top.shape)
        positions = top.cpu().remainder(self._num_items + 1)
        self._best.scatter_reduce_(0, positions.reshape(-1), places.reshape(-1), "amin")

    def at(self, k: int) -> float:
        """The share of the catalogue that is in at least one top-k list."""
        return int((self._best[: self._num_items] <= k).sum()) / max(1, self._num_items)


def user_metrics(ranks: Counts, ks: Sequence[int], num_items: int) -> dict[str, Array]:
    """hr@k, ndcg@k and mrr of each user (one target each); 0 if the target was removed from the ranking."""
    is_ranked = ranks <= num_items
    metrics: dict[str, Array] = {}
    for k in ks:
        metrics[f"hr@{k}"] = (is_ranked & (ranks <= k)).astype(np.float64)
    for k in ks:
        metrics[f"ndcg@{k}"] = metrics[f"hr@{k}"] / np.log2(ranks + 1.0)
    metrics["mrr"] = is_ranked / ranks
    return metrics


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over users and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def resamples(num_users: int, *, seed: int, num: int) -> Iterator[Counts]:
    """How often each user is drawn in each bootstrap resample; one at a time, to bound memory."""
    random = np.random.default_rng(seed)
    for _ in range(num):
        yield np.bincount(random.integers(num_users, size=num_users), minlength=num_users)


def bootstrap_all(columns: Mapping[str, Array], *, seed: int, num: int = 1000) -> dict[str, Interval]:
    """95 % percentile intervals of the means of several per-user columns, from the same resamples of users."""
    values = np.stack(list(columns.values()), axis=1).astype(np.float64)
    num_users = len(values)
    if not num_users:
        raise DataError(
            "there are no users to average over: the evaluation had no samples. Use a split with test targets."
        )
    means = np.empty((num, values.shape[1]))
    for index, counts in enumerate(resamples(num_users, seed=seed, num=num)):
        means[index] = counts @ values / num_users
    lows, highs = np.percentile(means, [2.5, 97.5], axis=0)
    table = zip(columns, values.mean(axis=0), lows, highs, strict=True)
    return {name: Interval(float(mean), float(low), float(high)) for name, mean, low, high in table}


def bootstrap(values: Array, seed: int, num: int = 1000) -> Interval:
    """The 95 % percentile interval of the mean of per-user values [n]."""
    return bootstrap_all({"": values}, seed=seed, num=num)[""]


def paired_difference(a: Array, b: Array, seed: int, num: int = 1000) -> Interval:
    """The interval of mean(b - a) over the same users, in the same order."""
    if a.shape != b.shape:
        raise DataError(
            f"a paired difference needs the same users in both, but there are {len(a)} and {len(b)} values. Evaluate both runs on the same users."
        )
    return bootstrap(b - a, seed, num)


class Tertile(NamedTuple):
    """Users with history lengths low .. high, inclusive."""

    name: str
    low: int
    high: int
    mask: NDArray[np.bool_]


def tertiles(lengths: Counts) -> list[Tertile]:
    """Short, medium and long histories, about a third of the users each; empty ones are left out."""
    first, second = np.quantile(lengths, [1 / 3, 2 / 3], method="lower")
    masks = {
        "short": lengths <= first,
        "medium": (lengths > first) & (lengths <= second),
        "long": lengths > second,
    }
    return [
        Tertile(name, int(lengths[mask].min()), int(lengths[mask].max()), mask)
        for name, mask in masks.items()
        if mask.any()
    ]
