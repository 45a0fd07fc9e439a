"""Inference with a trained model: evaluation on held-out targets, and recommendations for users of the log.

Row lookups are read-only and never admit ids. On several ranks every rank scores everything, so that all take the same
decision; calls are collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from nestpipe.config import Config
from nestpipe.data.batch_builder import BatchBuilder, ModelInputs
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.data.splits import Ints, Split
from nestpipe.embedding.row_reader import RowReader, read_rows
from nestpipe.errors import ConfigError, DataError
from nestpipe.eval.catalogue_predictor import (
    CataloguePredictor,
    UserRequest,
    catalogue_positions,
    seen_items,
    training_counts,
)
from nestpipe.eval.ranking_eval import RankingPredictor
from nestpipe.eval.retrieval_eval import EvalBatch, EvalReport, evaluate, evaluate_lists, popularity_report
from nestpipe.eval.topk_metrics import Top, top_items
from nestpipe.generative.beam import FoundItems, expand, search
from nestpipe.generative.trie import ItemPool, Trie
from nestpipe.jagged import Batch, Jagged
from nestpipe.models.build_model import inputs_of
from nestpipe.models.config import DCNConfig, EncDecConfig, RankingConfig
from nestpipe.models.contract import Model, Recommender
from nestpipe.models.encdec import EncDec

Target = Literal["test", "validation"]


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


class GenerativePredictor(CataloguePredictor):
    """Generates items with an encoder-decoder model and its embedding rows."""

    def generate(self, batch: Batch, k: int, *, seen: Jagged | None = None, pool: ItemPool | None = None) -> FoundItems:
        """The best k items of each request, without seen items and within a pool, if given."""
        model = cast(EncDec, self._model)
        trie = cast(Trie, model.ids)
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

    def top(self, request: UserRequest, k: int) -> Top:
        """The best k items that the beam finds."""
        found = self.generate(request.batch, k, seen=request.seen)
        return Top(found.positions, found.scores)


class RetrievalPredictor(CataloguePredictor):
    """Ranks the catalogue with a model and its embedding rows."""

    def encode(self, batch: Batch) -> Tensor:
        """Query vectors [B, D]."""
        return self.encoder()(batch)

    def encoder(self) -> Callable[[Batch], Tensor]:
        """`encode` as a function without a reference to the log, which may change while it is used."""
        model, reader = cast(Recommender, self._model), self._rows

        def encode(batch: Batch) -> Tensor:
            rows = read_rows(reader, model.encode_lookups(batch))
            with torch.no_grad():
                return model.encode(rows, batch)

        return encode

    def evaluate(self, target: Target = "test", *, progress: bool = True) -> EvalReport:
        """Ranks the held-out targets against the whole catalogue."""
        samples = EvalBatches(self._sequences, self._split, self._config, target)
        config = self._config
        return evaluate(self.encode, self.item_vectors, samples, config.eval, config.seed, progress=progress)

    def top(self, request: UserRequest, k: int) -> Top:
        """The best k items by the dot product of query and item vector."""
        queries = self.encode(request.batch)
        return top_items(queries, self.item_vectors, request.seen, k, self._config.eval.max_bytes)


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


def popularity(sequences: Sequences, split: Split, config: Config, target: Target = "test") -> EvalReport:
    """Evaluates the popularity baseline: the items with most training events."""
    counts = torch.from_numpy(training_counts(sequences, split))
    return popularity_report(counts, EvalBatches(sequences, split, config, target), config.eval, config.seed)
