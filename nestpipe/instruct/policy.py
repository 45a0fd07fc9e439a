"""Policy optimisation on groups of generated paths: SA-GCPO, and GRPO, GSPO and SAPO behind the same call.

    A_i = (R_i - mean R) / std R                                 within the group of one context
    Γ_i = 0 if A_i > 0 and R_i < R*(the logged item), else A_i   SA-GCPO only
    f(ρ) = σ(τ(ρ-1)) * 4/τ, τ by the sign of A                   so that f(1) = 2/τ, f'(1) = 1, f' = sech²(τ(ρ-1)/2)

    sa_gcpo   J = mean_i Γ_i * mean_t f(ρ_it)
    sapo      J = mean_i A_i * mean_t f(ρ_it)
    grpo      J = mean_i mean_t min(ρ_it A_i, clip(ρ_it) A_i)
    gspo      J = mean_i min(s_i A_i, clip(s_i) A_i),  s_i = exp(mean_t log ρ_it)

The threshold keeps the model from learning what is only the best of a bad group. Alone it does harm where the logged item is out of
reach, because then nothing positive is left to learn: the next-code loss on logged rows stays on as an anchor, and a warning says when
more than nine tenths of the positive advantages are suppressed.

Letters: N contexts, G paths of each, L codes of a path.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nestpipe.errors import ConfigError

Kind = Literal["sa_gcpo", "sapo", "gspo", "grpo"]
_LEAST_STD = 1e-6  # a group whose rewards are all the same teaches nothing
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How a policy is improved."""

    kind: Kind = "sa_gcpo"
    """The objective."""
    group: int = 16
    """Paths drawn for each context."""
    tau_positive: float = 1.0
    """sa_gcpo, sapo: how fast the weight of a code falls as its probability moves, where it was good."""
    tau_negative: float = 1.05
    """And where it was bad."""
    clip: float = 0.2
    """grpo, gspo: ratios beyond 1 ± clip earn nothing more."""
    threshold: bool = True
    """sa_gcpo: no positive advantage for a reward below that of the logged item."""
    anchor: float = 0.1
    """Weight of the next-code loss on logged rows; 0 turns it off."""
    warn_share: float = 0.9
    """Warn when more than this share of positive advantages is suppressed."""
    warn_every: int = 100
    """Updates that a share is taken over."""

    def problems(self) -> Iterator[str]:
        if self.kind not in get_args(Kind):
            yield f"kind is {self.kind!r}; it must be one of {', '.join(get_args(Kind))}"
        if self.group < 2:
            yield f"group is {self.group}; a group of one has no advantage, take at least 2"
        for name in ("tau_positive", "tau_negative", "clip"):
            if not getattr(self, name) > 0:
                yield f"{name} is {getattr(self, name)}; it must be above 0"
        if not self.anchor >= 0:
            yield f"anchor is {self.anchor}; it must not be negative"
        if not 0 < self.warn_share <= 1 or self.warn_every < 1:
            yield f"warn_share is {self.warn_share} and warn_every {self.warn_every}; it takes a share and at least 1"


def advantages(rewards: Tensor) -> Tensor:
    """Rewards [N, G] as deviations within their group, in units of its standard deviation; 0 if all are the same."""
    centred = rewards - rewards.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return torch.where(deviation > _LEAST_STD, centred / deviation.clamp(min=_LEAST_STD), 0.0)


def gate(ratios: Tensor, tau: Tensor | float) -> Tensor:
    """f(ρ)."""
    return torch.sigmoid(tau * (ratios - 1)) * (4 / tau)


class Policy:
    """An objective and what it remembers: how many positive advantages were suppressed lately."""

    def __init__(self, config: PolicyConfig):
        if problems := list(config.problems()):
            raise ConfigError("the policy has problems: " + "; ".join(problems) + ".")
        self.config = config
        self.num_positive = self.num_suppressed = self._num_updates = 0

    def loss(self, new: Tensor, old: Tensor, rewards: Tensor, logged: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Sum over contexts of -J, plus the anchor.

        Log-probabilities [N, G, L] of the codes now and when they were drawn; rewards [N, G]; rewards [N] of the logged items; the
        next-code losses of logged rows, summed. Counts what the threshold suppresses.
        """
        found = advantages(rewards)
        if self.config.kind == "sa_gcpo" and self.config.threshold:
            found = self._above(found, rewards, logged)
        total = -self._gains(new, old.detach(), found.detach()).mean(1).sum()
        if anchor is not None:
            total = total + self.config.anchor * anchor
        return total

    def _gains(self, new: Tensor, old: Tensor, found: Tensor) -> Tensor:
        """What each path contributes [N, G]."""
        config = self.config
        match config.kind:
            case "sa_gcpo" | "sapo":
                tau = torch.where(found > 0, config.tau_positive, config.tau_negative).to(new.dtype)
                return found * gate((new - old).exp(), tau.unsqueeze(2)).mean(2)
            case "gspo":
                return self._clipped((new - old).mean(2).exp(), found)
            case "grpo":
                return self._clipped((new - old).exp(), found.unsqueeze(2)).mean(2)

    def _clipped(self, ratios: Tensor, found: Tensor) -> Tensor:
        near = ratios.clamp(1 - self.config.clip, 1 + self.config.clip)
        return torch.minimum(ratios * found, near * found)

    def _above(self, found: Tensor, rewards: Tensor, logged: Tensor) -> Tensor:
        """Γ: advantages without the positive ones whose reward is below that of the logged item."""
        positive = found > 0
        suppressed = positive & (rewards < logged.unsqueeze(1))
        self.num_positive += int(positive.sum())
        self.num_suppressed += int(suppressed.sum())
        self._num_updates += 1
        if self._num_updates == self.config.warn_every:
            if self.num_suppressed > self.config.warn_share * self.num_positive:
                _log.warning(
                    "%d of %d positive advantages of the last %d updates were suppressed: the logged items are out of reach, and "
                    "little but the anchor (%g) teaches what is good. Train longer on the log first, or set threshold off.",
                    *(self.num_suppressed, self.num_positive, self.config.warn_every, self.config.anchor),
                )
            self.num_positive = self.num_suppressed = self._num_updates = 0
        return found.masked_fill(suppressed, 0.0)
