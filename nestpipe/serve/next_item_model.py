"""A next-item run, opened for serving: histories in, the best items of the whole catalogue out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.embedding.row_reader import TableRows, read_rows
from nestpipe.errors import ConfigError
from nestpipe.eval.catalogue_ranking import top_items
from nestpipe.jagged import Batch, Jagged, offsets_of
from nestpipe.models.build_model import inputs_of
from nestpipe.models.contract import Recommender
from nestpipe.serve.known_items import Ints, KnownItems, ScoredItems, known_items
from nestpipe.serve.known_rows import KnownRows
from nestpipe.serve.model import rows_in_files, without_events
from nestpipe.training.run_folder import Run


@dataclass(frozen=True, slots=True, eq=False)
class PreparedHistory:
    """A history as the model reads it, and the catalogue positions that must not be recommended."""

    batch: Batch
    removed: Tensor


class NextItemModel:
    """A model in use; `known` are the items of its catalogue with their vectors."""

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
        self._model, self._rows, self._builder, self.known = model, rows, builder, known
        self._vectors, self.max_len, self._block, self.name = known.vectors, max_len, block, name

    def prepare(self, events: Sequences, query_time: int, *, excluded: Ints | None = None) -> PreparedHistory:
        """One user's events, for a request at a time in seconds; raises DataError for events that the model cannot read."""
        end = np.array([len(events.items)])
        start, asked = truncate(end, self.max_len, self._block), np.array([query_time * 1000])
        had = self.known.known_positions(events.items)
        batch = self._builder.over(events).history(torch.tensor([0]), start, end, request_ms=asked)
        seen = had[:0] if self.known.keeps_seen else had
        removed = seen if excluded is None else np.concatenate([seen, self.known.known_positions(excluded)])
        return PreparedHistory(batch, torch.from_numpy(np.unique(removed)))

    def recommend(self, prepared: Sequence[PreparedHistory], ks: Sequence[int]) -> list[ScoredItems]:
        """The best k items for each of some histories, which must not be empty, by exact scores of the whole catalogue."""
        lengths = torch.tensor([len(one.removed) for one in prepared])
        removed = Jagged(torch.cat([one.removed for one in prepared]), offsets_of(lengths), int(lengths.max()))
        queries = self._encode(Batch.concat([one.batch for one in prepared]))
        top = top_items(queries, self._vectors, removed, max(ks), self.known.max_bytes)
        return [
            self.known.scored(positions, scores, k)
            for positions, scores, k in zip(top.positions, top.scores, ks, strict=True)
        ]

    def scores(self, histories: Sequence[Sequences], items: Sequence[int], *, query_time: int) -> Tensor:
        """Scores [n, K] of items after histories; those of an empty one are zero."""
        wanted = torch.from_numpy(self.known.positions(np.array(items, np.int64)))
        found = torch.zeros(len(histories), len(wanted), dtype=self._vectors.dtype)
        kept = [place for place, one in enumerate(histories) if len(one.items)]
        if kept:
            queries = self._encode(Batch.concat([self.prepare(histories[place], query_time).batch for place in kept]))
            found[kept] = queries @ self._vectors.index_select(0, wanted).T
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
        KnownRows(loaded.rows, run.sequences.catalogue),
        BatchBuilder(without_events(run.sequences), None, inputs, statistics=run.statistics()),
        known_items(run, loaded),
        max_len=config.data.max_len,
        block=config.data.truncate_block,
        name=f"{run.folder.name}/step-{manifest.step}/{manifest.digest[:12]}",
    )
