"""The first two stages of the cascade: retrieval by vector search, and pre-rank by exact dot products.

    past  --encode-->  query [D]  --index-->  some hundred allowed positions  --pre-rank-->  candidates

What rules remove is removed before the search. The index may be approximate (any faiss factory string); pre-rank scores its
results exactly. Where few items are allowed these are scanned, so that the search is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.sequences import Sequences, truncate
from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import DataError
from nestpipe.eval.predictor import RetrievalPredictor
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import DCNConfig, RankingConfig
from nestpipe.rules.compiled_rules import CompiledRules, no_rules
from nestpipe.rules.item_attributes import Mask
from nestpipe.rules.selection import best_by_vector, select, top_places
from nestpipe.training.run_folder import Run

log = logging.getLogger("nestpipe")

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
_MANY = 20  # an approximate index is asked if more than one of so many items is allowed; else these are scanned
_MEAN_OF = 32  # events whose mean is the query, without a trained retrieval model


@dataclass(frozen=True, slots=True, eq=False)
class PastEvents:
    """A user's events: items and times (milliseconds since 1970; None for a log that has only order)."""

    items: Ints
    times_ms: Ints | None = None


class Index(Protocol):
    """Finds the vectors with the highest dot products."""

    @property
    def is_exact(self) -> bool: ...

    def search(self, query: Floats, k: int, allowed: Mask | None = None) -> Ints:
        """The places of at most k vectors, of the allowed ones if a mask is given, best first."""


class ExactIndex:
    """Every vector is scored; ties keep the order of the catalogue."""

    is_exact = True

    def __init__(self, vectors: Floats):
        self._vectors = vectors

    def search(self, query: Floats, k: int, allowed: Mask | None = None) -> Ints:
        scores = self._vectors @ query
        return top_places(scores if allowed is None else np.where(allowed, scores, -np.inf), k)


class FaissIndex:
    """An index of faiss by its factory string: 'Flat', 'HNSW32', 'IVF256,Flat', ..."""

    def __init__(self, vectors: Floats, spec: str, faiss: Any):
        faiss.omp_set_num_threads(1)  # searches run concurrently, one thread each
        self._index = faiss.index_factory(vectors.shape[1], spec, faiss.METRIC_INNER_PRODUCT)
        self._index.train(vectors)
        self._index.add(vectors)
        self._faiss, self.is_exact = faiss, spec == "Flat"

    def search(self, query: Floats, k: int, allowed: Mask | None = None) -> Ints:
        params = None if allowed is None else self._selecting(allowed)
        places: Ints = self._index.search(query[None], min(k, self._index.ntotal), params=params)[1][0]
        return places[places >= 0]

    def _selecting(self, allowed: Mask) -> Any:
        """Search parameters that leave allowed vectors only."""
        selector = self._faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        if isinstance(self._index, self._faiss.IndexHNSW):
            return self._faiss.SearchParametersHNSW(sel=selector)
        if isinstance(self._index, self._faiss.IndexIVF):
            return self._faiss.SearchParametersIVF(sel=selector, nprobe=self._index.nprobe)
        return self._faiss.SearchParameters(sel=selector)


def build_index(vectors: Floats, spec: str = "Flat") -> Index:
    """An index of faiss if it is installed, else exact search; logs which."""
    try:
        import faiss
    except ModuleNotFoundError:
        log.warning(
            "retrieval index: exact search with numpy over %s items (faiss is not installed: pip install 'nestpipe[serve]')",
            f"{len(vectors):,}",
        )
        return ExactIndex(vectors)
    log.info("retrieval index: faiss %s over %s items", spec, f"{len(vectors):,}")
    return FaissIndex(vectors, spec, faiss)


