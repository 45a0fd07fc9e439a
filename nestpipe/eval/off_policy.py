"""Off-policy estimates: the mean reward that a policy would have had, from a log of what another one showed.

    w_i = pi(shown item | request i) / propensity of the shown item

    SNIPS           sum w r / sum w                              self-normalised importance sampling
    doubly robust   mean of  direct_i + w_i (r_i - q_i)          q: modelled reward of the shown item; direct: its mean under pi

Neither clips weights: clipping moves the estimate by an amount that no interval knows. Instead an estimate is refused where
few requests carry most of the weight. An estimate comes with its influence [..., n], whose deviation over sqrt(n) is its
standard error; that of a difference of two policies is that of the difference of their influences, because the requests are
the same.

All arrays are [..., n], n independent requests.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from rich.table import Table

from nestpipe.eval.compare import signed
from nestpipe.eval.topk_metrics import Array, Interval

MIN_EFFECTIVE = 50.0  # requests; with fewer the normal interval is too narrow
_Z = 1.959964


class Estimate(NamedTuple):
    """A value [...] and its influence [..., n]."""

    value: Array
    influence: Array

    def minus(self, other: Estimate) -> Estimate:
        return Estimate(self.value - other.value, self.influence - other.influence)

    def bounds(self) -> tuple[Array, Array]:
        """The 95 % interval."""
        error = _Z * self.influence.std(-1, ddof=1) / np.sqrt(self.influence.shape[-1])
        return self.value - error, self.value + error

    def interval(self) -> Interval:
        low, high = self.bounds()
        return Interval(float(self.value), float(low), float(high))


def mean_of(values: Array) -> Estimate:
    """A plain mean."""
    value = np.asarray(values.mean(-1))
    return Estimate(value, values - value[..., None])


def snips(weights: Array, rewards: Array) -> Estimate:
    """Self-normalised importance sampling."""
    value = np.asarray((weights * rewards).sum(-1) / weights.sum(-1))
    return Estimate(value, weights * (rewards - value[..., None]) / weights.mean(-1)[..., None])


def doubly_robust(weights: Array, rewards: Array, modelled: Array, direct: Array) -> Estimate:
    """The modelled value, corrected by what the log says about the model's errors."""
    return mean_of(direct + weights * (rewards - modelled))


def effective_number(weights: Array) -> float:
    """How many requests of equal weight would vary as much."""
    return float(weights.sum() ** 2 / (weights**2).sum()) if weights.any() else 0.0


@dataclass(frozen=True, slots=True)
class PolicyValue:
    """The estimated mean reward of a policy."""

    snips: Interval
    doubly_robust: Interval
    effective_requests: float


@dataclass(frozen=True, slots=True)
class OffPolicyReport:
    """Estimated rewards of start and aligned policy, and of what was shown; or the reason why there is no estimate."""

    reason: str = ""
    num_requests: int = 0
    num_left_out: int = 0  # without reward or propensity
    logged: Interval | None = None
    start: PolicyValue | None = None
    aligned: PolicyValue | None = None
    snips: Interval | None = None  # aligned - start
    doubly_robust: Interval | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Table | str:
        if self.start is None or self.aligned is None or self.snips is None or self.doubly_robust is None:
            return f"no off-policy estimate: {self.reason}"
        title = f"off-policy: mean reward of one drawn item, {self.num_requests:,} held-out requests"
        table = Table(title=title, box=None, pad_edge=False)
        for header in ("policy", "SNIPS [95 %]", "doubly robust [95 %]", "effective"):
            table.add_column(header, no_wrap=True)
        for name, one in (("start", self.start), ("aligned", self.aligned)):
            table.add_row(name, str(one.snips), str(one.doubly_robust), f"{one.effective_requests:,.0f}")
        table.add_row("difference", signed(self.snips), signed(self.doubly_robust), "")
        table.add_row("as shown", str(self.logged), "", f"{self.num_requests:,}")
        return table


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoggedRequests:
    """What was logged [n]: the reward of the shown item, its modelled reward, and the probability that it was shown."""

    rewards: Array
    modelled: Array
    propensities: Array


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyAnswers:
    """A policy on the same requests [n]: the probability of the shown item, and the modelled reward of its own draws."""

    probabilities: Array
    direct: Array


def off_policy_report(logged: LoggedRequests, start: PolicyAnswers, aligned: PolicyAnswers) -> OffPolicyReport:
    """Estimates from the requests that have a reward and a propensity."""
    known = np.isfinite(logged.rewards) & (logged.propensities > 0) & (logged.propensities <= 1)
    left_out = int((~known).sum())
    if not known.any():
        return OffPolicyReport(
            reason=f"none of {len(known):,} held-out requests has both a reward and a propensity in (0, 1]."
        )
    rewards, modelled = logged.rewards[known], logged.modelled[known]
    values, estimates = [], []
    for one in (start, aligned):
        weights = one.probabilities[known] / logged.propensities[known]
        found = snips(weights, rewards) if weights.any() else None
        if found is None or effective_number(weights) < MIN_EFFECTIVE:
            reason = (
                f"the weights of {len(rewards):,} requests are worth {effective_number(weights):.0f} equal ones; with fewer than "
                f"{MIN_EFFECTIVE:.0f} an interval would not hold. The log has too few requests, or shows other items than the run would."
            )
            return OffPolicyReport(reason=reason, num_requests=len(rewards), num_left_out=left_out)
        robust = doubly_robust(weights, rewards, modelled, one.direct[known])
        estimates.append((found, robust))
        values.append(PolicyValue(found.interval(), robust.interval(), effective_number(weights)))
    (old, old_robust), (new, new_robust) = estimates
    return OffPolicyReport(
        num_requests=len(rewards),
        num_left_out=left_out,
        logged=mean_of(rewards).interval(),
        start=values[0],
        aligned=values[1],
        snips=new.minus(old).interval(),
        doubly_robust=new_robust.minus(old_robust).interval(),
    )
