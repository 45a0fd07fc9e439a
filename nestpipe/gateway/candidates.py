"""The first two stages of the cascade: retrieval by vector search, and pre-rank by exact dot products and business filters.

    past  --encode-->  query [D]  --index-->  some hundred catalogue positions  --pre-rank-->  candidates

The index may be approximate (any faiss factory string); pre-rank scores its results exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from nestpipe.training.run_folder import Run

log = logging.getLogger("nestpipe")

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
_MEAN_OF = 32  # events whose mean is the query, without a trained retrieval model


@dataclass(frozen=True, slots=True, eq=False)
class PastEvents:
    """A user's events: items and times (milliseconds since 1970; None for a log that has only order)."""

    items: Ints
    times_ms: Ints | None = None


class Index(Protocol):
    """Finds the vectors with the highest dot products."""

    def search(self, query: Floats, k: int) -> Ints:
        """The places of at most k vectors, best first."""


class ExactIndex:
    """Every vector is scored; ties keep the order of the catalogue."""

    def __init__(self, vectors: Floats):
        self._vectors = vectors

    def search(self, query: Floats, k: int) -> Ints:
        return best_places(self._vectors @ query, k)


class FaissIndex:
    """An index of faiss by its factory string: 'Flat', 'HNSW32', 'IVF256,Flat', ..."""

    def __init__(self, vectors: Floats, spec: str, faiss: Any):
        faiss.omp_set_num_threads(1)  # searches run concurrently, one thread each
        self._index = faiss.index_factory(vectors.shape[1], spec, faiss.METRIC_INNER_PRODUCT)
        self._index.train(vectors)
        self._index.add(vectors)

    def search(self, query: Floats, k: int) -> Ints:
        places: Ints = self._index.search(query[None], min(k, self._index.ntotal))[1][0]
        return places[places >= 0]


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


class Filter(Protocol):
    """A business rule: which of some items (best first) a user may be shown."""

    def __call__(self, items: Ints, past: PastEvents) -> NDArray[np.bool_]: ...


def unseen(items: Ints, past: PastEvents) -> NDArray[np.bool_]:
    """Items that are not in the history."""
    return ~np.isin(items, past.items)


def without(blocked: Collection[int]) -> Filter:
    """Items that are not blocked."""
    listed = np.array(sorted(blocked), dtype=np.int64)
    return lambda items, past: ~np.isin(items, listed)


def at_most(limit: int, group_of: Callable[[Ints], Ints]) -> Filter:
    """The best `limit` items of each group (category, author)."""

    def keep(items: Ints, past: PastEvents) -> NDArray[np.bool_]:
        groups = group_of(items)
        order = np.argsort(groups, kind="stable")
        first = np.searchsorted(groups[order], groups[order])  # where each group begins in that order
        rank = np.empty(len(items), dtype=np.int64)
        rank[order] = np.arange(len(items)) - first
        return rank < limit

    return keep


@dataclass(frozen=True, slots=True, eq=False)
class CandidateItems:
    """Items with scores, best first; those of a user without history are popular, and not ranked."""

    items: Sequence[OwnId]
    scores: Sequence[float]
    is_popular: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Retriever:
    """Items [I] (ascending ids) with vectors [I, D], and an encoder of histories to queries [D].

    `popularity` [I] counts the training events of each item; without it a user without history has a query too.
    """

    items: Ints
    vectors: Floats
    index: Index
    encode: Callable[[PastEvents, int | None], Floats]
    past_of: Callable[[int], PastEvents]
    filters: tuple[Filter, ...] = (unseen,)
    popularity: Ints | None = None

    def retrieve(self, past: PastEvents, k: int, *, query_time: int | None = None) -> tuple[Floats, Ints]:
        """The query and the places of its nearest items: k, and as many more as the `unseen` filter may drop."""
        query = np.ascontiguousarray(self.encode(past, query_time), dtype=np.float32)
        return query, self.index.search(query, k + len(np.unique(past.items)))

    def prerank(
        self, query: Floats, places: Ints, past: PastEvents, count: int, *, filters: Iterable[Filter] = ()
    ) -> CandidateItems:
        """The best `count` of some places by exact dot product, after the filters of the service and of the request."""
        scores = self.vectors[places] @ query
        order = best_places(scores, len(scores))
        places, scores = places[order], scores[order]
        for keep in (*self.filters, *filters):
            kept = keep(self.items[places], past)
            places, scores = places[kept], scores[kept]
        return CandidateItems(self.items[places[:count]].tolist(), scores[:count].tolist())

    @cached_property
    def _by_popularity(self) -> Ints:
        assert self.popularity is not None
        return np.argsort(-self.popularity, kind="stable")

    def popular(self, past: PastEvents, count: int, *, filters: Iterable[Filter] = ()) -> CandidateItems | None:
        """For a user without history the items with most training events, after the filters; None for other users."""
        if self.popularity is None or len(past.items):
            return None
        places = self._by_popularity
        for keep in (*self.filters, *filters):
            places = places[keep(self.items[places], past)]
        counts = self.popularity[places[:count]].astype(float)
        return CandidateItems(self.items[places[:count]].tolist(), counts.tolist(), is_popular=True)


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


def best_places(scores: Floats, k: int) -> Ints:
    """The places of the k highest scores, best first; equal scores in their order."""
    if k < len(scores):
        bar = np.partition(scores, len(scores) - k)[len(scores) - k]
        above, level = np.flatnonzero(scores > bar), np.flatnonzero(scores == bar)
        places = np.sort(np.concatenate([above, level[: k - len(above)]]))
    else:
        places = np.arange(len(scores))
    return places[np.argsort(-scores[places], kind="stable")]