@dataclass(frozen=True, slots=True, eq=False)
class CandidateItems:
    """Items with scores, best first; those of a user without history are popular, and not ranked.

    `allowed` is how many items the rules left; `is_final` says that a ranking needs no more rules.
    """

    items: Sequence[OwnId]
    scores: Sequence[float]
    is_popular: bool = False
    allowed: int | None = None
    unknown: Sequence[OwnId] = ()
    is_final: bool = True


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RetrievedItems:
    """The result of retrieval: places in the catalogue, what was searched for, and the rules that the rest must obey."""

    past: PastEvents
    query: Floats
    places: Ints
    rules: CompiledRules
    removed: Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class Retriever:
    """Items [I] (ascending ids) with vectors [I, D], and an encoder of histories to queries [D].

    `popularity` [I] counts the training events of each item; without it a user without history has a query too.
    `keeps_seen`: items of the history may be found. `has_vectors`: vectors say which items are alike.
    """

    items: Ints
    vectors: Floats
    index: Index
    encode: Callable[[PastEvents, int | None], Floats]
    past_of: Callable[[int], PastEvents]
    keeps_seen: bool = False
    popularity: Ints | None = None
    has_vectors: bool = True

    def retrieve(
        self, past: PastEvents, k: int, rules: CompiledRules | None = None, *, query_time: int | None = None
    ) -> RetrievedItems:
        """The k nearest items that withdrawals, `exclude`, `filter` and `unseen` leave."""
        rules = rules or no_rules(len(self.items))
        query = np.ascontiguousarray(self.encode(past, query_time), dtype=np.float32)
        removed = rules.removed(self._known_places(past.items), keeps_seen=self.keeps_seen)
        places = self._search(query, k, rules, removed)
        return RetrievedItems(past=past, query=query, places=places, rules=rules, removed=removed)

    def _search(self, query: Floats, k: int, rules: CompiledRules, removed: Ints) -> Ints:
        allowed = rules.allowed
        if allowed is None or (not self.index.is_exact and rules.num_allowed * _MANY > rules.num_items):
            found = self.index.search(query, k + len(removed), allowed)
            found = found[~np.isin(found, removed)][:k]
            if allowed is None or len(found) == min(k, rules.num_left(removed)):
                return found
        # Few items are allowed, or an approximate index has not found enough of them.
        return best_by_vector(self.vectors, query, rules.removing(), k, removed=removed).positions

    def prerank(self, found: RetrievedItems, count: int) -> CandidateItems:
        """The best `count` of what was retrieved by exact dot product, then pinned items."""
        scores = self.vectors[found.places] @ found.query
        best = found.places[top_places(scores, count)]
        pins = found.rules.pins
        places = np.concatenate([best, pins[~np.isin(pins, best)]])
        scores = self.vectors[places] @ found.query
        return self._as_candidates(found, places, scores, is_final=found.rules.removes_only)

    def popular(self, found: RetrievedItems, count: int) -> CandidateItems | None:
        """For a user without history the items with most training events, under all rules; None for other users."""
        if self.popularity is None or len(found.past.items):
            return None
        counts = self.popularity.astype(np.float64)
        best = select(counts, found.rules, count, removed=found.removed, vectors=self.directions)
        return self._as_candidates(found, best.positions, best.scores, is_popular=True)

    def listed(self, found: RetrievedItems, items: Sequence[int], scores: Sequence[float], k: int) -> CandidateItems:
        """The list of k, of candidates in the order of a ranking, under all rules."""
        places = np.searchsorted(self.items, np.array(items, np.int64))
        best = select(
            np.array(scores, np.float64),
            found.rules,
            k,
            removed=found.removed,
            positions=places,
            vectors=self.directions,
        )
        return self._as_candidates(found, best.positions, best.scores)

    @property
    def directions(self) -> Floats | None:
        """The vectors that `diversity` compares."""
        return self.vectors if self.has_vectors else None

    def _as_candidates(self, found: RetrievedItems, places: Ints, scores: Any, **about: bool) -> CandidateItems:
        allowed, unknown = found.rules.num_left(found.removed), found.rules.unknown
        return CandidateItems(self.items[places].tolist(), scores.tolist(), allowed=allowed, unknown=unknown, **about)

    def _known_places(self, items: Ints) -> Ints:
        places = np.minimum(np.searchsorted(self.items, items), len(self.items) - 1)
        known: Mask = self.items[places] == items
        return places[known]


