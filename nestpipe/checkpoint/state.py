"""A training state as the content of a checkpoint and back. Rows are stored by bucket, so any number of ranks can load them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.checkpoint.chain import BucketRange
from nestpipe.checkpoint.current_rows import adam_constants
from nestpipe.checkpoint.manifest import ADAM, RATES, Link, Manifest
from nestpipe.checkpoint.places import Place
from nestpipe.checkpoint.reader import read_dense, table_sections
from nestpipe.checkpoint.writer import SaveContent
from nestpipe.embedding.row_snapshot import TableSnapshot
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.stale_rows import PreviousRows, StaleRows
from nestpipe.embedding.table import Table
from nestpipe.pipeline.stages import TrainState


@dataclass(frozen=True, slots=True, eq=False)
class StateSource:
    """A training state of which snapshots can be taken between steps."""

    state: TrainState

    def changed_bytes(self) -> int:
        embedding = self.state.embedding
        return sum(table.changed_bytes() for table in embedding.tables.values()) // embedding.num_groups

    def snapshot(self, *, concurrent: bool, delta: bool) -> StateSnapshot:
        return StateSnapshot(self.state, concurrent=concurrent, delta=delta)


class StateSnapshot:
    """The state of this rank as it is now: its share of the buckets among replicas, and on rank 0 the dense part.

    With `concurrent` training may continue while it is saved. `close` must follow.
    """

    def __init__(self, state: TrainState, *, concurrent: bool = False, delta: bool = False):
        embedding = state.embedding
        self._tables: dict[str, Table] = embedding.tables
        self._num_buckets = embedding.owners.num_buckets
        dense = state.dense.export(everywhere=False)
        self._dense = {**dense, **_rates(state)} if state.control.world.rank == 0 else None
        self._snapshots: dict[str, TableSnapshot] = {}
        for name, table in embedding.tables.items():
            access = embedding.row_access[name]
            kept = access.previous.export() if isinstance(access, StaleRows) and access.previous else {}
            self._snapshots[name] = table.snapshot(
                embedding.owners, _own_buckets(embedding), extra=kept, delta=delta, concurrent=concurrent
            )

    @property
    def is_tight(self) -> bool:
        """Whether the next steps may have to wait until more of the snapshot has been read."""
        return any(snapshot.rows.is_tight for snapshot in self._snapshots.values())

    def content(self, chain: Sequence[Link] = ()) -> SaveContent:
        """What to save; can be consumed once."""
        tables = {name: snapshot.read() for name, snapshot in self._snapshots.items()}
        return SaveContent(self._dense, tables, dict.fromkeys(tables, self._num_buckets), chain)

    def close(self) -> None:
        """Ends the snapshot, read or not."""
        for table in self._tables.values():
            table.end_snapshot()


def _rates(state: TrainState) -> dict[str, Tensor]:
    """What rows of exact Adam need to catch up; the same on every rank."""
    content: dict[str, Tensor] = {}
    for name, table in state.embedding.tables.items():
        if (config := table.adam) is not None:
            content |= {RATES + name: table.rates(state.num_steps), ADAM + name: adam_constants(config)}
    return content


def _own_buckets(embedding: ShardedTables) -> range:
    """The buckets that this rank saves: those that it owns, divided among the replicas that own the same."""
    buckets, number, count = embedding.owners.buckets_of(embedding.rank), embedding.group, embedding.num_groups
    return buckets[len(buckets) * number // count : len(buckets) * (number + 1) // count]


def restore_state(state: TrainState, folder: Place, manifest: Manifest) -> None:
    """Loads the dense part and the rows that this rank owns into a new state; raises CheckpointError."""
    embedding = state.embedding
    dense = read_dense(folder, manifest)
    state.dense.load(dense)
    own = BucketRange(embedding.owners, embedding.owners.buckets_of(embedding.rank))
    for name, table in embedding.tables.items():
        # The index, then the rows section by section: a table may be larger than memory.
        indices = [section.index for section in table_sections(folder, manifest, name, own)]
        content = {key: torch.cat([one[key] for one in indices]) for key in indices[0]}
        table.load_index(content)
        for section in table_sections(folder, manifest, name, own):
            table.load_rows({"ids": section.index["ids"], **section.rows()})
        table.load_rates(dense.get(RATES + name), manifest.step)
        if isinstance(access := embedding.row_access[name], StaleRows):
            access.previous = PreviousRows.read(content)
    state.num_steps = manifest.step
