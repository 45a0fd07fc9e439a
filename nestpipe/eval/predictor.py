"""Inference with a trained model: evaluation on held-out targets, and recommendations for users of the log.

Row lookups are read-only and never admit ids. On several ranks every rank scores everything, so that all take the same
decision; calls are collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.config import Config
from nestpipe.data.batch_builder import BatchBuilder, ModelInputs
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.data.splits import Ints, Split, train_mask
from nestpipe.embedding.row_reader import RowReader, read_rows
from nestpipe.errors import ConfigError, DataError
from nestpipe.eval.ranking_eval import RankingPredictor
from nestpipe.eval.retrieval_eval import EvalBatch, EvalReport, evaluate, evaluate_lists, popularity_report
from nestpipe.eval.topk_metrics import top_items
from nestpipe.generative.beam import FoundItems, expand, search
from nestpipe.generative.trie import ItemPool, Trie
from nestpipe.jagged import Batch, Jagged, offsets_of, ranges
from nestpipe.models.build_model import inputs_of
from nestpipe.models.config import DCNConfig, EncDecConfig, RankingConfig
from nestpipe.models.contract import Model, Recommender
from nestpipe.models.encdec import EncDec

Target = Literal["test", "validation"]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Items for one user, best first, with their scores."""

    items: list[int]
    scores: list[float]


class EvalBatches:
    """The users of a split that have a target, in the order of the file, in batches."""

    def __init__(
        self, sequences: Sequences, split: Split, config: Config, target: Target, *, inputs: ModelInputs | None = None
    ):
        self._sequences, self._config = sequences, config
        self._targets: Ints = split.test if target == "test" else split.validation
        self._rows = np.flatnonzero(self._targets >= 1)
        if not len(self._rows):
            hint = "Use another split (--data.split)."
            if target == "validation" and not config.data.validation:
                hint = "It was trained without --data.validation; evaluate the test targets instead."
            raise DataError(f"{sequences.path} has no {target} targets under this split. {hint}")
        self._builder = BatchBuilder(sequences, split, inputs)

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._config.eval.batch_size)

    def __iter__(self) -> Iterator[EvalBatch]:
        size = self._config.eval.batch_size
        for first in range(0, len(self._rows), size):
            yield self._batch(self._rows[first : first + size])

    def _batch(self, rows: Ints) -> EvalBatch:
        sequences, data = self._sequences, self._config.data
        end = self._targets[rows]
        start = truncate(end, data.max_len, data.truncate_block)
        at = sequences.offsets[rows] + end
        request_ms = None if sequences.times is None else sequences.times[at]
        history = self._builder.history(torch.from_numpy(rows), start, end, request_ms=request_ms)
        first_seen = start if self._config.eval.seen == "input" else np.zeros_like(start)
        return EvalBatch(
            batch=replace(history, sample_features={**history.sample_features, **self._builder.requests(at)}),
            target_positions=torch.from_numpy(catalogue_positions(sequences, sequences.items[at])),
            seen=seen_items(sequences, rows, first_seen, end),
            users=torch.from_numpy(sequences.users[rows]),
        )


class GenerativePredictor:
    """Generates items with an encoder-decoder model and its embedding rows."""

    def __init__(self, model: Model, rows: RowReader, sequences: Sequences, split: Split, config: Config):
        self._model = cast(EncDec, model)
        self._rows, self._sequences, self._split, self._config = rows, sequences, split, config

    def generate(self, batch: Batch, k: int, *, seen: Jagged | None = None, pool: ItemPool | None = None) -> FoundItems:
        """The best k items of each request, without seen items and within a pool, if given."""
        trie, model = cast(Trie, self._model.ids), self._model
        batch = model.select(batch, None)
        rows = read_rows(self._rows, model.encode_lookups(batch))
        with torch.no_grad():
            decoding = model.decoding(rows, batch)
        beams = search(decoding, trie, width=model.config.beam, pool=pool, softmax=model.config.softmax)
        return expand(trie, beams, k, seen=seen, allowed=None if pool is None else pool.items)

    def evaluate(self, target: Target = "test", *, progress: bool = True) -> EvalReport:
        """Ranks of the held-out targets in the generated lists."""
        config = self._config
        samples = EvalBatches(self._sequences, self._split, config, target, inputs=inputs_of(config, self._sequences))
        num_items, k = len(self._sequences.catalogue), max(config.eval.ks)

        def lists(sample: EvalBatch) -> Tensor:
            seen = None if config.eval.seen == "none" else sample.seen
            return self.generate(sample.batch, k, seen=seen).positions

        return evaluate_lists(lists, num_items, samples, config.eval, config.seed, progress=progress)

    def recommend(self, user: int, k: int = 10, *, request_ms: int | None = None) -> Recommendation:
        """The best k items that the user has not seen; at most as many as the beam width."""
        request = user_request(self._sequences, self._split, self._config, user, request_ms)
        found = self.generate(request.batch, k, seen=request.seen)
        kept = found.positions[0] >= 0
        items = self._sequences.catalogue[found.positions[0][kept].numpy()]
        return Recommendation(items.tolist(), found.scores[0][kept].tolist())


