"""Rewards of generated paths, for alignment: what a scenario counts, and where the numbers come from.

    R = sum over m of w[scenario, m] * rho_m

    format       1 for a live path; constrained sampling draws no others, so it cancels within a group
    relative     similarity of the instruction and the item, by the vectors that Q2I trains
    ranking      value of a trained ranker, as its quantile among the logged items
    diversity    difference from the other paths of the group
    COLUMN       a number of the item table, or what the log lets expect of a logged number (logged_reward.py)

Every part is in 0 .. 1.

Letters: N contexts, K paths of each, L codes of a path, S scenarios, I items.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Ints
from nestpipe.errors import ConfigError
from nestpipe.generative.logged_reward import LoggedReward
from nestpipe.generative.policy_optimisation import Rollout
from nestpipe.generative.scenarios import REWARDS, Scenario
from nestpipe.generative.trie import ItemPool, Trie
from nestpipe.jagged import Jagged
from nestpipe.models.encdec import EncDec

Values = Callable[["RewardContext", Tensor], Tensor]  # of items [N, K], as catalogue positions


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RewardContext:
    """N requests: users (rows of the folder), how many of their events came before, and what steered them."""

    users: Ints
    ends: Ints
    scenarios: Tensor  # [N], 0 where the log names none
    given: Mapping[str, Jagged]


def format_reward(leaves: Tensor, pool: ItemPool | None = None) -> Tensor:
    """1 for live leaves [N, G], 0 for others and for -1."""
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


def diversity_reward(trie: Trie, leaves: Tensor, group: Tensor | None = None) -> Tensor:
    """1 - the mean share of leading codes that leaves [N, K] have in common with a group [N, G].

    Without a group: with the others among the leaves.
    """
    path, others = _nodes(trie, leaves), _nodes(trie, leaves if group is None else group)
    alike = (path.unsqueeze(2) == others.unsqueeze(1)).float().mean(3)
    if group is not None:
        return 1 - alike.mean(2)
    return 1 - (alike.sum(2) - 1) / max(leaves.shape[1] - 1, 1)


def leaf_items(trie: Trie, leaves: Tensor) -> Tensor:
    """The first item of each leaf, as catalogue positions."""
    return trie.leaf_items.index_select(0, trie.first[-1].index_select(0, leaves.flatten())).view_as(leaves)


def _nodes(trie: Trie, leaves: Tensor) -> Tensor:
    """The nodes [..., L] of leaves: equal nodes, equal leading codes."""
    return trie.item_nodes.index_select(0, leaf_items(trie, leaves).flatten()).view(*leaves.shape, -1)


class Rewards:
    """The weighted rewards of paths."""

    def __init__(
        self,
        model: EncDec,
        trie: Trie,
        weights: Sequence[Mapping[str, float]],
        *,
        columns: Mapping[str, Tensor | LoggedReward],
        ranking: Values | None = None,
    ):
        """`weights` by scenario number; `columns` of items are [I]; `ranking` returns quantiles."""
        self._model, self._trie, self._columns, self._ranking = model, trie, columns, ranking
        names = {name: None for one in weights for name, weight in one.items() if weight}
        self._weights = {name: torch.tensor([one.get(name, 0.0) for one in weights]) for name in names}

    @torch.no_grad()
    def of(
        self,
        context: RewardContext,
        paths: Rollout,
        group: Tensor | None = None,
        observed: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """R [N, K] of paths with log-probabilities of the reference.

        `group` [N, G]: the leaves that they are compared with for diversity [default: each other]. `observed`: parts [N, K]
        that are known and need no model.
        """
        total = torch.zeros(paths.leaves.shape)
        for name, weights in self._weights.items():
            known = (observed or {}).get(name)
            part = self._part(name, context, paths, group) if known is None else known
            total = total + weights.index_select(0, context.scenarios).unsqueeze(1) * part
        return total

    @property
    def logged_columns(self) -> dict[str, LoggedReward]:
        """The rewards that are modelled numbers of the log."""
        models = {name: self._columns.get(name) for name in self._weights}
        return {name: one for name, one in models.items() if isinstance(one, LoggedReward)}

    def _part(self, name: str, context: RewardContext, paths: Rollout, group: Tensor | None) -> Tensor:
        leaves = paths.leaves
        items = leaf_items(self._trie, leaves)
        match name:
            case "format":
                return format_reward(leaves)
            case "diversity":
                return diversity_reward(self._trie, leaves, group)
            case "relative":
                queries, vectors = self._model.query_vectors(context.given, len(leaves)), self._model.igr_vectors(items)
                return relative_reward(queries, vectors)
            case "ranking":
                assert self._ranking is not None
                return self._ranking(context, items)
            case _:
                column = self._columns[name]
                if isinstance(column, LoggedReward):
                    return column.of(context.scenarios, items, paths.log_probs)
                return column[items]


def reward_weights(
    records: Sequence[Scenario], sequences: Sequences, model: EncDec, *, has_ranker: bool
) -> list[Mapping[str, float]]:
    """The weights of each scenario, with defaults; raises ConfigError for a reward that the run cannot compute."""
    available = {
        "relative": model.igr is not None,
        "ranking": has_ranker,
        model.config.behaviour: bool(model.config.behaviour),
    }
    default = {name: 1.0 for name, can in available.items() if can}
    if not default and any(not one.reward_weights for one in records):
        raise ConfigError(
            f"nothing says which items are better: the scenario '{records[0].name}' has no reward_weights, and the run has no "
            "reward of its own. Name a scenario file with --scenarios, whose reward_weights name number columns of the log or "
            f"of its items ({', '.join(_columns(sequences)) or 'it has none'}), or a trained ranker with --ranker."
        )
    for one in records:
        for name in (name for name, weight in one.reward_weights.items() if weight):
            _check_reward(name, one.name, sequences, available)
    return [one.reward_weights or default for one in records]


def _check_reward(name: str, scenario: str, sequences: Sequences, available: Mapping[str, bool]) -> None:
    where = f"the reward '{name}' of scenario '{scenario}'"
    if name == "relative" and not available["relative"]:
        raise ConfigError(
            f"{where} compares instructions with items, but the run was trained without their vectors. Train it with "
            "--model.q2i 0.1 --data.group-size 16, or set the weight to 0."
        )
    if name == "ranking" and not available["ranking"]:
        raise ConfigError(
            f"{where} is the value of a trained ranker; name its run with --ranker, or set the weight to 0."
        )
    known = [*REWARDS, *_columns(sequences)]
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are: {', '.join(known)}."
        raise ConfigError(f"{where} is neither a reward nor a number column of {sequences.path}; {hint}")


def _columns(sequences: Sequences) -> list[str]:
    """Numbers of events and items, and labels."""
    numbers = [one.name for one in sequences.schema.of_scope("event", "item") if one.kind == "number"]
    return [*numbers, *(label.name for label in sequences.schema.labels)]


def item_column(sequences: Sequences, name: str) -> Tensor:
    """A number of the item table [I], scaled to 0 .. 1; a missing one is the mean."""
    values = np.asarray(sequences.item_features[name].values, dtype=np.float64)
    known = values[~np.isnan(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    filled = np.where(np.isnan(values), known.mean() if len(known) else 0.0, values)
    return torch.from_numpy((filled - low) / (high - low if high > low else 1.0)).float()


def counted_columns(weights: Sequence[Mapping[str, float]]) -> list[str]:
    """The columns that the weights name."""
    return list({name: None for one in weights for name, weight in one.items() if weight and name not in REWARDS})
