"""A next-item run, opened for serving: histories in, the best items of the whole catalogue out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.item_content import ItemContent
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.embedding.row_reader import TableRows, read_rows
from nestpipe.errors import ConfigError
from nestpipe.eval.catalogue_ranking import top_items
from nestpipe.jagged import Batch, Jagged, offsets_of
from nestpipe.models.build_model import inputs_of
from nestpipe.models.contract import Recommender
from nestpipe.serve.followed_items import FollowedItems
from nestpipe.serve.known_items import Ints, KnownItems, ScoredItems, known_items
from nestpipe.serve.model import rows_in_files, without_events
from nestpipe.training.run_folder import Run


@dataclass(frozen=True, slots=True, eq=False)
class PreparedHistory:
    """A history as the model reads it, and the positions that must not be recommended of a catalogue."""

    batch: Batch
    removed: Tensor
    known: KnownItems


class NextItemModel:
    """A model in use; `known` are the items of its catalogue with their vectors, as of now."""

    def __init__(
        self,
        model: Recommender,
        rows: TableRows,
        builder: BatchBuilder,
        known: KnownItems,
        *,
        max_len: int,
        block: int,
        name: str,
    ):
        assert known.vectors is not None, "a model that ranks the catalogue has item vectors"
        self._model, self._rows, self._builder = model, rows, builder
        self._items = FollowedItems(model, rows, known)
        self.max_len, self._block, self.name = max_len, block, name

    @property
    def known(self) -> KnownItems:
        return self._items.known

    def follow(self, live: ItemContent | None) -> bool:
        """Takes what the living catalogue has changed; True if there was something. From the engine's thread."""
        return self._items.follow(live)

    def check(self, events: Sequences) -> None:
        """Raises DataError for an event that says nothing to the model: on an item that it has neither row nor content of."""
        if not self._items.reads_new_items:
            self.known.positions(events.items)
        self.prepare(events, 0)

    def prepare(self, events: Sequences, query_time: int, *, excluded: Ints | None = None) -> PreparedHistory:
        """One user's events, for a request at a time in seconds. An item that was not trained has its initial row."""
        known = self.known
        end = np.array([len(events.items)])
        start, asked = truncate(end, self.max_len, self._block), np.array([query_time * 1000])
        had = known.known_positions(events.items)
        batch = self._builder.over(events).history(torch.tensor([0]), start, end, request_ms=asked)
        seen = had[:0] if known.keeps_seen else had
        removed = seen if excluded is None else np.concatenate([seen, known.known_positions(excluded)])
        return PreparedHistory(batch, torch.from_numpy(np.unique(removed)), known)

    def recommend(self, prepared: Sequence[PreparedHistory], ks: Sequence[int]) -> list[ScoredItems]:
        """The best k items for each of some histories, which must not be empty, by exact scores of the whole catalogue.

        All were prepared with one catalogue.
        """
        known = prepared[0].known
        lengths = torch.tensor([len(one.removed) for one in prepared])
        removed = Jagged(torch.cat([one.removed for one in prepared]), offsets_of(lengths), int(lengths.max()))
        queries = self._encode(Batch.concat([one.batch for one in prepared]))
        assert known.vectors is not None
        top = top_items(queries, known.vectors, removed, max(ks), known.max_bytes)
        return [
            known.scored(positions, scores, k)
            for positions, scores, k in zip(top.positions, top.scores, ks, strict=True)
        ]

    def scores(self, histories: Sequence[Sequences], items: Sequence[int], *, query_time: int) -> Tensor:
        """Scores [n, K] of items after histories; those of an empty one are zero."""
        known = self.known
        assert known.vectors is not None
        wanted = known.vectors.index_select(0, torch.from_numpy(known.positions(np.array(items, np.int64))))
        found = torch.zeros(len(histories), len(wanted), dtype=wanted.dtype)
        kept = [place for place, one in enumerate(histories) if len(one.items)]
        if kept:
            queries = self._encode(Batch.concat([self.prepare(histories[place], query_time).batch for place in kept]))
            found[kept] = queries @ wanted.T
        return found

    def _encode(self, batch: Batch) -> Tensor:
        rows = read_rows(self._rows, self._model.encode_lookups(batch))
        with torch.no_grad():
            return self._model.encode(rows, batch)


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
        known_items(run, loaded),
        max_len=config.data.max_len,
        block=config.data.truncate_block,
        name=f"{run.folder.name}/step-{manifest.step}/{manifest.digest[:12]}",
    )
