"""Inference with a trained model: evaluation on held-out targets, and recommendations for users of the log.

Row lookups are read-only and never admit ids. Where rows are sharded over ranks, lookups are collective, and `evaluate` shares
users and catalogue among the ranks: all get the same report, bitwise that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast, overload

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
from nestpipe.eval.eval_ranks import EvalRanks, OneRank, part_of
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.protocol import Target, protocol_of
from nestpipe.eval.ranking_eval import RankingPredictor
from nestpipe.eval.retrieval_eval import EvalBatch, evaluate, evaluate_lists, popularity_report
from nestpipe.eval.ruled_ranking import RuledQuery, top_lists
from nestpipe.eval.user_sample import sampled_users
from nestpipe.generative.allowed_pools import AllowedPools
from nestpipe.generative.beam import FoundItems, expand, search
from nestpipe.generative.ruled_decoding import RuledRequest, decode_lists
from nestpipe.generative.trie import ItemPool, Trie
from nestpipe.jagged import Batch, Jagged
from nestpipe.models.build_model import inputs_of
from nestpipe.models.config import DCNConfig, EncDecConfig, RankingConfig
from nestpipe.models.contract import Model, Recommender
from nestpipe.models.encdec import EncDec
from nestpipe.ops.catalogue_scan import CataloguePart, block_items
from nestpipe.rules.selection import SelectedItems

_MIN_USERS = 16  # a batch of fewer is padded: libraries round small products in another way


class EvalBatches(Sequence[EvalBatch]):
    """The users of a split that have a target, or a fixed sample of them, in the order of the file, in batches."""

    def __init__(
        self, sequences: Sequences, split: Split, config: Config, target: Target, *, inputs: ModelInputs | None = None
    ):
        self._sequences, self._config = sequences, config
        self._targets: Ints = split.test if target == "test" else split.validation
        rows = np.flatnonzero(self._targets >= 1)
        self._rows = rows[sampled_users(sequences.users[rows], config.eval.max_users)]
        if not len(self._rows):
            hint = "Use another split (--data.split)."
            if target == "validation" and not config.data.validation:
                hint = "It was trained without --data.validation; evaluate the test targets instead."
            raise DataError(f"{sequences.path} has no {target} targets under this split. {hint}")
        self._builder = BatchBuilder(sequences, split, inputs)

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._config.eval.batch_size)

    @overload
    def __getitem__(self, number: int) -> EvalBatch: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[EvalBatch]: ...
    def __getitem__(self, number: int | slice) -> EvalBatch | Sequence[EvalBatch]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        size = self._config.eval.batch_size
        return self._batch(self._rows[number * size : (number + 1) * size])

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

    def on_log(self, sequences: Sequences) -> GenerativePredictor:
        """The same model on its log with other features."""
        return GenerativePredictor(self._model, self._rows, sequences, self._split, self._config)

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

    def evaluate(self, target: Target = "test", *, ranks: EvalRanks | None = None, progress: bool = True) -> EvalReport:
        """Ranks of the held-out targets in the generated lists. Collective."""
        config = self._config
        samples = EvalBatches(self._sequences, self._split, config, target, inputs=inputs_of(config, self._sequences))
        num_items, k = len(self._sequences.catalogue), max(config.eval.ks)

        def lists(sample: EvalBatch) -> Tensor:
            seen = None if config.eval.seen == "none" else sample.seen
            return self.generate(sample.batch, k, seen=seen).positions

        found = evaluate_lists(lists, num_items, samples, config.eval, config.seed, ranks=ranks, progress=progress)
        return replace(found, protocol=protocol_of(self._sequences, config, target))

    def lists(self, request: UserRequest, k: int) -> list[SelectedItems]:
        """What the beam finds among the items that the rules leave."""
        model = cast(EncDec, self._model)
        batch = model.select(request.batch, None)
        rows = read_rows(self._rows, model.encode_lookups(batch))
        return decode_lists(
            lambda: model.decoding(rows, batch),
            cast(Trie, model.ids),
            self._pools,
            [RuledRequest(request.rules, removed, k) for removed in request.removed],
            width=model.config.beam,
            softmax=model.config.softmax,
            vectors=self._alike(request.rules),
        )

    @cached_property
    def _pools(self) -> AllowedPools:
        return AllowedPools(cast(Trie, cast(EncDec, self._model).ids))


class RetrievalPredictor(CataloguePredictor):
    """Ranks the catalogue with a model and its embedding rows."""

    @property
    def parts(self) -> tuple[Model, RowReader]:
        """The model and its rows."""
        return self._model, self._rows

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

    def evaluate(self, target: Target = "test", *, ranks: EvalRanks | None = None, progress: bool = True) -> EvalReport:
        """Ranks the held-out targets against the whole catalogue. Collective."""
        config, ranks = self._config, ranks or OneRank()
        samples = EvalBatches(self._sequences, self._split, config, target)
        part = self.catalogue_part(ranks)
        found = evaluate(self._encode_padded, part, samples, config.eval, config.seed, ranks=ranks, progress=progress)
        return replace(found, protocol=protocol_of(self._sequences, config, target))

    def _encode_padded(self, batch: Batch) -> Tensor:
        num_users = batch.num_samples
        if num_users >= _MIN_USERS:
            return self.encode(batch)
        return self.encode(batch.select(torch.arange(_MIN_USERS).clamp(max=num_users - 1)))[:num_users]

    def catalogue_part(self, ranks: EvalRanks) -> CataloguePart:
        """The item vectors that this rank scores. Collective."""
        num_items = len(self._sequences.catalogue)
        own = part_of(num_items, block_items(self._config.eval.max_bytes), ranks)
        vectors = self.item_vectors if ranks.size == 1 else self._vectors_of(own)
        return CataloguePart(vectors, own.start, num_items)

    def lists(self, request: UserRequest, k: int) -> list[SelectedItems]:
        """By the dot product of query and item vector."""
        queries = self.encode(request.batch)
        asked = [RuledQuery(request.rules, removed, k) for removed in request.removed]
        return top_lists(queries, self.item_vectors, asked, self._config.eval.max_bytes)


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
