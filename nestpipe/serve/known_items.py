"""The items that a model knows: positions, popularity, similar items, and candidates from their own vectors."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError
from nestpipe.eval.catalogue_predictor import content_vectors, training_counts
from nestpipe.eval.catalogue_ranking import top_items
from nestpipe.gateway.candidates import Floats, PastEvents, Retriever, build_index, mean_encoder, without
from nestpipe.jagged import Jagged
from nestpipe.models.content_retrieval import ContentRetrieval
from nestpipe.ops.catalogue_scan import block_items
from nestpipe.serve.config import Stages
from nestpipe.training.run_folder import LoadedModel, Run

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoredItems:
    """Numbers of items with their scores, best first."""

    items: list[int]
    scores: list[float]


class KnownItems:
    """Items [I], ascending; `popularity` [I] counts their training events, `vectors` [I, D] are those of the model, if any."""

    def __init__(self, items: Ints, *, popularity: Ints, vectors: Tensor | None, keeps_seen: bool, max_bytes: int):
        """`keeps_seen`: items that a user has had may be recommended again, as the run was evaluated."""
        self.items, self.vectors, self.keeps_seen, self.max_bytes = items, vectors, keeps_seen, max_bytes
        self.popularity, self._by_popularity = popularity, np.argsort(-popularity, kind="stable")
        self._search: CandidateSearch | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.items)

    def positions(self, items: Ints) -> Ints:
        """Catalogue positions; raises DataError for an item that is not in the catalogue."""
        places = np.minimum(np.searchsorted(self.items, items), len(self.items) - 1)
        if len(unknown := np.flatnonzero(self.items[places] != items)):
            raise DataError(
                f"item number {items[unknown[0]]} is not in the catalogue of the model, which has {len(self.items):,} items."
            )
        return places

    def known_positions(self, items: Ints) -> Ints:
        """Catalogue positions of the items that are in the catalogue; others are left out."""
        places = np.minimum(np.searchsorted(self.items, items), len(self.items) - 1)
        return np.asarray(places[self.items[places] == items])

    def replaced(self, items: Ints, popularity: Ints, vectors: Tensor | None) -> KnownItems:
        """Another catalogue under the same rules."""
        return KnownItems(
            items, popularity=popularity, vectors=vectors, keeps_seen=self.keeps_seen, max_bytes=self.max_bytes
        )

    def scored(self, positions: Tensor, scores: Tensor, k: int) -> ScoredItems:
        """The first k of some positions, of which -1 is none."""
        kept = (positions >= 0).nonzero().flatten()[:k]
        return ScoredItems(self.items[positions[kept].numpy()].tolist(), scores[kept].tolist())

    def popular(self, k: int, *, removed: Ints) -> ScoredItems:
        """The items with most training events, without those at some positions; the counts are the scores."""
        kept = self._by_popularity[~np.isin(self._by_popularity, removed)][:k]
        return ScoredItems(self.items[kept].tolist(), self.popularity[kept].astype(float).tolist())

    def similar(self, items: Ints, k: int) -> ScoredItems:
        """The items whose vectors point most in the direction of the given ones' mean (cosine), without these."""
        positions, directions = torch.from_numpy(self.positions(items)), self._directions
        query = F.normalize(directions.index_select(0, positions).mean(0, keepdim=True), dim=1)
        own = Jagged(positions, torch.tensor([0, len(positions)]), len(positions))
        top = top_items(query, directions, own, k, self.max_bytes)
        return self.scored(top.positions[0], top.scores[0], k)

    @cached_property
    def _directions(self) -> Tensor:
        if self.vectors is None:
            raise DataError(
                "this model has no item vectors, so it knows no similar items: 'item' is not among its features."
            )
        return F.normalize(self.vectors, dim=1)

    def search(self) -> CandidateSearch:
        """Candidates by the model's own vectors, built on first use. The query is the mean of the last events.

        Without vectors, candidates come by popularity.
        """
        with self._lock:
            if self._search is None:
                self._search = self._build_search()
            return self._search

    def _build_search(self) -> CandidateSearch:
        if self.vectors is None:
            vectors: Floats = self.popularity.astype(np.float32)[:, None]
        else:
            vectors = np.ascontiguousarray(self.vectors.numpy(), dtype=np.float32)
        retriever = Retriever(
            items=self.items,
            vectors=vectors,
            index=build_index(vectors),
            encode=_always_one if self.vectors is None else mean_encoder(self.items, vectors),
            past_of=no_past,
        )
        return CandidateSearch(retriever, self.keeps_seen)


class CandidateSearch:
    """Retrieval and pre-rank of an instance that ranks."""

    def __init__(self, retriever: Retriever, keeps_seen: bool):
        self.retriever, self._keeps_seen = retriever, keeps_seen

    def find(self, events: Sequences, query_time: int, k: int, *, excluded: Ints, stages: Stages) -> list[int]:
        """Candidates for a history at a time in seconds, best first: enough for k, without seen and excluded items."""
        past = PastEvents(events.items, events.times)
        count = max(k, stages.num_candidates)
        most = max(stages.num_retrieved, count) + len(excluded)
        query, places = self.retriever.retrieve(past, most, query_time=query_time)
        if self._keeps_seen:
            past = no_past(0)
        filters = (without(excluded.tolist()),) if len(excluded) else ()
        found = self.retriever.prerank(query, places, past, count, filters=filters)
        return [int(one) for one in found.items]


def known_items(run: Run, loaded: LoadedModel) -> KnownItems:
    """The catalogue of a run with the vectors of a checkpoint, which are those of `nestpipe similar`."""
    items, vectors = np.array(run.sequences.catalogue), None
    if isinstance(loaded.model, ContentRetrieval):
        size = block_items(run.config.eval.max_bytes)
        vectors = content_vectors(loaded.model, loaded.rows, torch.from_numpy(items), size=size)
    elif "item" in loaded.rows.tables:
        vectors = loaded.rows.peek("item", torch.from_numpy(items))
        if (as_vectors := getattr(loaded.model, "item_vectors", None)) is not None:
            with torch.no_grad():
                vectors = as_vectors(vectors)
    return KnownItems(
        items,
        popularity=training_counts(run.sequences, run.split),
        vectors=vectors,
        keeps_seen=run.config.eval.seen == "none",
        max_bytes=run.config.eval.max_bytes,
    )


def no_past(user: int) -> PastEvents:
    """The history of nobody: requests bring theirs."""
    return PastEvents(np.empty(0, np.int64))


def _always_one(past: PastEvents, query_time: int | None) -> Floats:
    return np.ones(1, np.float32)
