"""Recommendation requests of an instance, their answers, and explanations: one event of the history is left out at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.sequences import Sequences
from nestpipe.rules.rule_book import RequestRules
from nestpipe.serve.known_items import ScoredItems
from nestpipe.serve.request_instruction import RequestInstruction
from nestpipe.serve.schemas import Provenance, StageTime
from nestpipe.serve.user_history import without_event

EXPLAINED_EVENTS = 32  # last events that an explanation weighs
_SHOWN_EVENTS = 3  # of them, for each item
_CHUNK = 8  # histories that are scored together


class WeighedEvent(NamedTuple):
    """An event of the history (item, seconds since 1970) and by how much a score falls without it."""

    item: int
    time: int | None
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationAnswer:
    """Recommended items: how they were found, by which model, and how long that took."""

    found: ScoredItems
    path: str
    model: str
    times_ms: dict[str, float]
    degraded: bool = False
    prefix_len: int = 0
    stages: dict[str, StageTime] = field(default_factory=dict)
    instruction: Provenance | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class RecommendationJob:
    """A request for items before a deadline, at a time in seconds; scenario, trigger and instruction steer generation."""

    user: int
    k: int
    deadline: float
    query_time: int
    rules: RequestRules = field(default_factory=RequestRules)
    history: Sequences | None = None
    scenario: str | None = None
    trigger: int | None = None
    instruction: RequestInstruction | None = None
    served: Any = None  # the model that answers; set by the instance or the engine
    reply: Future[RecommendationAnswer] = field(default_factory=Future)
    arrived: float = 0.0  # set by the engine

    def __lt__(self, other: RecommendationJob) -> bool:
        return self.deadline < other.deadline


def influence(
    events: Sequences,
    num_events: int,
    score: Callable[[Sequence[Sequences]], Tensor],
    *,
    check_deadline: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """By how much scores fall without each of the last events: [num_events, K], oldest first.

    `score` gives the scores [n, K] of K items for n histories, one of which may be empty.
    """
    length = len(events.items)
    variants = [events, *(without_event(events, place) for place in range(length - num_events, length))]
    scores = []
    for first in range(0, len(variants), _CHUNK):
        check_deadline()
        scores.append(score(variants[first : first + _CHUNK]))
    found: NDArray[np.float64] = torch.cat(scores).numpy().astype(np.float64)
    return found[:1] - found[1:]


def heaviest(events: Sequences, weights: NDArray[np.float64]) -> list[list[WeighedEvent]]:
    """For each item the events without which its score falls most, of weights [num_events, K]."""
    first, times = len(events.items) - len(weights), events.times
    shown = []
    for column in weights.T:
        best = np.argsort(-column, kind="stable")[:_SHOWN_EVENTS]
        best = best[column[best] > 0]  # an event without which the score rises explains nothing
        shown.append(
            [
                WeighedEvent(
                    int(events.items[first + place]),
                    None if times is None else int(times[first + place] // 1000),
                    float(column[place]),
                )
                for place in best.tolist()
            ]
        )
    return shown