class RetrievalPredictor:
    """Ranks the catalogue with a model and its embedding rows."""

    def __init__(self, model: Model, rows: RowReader, sequences: Sequences, split: Split, config: Config):
        self._model = cast(Recommender, model)
        self._rows, self._sequences, self._split, self._config = rows, sequences, split, config

    def encode(self, batch: Batch) -> Tensor:
        """Query vectors [B, D]."""
        return self.encoder()(batch)

    def encoder(self) -> Callable[[Batch], Tensor]:
        """`encode` as a function without a reference to the log, which may change while it is used."""
        model, reader = self._model, self._rows

        def encode(batch: Batch) -> Tensor:
            rows = read_rows(reader, model.encode_lookups(batch))
            with torch.no_grad():
                return model.encode(rows, batch)

        return encode

    @cached_property
    def item_vectors(self) -> Tensor:
        """Vectors [I, D] of the whole catalogue, computed at the first use."""
        with torch.no_grad():
            return self._model.item_vectors(
                self._rows.peek("item", torch.from_numpy(np.array(self._sequences.catalogue)))
            )

    def evaluate(self, target: Target = "test", *, progress: bool = True) -> EvalReport:
        """Ranks the held-out targets against the whole catalogue."""
        samples = EvalBatches(self._sequences, self._split, self._config, target)
        config = self._config
        return evaluate(self.encode, self.item_vectors, samples, config.eval, config.seed, progress=progress)

    def recommend(self, user: int, k: int = 10, *, request_ms: int | None = None) -> Recommendation:
        """The best k items that the user has not seen, at a time (default: that of the last event)."""
        request = user_request(self._sequences, self._split, self._config, user, request_ms)
        queries = self.encode(request.batch)
        top = top_items(queries, self.item_vectors, request.seen, k, self._config.eval.max_bytes)
        kept = top.positions[0] >= 0
        items = self._sequences.catalogue[top.positions[0][kept].numpy()]
        return Recommendation(items.tolist(), top.scores[0][kept].tolist())


Predictor = RetrievalPredictor | RankingPredictor | GenerativePredictor


def make_predictor(model: Model, rows: RowReader, sequences: Sequences, split: Split, config: Config) -> Predictor:
    """The predictor for the kind of model that was trained."""
    if isinstance(config.model, RankingConfig | DCNConfig):
        return RankingPredictor(model, rows, sequences, split, config)
    if isinstance(config.model, EncDecConfig):
        return GenerativePredictor(model, rows, sequences, split, config)
    if not isinstance(model, Recommender):
        raise ConfigError(
            f"{type(model).__name__} cannot be evaluated: it lacks encode_lookups, encode or item_vectors, which rank the "
            "catalogue. Implement them (nestpipe.models.contract.Recommender)."
        )
    return RetrievalPredictor(model, rows, sequences, split, config)


@dataclass(frozen=True, slots=True, eq=False)
class UserRequest:
    """The history of one user of the log, and the items to leave out."""

    batch: Batch
    seen: Jagged | None


def user_request(sequences: Sequences, split: Split, config: Config, user: int, request_ms: int | None) -> UserRequest:
    """A request of a user at a time (default: that of the last event); raises DataError for an unknown user."""
    rows = np.flatnonzero(sequences.users == user)
    if not len(rows):
        raise DataError(
            f"user {user} is not among the {len(sequences.users):,} users of {sequences.path}, so there is no history to read. Check the id."
        )
    end = np.diff(sequences.offsets)[rows]
    start = truncate(end, config.data.max_len, config.data.truncate_block)
    times = sequences.times
    query_ms = None if times is None else times[sequences.offsets[rows + 1] - 1]
    if query_ms is not None and request_ms is not None:
        query_ms = np.array([request_ms])
    builder = BatchBuilder(sequences, split, inputs_of(config, sequences))
    batch = builder.history(torch.from_numpy(rows), start, end, request_ms=query_ms)
    seen = None if config.eval.seen == "none" else seen_items(sequences, rows, np.zeros_like(end), end)
    return UserRequest(batch, seen)


def popularity(sequences: Sequences, split: Split, config: Config, target: Target = "test") -> EvalReport:
    """Evaluates the popularity baseline: the items with most training events."""
    positions = catalogue_positions(sequences, sequences.items[train_mask(sequences, split)])
    counts = torch.from_numpy(np.bincount(positions, minlength=len(sequences.catalogue)))
    return popularity_report(counts, EvalBatches(sequences, split, config, target), config.eval, config.seed)


def catalogue_positions(sequences: Sequences, items: NDArray[np.int64]) -> Ints:
    """The position of each item in the catalogue."""
    return np.searchsorted(sequences.catalogue, items)


def seen_items(sequences: Sequences, rows: Ints, start: Ints, end: Ints) -> Jagged:
    """Catalogue positions of the events start .. end - 1 of each user."""
    lengths = torch.from_numpy(end - start)
    events = ranges(torch.from_numpy(sequences.offsets[rows] + start), lengths).numpy()
    positions = torch.from_numpy(catalogue_positions(sequences, sequences.items[events]))
    return Jagged(positions, offsets_of(lengths), int(lengths.max()) if len(lengths) else 0)
