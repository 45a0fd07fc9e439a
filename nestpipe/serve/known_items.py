"""The items that a model knows: positions, popularity, similar items, and candidates from their own vectors."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nestpipe.data.folder_merge import is_among
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError
from nestpipe.eval.catalogue_predictor import content_vectors, training_counts
from nestpipe.eval.catalogue_ranking import top_items
from nestpipe.gateway.candidates import (
    CandidateItems,
    Floats,
    PastEvents,
    RetrievedItems,
    Retriever,
    build_index,
    mean_encoder,
)
from nestpipe.jagged import Jagged
from nestpipe.models.content_retrieval import ContentRetrieval
from nestpipe.ops.catalogue_scan import block_items
from nestpipe.rules.compiled_rules import CompiledRules, no_rules
from nestpipe.rules.rule_book import RequestRules
from nestpipe.rules.selection import SelectedItems, best_by_vector, select
from nestpipe.serve.config import Stages
from nestpipe.training.run_folder import LoadedModel, Run

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoredItems:
    """Numbers of items with their scores, best first; `allowed` is how many items could have been shown."""

    items: list[int]
    scores: list[float]
    allowed: int = 0


class KnownItems:
    """Items [I], ascending; `popularity` [I] counts their training events, `vectors` [I, D] are those of the model, if any."""

    def __init__(self, items: Ints, *, popularity: Ints, vectors: Tensor | None, keeps_seen: bool, max_bytes: int):
        """`keeps_seen`: items that a user has had may be recommended again, as the run was evaluated."""
        self.items, self.vectors, self.keeps_seen, self.max_bytes = items, vectors, keeps_seen, max_bytes
        self.popularity = popularity
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

    def replaced(self, items: Ints, popularity: Ints, vectors: Tensor | None) -> KnownItems:
        """Another catalogue under the same rules."""
        return KnownItems(
            items, popularity=popularity, vectors=vectors, keeps_seen=self.keeps_seen, max_bytes=self.max_bytes
        )

    def has(self, items: Ints) -> NDArray[np.bool_]:
        """Which items the model knows."""
        return is_among(items, self.items)

    def known_positions(self, items: Ints) -> Ints:
        """Catalogue positions of those items that the model knows."""
        return np.searchsorted(self.items, items[self.has(items)])

    def scored(self, positions: Tensor, scores: Tensor, k: int, *, allowed: int) -> ScoredItems:
        """The first k of some positions, of which -1 is none."""
        kept = (positions >= 0).nonzero().flatten()[:k]
        return ScoredItems(self.items[positions[kept].numpy()].tolist(), scores[kept].tolist(), allowed)

    def listed(self, found: SelectedItems) -> ScoredItems:
        """A list under rules."""
        return ScoredItems(self.items[found.positions].tolist(), found.scores.tolist(), found.num_left)

    def popular(self, k: int, rules: CompiledRules, *, vectors: Floats | None) -> ScoredItems:
        """The items with most training events under the rules, for users without history; the counts are the scores.

        `vectors` are those that `diversity` compares.
        """
        removed = rules.removed(np.empty(0, np.int64), keeps_seen=self.keeps_seen)
        counts = self.popularity.astype(np.float64)
        return self.listed(select(counts, rules, k, removed=removed, vectors=vectors))

    def similar(self, items: Ints, k: int, rules: CompiledRules | None = None) -> ScoredItems:
        """The items whose vectors point most in the direction of the given ones' mean (cosine), without these."""
        own, directions, rules = self.positions(items), self._directions, rules or no_rules(len(self))
        positions = torch.from_numpy(np.unique(np.concatenate([own, rules.excluded])))
        query = F.normalize(directions.index_select(0, torch.from_numpy(own)).mean(0, keepdim=True), dim=1)
        if rules.is_plain:
            removed = Jagged(positions, torch.tensor([0, len(positions)]), len(positions))
            top = top_items(query, directions, removed, k, self.max_bytes)
            return self.scored(top.positions[0], top.scores[0], k, allowed=rules.num_left(positions.numpy()))
        return self.listed(best_by_vector(directions.numpy(), query[0].numpy(), rules, k, removed=positions.numpy()))

    @property
    def vector_array(self) -> Floats | None:
        """The vectors as numpy has them, without a copy."""
        return None if self.vectors is None else self.vectors.numpy()

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
            keeps_seen=self.keeps_seen,
            has_vectors=self.vectors is not None,
        )
        return CandidateSearch(retriever)


class CandidateSearch:
    """Retrieval and pre-rank of an instance that ranks."""

    def __init__(self, retriever: Retriever):
        self.retriever = retriever

    def find(
        self, events: Sequences, query_time: int, k: int, *, rules: RequestRules, stages: Stages
    ) -> RankingCandidates:
        """Candidates for a history at a time in seconds, best first: enough for k, and pinned items."""
        past = PastEvents(events.items, events.times)
        count = max(k, stages.num_candidates)
        compiled = rules.on(self.retriever.items)
        found = self.retriever.retrieve(past, max(stages.num_retrieved, count), compiled, query_time=query_time)
        return RankingCandidates(self.retriever, found, self.retriever.prerank(found, count))


@dataclass(frozen=True, slots=True, eq=False)
class RankingCandidates:
    """Candidates of a request, and the rules that its ranking must obey."""

    retriever: Retriever
    found: RetrievedItems
    candidates: CandidateItems

    @property
    def items(self) -> list[int]:
        return cast(list[int], list(self.candidates.items))

    @property
    def allowed(self) -> int:
        return self.found.rules.num_left(self.found.removed)

    def listed(self, items: list[int], scores: list[float], k: int) -> ScoredItems:
        """The list of k, of the candidates in the order of the ranking."""
        if self.candidates.is_final:
            return ScoredItems(items[:k], scores[:k], self.allowed)
        best = self.retriever.listed(self.found, items, scores, k)
        return ScoredItems(cast(list[int], list(best.items)), list(best.scores), self.allowed)


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
