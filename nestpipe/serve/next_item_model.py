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
from nestpipe.eval.ruled_ranking import RuledQuery, top_lists
from nestpipe.jagged import Batch
from nestpipe.models.build_model import inputs_of
from nestpipe.models.contract import Recommender
from nestpipe.rules.compiled_rules import CompiledRules
from nestpipe.rules.rule_book import RequestRules
from nestpipe.serve.followed_items import FollowedItems
from nestpipe.serve.known_items import Ints, KnownItems, ScoredItems, known_items
from nestpipe.serve.known_rows import KnownRows
from nestpipe.serve.model import rows_in_files, without_events
from nestpipe.training.run_folder import Run


@dataclass(frozen=True, slots=True, eq=False)
class PreparedHistory:
    """A history as the model reads it, the rules of its request, and the positions that they remove of a catalogue."""

    batch: Batch
    rules: CompiledRules
    removed: Ints
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

    def prepare(self, events: Sequences, query_time: int, *, rules: RequestRules | None = None) -> PreparedHistory:
        """One user's events, for a request at a time in seconds; raises DataError for an item that the model cannot read."""
        known = self.known
        compiled = (rules or RequestRules()).on(known.items)
        first = truncate(len(events.items), self.max_len, self._block)
        had = known.known_positions(events.items)
        batch = self._builder.request(events, first, query_s=query_time)
        return PreparedHistory(batch, compiled, compiled.removed(had, keeps_seen=known.keeps_seen), known)

    def recommend(self, prepared: Sequence[PreparedHistory], ks: Sequence[int]) -> list[ScoredItems]:
        """The best k items for each of some histories, which must not be empty, by exact scores of the whole catalogue.

        All were prepared with one catalogue.
        """
        known = prepared[0].known
        assert known.vectors is not None
        queries = self._encode(Batch.concat([one.batch for one in prepared]))
        return [
            known.listed(one)
            for one in top_lists(
                queries,
                known.vectors,
                [RuledQuery(one.rules, one.removed, k) for one, k in zip(prepared, ks, strict=True)],
                known.max_bytes,
            )
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
        KnownRows(loaded.rows, run.sequences.catalogue),
        BatchBuilder(without_events(run.sequences), None, inputs, statistics=run.statistics()),
        known_items(run, loaded),
        max_len=config.data.max_len,
        block=config.data.truncate_block,
        name=f"{run.folder.name}/step-{manifest.step}/{manifest.digest[:12]}",
    )
