"""Pools of requests under rules: beam search inside one follows only paths that lead to an allowed item.

    mask over items [I]  --once-->  allowed items below each node  --minus what a request removes-->  live nodes

Counts of nodes are kept for each mask (a filter, the pool of a scenario, or both), so a request costs what it removes: items
that the user has had, and those that it excludes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.generative.trie import ItemPool, Trie

_KEPT_MASKS = 32


class PoolRequest(NamedTuple):
    """A mask over catalogue positions (None: all), positions to remove, and the number of the scenario."""

    allowed: NDArray[np.bool_] | None
    removed: NDArray[np.int64]
    scenario: int = 0


class _CountedMask(NamedTuple):
    """A mask [I] with the allowed items below each node, level by level."""

    source: NDArray[np.bool_] | None  # held, so that its id stays its own
    items: Tensor
    counts: tuple[Tensor, ...]
    live: tuple[Tensor, ...]
    num_items: int


class AllowedPools:
    """Makes the pools of requests. `scenarios` [S, I] are the items that each scenario may show; None: all."""

    def __init__(self, trie: Trie, scenarios: Tensor | None = None):
        self._trie, self._scenarios = trie, scenarios
        self._kept: OrderedDict[tuple[int, int], _CountedMask] = OrderedDict()

    def num_left(self, request: PoolRequest) -> int:
        """How many items a request may show."""
        mask = self._counted(request)
        removed = torch.from_numpy(request.removed)
        return mask.num_items - int(mask.items.index_select(0, removed).sum())

    def pool(self, requests: Sequence[PoolRequest]) -> ItemPool:
        """The pools of requests, each of which has items left."""
        masks = [self._counted(one) for one in requests]
        items = torch.stack([one.items for one in masks])
        live = [torch.stack([one.live[level] for one in masks]) for level in range(self._trie.num_levels)]
        for row, (mask, request) in enumerate(zip(masks, requests, strict=True)):
            removed = torch.from_numpy(request.removed)
            removed = removed[mask.items.index_select(0, removed)]
            items[row, removed] = False
            for level, nodes in enumerate(self._trie.item_nodes[removed].unbind(1)):
                below, num_removed = nodes.unique(return_counts=True)
                live[level][row, below] = mask.counts[level].index_select(0, below) > num_removed
        return ItemPool(self._trie.version, self._trie.digest, tuple(live), items)

    def _counted(self, request: PoolRequest) -> _CountedMask:
        key = (id(request.allowed), request.scenario if self._scenarios is not None else 0)
        if key not in self._kept:
            self._kept[key] = self._count(request)
            if len(self._kept) > _KEPT_MASKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _count(self, request: PoolRequest) -> _CountedMask:
        items = torch.ones(len(self._trie.items), dtype=torch.bool)
        if request.allowed is not None:
            items = torch.from_numpy(request.allowed.copy())
        if self._scenarios is not None:
            items &= self._scenarios[request.scenario]
        of_items = items.to(torch.int64)
        counts = tuple(
            torch.zeros(len(codes), dtype=torch.int64).index_add_(0, self._trie.item_nodes[:, level], of_items)
            for level, codes in enumerate(self._trie.codes)
        )
        return _CountedMask(request.allowed, items, counts, tuple(one > 0 for one in counts), int(of_items.sum()))
