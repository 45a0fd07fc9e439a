"""A trained model in use: query vectors for histories, evaluation on held-out targets, recommendations.

Reads rows without admitting any, so scoring never changes what is trained. On several ranks each of them scores
everything, so that all come to the same decision; they must ask in step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.config import Config
from nestpipe.data.batches import BatchBuilder
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.data.splits import Ints, Split, train_mask
from nestpipe.errors import DataError
from nestpipe.evaluate import EvalBatch, Report, evaluate, popularity_report
from nestpipe.jagged import Batch, Jagged, offsets_of, ranges
from nestpipe.model import Recommender
from nestpipe.models.ranking_config import DCNConfig, RankingConfig
from nestpipe.peeking import peek_rows
from nestpipe.pipeline.stages import TrainState
from nestpipe.rank_eval import RankingScorer
from nestpipe.ranking_metrics import top_items

Target = Literal["test", "validation"]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Items for one user, best first, with their scores."""

    items: list[int]
    scores: list[float]


class EvalBatches:
    """The users of a split that have a target, in the order of the file, in batches."""

    def __init__(self, sequences: Sequences, split: Split, config: Config, target: Target):
        self._sequences, self._config = sequences, config
        self._targets: Ints = split.test if target == "test" else split.validation
        self._rows = np.flatnonzero(self._targets >= 1)
        if not len(self._rows):
            hint = "" if target == "test" or config.data.validation else " It was trained without --data.validation."
            raise DataError(f"{sequences.path} has no {target} targets under this split.{hint}")
        self._builder = BatchBuilder(sequences, split)

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
        asked = None if sequences.times is None else sequences.times[at]
        first_seen = start if self._config.eval.seen == "input" else np.zeros_like(start)
        return EvalBatch(
            batch=self._builder.history(torch.from_numpy(rows), start, end, asked_ms=asked),
            target_positions=torch.from_numpy(catalogue_positions(sequences, sequences.items[at])),
            seen=seen_items(sequences, rows, first_seen, end),
            users=torch.from_numpy(sequences.users[rows]),
        )


class Scorer:
    """Scores with the weights of a training state."""

    def __init__(self, state: TrainState, sequences: Sequences, split: Split, config: Config):
        self._model = cast(Recommender, state.model)
        self._embedding, self._sequences, self._split, self._config = state.embedding, sequences, split, config

    def encode(self, batch: Batch) -> Tensor:
        """Query vectors [B, D]."""
        rows = peek_rows(self._embedding, self._model.encode_lookups(batch))
        with torch.no_grad():
            return self._model.encode(rows, batch)

    @cached_property
    def item_vectors(self) -> Tensor:
        """Vectors [I, D] of the whole catalogue, as of the first use."""
        with torch.no_grad():
            return self._model.item_vectors(
                self._embedding.peek("item", torch.from_numpy(np.array(self._sequences.catalogue)))
            )

    def evaluate(self, target: Target = "test", *, progress: bool = True) -> Report:
        """Ranks the held-out targets against the whole catalogue."""
        samples = EvalBatches(self._sequences, self._split, self._config, target)
        config = self._config
        return evaluate(self.encode, self.item_vectors, samples, config.eval, config.seed, progress=progress)

    def recommend(self, user: int, k: int = 10, *, asked_ms: int | None = None) -> Recommendation:
        """The best k items that the user of the log has not had, asked at a time (default: that of the last event)."""
        rows = np.flatnonzero(self._sequences.users == user)
        if not len(rows):
            raise DataError(f"{self._sequences.path} has no user {user}; it has {len(self._sequences.users):,} users.")
        end = np.diff(self._sequences.offsets)[rows]
        start = truncate(end, self._config.data.max_len, self._config.data.truncate_block)
        times = self._sequences.times
        asked = None if times is None else times[self._sequences.offsets[rows + 1] - 1]
        if asked is not None and asked_ms is not None:
            asked = np.array([asked_ms])
        builder = BatchBuilder(self._sequences, self._split)
        queries = self.encode(builder.history(torch.from_numpy(rows), start, end, asked_ms=asked))
        seen = None if self._config.eval.seen == "none" else seen_items(self._sequences, rows, np.zeros_like(end), end)
        top = top_items(queries, self.item_vectors, seen, k, self._config.eval.max_bytes)
        kept = top.positions[0] >= 0
        items = self._sequences.catalogue[top.positions[0][kept].numpy()]
        return Recommendation(items.tolist(), top.scores[0][kept].tolist())


AnyScorer = Scorer | RankingScorer


def make_scorer(state: TrainState, sequences: Sequences, split: Split, config: Config) -> AnyScorer:
    """What evaluates the kind of model that was trained."""
    if isinstance(config.model, RankingConfig | DCNConfig):
        return RankingScorer(state, sequences, split, config)
    return Scorer(state, sequences, split, config)


def popularity(sequences: Sequences, split: Split, config: Config, target: Target = "test") -> Report:
    """The floor that every model must beat: the items with most training events."""
    positions = catalogue_positions(sequences, sequences.items[train_mask(sequences, split)])
    counts = torch.from_numpy(np.bincount(positions, minlength=len(sequences.catalogue)))
    return popularity_report(counts, EvalBatches(sequences, split, config, target), config.eval, config.seed)


def catalogue_positions(sequences: Sequences, items: NDArray[np.int64]) -> Ints:
    """The place of each item in the catalogue."""
    return np.searchsorted(sequences.catalogue, items)


def seen_items(sequences: Sequences, rows: Ints, start: Ints, end: Ints) -> Jagged:
    """Catalogue positions of the events start .. end - 1 of each user."""
    lengths = torch.from_numpy(end - start)
    events = ranges(torch.from_numpy(sequences.offsets[rows] + start), lengths).numpy()
    positions = torch.from_numpy(catalogue_positions(sequences, sequences.items[events]))
    return Jagged(positions, offsets_of(lengths), int(lengths.max()) if len(lengths) else 0)
