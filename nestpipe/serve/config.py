"""Settings of an instance and of a gateway: sizes, prefill policy, limits, stages. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

MAX_TICKET_CHARS = 1024
MAX_TICKET_S = 300.0
"""A ticket that would live longer was made under another clock; clocks that jump back must not make tickets immortal."""
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Of all latency histograms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an instance."""

    device_bytes: int = 256 << 20
    """Capacity of the device tier: KV prefixes of requests to come."""
    host_bytes: int = 1 << 30
    """Capacity of the host tier: used KV prefixes, for the user's next request."""
    device_ttl_s: float = 10.0
    """How long a KV prefix stays on the device for its request."""
    host_ttl_s: float = 600.0
    """How long it stays on the host."""
    chunk: int = 1024
    """Events of a prefill chunk, which a ranking request may have to wait for."""
    max_batch: int = 16
    """Requests scored together, if that takes at most 20 ms."""
    max_queue: int = 256
    """Requests that may be queued; more are refused with 429."""

    def problems(self) -> Iterator[str]:
        for name in ("device_bytes", "host_bytes", "device_ttl_s", "host_ttl_s"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more"
        if self.device_ttl_s > MAX_TICKET_S:
            yield f"device_ttl_s is {self.device_ttl_s}; tickets are valid for at most {MAX_TICKET_S:.0f} s, so it must not be more"
        for name in ("chunk", "max_batch", "max_queue"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerConfig:
    """When a prefill hint is admitted."""

    mode: Literal["on", "always", "shadow", "off"] = "on"
    """always: whatever fits into the cache and the rate; shadow: decide and report only; off: never."""
    budget_ms: float = 100.0
    """P99 latency that ranking may have; also the deadline of requests that name none."""
    lead_ms: float = 35.0
    """Time from the prefill hint to the ranking request, which retrieval and pre-rank take."""
    rate_ms_per_s: float = 500.0
    """Compute for prefills, in milliseconds per second."""
    burst_ms: float = 2000.0
    """Unused compute that they may save up."""
    nearline_ms_per_s: float = 200.0
    """Compute for near-line prefills, which extend stored KV prefixes while no request waits; 0: none."""

    def problems(self) -> Iterator[str]:
        for name in ("budget_ms", "lead_ms", "rate_ms_per_s", "burst_ms"):
            if not 0 < getattr(self, name) < float("inf"):
                yield f"{name} is {getattr(self, name)}; it must be above 0 and finite"
        if not 0 <= self.nearline_ms_per_s < float("inf"):
            yield f"nearline_ms_per_s is {self.nearline_ms_per_s}; it must be 0 or more, and finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a request; what exceeds them is refused before it is queued."""

    body_bytes: int = 1 << 20
    """Bytes of a body."""
    body_s: float = 5.0
    """Time that a body may take to arrive."""
    candidates: int = 2048
    """Candidates of one request."""
    items: int = 1000
    """Items that one request may ask for."""
    history: int = 10_000
    """Events of a history in a request."""
    events: int = 1000
    """Events of one POST /v1/events."""
    deadline_ms: float = 60_000.0
    """The longest deadline."""

    def problems(self) -> Iterator[str]:
        for name in ("body_bytes", "body_s", "candidates", "items", "history", "events", "deadline_ms"):
            if not getattr(self, name) > 0:
                yield f"{name} is {getattr(self, name)}; it must be above 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Limits of a gateway."""

    max_bytes: int = 1 << 20
    body_s: float = 5.0
    max_history: int = 8192
    max_candidates: int = 4096
    max_k: int = 1000
    max_events: int = 1000
    deadline_ms: float = 60_000.0
    write_s: float = 5.0
    """How long an instance may take for events and invalidations."""
    similar_s: float = 5.0
    """How long instances may take for similar items."""
    max_in_flight: int = 256
    """Requests in flight; more are refused with 429."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Deadlines and sizes of a gateway's cascade."""

    retrieval_ms: float = 50.0
    """Deadline of retrieval."""
    prerank_ms: float = 20.0
    """Deadline of pre-rank."""
    rank_ms: float = 100.0
    """Deadline of ranking, a second attempt included."""
    prefill_hint_ms: float = 5.0
    """How long ranking waits for the answer to the prefill hint when the candidates are ready."""
    num_retrieved: int = 512
    """Items from retrieval."""
    num_candidates: int = 128
    """Items that pre-rank leaves for ranking."""

    def problems(self) -> Iterator[str]:
        for name in ("retrieval_ms", "prerank_ms", "rank_ms", "prefill_hint_ms"):
            if not 0 < getattr(self, name) < float("inf"):
                yield f"{name} is {getattr(self, name)}; it must be above 0 and finite"
        if not 1 <= self.num_candidates <= self.num_retrieved:
            yield f"num_candidates is {self.num_candidates} of num_retrieved {self.num_retrieved}; it takes 1 .. num_retrieved"

    @property
    def whole_ms(self) -> float:
        """The deadlines of all stages together."""
        return self.retrieval_ms + self.prerank_ms + self.rank_ms

    def within(self, deadline_ms: float | None) -> Stages:
        """The stages of a request that names a deadline: each keeps its share of the time."""
        if deadline_ms is None:
            return self
        share = deadline_ms / self.whole_ms
        return replace(
            self,
            retrieval_ms=self.retrieval_ms * share,
            prerank_ms=self.prerank_ms * share,
            rank_ms=self.rank_ms * share,
            prefill_hint_ms=min(self.prefill_hint_ms, self.rank_ms * share),
        )
