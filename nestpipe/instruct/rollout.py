"""Paths drawn from a model, and the log-probabilities of given paths; both work on any decoder that the search can drive.

Probabilities are those of the search: over the codes that are live after a prefix (`legal`), or over all codes (`full`), where dead
codes are never drawn. Draws are counter-based: a request's paths do not depend on who else is in the batch.

Letters: R requests, G paths of each, L levels, C codes of a level.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestpipe.draw import Draw, bits
from nestpipe.hashing import shift_right
from nestpipe.instruct.beam import Decoder, Softmax
from nestpipe.instruct.trie import Pool, Trie, check_version
from nestpipe.jagged import ranges


class Rollout(NamedTuple):
    """Leaves [R, G] and the log-probabilities [R, G, L] of their codes."""

    leaves: Tensor
    log_probs: Tensor


@torch.no_grad()
def draw_paths(
    decoder: Decoder,
    trie: Trie,
    *,
    num: int,
    draw: Draw,
    samples: Tensor,
    pool: Pool | None = None,
    softmax: Softmax = "legal",
) -> Rollout:
    """`num` paths of each request, drawn independently; `samples` [R] tells requests apart."""
    check_version("the model", decoder.version, trie.version)
    nodes = torch.zeros(len(samples), num, dtype=torch.int64)
    codes, logs = nodes, []
    for level in range(trie.num_levels):
        logits = _logits(decoder, level, num, codes)
        legal, live = _live_codes(trie, level, nodes, pool)
        log_probs = _log_softmax(logits, live, softmax)
        keys = draw.keys("paths", samples, torch.full_like(samples, level))
        codes = (log_probs.double() + _gumbel(keys, log_probs)).masked_fill(~live, -torch.inf).argmax(2)
        logs.append(log_probs.gather(2, codes.unsqueeze(2)))
        rank = legal.cumsum(2).gather(2, codes.unsqueeze(2)).squeeze(2) - 1
        nodes = trie.first[level].index_select(0, nodes.flatten()).view_as(nodes) + rank
    return Rollout(nodes, torch.cat(logs, 2))


def path_log_probs(
    decoder: Decoder, trie: Trie, leaves: Tensor, *, pool: Pool | None = None, softmax: Softmax = "legal"
) -> Tensor:
    """Log-probabilities [R, G, L] of the codes of leaves [R, G], with gradients if the decoder has some."""
    check_version("the model", decoder.version, trie.version)
    items = trie.leaf_items.index_select(0, trie.first[-1].index_select(0, leaves.flatten()))
    path = trie.item_nodes.index_select(0, items).view(*leaves.shape, -1)
    every = trie.item_codes.index_select(0, items).view(*leaves.shape, -1)
    logs = []
    for level in range(trie.num_levels):
        logits = _logits(decoder, level, leaves.shape[1], every[:, :, level - 1])
        before = path[:, :, level - 1] if level else torch.zeros_like(leaves)
        live = _live_codes(trie, level, before, pool)[1]
        logs.append(_log_softmax(logits, live, softmax).gather(2, every[:, :, level : level + 1]))
    return torch.cat(logs, 2)


def _logits(decoder: Decoder, level: int, num: int, codes: Tensor) -> Tensor:
    """Logits [R, G, C] of a level, after the codes [R, G] of the level before."""
    if not level:
        return decoder.first().expand(-1, num, -1)
    parents = torch.zeros_like(codes) if level == 1 else torch.arange(num).expand_as(codes)
    return decoder.next(parents, codes)


def _log_softmax(logits: Tensor, live: Tensor, softmax: Softmax) -> Tensor:
    if softmax == "legal":
        logits = logits.masked_fill(~live, -torch.inf)
    return logits.log_softmax(2)


def _live_codes(trie: Trie, level: int, nodes: Tensor, pool: Pool | None) -> tuple[Tensor, Tensor]:
    """Which codes [R, G, C] follow nodes [R, G] of the level before: all there are, and those that are live."""
    flat = nodes.flatten()
    legal = trie.legal(level, flat).view(*nodes.shape, -1)
    if pool is None:
        return legal, legal
    start = trie.first[level].index_select(0, flat)
    count = trie.first[level].index_select(0, flat + 1) - start
    live = torch.zeros_like(legal).flatten()
    # The children of a node stand in the order of their codes, as do the places of its legal codes.
    of_request = torch.arange(len(nodes)).repeat_interleave(nodes.shape[1]).repeat_interleave(count)
    alive = pool.live[level][of_request if len(pool.live[level]) > 1 else 0, ranges(start, count)]
    live[legal.flatten().nonzero().flatten()[alive]] = True
    return legal, live.view_as(legal)


def _gumbel(keys: Tensor, like: Tensor) -> Tensor:
    """Standard Gumbel numbers [R, G, C] for keys [R]."""
    uniform = (shift_right(bits(keys, like[0].numel()), 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log().view(like.shape)
