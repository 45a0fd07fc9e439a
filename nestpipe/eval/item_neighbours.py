"""Weighted edges between items, counted on training events: what follows an item, and what the same users had.

    transitions(window)   i -> j: sum of 1 / d over training events j that are d <= window events after i, per event of i
    cosine_neighbours(n)  i -> j: users with both / sqrt(users with i * users with j), the n best of each item

Positions are catalogue positions. Memory is bounded: edges are summed for a block of source items at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split, train_mask
from nestpipe.eval.topk_metrics import Array, Counts
from nestpipe.jagged import ranges

_AT_ONCE = 1 << 23  # pairs of events that are summed at a time


@dataclass(frozen=True, slots=True, eq=False)
class TrainingEvents:
    """Catalogue positions of all training events, in order; events of user u are offsets[u] .. offsets[u + 1]."""

    items: Counts
    offsets: Counts
    num_items: int

    @staticmethod
    def of(sequences: Sequences, split: Split) -> TrainingEvents:
        items = np.searchsorted(sequences.catalogue, sequences.items[train_mask(sequences, split)])
        return TrainingEvents(
            items, _offsets(np.minimum(split.train_end, np.diff(sequences.offsets))), len(sequences.catalogue)
        )

    @property
    def users(self) -> Counts:
        """The user of each event."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def counts(self) -> Counts:
        """Training events of each item of the catalogue."""
        return np.bincount(self.items, minlength=self.num_items)

    def once(self) -> TrainingEvents:
        """Each item of a user once, in the order of the catalogue."""
        pairs = np.unique(self.users * self.num_items + self.items)
        users, items = pairs // self.num_items, pairs % self.num_items
        return TrainingEvents(items, _offsets(np.bincount(users, minlength=len(self.offsets) - 1)), self.num_items)


@dataclass(frozen=True, slots=True, eq=False)
class ItemNeighbours:
    """Neighbours of each item with their weights, all above 0; those of item i are offsets[i] .. offsets[i + 1]."""

    offsets: Counts
    items: Counts
    weights: Array


def transitions(events: TrainingEvents, *, window: int) -> ItemNeighbours:
    """What follows an item within `window` events, nearer ones with more weight, per event of the item."""
    ends = events.offsets[1:][events.users]
    places = np.arange(len(events.items))
    counts = events.counts()
    found = _summed(events, places + 1, np.minimum(places + 1 + window, ends), falls=True)
    sources, items, weights = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return ItemNeighbours(_offsets(np.bincount(sources, minlength=events.num_items)), items, weights / counts[sources])


def cosine_neighbours(events: TrainingEvents, *, num_neighbours: int) -> ItemNeighbours:
    """The items that share most users with an item, relative to how many users both have; ties to the lower position."""
    once = events.once()
    counts = once.counts()
    kept = [
        _best(sources, items, shared / np.sqrt(counts[sources] * counts[items]), num_neighbours)
        for sources, items, shared in _summed(
            once, once.offsets[:-1][once.users], once.offsets[1:][once.users], falls=False
        )
    ]
    sources, items, weights = (np.concatenate(columns) for columns in zip(*kept, strict=True))
    return ItemNeighbours(_offsets(np.bincount(sources, minlength=events.num_items)), items, weights)


def _best(sources: Counts, items: Counts, weights: Array, num: int) -> tuple[Counts, Counts, Array]:
    """The `num` other items of each source with most weight; entries are in the order of source and item."""
    is_other = sources != items
    sources, items, weights = sources[is_other], items[is_other], weights[is_other]
    bounds = np.concatenate([np.flatnonzero(np.diff(sources, prepend=-1)), [len(sources)]])
    # A sort for each source is faster than one of all entries by source and weight.
    places = [
        low + np.argsort(-weights[low:high], kind="stable")[:num] for low, high in itertools.pairwise(bounds.tolist())
    ]
    best = np.concatenate([np.empty(0, np.int64), *places])
    return sources[best], items[best], weights[best]


def _summed(
    events: TrainingEvents, first: Counts, end: Counts, *, falls: bool
) -> Iterator[tuple[Counts, Counts, Array]]:
    """Sums over pairs of each event e and the events n in first[e] .. end[e] - 1, by (item, item), a block of items at a time.

    A pair counts 1, or if it `falls` 1 / (n - e).
    """
    order = np.argsort(events.items, kind="stable")
    lengths = (end - first)[order]
    of_item = np.searchsorted(events.items[order], np.arange(events.num_items + 1))
    before = np.concatenate([[0], np.cumsum(lengths)])[of_item]  # pairs of all items before each item
    low = 0
    while low < events.num_items:
        high = max(low + 1, int(np.searchsorted(before, before[low] + _AT_ONCE, side="right")) - 1)
        own = slice(of_item[low], of_item[high])
        near = ranges(torch.from_numpy(first[order[own]]), torch.from_numpy(lengths[own])).numpy()
        origin = np.repeat(order[own], lengths[own])
        keys = (events.items[origin] - low) * events.num_items + events.items[near]
        weights = 1.0 / (near - origin) if falls else None
        distinct, sums = sums_by_key(keys, weights, (high - low) * events.num_items)
        yield low + distinct // events.num_items, distinct % events.num_items, sums
        low = high


def sums_by_key(keys: Counts, weights: Array | None, num_keys: int) -> tuple[Counts, Array]:
    """Distinct keys, ascending, and the sum of the weights [default: 1 each] of each."""
    if num_keys > 8 * len(keys):  # a table of all keys would cost more than a sort
        distinct, place = np.unique(keys, return_inverse=True)
        return distinct, np.bincount(place, weights, minlength=len(distinct)).astype(np.float64)
    counts = np.bincount(keys, minlength=num_keys)
    sums = counts if weights is None else np.bincount(keys, weights, minlength=num_keys)
    distinct = np.flatnonzero(counts)
    return distinct, sums[distinct].astype(np.float64)


def _offsets(lengths: Counts) -> Counts:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
