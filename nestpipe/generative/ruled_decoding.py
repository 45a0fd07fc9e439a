"""Beam search under rules: what they remove is removed from the trie, then lists are made of all items that the search found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.generative.allowed_pools import AllowedPools, PoolRequest
from nestpipe.generative.beam import Decoder, Softmax, expand, path_scores, search
from nestpipe.generative.trie import Trie
from nestpipe.rules.compiled_rules import CompiledRules
from nestpipe.rules.selection import SelectedItems, select

_NOTHING = np.empty(0, np.int64)


class RuledRequest(NamedTuple):
    """Compiled rules of a request, the positions that they remove, the length of its list and its scenario."""

    rules: CompiledRules
    removed: NDArray[np.int64]
    k: int
    scenario: int = 0


@torch.no_grad()
def decode_lists(
    start: Callable[[], Decoder],
    trie: Trie,
    pools: AllowedPools,
    requests: Sequence[RuledRequest],
    *,
    width: int,
    softmax: Softmax,
    vectors: NDArray[Any] | None = None,
) -> list[SelectedItems]:
    """The list of each request; `start` begins decoding them. Scores are log-probabilities, of pins over the whole catalogue.

    If `width` is at least the number of live leaves, the list is that of an exhaustive ranking of the allowed items.
    """
    wanted = [PoolRequest(one.rules.allowed, one.removed, one.scenario) for one in requests]
    num_left = [pools.num_left(one) for one in wanted]
    # A request without items has no live leaf to search for; it takes part with all of them, for nothing.
    everything = PoolRequest(None, _NOTHING)
    searched = [one if num else everything for one, num in zip(wanted, num_left, strict=True)]
    pool = pools.pool(searched)
    beams = search(start(), trie, width=width, pool=pool, softmax=softmax)
    every = beams.leaves.shape[1] * int(trie.first[-1].diff().max())
    most = max(one.k if one.rules.removes_only else every for one in requests)
    found = expand(trie, beams, min(most, len(trie.items)), allowed=pool.items)
    pinned = np.unique(np.concatenate([one.rules.pins for one in requests]))
    pin_scores = path_scores(start(), trie, torch.from_numpy(pinned), softmax=softmax).numpy() if len(pinned) else None
    lists = []
    for row, request in enumerate(requests):
        places, scores = found.positions[row].numpy(), found.scores[row].numpy()
        kept = (places >= 0) & (num_left[row] > 0) & ~np.isin(places, request.rules.pins)
        places, scores = places[kept], scores[kept]
        if pin_scores is not None and len(request.rules.pins):
            own = pin_scores[row, np.searchsorted(pinned, request.rules.pins)]
            places, scores = np.concatenate([request.rules.pins, places]), np.concatenate([own, scores])
        made = select(scores, request.rules, request.k, removed=request.removed, positions=places, vectors=vectors)
        lists.append(made._replace(num_left=num_left[row]))
    return lists
