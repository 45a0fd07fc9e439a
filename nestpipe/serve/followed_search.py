"""Candidates of a retrieval run with item features, whose index follows the living catalogue without a restart."""

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
from nestpipe.gateway.live_index import LiveIndex
from nestpipe.serve.config import Stages
from nestpipe.serve.followed_items import FollowedItems
from nestpipe.serve.known_items import CandidateSearch, Ints, KnownItems, no_past
from nestpipe.training.run_folder import Run

_FOLLOW_S = 0.2  # between two looks at the living catalogue


class FollowedSearch(CandidateSearch):
    """Retrieval that looks at the living catalogue of a request's history. Thread-safe."""

    def __init__(
        self,
        retriever: Retriever,
        items: FollowedItems,
        *,
        keeps_seen: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(retriever, keeps_seen)
        self._items, self._clock = items, clock
        self._index = LiveIndex.of(retriever.vectors, build_index)
        self._trained = dict(zip(retriever.items.tolist(), range(len(retriever.items)), strict=True))
        self._places, self._hidden = dict(self._trained), set[int]()  # place of each number; numbers not to be found
        self._changed: dict[int, torch.Tensor] = {}
        self._lock, self._follow_at = threading.Lock(), float("-inf")
        self._original = retriever.vectors

    def find(self, events: Sequences, query_time: int, k: int, *, excluded: Ints, stages: Stages) -> list[int]:
        self.follow(getattr(events, "live", None))
        return super().find(events, query_time, k, excluded=excluded, stages=stages)

    def follow(self, live: ItemContent | None) -> None:
        """Takes what the living catalogue has changed; looks at it a few times a second at most."""
        if live is None or self._clock() < self._follow_at:
            return
        with self._lock:
            self._follow_at = self._clock() + _FOLLOW_S
            if self._items.follow(live):
                self._take(self._items.later, set(self._items.withdrawn.tolist()))

    def _take(self, later: dict[int, torch.Tensor], withdrawn: set[int]) -> None:
        back = self._changed.keys() - later.keys()  # of which training's vectors count again, if there are any
        hidden = withdrawn | {number for number in back if number not in self._trained}
        shown = (self._hidden - hidden) & self._trained.keys()
        vectors = {
            number: torch.from_numpy(self._original[self._trained[number]])
            for number in back | shown
            if number in self._trained
        }
        vectors |= {
            number: one
            for number, one in later.items()
            if self._changed.get(number) is not one or number in self._hidden
        }
        for number in vectors:
            self._places.setdefault(number, len(self._places))
        places = np.array([self._places[number] for number in vectors], np.int64)
        removed = np.array([self._places[number] for number in hidden if number in self._places], np.int64)
        rows = (
            torch.stack(list(vectors.values())).numpy()
            if vectors
            else np.empty((0, self._original.shape[1]), np.float32)
        )
        self._index = self._index.changed(places, rows, removed=removed)
        numbers = np.array(list(self._places), np.int64)  # in the order of their places
        self.retriever = replace(self.retriever, items=numbers, vectors=self._index.vectors, index=self._index)
        self._changed, self._hidden = dict(later), hidden


def followed_search(run: Run, *, keeps_seen: bool) -> FollowedSearch:
    """The search of a run whose model reads item features."""
    scorer = run.predictor()
    assert isinstance(scorer, RetrievalPredictor)
    retriever = retriever_of(run, scorer=scorer, past_of=no_past)
    vectors = torch.from_numpy(retriever.vectors)
    known = KnownItems(
        retriever.items,
        popularity=np.zeros(len(retriever.items), np.int64),
        vectors=vectors,
        keeps_seen=keeps_seen,
        max_bytes=run.config.eval.max_bytes,
    )
    return FollowedSearch(retriever, FollowedItems(*scorer.parts, known), keeps_seen=keeps_seen)
