"""Constrained beam search over the trie of semantic ids: the most probable live leaves, for many requests at once.

    level 0      root ─ live children ─ the best W ─┐
    level 1      W beams ─ live children of each ───┴ the best W of all ─ ...

Beams are extended by live codes only, so every result is a live path. Its log-probability is the sum over levels of a
log-softmax: over the codes of the trie (`legal`, leaf probabilities sum to 1), or over all codes (`full`). A pool removes paths
and leaves the probabilities of the others as they are: renormalised at each node, the last item of a thin branch would inherit
all of it. The top W are taken over all beams and codes together. If W is at least the number of live leaves, no path is
pruned and the result is the exhaustive ranking. Ties go to the lower code sequence: beams are sorted by node number.

The decoder stores the encoder's memory once per request; only the decoded prefixes exist per beam.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from nestpipe.errors import DataError
from nestpipe.generative.trie import ItemPool, Trie, check_pool, check_version
from nestpipe.jagged import Jagged

Softmax = Literal["legal", "full"]


class Decoder(Protocol):
    """The state of decoding some requests; `version` is that of the model's semantic ids."""

    @property
    def version(self) -> str: ...

    def first(self) -> Tensor:
        """Logits [R, 1, codes] of the first level."""
        ...

    def next(self, parents: Tensor, codes: Tensor, nodes: Tensor) -> Tensor:
        """Logits [R, W, codes] of the next level: beam w extends beam parents[r, w] of the level before by codes[r, w].

        `nodes` are the beams' nodes in the trie, -1 where there is no beam.
        """
        ...


class Beams(NamedTuple):
    """Leaves [R, W], best first, and their log-probabilities; -1 and -inf if there are fewer live leaves."""

    leaves: Tensor
    scores: Tensor


class FoundItems(NamedTuple):
    """Catalogue positions [R, k], best first, and the log-probabilities of their leaves; -1 and -inf if there are fewer."""

    positions: Tensor
    scores: Tensor


@torch.no_grad()
def search(
    decoder: Decoder, trie: Trie, *, width: int, pool: ItemPool | None = None, softmax: Softmax = "legal"
) -> Beams:
    """The top `width` live leaves of each request; raises DataError if trie, pool and model have different versions."""
    if width < 1:
        raise ValueError(f"the beam width is {width}; it must be at least 1")
    check_version("the model", decoder.version, trie.version)
    check_pool(pool, trie)
    logits = decoder.first()
    nodes = parents = codes = torch.zeros(logits.shape[:2], dtype=torch.int64)
    scores = logits.new_zeros(logits.shape[:2])
    for level in range(trie.num_levels):
        if level:
            logits = decoder.next(parents, codes, nodes)
        children, log_probs = _children(trie, level, pool, nodes, logits, softmax)
        scores, parents, nodes = _best(scores.unsqueeze(2) + log_probs, children, width)
        codes = trie.codes[level].index_select(0, nodes.clamp(min=0).flatten()).view_as(nodes)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return Beams(nodes.gather(1, order), scores)


@torch.no_grad()
def path_scores(decoder: Decoder, trie: Trie, positions: Tensor, *, softmax: Softmax = "legal") -> Tensor:
    """The log-probabilities [R, K] of the leaves of items [K] (catalogue positions), for each request: no beam, all paths."""
    check_version("the model", decoder.version, trie.version)
    logits = decoder.first()
    nodes = codes = torch.zeros(logits.shape[:2], dtype=torch.int64)
    scores = logits.new_zeros(len(logits), len(positions))
    for level in range(trie.num_levels):
        if level:
            parents = torch.zeros_like(nodes) if level == 1 else torch.arange(len(positions)).expand_as(nodes)
            logits = decoder.next(parents, codes, nodes)
        children, log_probs = _children(trie, level, None, nodes, logits, softmax)
        wanted = trie.item_nodes[positions, level].expand(len(logits), -1)
        places = (
            (children.expand(-1, len(positions), -1) == wanted.unsqueeze(2)).to(torch.uint8).argmax(2, keepdim=True)
        )
        scores += log_probs.expand(-1, len(positions), -1).gather(2, places).squeeze(2)
        nodes, codes = wanted.contiguous(), trie.item_codes[positions, level].repeat(len(logits), 1)
    return scores


