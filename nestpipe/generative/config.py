"""Settings of semantic ids and of near-line instructions; torch-free, for the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nestpipe.generative.instruction_store import ANY

Encoder = Literal["auto", "minilm", "words"]
CollisionPolicy = Literal["keep", "suffix", "reassign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SidConfig:
    """How semantic ids are made."""

    levels: int = 3
    """Codes of an id, without the suffix."""
    codes: int = 256
    """Codes to choose from at each level."""
    policy: CollisionPolicy = "suffix"
    """Items with equal codes: keep one id for all, count them in one more level, or move all but one to the nearest free id."""
    suffix_size: int = 0
    """suffix: codes of the last level; 0 takes twice what the catalogue needs, so that new items find room."""
    balanced: bool = False
    """No code of a level has more than its share of the items."""
    iterations: int = 25
    """Rounds of K-means."""
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
    """Where it is, up to the version: http://127.0.0.1:8000/v1. Without one the template writes everything."""
    model: str = ""
    """Name of the model there."""
    timeout_s: float = 30.0
    """The longest a call may take as a whole, however its answer drips in."""
    retries: int = 2
    """Further attempts of a call that was refused or not answered; wrong answers are not asked for again."""
    concurrency: int = 4
    """Calls at a time."""
    per_call: int = 8
    """Requests of one call."""
    max_bytes: int = 1 << 20
    """The largest answer that is read."""
    max_chars: int = 300
    """The longest text that is taken."""
    give_up: int = 3
    """Attempts in a row without any answer, after which the endpoint is left alone for `rest_s`."""
    rest_s: float = 60.0
    """How long the template writes everything after the endpoint was given up."""

    def problems(self) -> Iterator[str]:
        if not self.url.startswith(("http://", "https://")):
            yield f"url is {self.url!r}; it must begin with http:// or https://"
        if not self.model:
            yield "model is not given; name the endpoint's model"
        for name in ("timeout_s", "concurrency", "per_call", "max_bytes", "max_chars", "give_up"):
            if not getattr(self, name) > 0:
                yield f"{name} is {getattr(self, name)}; it must be above 0"
        for name in ("retries", "rest_s"):
            if not getattr(self, name) >= 0:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkConfig:
    """How often instructions are made, and how long they last."""

    window_s: float = 300.0
    """At most one regeneration of a user's instructions in this time."""
    ttl_s: float = 7 * 86400.0
    """How long an instruction is used."""
    batch: int = 64
    """Users between two writes: what a crash may have to do again."""
    max_tries: int = 3
    """Windows in which a model is asked again for texts that the template had to write."""
    scenarios: tuple[str, ...] = (ANY,)
    """Scenarios that get instructions of their own; * is one for any."""

    def problems(self) -> Iterator[str]:
        for name in ("window_s", "max_tries"):
            if not 0 <= getattr(self, name) < math.inf:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more, and finite"
        if not 0 < self.ttl_s < math.inf or self.batch < 1:
            yield f"ttl_s is {self.ttl_s} and batch {self.batch}; both must be above 0, and finite"
        if not self.scenarios or len(set(self.scenarios)) != len(self.scenarios):
            yield f"scenarios is {self.scenarios}; it names each scenario once, and at least one or *"
