"""Rewards of generated items, each in 0 .. 1, and their sum by the weights of the scenario.

    format      the path is an item that may be shown
    relative    how near the item is to what the instruction asks for (IGR's q·h)
    ranking     a ranker's value, as its quantile among values of reference: rankers of other scenarios have other scales
    diversity   how far the path is from the other members of its group; itself does not count, as a shared value would cancel

Letters: N contexts, G members of a group, L levels, E width, M values of reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.instruct.scenarios import REWARDS, Scenario
from nestpipe.instruct.trie import Pool, Trie


def format_reward(leaves: Tensor, pool: Pool | None = None) -> Tensor:
    """1 for leaves [N, G] that are live, 0 for the others and for -1."""
    found = leaves >= 0
    if pool is not None:
        found &= pool.at(-1, leaves.clamp(min=0))
    return found.float()


def relative_reward(queries: Tensor, items: Tensor) -> Tensor:
    """Unit vectors of instructions [N, E] and of generated items [N, G, E]."""
    return (1 + (items * queries.unsqueeze(1)).sum(2)) / 2


def ranking_reward(values: Tensor, reference: Tensor) -> Tensor:
    """The share of the reference [M], ascending, that is not above each of the values [N, G]."""
    return torch.searchsorted(reference, values.contiguous(), right=True).to(values.dtype) / len(reference)


def diversity_reward(trie: Trie, leaves: Tensor) -> Tensor:
    """1 - the mean share of leading codes that leaves [N, G] have in common with the others of their group."""
    items = trie.leaf_items.index_select(0, trie.first[-1].index_select(0, leaves.flatten()))
    path = trie.item_nodes.index_select(0, items).view(*leaves.shape, -1)  # one node: one sequence of leading codes
    alike = (path.unsqueeze(2) == path.unsqueeze(1)).float().mean(3)
    num_others = max(leaves.shape[1] - 1, 1)
    return 1 - (alike.sum(2) - 1) / num_others


def total_reward(scenario: Scenario, parts: Mapping[str, Tensor]) -> Tensor:
    """R [N, G] = the weighted sum of the parts that the scenario counts; raises KeyError if one is missing."""
    weights = {name: scenario.reward_weights.get(name, 0.0) for name in REWARDS}
    counted = [weight * parts[name] for name, weight in weights.items() if weight]
    return torch.stack(counted).sum(0)