def _children(
    trie: Trie, level: int, pool: ItemPool | None, nodes: Tensor, logits: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Children [R, W, K] of nodes [R, W] and their log-probabilities; -1 and -inf where there is none or it is dead."""
    above = nodes.clamp(min=0).flatten()
    start = trie.first[level].index_select(0, above).view_as(nodes)
    count = (trie.first[level].index_select(0, above + 1).view_as(nodes) - start).masked_fill_(nodes < 0, 0)
    place = torch.arange(int(count.max()))
    live = place < count.unsqueeze(2)
    children = (start.unsqueeze(2) + place).masked_fill_(~live, 0)
    codes = trie.codes[level].index_select(0, children.flatten()).view_as(children)
    picked = logits.gather(2, codes).masked_fill_(~live, -torch.inf)
    log_probs = picked.log_softmax(2) if softmax == "legal" else picked - logits.logsumexp(2, keepdim=True)
    if pool is not None:
        live &= pool.at(level, children)
    # The softmax of a beam without live children is nan.
    return children.masked_fill_(~live, -1), log_probs.masked_fill_(~live, -torch.inf)


def _best(scores: Tensor, nodes: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The top of [R, W, K], sorted by node: scores, parents and nodes, each [R, at most width]."""
    flat, num_children = scores.flatten(1), scores.shape[2]
    width = min(width, int((nodes >= 0).flatten(1).sum(1).max()))
    kth = flat.topk(width, dim=1, sorted=False).values.amin(1, keepdim=True)
    taken = flat > kth
    tied = flat == kth
    taken |= tied & (tied.cumsum(1) <= width - taken.sum(1, keepdim=True))
    columns = taken.nonzero()[:, 1].view(len(flat), width)
    return flat.gather(1, columns), columns // num_children, nodes.flatten(1).gather(1, columns)


def expand(
    trie: Trie, beams: Beams, k: int, *, seen: Jagged | None = None, allowed: Tensor | None = None, per_leaf: int = 0
) -> FoundItems:
    """The first k items of the leaves, without `seen` ones (catalogue positions), only `allowed` ones (mask [I] or [R, I]).

    At most `per_leaf` items per leaf, in catalogue order (0: all).
    """
    num_requests = len(beams.leaves)
    leaves = beams.leaves.clamp(min=0).flatten()
    start = trie.first[-1].index_select(0, leaves)
    count = (trie.first[-1].index_select(0, leaves + 1) - start).masked_fill_(beams.leaves.flatten() < 0, 0)
    place = torch.arange(min(int(count.max()), per_leaf or len(trie.items)))
    keep = (place < count.unsqueeze(1)).view(num_requests, -1)
    index = (start.unsqueeze(1) + place).clamp_(max=len(trie.items) - 1).flatten()
    positions = trie.leaf_items.index_select(0, index).view(num_requests, -1)
    if allowed is not None:
        keep &= allowed.expand(num_requests, -1).gather(1, positions)
    if seen is not None:
        if seen.num_rows != num_requests:
            raise DataError(f"{seen.num_rows} rows of seen items for {num_requests} requests; they must match.")
        own = torch.arange(num_requests).unsqueeze(1) * len(trie.items) + positions
        keep &= ~torch.isin(own, seen.row_of_value() * len(trie.items) + seen.values)
    scores = beams.scores.repeat_interleave(len(place), 1).masked_fill(~keep, -torch.inf)
    order = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :k]
    missing = (0, k - order.shape[1])
    return FoundItems(
        torch.nn.functional.pad(positions.masked_fill(~keep, -1).gather(1, order), missing, value=-1),
        torch.nn.functional.pad(scores.gather(1, order), missing, value=-torch.inf),
    )