def retriever_of(
    run: Run,
    *,
    spec: str = "Flat",
    step: int | None = None,
    past_of: Callable[[int], PastEvents] | None = None,
    scorer: RetrievalPredictor | None = None,
) -> Retriever:
    """Retrieval with a trained run: its queries and item vectors; a ranking run uses means of its item rows.

    `scorer` is the run's predictor, if it is open already.
    """
    items = np.array(run.sequences.catalogue)
    if isinstance(run.config.model, RankingConfig | DCNConfig):
        vectors = _floats(run.load_model(step).rows.peek("item", torch.from_numpy(items)))
        encode = mean_encoder(items, vectors)
    else:
        opened = scorer or run.predictor(step)
        assert isinstance(opened, RetrievalPredictor)
        vectors, encode = _floats(opened.item_vectors), _encoder(opened.encoder(), run)
    return Retriever(
        items=items,
        vectors=vectors,
        index=build_index(vectors, spec),
        encode=encode,
        past_of=past_of or PastReader(run.sequences),
    )


class PastReader:
    """Histories from a sequence folder; empty for unknown users."""

    def __init__(self, sequences: Sequences):
        self._sequences = sequences

    def __call__(self, user: int) -> PastEvents:
        users = self._sequences.users
        row = int(np.searchsorted(users, user))
        if row == len(users) or users[row] != user:
            return PastEvents(np.empty(0, dtype=np.int64))
        own = slice(*self._sequences.offsets[row : row + 2].tolist())
        times = self._sequences.times
        return PastEvents(np.array(self._sequences.items[own]), None if times is None else np.array(times[own]))


def mean_encoder(items: Ints, vectors: Floats) -> Callable[[PastEvents, int | None], Floats]:
    """Query: the mean vector of the last events; without events, that of all items."""
    overall_mean: Floats = np.asarray(vectors.mean(axis=0))

    def encode(past: PastEvents, query_time: int | None) -> Floats:
        last = past.items[-_MEAN_OF:]
        places = np.minimum(np.searchsorted(items, last), len(items) - 1)
        known = places[items[places] == last]
        return np.asarray(vectors[known].mean(axis=0)) if len(known) else overall_mean

    return encode


def _encoder(encode_batch: Callable[[Batch], torch.Tensor], run: Run) -> Callable[[PastEvents, int | None], Floats]:
    """Queries of a retrieval model, with training's truncation."""
    data, timed = run.config.data, run.sequences.times is not None

    def encode(past: PastEvents, query_time: int | None) -> Floats:
        start = truncate(len(past.items), data.max_len, data.truncate_block)
        events = past.items[start:]
        offsets, times, query_times = torch.tensor([0, len(events)]), None, None
        if timed:
            if past.times_ms is None and len(events):
                raise DataError(
                    "this model reads the times of events, but the history has none; send 'time' with each event."
                )
            seconds = events if past.times_ms is None else past.times_ms[start:] // 1000
            last = int(seconds[-1]) if len(seconds) else 0
            following = np.append(seconds[1:], query_time if query_time is not None else last)[: len(seconds)]
            times = Jagged(torch.from_numpy(seconds), offsets, len(events))
            query_times = times.with_values(torch.from_numpy(following))
        batch = Batch(
            cursor=Cursor(0, 0),
            sample_ids=torch.zeros(1, dtype=torch.int64),
            items=Jagged(torch.from_numpy(events), offsets, len(events)),
            times=times,
            query_times=query_times,
        )
        return _floats(encode_batch(batch)[0])

    return encode


def past_from(history: Sequence[Any] | None, past: PastEvents) -> PastEvents:
    """The history of the request, or the stored one."""
    if history is None:
        return past
    items = np.array([event["item"] for event in history], dtype=np.int64)
    timed = bool(history) and all("time" in event for event in history)
    return PastEvents(items, np.array([event["time"] for event in history], dtype=np.int64) * 1000 if timed else None)


def _floats(tensor: torch.Tensor) -> Floats:
    return np.ascontiguousarray(tensor.detach().numpy(), dtype=np.float32)
