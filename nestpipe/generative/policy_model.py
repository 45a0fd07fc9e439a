"""The model of an aligned run in training: the encoder-decoder with the objective of a policy instead of the next-code loss.

A training batch is one context per sample: the history up to an event, steered as the next event was. Its group, the paths
that the frozen reference drew for it, rides on the batch as sample features (training/rollouts.py). A step computes the
probabilities of these paths and of the logged item under the weights of today.

    loss = -J(paths) + sft_weight * -log p(logged item)

The parameters and tables are those of `EncDec`, so evaluation and serving open an aligned run as an `EncDec`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from nestpipe.embedding.lookup import Lookup, Rows
from nestpipe.generative.config import AlignedConfig
from nestpipe.generative.policy_optimisation import Policy, path_log_probs
from nestpipe.generative.scenario_pools import pools_of
from nestpipe.generative.trie import ItemPool, Trie
from nestpipe.jagged import Batch
from nestpipe.models.backbone import initial_weights
from nestpipe.models.contract import Output
from nestpipe.models.encdec import EncDec
from nestpipe.models.instruction import queries_of
from nestpipe.rng import Rng

LEAVES, LOG_PROBS, GAINS = "group.leaves", "group.log_probs", "group.gains"
_STEERS = ("scenario", "trigger", "reasoning")


class PolicyModel(EncDec):
    """Trains the probabilities of groups of paths."""

    def __init__(self, config: AlignedConfig, ids: Trie, *, max_len: int, text: Tensor | None = None):
        super().__init__(config, ids, max_len=max_len, text=text)
        self.coupling = "none"  # the objective compares paths of one context alone
        self.policy = Policy(config.policy)
        self.pools: ItemPool | None = None  # by scenario number

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        return self.encode_lookups(request_of(batch))

    def weight(self, batch: Batch) -> float:
        return float(batch.num_samples)

    def select(self, batch: Batch, rng: Rng | None) -> Batch:
        return super().select(batch, None)  # as in a request: nothing of the instruction is dropped

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        host, trie = batch.on_host, cast(Trie, self.ids)
        request = request_of(host)
        leaves, (_, old, gains) = group_of(host, trie.num_levels)[0], group_of(batch, trie.num_levels)
        pool = pools_of(self.pools, request)
        logged = trie.item_nodes[:, -1].index_select(0, trie.positions(last_targets(host))).unsqueeze(1)
        can_follow = torch.ones(len(logged)) if pool is None else pool.at(-1, logged).flatten().float()
        # One decoding for both: the logged item is one more path, if its scenario may show it.
        paths = torch.cat([leaves, torch.where(can_follow.unsqueeze(1) > 0, logged, leaves[:, :1])], 1)
        asked = request if batch.host is None else dataclasses.replace(batch, host=request)
        new = path_log_probs(self.decoding(rows, asked), trie, paths, pool=pool, softmax=self.config.softmax)
        objective = self.policy.objective(new[:, :-1], old, gains).mean(1).sum()
        supervised = -(new[:, -1].sum(1) * self.put(can_follow)).sum()
        with torch.no_grad():
            moved = (
                (old - new[:, :-1]).sum(2).mean(1).sum()
            )  # paths are drawn from the reference: KL(reference | policy)
        logs = {"objective": objective.detach(), "next_code": supervised.detach(), "kl": moved}
        return Output(self.policy.config.sft_weight * supervised - objective, logs)


def request_of(batch: Batch) -> Batch:
    """The last event of each history as a request: what steered its target, without the target."""
    queries = queries_of(batch, "last")
    given = queries.of_samples({name: one for name, one in queries.given.items() if name in _STEERS})
    return dataclasses.replace(
        batch, targets=None, target_features={}, sample_features={**batch.sample_features, **given}
    )


def last_targets(batch: Batch) -> Tensor:
    """The target of the last event of each history, [N]."""
    return queries_of(batch, "last").targets


def group_of(batch: Batch, num_levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves [N, G], their log-probabilities [N, G, L] when they were drawn, and their gains [N, G]."""
    leaves, old, gains = (batch.sample_features[name].values for name in (LEAVES, LOG_PROBS, GAINS))
    size = len(leaves) // batch.num_samples if batch.num_samples else 1
    return leaves.view(-1, size), old.view(-1, size, num_levels), gains.view(-1, size)


def build_policy_model(
    config: AlignedConfig, ids: Trie, *, max_len: int, seed: int, text: Tensor | None = None
) -> PolicyModel:
    """A model whose initial dense weights are a function of the seed."""
    with initial_weights(seed):
        return PolicyModel(config, ids, max_len=max_len, text=text)
