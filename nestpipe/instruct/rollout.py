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
from nestpipe.instruct.trie import Pool, Trie, check_pool, check_version


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
    check_pool(pool, trie)
    nodes = torch.zeros(len(samples), num, dtype=torch.int64)
    codes, logs = nodes, []
    for level in range(trie.num_levels):
        logits = _logits(decoder, level, codes, nodes)
        after = _live_nodes(trie, level, nodes, pool)
        live = after >= 0
        log_probs = _log_softmax(logits, live, softmax)
        keys = draw.keys("paths", samples, torch.full_like(samples, level))
        codes = (log_probs.double() + _gumbel(keys, log_probs)).masked_fill(~live, -torch.inf).argmax(2)
        logs.append(log_probs.gather(2, codes.unsqueeze(2)))
        nodes = after.gather(2, codes.unsqueeze(2)).squeeze(2)
    return Rollout(nodes, torch.cat(logs, 2))


def path_log_probs(
    decoder: Decoder, trie: Trie, leaves: Tensor, *, pool: Pool | None = None, softmax: Softmax = "legal"
) -> Tensor:
    """Log-probabilities [R, G, L] of the codes of leaves [R, G], with gradients if the decoder has some."""
    check_version("the model", decoder.version, trie.version)
    check_pool(pool, trie)
    items = trie.leaf_items.index_select(0, trie.first[-1].index_select(0, leaves.flatten()))
    path = trie.item_nodes.index_select(0, items).view(*leaves.shape, -1)
    every = trie.item_codes.index_select(0, items).view(*leaves.shape, -1)
    logs = []
    for level in range(trie.num_levels):
        before = path[:, :, level - 1] if level else torch.zeros_like(leaves)
        logits = _logits(decoder, level, every[:, :, level - 1], before)
        live = _live_nodes(trie, level, before, pool) >= 0
        logs.append(_log_softmax(logits, live, softmax).gather(2, every[:, :, level : level + 1]))
    return torch.cat(logs, 2)


def _logits(decoder: Decoder, level: int, codes: Tensor, nodes: Tensor) -> Tensor:
    """Logits [R, G, C] of a level, after the codes and nodes [R, G] of the level before."""
    if not level:
        return decoder.first().expand(-1, codes.shape[1], -1)
    parents = torch.zeros_like(codes) if level == 1 else torch.arange(codes.shape[1]).expand_as(codes)
    return decoder.next(parents, codes, nodes)


def _log_softmax(logits: Tensor, live: Tensor, softmax: Softmax) -> Tensor:
    if softmax == "legal":
        logits = logits.masked_fill(~live, -torch.inf)
    return logits.log_softmax(2)


def _live_nodes(trie: Trie, level: int, nodes: Tensor, pool: Pool | None) -> Tensor:
    """The live nodes [R, G, C] that each code leads to from nodes [R, G] of the level before; -1 where there is none."""
    children, places = trie.children(level, nodes.flatten())
    size = trie.sizes[level]
    if pool is not None:
        live = pool.live[level]
        request = places // (size * nodes.shape[1]) if len(live) > 1 else torch.zeros_like(places)
        children = children.masked_fill(~live[request, children], -1)
    found = torch.full((nodes.numel() * size,), -1, dtype=torch.int64)
    return found.index_copy_(0, places, children).view(*nodes.shape, size)


def _gumbel(keys: Tensor, like: Tensor) -> Tensor:
    """Standard Gumbel numbers [R, G, C] for keys [R]."""
    uniform = (shift_right(bits(keys, like[0].numel()), 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log().view(like.shape)
