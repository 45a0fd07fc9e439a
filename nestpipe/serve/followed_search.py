"""Candidates of a retrieval run with item features, which follow the living catalogue without a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from nestpipe.data.item_content import ItemContent
from nestpipe.data.sequences import Sequences
from nestpipe.eval.predictor import RetrievalPredictor
from nestpipe.gateway.candidates import Retriever, build_index, retriever_of
from nestpipe.rules.rule_book import RequestRules
from nestpipe.serve.config import Stages
from nestpipe.serve.followed_items import FollowedItems
from nestpipe.serve.known_items import CandidateSearch, KnownItems, RankingCandidates, no_past
from nestpipe.training.run_folder import Run

_FOLLOW_S = 0.2  # between two looks at the living catalogue


class FollowedSearch(CandidateSearch):
    """Retrieval that looks at the living catalogue of a request's history. Thread-safe."""

    def __init__(self, retriever: Retriever, items: FollowedItems, *, clock: Callable[[], float] = time.monotonic):
        super().__init__(retriever)
        self._items, self._clock = items, clock
        self._lock, self._follow_at = threading.Lock(), float("-inf")

    def find(
        self, events: Sequences, query_time: int, k: int, *, rules: RequestRules, stages: Stages
    ) -> RankingCandidates:
        self.follow(events.live)
        return super().find(events, query_time, k, rules=rules, stages=stages)

    def follow(self, live: ItemContent | None) -> None:
        """Takes what the living catalogue has changed; looks at it a few times a second at most."""
        if live is None or self._clock() < self._follow_at:
            return
        with self._lock:
            self._follow_at = self._clock() + _FOLLOW_S
            if self._items.follow(live):
                known = self._items.known
                assert known.vectors is not None
                vectors = known.vectors.numpy()
                self.retriever = replace(
                    self.retriever,
                    items=known.items,
                    vectors=vectors,
                    index=build_index(vectors),
                    popularity=None if self.retriever.popularity is None else known.popularity,
                )


def followed_search(run: Run, *, keeps_seen: bool) -> FollowedSearch:
    """The search of a run whose model reads item features."""
    scorer = run.predictor()
    assert isinstance(scorer, RetrievalPredictor)
    retriever = replace(retriever_of(run, scorer=scorer, past_of=no_past), keeps_seen=keeps_seen)
    counts = np.zeros(len(retriever.items), np.int64) if retriever.popularity is None else retriever.popularity
    known = KnownItems(
        retriever.items,
        popularity=counts,
        vectors=torch.from_numpy(retriever.vectors),
        keeps_seen=keeps_seen,
        max_bytes=run.config.eval.max_bytes,
    )
    return FollowedSearch(retriever, FollowedItems(*scorer.parts, known))
