"""Settings of semantic ids, near-line instructions and alignment; torch-free, for the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nestpipe.models.config import EncDecConfig

Encoder = Literal["auto", "minilm", "words"]
CollisionPolicy = Literal["keep", "suffix", "reassign"]
PolicyKind = Literal["sa_gcpo", "sapo", "gspo", "grpo"]
_FILLED = {"concurrency": 4, "max_actions": 50, "max_chars": 300}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidConfig:
    """Settings of semantic ids."""

    levels: int = 3
    """Number of levels, without the suffix level."""
    codes: int = 256
    """Codebook size of each level."""
    policy: CollisionPolicy = "suffix"
    """Items with equal codes: keep one id for all, number them in a suffix level, or reassign all but one to the nearest free id."""
    suffix_size: int = 0
    """suffix: size of the suffix level; 0: twice what the catalogue needs, which leaves room for new items."""
    balanced: bool = False
    """Balance the codes: at most ceil(items / codes) items per code and level."""
    iterations: int = 25
    """Iterations of K-means."""
    seed: int = 0
    """Seed of K-means."""

    def problems(self) -> Iterator[str]:
        for name in ("levels", "codes", "iterations"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if self.suffix_size < 0:
            yield f"suffix_size is {self.suffix_size}; it must be 0 (as needed) or more"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """An OpenAI-compatible endpoint, such as vLLM, xLLM or Ollama."""

    url: str = ""
    """Base URL with the API version, such as http://127.0.0.1:8000/v1. Without one the template writes all texts."""
    model: str = ""
    """Name of the model at the endpoint."""
    timeout_s: float = 30.0
    """Total deadline of one call, including the body of the response."""
    retries: int = 2
    """Retries of a call that failed (timeout, connection, status 408, 429 or 5xx); invalid answers are not retried."""
    wait: bool = False
    """Wait for the model instead of falling back to the template: repeat a failed call until it succeeds."""
    concurrency: int = 0
    """Concurrent calls; 0: 4, or 1 with --llm."""
    requests_per_call: int = 0
    """Instruction requests in one call; 0: fitted to the measured speed, 1 to 8."""
    max_bytes: int = 1 << 20
    """Largest response body that is read."""
    max_actions: int = 0
    """Latest actions of a user that are sent; 0: 50, or 10 with --llm."""
    max_chars: int = 0
    """Longest text that is accepted; 0: 300, or 120 with --llm."""
    max_failures: int = 3
    """Circuit breaker: consecutive failed attempts after which the endpoint is not called for `cooldown_s`."""
    cooldown_s: float = 60.0
    """Circuit breaker: seconds without calls; the template writes all texts meanwhile."""

    def problems(self) -> Iterator[str]:
        if not self.url.startswith(("http://", "https://")):
            yield f"url is {self.url!r}; it must begin with http:// or https://"
        if not self.model:
            yield "model is not given; name the endpoint's model"
        for name in ("timeout_s", "max_bytes", "max_failures"):
            if not getattr(self, name) > 0:
                yield f"{name} is {getattr(self, name)}; it must be above 0"
        for name in ("retries", "cooldown_s", "concurrency", "requests_per_call", "max_actions", "max_chars"):
            if not getattr(self, name) >= 0:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more"

    def filled(self, *, is_local: bool = False) -> EndpointConfig:
        """With values in place of 0: small ones for a model on this machine, which takes a second per 100 tokens."""
        values = {"concurrency": 1, "max_actions": 10, "max_chars": 120} if is_local else _FILLED
        own: dict[str, Any] = {name: getattr(self, name) or value for name, value in values.items()}
        return dataclasses.replace(self, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkConfig:
    """How often instructions are generated, and how long they are valid."""

    min_interval_s: float = 300.0
    """Minimum time between two generations for one user."""
    ttl_s: float = 7 * 86400.0
    """Time to live of an instruction."""
    batch_size: int = 64
    """Most users per write, fewer if the model is slow; a crash repeats at most one write."""
    max_retries: int = 3
    """Retries of the model, `min_interval_s` apart, for texts that the template had to write."""
    scenarios: tuple[str, ...] = ()
    """Scenarios with their own instructions; * is one instruction for all scenarios. [default: *, and the scenarios whose
    record in the scenario file has an instruction template]"""

    def problems(self) -> Iterator[str]:
        for name in ("min_interval_s", "max_retries"):
            if not 0 <= getattr(self, name) < math.inf:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more, and finite"
        if not 0 < self.ttl_s < math.inf or self.batch_size < 1:
            yield f"ttl_s is {self.ttl_s} and batch_size {self.batch_size}; both must be above 0, and finite"
        if len(set(self.scenarios)) != len(self.scenarios):
            yield f"scenarios is {self.scenarios}; name each scenario once"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Settings of policy optimisation."""

    kind: PolicyKind = "sa_gcpo"
    """Objective."""
    group_size: int = 16
    """Paths drawn per context."""
    tau_positive: float = 1.0
    """sa_gcpo, sapo: temperature of the soft gate for positive advantages."""
    tau_negative: float = 1.05
    """sa_gcpo, sapo: temperature of the soft gate for negative advantages."""
    clip: float = 0.2
    """grpo, gspo: clip range of the probability ratio, 1 ± clip."""
    threshold: bool = True
    """sa_gcpo: drop positive advantages whose reward is below that of the logged item."""
    sft_weight: float = 0.1
    """Weight of the supervised next-code loss on logged rows; 0: off."""
    warn_share: float = 0.9
    """Share of suppressed positive advantages above which a warning is logged."""
    warn_every: int = 100
    """Number of updates over which that share is measured."""

    def problems(self) -> Iterator[str]:
        if self.kind not in get_args(PolicyKind):
            yield f"kind is {self.kind!r}; it must be one of {', '.join(get_args(PolicyKind))}"
        if self.group_size < 2:
            yield f"group_size is {self.group_size}; advantages need at least 2"
        for name in ("tau_positive", "tau_negative", "clip"):
            if not getattr(self, name) > 0:
                yield f"{name} is {getattr(self, name)}; it must be above 0"
        if not self.sft_weight >= 0:
            yield f"sft_weight is {self.sft_weight}; it must not be negative"
        if not 0 < self.warn_share <= 1 or self.warn_every < 1:
            yield f"warn_share is {self.warn_share} and warn_every {self.warn_every}; they must be in (0, 1] and at least 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedConfig(EncDecConfig):
    """A generative model that is aligned with rewards, from a trained run; written by 'nestpipe align'."""

    start: str = ""
    """Folder of the run that is aligned; its weights are the frozen reference that paths are drawn from."""
    ranker: str = ""
    """Folder of the trained run whose scores are the reward 'ranking'; empty: none."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)

    def problems(self) -> Iterator[str]:
        yield from EncDecConfig.problems(self)
        yield from (f"policy.{problem}" for problem in self.policy.problems())
