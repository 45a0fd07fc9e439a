"""A next-item run, opened for serving: histories in, the best items of the whole catalogue out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.embedding.row_reader import TableRows, read_rows
from nestpipe.errors import ConfigError, DataError
from nestpipe.eval.catalogue_predictor import training_counts
from nestpipe.eval.topk_metrics import top_items
from nestpipe.jagged import Batch, Jagged, offsets_of
from nestpipe.models.build_model import inputs_of
from nestpipe.models.contract import Recommender
from nestpipe.serve.model import rows_in_files, without_events
from nestpipe.training.run_folder import Run

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedHistory:
    """A history as the model reads it, and the catalogue positions that must not be recommended."""

    batch: Batch
    removed: Tensor


@dataclass(frozen=True, slots=True)
class ScoredItems:
    """Numbers of items with their scores, best first."""

    items: list[int]
    scores: list[float]


class NextItemModel:
    """A model in use. `items` [I] is its catalogue, `popularity` [I] counts the training events of each item."""

    def __init__(
        self,
        model: Recommender,
        rows: TableRows,
        builder: BatchBuilder,
        *,
        items: Ints,
        popularity: Ints,
        max_len: int,
        block: int,
        max_bytes: int,
        keeps_seen: bool,
        name: str,
    ):
        """`keeps_seen`: items that a user has had may be recommended again, as the run was evaluated."""
        self._model, self._rows, self._builder, self._max_bytes = model, rows, builder, max_bytes
        self.items, self.max_len, self._block, self.name = items, max_len, block, name
        self._keeps_seen = keeps_seen
        self._by_popularity = np.argsort(-popularity, kind="stable")
        self._popularity = popularity
        with torch.no_grad():
            self._vectors = model.item_vectors(rows.peek("item", torch.from_numpy(items)))
            self._directions = F.normalize(self._vectors, dim=1)

    def num_read(self, num_events: int) -> int:
        """How many of the last events of a history the model reads."""
        return num_events - truncate(num_events, self.max_len, self._block)

    def prepare(self, events: Sequences, query_time: int, *, excluded: Ints | None = None) -> PreparedHistory:
        """One user's events, for a request at a time in seconds; raises DataError for an item that the model does not know."""
        end = np.array([len(events.items)])
        start, asked = truncate(end, self.max_len, self._block), np.array([query_time * 1000])
        had = self._positions(events.items)
        batch = self._builder.over(events).history(torch.tensor([0]), start, end, request_ms=asked)
        seen = had[:0] if self._keeps_seen else had
        removed = seen if excluded is None else np.concatenate([seen, self._positions(excluded)])
        return PreparedHistory(batch, torch.from_numpy(np.unique(removed)))

    def recommend(self, prepared: Sequence[PreparedHistory], ks: Sequence[int]) -> list[ScoredItems]:
        """The best k items for each of some histories, which must not be empty, by exact scores of the whole catalogue."""
        lengths = torch.tensor([len(one.removed) for one in prepared])
        removed = Jagged(torch.cat([one.removed for one in prepared]), offsets_of(lengths), int(lengths.max()))
        queries = self._encode(Batch.concat([one.batch for one in prepared]))
        top = top_items(queries, self._vectors, removed, max(ks), self._max_bytes)
        return [
            self._scored(positions, scores, k)
            for positions, scores, k in zip(top.positions, top.scores, ks, strict=True)
        ]

    def popular(self, k: int, *, removed: Tensor) -> ScoredItems:
        """The items with most training events, for a user without history; the counts are the scores."""
        kept = self._by_popularity[~np.isin(self._by_popularity, removed.numpy())][:k]
        return ScoredItems(self.items[kept].tolist(), self._popularity[kept].astype(float).tolist())

    def similar(self, items: Ints, k: int) -> ScoredItems:
        """The items whose vectors point most in the direction of the given ones' mean (cosine), without these."""
        positions = torch.from_numpy(self._positions(items))
        query = F.normalize(self._directions.index_select(0, positions).mean(0, keepdim=True), dim=1)
        own = Jagged(positions, torch.tensor([0, len(positions)]), len(positions))
        top = top_items(query, self._directions, own, k, self._max_bytes)
        return self._scored(top.positions[0], top.scores[0], k)

    def influence(self, events: Sequences, query_time: int, items: Sequence[int], *, num_events: int) -> Tensor:
        """By how much the scores of items [K] fall without each of the last events: [num_events, K], oldest first."""
        length = len(events.items)
        variants = [events, *(_without(events, place) for place in range(length - num_events, length))]
        kept = [self.prepare(one, query_time).batch for one in variants if len(one.items)]
        vectors = self._vectors.index_select(0, torch.from_numpy(self._positions(np.array(items, np.int64))))
        scores = self._encode(Batch.concat(kept)) @ vectors.T
        full, without = scores[:1], scores[1:]
        # Without its only event a history is empty and has no score of its own: the event is all there is.
        return full - without if len(without) else full

    def _encode(self, batch: Batch) -> Tensor:
        rows = read_rows(self._rows, self._model.encode_lookups(batch))
        with torch.no_grad():
            return self._model.encode(rows, batch)

    def _positions(self, items: Ints) -> Ints:
        """Catalogue positions; raises DataError for an item that is not in the catalogue."""
        places = np.minimum(np.searchsorted(self.items, items), len(self.items) - 1)
        if len(unknown := np.flatnonzero(self.items[places] != items)):
            raise DataError(
                f"item number {items[unknown[0]]} is not in the catalogue of the model, which has {len(self.items):,} items."
            )
        return places

    def _scored(self, positions: Tensor, scores: Tensor, k: int) -> ScoredItems:
        kept = (positions >= 0).nonzero().flatten()[:k]
        return ScoredItems(self.items[positions[kept].numpy()].tolist(), scores[kept].tolist())


def _without(events: Sequences, place: int) -> Sequences:
    """A history without one of its events."""
    kept = np.delete(np.arange(len(events.items)), place)
    return replace(
        events,
        offsets=np.array([0, len(kept)]),
        items=events.items[kept],
        times=None if events.times is None else events.times[kept],
    )


def open_next_item(run: Run, *, step: int | None = None, folder: Path, memory_bytes: int = 1 << 30) -> NextItemModel:
    """A checkpoint of a run, by default the best one if it validated, else the latest; rows lie in files in `folder`."""
    loaded = run.load_model(step, rows=rows_in_files(folder, memory_bytes))
    if not isinstance(loaded.model, Recommender):
        raise ConfigError(
            f"{run.folder} has a model of kind '{type(loaded.model).__name__}', which cannot rank the catalogue: it lacks "
            "encode_lookups, encode or item_vectors."
        )
    config, manifest = run.config, loaded.manifest
    inputs = inputs_of(config, run.sequences)
    return NextItemModel(
        loaded.model,
        loaded.rows,
        BatchBuilder(without_events(run.sequences), None, inputs, statistics=run.statistics()),
        items=np.array(run.sequences.catalogue),
        popularity=training_counts(run.sequences, run.split),
        max_len=config.data.max_len,
        block=config.data.truncate_block,
        max_bytes=config.eval.max_bytes,
        keeps_seen=config.eval.seen == "none",
        name=f"{run.folder.name}/step-{manifest.step}/{manifest.digest[:12]}",
    )
