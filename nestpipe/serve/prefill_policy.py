"""Which prefill hints to admit: arithmetic on costs, without clock, cache or model.

    T_full(L, C) = a0 + a1 (L + C) + a2 L² + a3 L C        history of L events and C candidates, at the request
    T_hit(L, C)  = b0 + b1 C + b2 L C                      last event and candidates, given a prefix of L events
    T_pre(L)     = c0 + c1 L + c2 L²                       the prefix alone
    T_read(L)    = d0 + d1 L                               a stored prefix, read from disk

The constants are fitted when an instance starts. While it runs they are corrected by the residuals of measurements: by the P99 for
the decision about a hint, which guards against the worst case, and by the median for the path of a ranking request, because a path
that is not tried is a worse answer for certain. The gain depends on L and on C, so a rule by length alone would be wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from nestpipe.serve.config import TriggerConfig

Kind = Literal["full", "hit", "pre", "read"]
Against = Literal["not_at_risk", "no_rescue", "too_late", "already_live", "no_room", "over_rate", "breaker"]
Reason = Literal["admitted", Against, "probe", "shadow", "off"]
REASONS = frozenset(get_args(Reason))
ADMITTED = frozenset({"admitted", "probe"})  # a probe is one of many hints that an open breaker refuses
Floats = NDArray[np.float64]
_WINDOW = 256  # measurements behind a correction
_USUAL_CANDIDATES = 128  # of a request that is not known yet
_EVERY = 16  # measurements between two corrections


class RankingCosts:
    """Costs in milliseconds, by the constants of the formulas; 0 without constants."""

    def __init__(self, constants: Mapping[Kind, Floats] | None = None, *, copy_ms_per_byte: float = 0.0):
        self._copy_ms_per_byte = copy_ms_per_byte
        self._constants = {kind: [0.0] * len(terms(kind, 0, 0)) for kind in get_args(Kind)}
        self._constants |= {kind: [float(one) for one in own] for kind, own in (constants or {}).items()}
        self._residuals: dict[Kind, deque[float]] = {kind: deque(maxlen=_WINDOW) for kind in get_args(Kind)}
        self._extra: dict[Kind, float] = dict.fromkeys(self._residuals, 0.0)
        self._usual = dict(self._extra)
        self._num_seen = Counter[Kind]()

    def full_ms(self, length: int, candidates: int) -> float:
        """P99, as `hit_ms` and `pre_ms`."""
        return self.expected("full", length, candidates) + self._extra["full"]

    def hit_ms(self, length: int, candidates: int) -> float:
        return self.expected("hit", length, candidates) + self._extra["hit"]

    def pre_ms(self, length: int, before: int = 0) -> float:
        """P99 of extending a prefix from `before` to `length` events."""
        return self._rest_ms(length, before) + self._extra["pre"]

    def read_ms(self, length: int) -> float:
        """P99 of reading a stored prefix; 0 for none."""
        return max(self.expected("read", length, 0) + self._extra["read"], 0.0) if length else 0.0

    def usual_ms(self, kind: Kind, length: int, candidates: int = 0, *, before: int = 0) -> float:
        """The median."""
        expected = self._rest_ms(length, before) if kind == "pre" else self.expected(kind, length, candidates)
        return max(expected + self._usual[kind], 0.0)

    def rest_ms(self, length: int, candidates: int, *, before: int) -> float:
        """The median of a request that extends a prefix of `before` events, in one call and not chunk by chunk.

        Full inference computes the prefix too, so it saves the difference of full inference and a hit on those events.
        """
        saved = self.expected("full", before, candidates) - self.expected("hit", before, candidates)
        return max(
            self.usual_ms("full", length, candidates) - max(saved, 0.0), self.usual_ms("hit", length, candidates)
        )

    def _rest_ms(self, length: int, before: int) -> float:
        done = self.expected("pre", before, 0) if before else 0.0
        return max(self.expected("pre", length, 0) - done, 0.0)

    def rescues(self, length: int, candidates: int, budget_ms: float) -> bool:
        """Whether a hit meets a budget in the median, and takes at most half as long as full inference."""
        is_in_time = self.usual_ms("hit", length, candidates) <= budget_ms
        return is_in_time and self.halves(length, candidates, 0)

    def halves(self, length: int, candidates: int, num_bytes: int) -> bool:
        """Whether a request whose prefix is cached on the host takes at most half as long as full inference."""
        kept_ms = self.expected("hit", length, candidates) + self.copy_ms(num_bytes)
        return kept_ms <= self.expected("full", length, candidates) / 2

    def stores(self, length: int, num_bytes: int) -> bool:
        """Whether a stored prefix pays: reading takes at most half as long as computing, and its hit as full inference."""
        reads = self.expected("read", length, 0) <= self.expected("pre", length, 0) / 2
        return reads and self.halves(length, _USUAL_CANDIDATES, num_bytes)

    def copy_ms(self, num_bytes: int) -> float:
        return num_bytes * self._copy_ms_per_byte

    def expected(self, kind: Kind, length: int, candidates: int) -> float:
        """By the fitted constants, without corrections."""
        return float(sum(map(mul, self._constants[kind], terms(kind, length, candidates))))

    def observe(self, kind: Kind, residual_ms: float) -> None:
        """Adds a residual: the measured minus the expected time."""
        self._residuals[kind].append(residual_ms)
        self._num_seen[kind] += 1
        if self._num_seen[kind] % _EVERY == 0:
            ordered = sorted(self._residuals[kind])
            self._usual[kind], self._extra[kind] = quantile(ordered, 0.5), quantile(ordered, 0.99)

    def relax(self) -> None:
        """A path was not tried because of its cost. Corrections must decay, or it would never be tried again."""
        for kind in self._extra:
            self._extra[kind] *= 0.9
            self._usual[kind] *= 0.9

    def as_dict(self) -> dict[str, Any]:
        """For /state."""
        return {
            kind: {"constants": list(c), "extra_ms": self._extra[kind], "usual_ms": self._usual[kind]}
            for kind, c in self._constants.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """Load of an instance when a prefill hint arrives."""

    is_live: bool  # the prefix is cached or in work
    has_room: bool
    tokens_ms: float
    work_ms: float  # of the prefill, after what is stored of it was read
    wait_ms: float  # until it would be done, reading included
    recent_wait_ms: float  # P99 queueing time of ranking requests in the last seconds
    queue_ms: float  # the same over a longer time


def decide_early(
    config: TriggerConfig, costs: RankingCosts, *, queue_ms: float, num_events: int, num_candidates: int
) -> Reason | None:
    """The first reason against a prefill that costs alone tell; None if there is none."""
    left_ms = config.budget_ms - queue_ms
    if config.mode == "off":
        return "off"
    if config.mode == "always":
        return None
    if num_events < 2 or costs.full_ms(num_events, num_candidates) <= left_ms:
        return "not_at_risk"
    return None if costs.rescues(num_events, num_candidates, config.budget_ms) else "no_rescue"


def helps_nobody(
    config: TriggerConfig, costs: RankingCosts, *, queue_ms: float, max_events: int, num_candidates: int
) -> bool:
    """Whether no hint would be admitted, however long its history: the longest is not at risk, or no hit is in time."""
    longest = decide_early(config, costs, queue_ms=queue_ms, num_events=max_events, num_candidates=num_candidates)
    if config.mode == "always" or longest in {"off", "not_at_risk"}:
        return longest is not None
    # With one candidate, because the answer must hold for fewer candidates too.
    return not costs.rescues(max_events, 1, config.budget_ms)


def decide(
    config: TriggerConfig, costs: RankingCosts, load: InstanceLoad, *, num_events: int, num_candidates: int
) -> Reason:
    """'admitted', or the first reason against a prefill now."""
    early = decide_early(config, costs, queue_ms=load.queue_ms, num_events=num_events, num_candidates=num_candidates)
    if early is not None:
        return early
    hit_ms = costs.hit_ms(num_events, num_candidates)
    tests: tuple[tuple[Reason, bool], ...] = (
        ("too_late", load.wait_ms > config.lead_ms + config.budget_ms - hit_ms),
        ("already_live", load.is_live),
        ("no_room", not load.has_room),
        ("over_rate", load.tokens_ms < load.work_ms),
        ("breaker", load.recent_wait_ms > config.budget_ms),
    )
    checked = {"already_live", "no_room", "over_rate"} if config.mode == "always" else REASONS
    first = next((reason for reason, fails in tests if fails and reason in checked), None)
    return first or ("shadow" if config.mode == "shadow" else "admitted")


class TokenBucket:
    """Rate limit in milliseconds of compute per second: a long prefill takes more tokens than a short one."""

    def __init__(self, *, per_s: float, most: float, now: float):
        self._per_s, self._most = per_s, most
        self._level, self._at = most, now

    def level(self, now: float) -> float:
        self._level = min(self._level + max(now - self._at, 0.0) * self._per_s, self._most)
        self._at = now
        return self._level

    def take(self, ms: float, now: float) -> None:
        self._level = self.level(now) - ms


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of some ascending numbers, by linear interpolation; numpy's costs 40 times as much for a few hundred."""
    place = share * (len(ordered) - 1)
    below = int(place)
    return ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


def terms(kind: Kind, length: int, candidates: int) -> tuple[float, ...]:
    """The terms that the constants of a formula are multiplied with."""
    n, c = float(length), float(candidates)
    match kind:
        case "full":
            return 1.0, n + c, n * n, n * c
        case "hit":
            return 1.0, c, n * c
        case "pre":
            return 1.0, n, n * n
        case "read":
            return 1.0, n
