"""Policy optimisation on groups of generated paths: SA-GCPO, and GRPO, GSPO and SAPO behind the same call.

    A_i = (R_i - mean R) / std R                                 within the group of one context
    Γ_i = 0 if A_i > 0 and R_i < R*(the logged item), else A_i   SA-GCPO only
    f(ρ) = σ(τ(ρ-1)) * 4/τ, τ by the sign of A                   so that f(1) = 2/τ, f'(1) = 1, f' = sech²(τ(ρ-1)/2)

    sa_gcpo   J = mean_i Γ_i * mean_t f(ρ_it)
    sapo      J = mean_i A_i * mean_t f(ρ_it)
    grpo      J = mean_i mean_t min(ρ_it A_i, clip(ρ_it) A_i)
    gspo      J = mean_i min(s_i A_i, clip(s_i) A_i),  s_i = exp(mean_t log ρ_it)

The threshold keeps the model from learning a path that is only the best of a bad group. It suppresses every positive advantage
where the logged item is out of reach. Therefore the supervised loss on logged rows (`sft_weight`) stays on, and a warning is
logged when more than nine tenths of the positive advantages are suppressed.

Letters: N contexts, G paths of each, L codes of a path.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.generative.beam import Decoder, Softmax
from nestpipe.generative.config import PolicyConfig
from nestpipe.generative.trie import ItemPool, Trie, check_pool, check_version
from nestpipe.ops.device_memory import upload
from nestpipe.rng import Rng, bits, shift_right


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
    rng: Rng,
    samples: Tensor,
    pool: ItemPool | None = None,
    softmax: Softmax = "legal",
) -> Rollout:
    """`num` independent paths per request; draws depend on the ids `samples` [R] of the requests."""
    check_version("the model", decoder.version, trie.version)
    check_pool(pool, trie)
    nodes = torch.zeros(len(samples), num, dtype=torch.int64)
    codes, logs = nodes, []
    for level in range(trie.num_levels):
        logits = _logits(decoder, level, codes, nodes)
        after = _live_nodes(trie, level, nodes, pool)
        live = after >= 0
        log_probs = _log_softmax(logits, live, softmax)
        keys = rng.keys("paths", samples, torch.full_like(samples, level))
        codes = (log_probs.double() + _gumbel(keys, log_probs)).masked_fill(~live, -torch.inf).argmax(2)
        logs.append(log_probs.gather(2, codes.unsqueeze(2)))
        nodes = after.gather(2, codes.unsqueeze(2)).squeeze(2)
    return Rollout(nodes, torch.cat(logs, 2))


def path_log_probs(
    decoder: Decoder, trie: Trie, leaves: Tensor, *, pool: ItemPool | None = None, softmax: Softmax = "legal"
) -> Tensor:
    """Log-probabilities [R, G, L] of the codes of leaves [R, G] on the host; differentiable if the decoder is."""
    check_version("the model", decoder.version, trie.version)
    check_pool(pool, trie)
    items = trie.leaf_items.index_select(0, trie.first[-1].index_select(0, leaves.flatten()))
    path = trie.item_nodes.index_select(0, items).view(*leaves.shape, -1)
    every = trie.item_codes.index_select(0, items).view(*leaves.shape, -1)
    logs = []
    for level in range(trie.num_levels):
        before = path[:, :, level - 1] if level else torch.zeros_like(leaves)
        logits = _logits(decoder, level, every[:, :, level - 1], before)
        live = upload(_live_nodes(trie, level, before, pool) >= 0, logits.device)
        codes = upload(every[:, :, level : level + 1], logits.device)
        logs.append(_log_softmax(logits, live, softmax).gather(2, codes))
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


def _live_nodes(trie: Trie, level: int, nodes: Tensor, pool: ItemPool | None) -> Tensor:
    """The live child [R, G, C] by code of nodes [R, G] of the level before; -1 where there is none."""
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


_MIN_STD = 1e-6
_log = logging.getLogger(__name__)


def advantages(rewards: Tensor) -> Tensor:
    """Rewards [N, G] standardised within their group; 0 if all are equal."""
    centred = rewards - rewards.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return torch.where(deviation > _MIN_STD, centred / deviation.clamp(min=_MIN_STD), 0.0)


def gate(ratios: Tensor, tau: Tensor | float) -> Tensor:
    """f(ρ)."""
    return torch.sigmoid(tau * (ratios - 1)) * (4 / tau)


class Policy:
    """The objective, with a count of the suppressed positive advantages since the last warning check."""

    def __init__(self, config: PolicyConfig):
        if problems := list(config.problems()):
            raise ConfigError("the policy has problems: " + "; ".join(problems) + ".")
        self.config = config
        self.num_positive = self.num_suppressed = self._num_updates = 0

    def loss(self, new: Tensor, old: Tensor, rewards: Tensor, logged: Tensor, sft_loss: Tensor | None = None) -> Tensor:
        """Sum over contexts of -J, plus the weighted supervised loss.

        `new` and `old` are log-probabilities [N, G, L] of the codes, now and when they were drawn; rewards [N, G]; `logged` are
        the rewards [N] of the logged items; `sft_loss` is the sum of the next-code losses of logged rows.
        """
        gains = self.gains(rewards, logged)
        total = -self.objective(new, old.detach(), gains.detach()).mean(1).sum()
        if sft_loss is not None:
            total = total + self.config.sft_weight * sft_loss
        return total

    def gains(self, rewards: Tensor, logged: Tensor) -> Tensor:
        """A, or Γ of SA-GCPO, [N, G] for rewards [N, G] and those of the logged items [N]."""
        found = advantages(rewards)
        uses_threshold = self.config.kind == "sa_gcpo" and self.config.threshold
        return self._above(found, rewards, logged) if uses_threshold else found

    def objective(self, new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        """Contribution [N, G] of each path to J."""
        config = self.config
        match config.kind:
            case "sa_gcpo" | "sapo":
                tau = torch.where(advantage > 0, config.tau_positive, config.tau_negative).to(new.dtype)
                return advantage * gate((new - old).exp(), tau.unsqueeze(2)).mean(2)
            case "gspo":
                return self._clipped((new - old).mean(2).exp(), advantage)
            case "grpo":
                return self._clipped((new - old).exp(), advantage.unsqueeze(2)).mean(2)

    def _clipped(self, ratios: Tensor, advantage: Tensor) -> Tensor:
        clipped = ratios.clamp(1 - self.config.clip, 1 + self.config.clip)
        return torch.minimum(ratios * advantage, clipped * advantage)

    def _above(self, advantage: Tensor, rewards: Tensor, logged: Tensor) -> Tensor:
        """Γ: advantages without the positive ones whose reward is below that of the logged item."""
        positive = advantage > 0
        suppressed = positive & (rewards < logged.unsqueeze(1))
        self.num_positive += int(positive.sum())
        self.num_suppressed += int(suppressed.sum())
        self._num_updates += 1
        if self._num_updates == self.config.warn_every:
            if self.num_suppressed > self.config.warn_share * self.num_positive:
                _log.warning(
                    "%d of %d positive advantages of the last %d updates were suppressed: the logged items are out of reach, so "
                    "the policy learns little beyond the supervised loss (sft_weight %g). Train longer on the log first, or turn "
                    "threshold off.",
                    *(self.num_suppressed, self.num_positive, self.config.warn_every, self.config.sft_weight),
                )
            self.num_positive = self.num_suppressed = self._num_updates = 0
        return advantage.masked_fill(suppressed, 0.0)
