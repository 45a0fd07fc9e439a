"""Sharded tables: each rank holds the rows of its buckets. A batch uses them through a `Window` (window.py)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.distributed.process_group import Channel
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.prefetch_buffer import RowAccess, rows_where_they_are
from nestpipe.embedding.replica_groups import Replicas
from nestpipe.embedding.table import Table


class ShardedTables:
    """All tables of a model, sharded over the ranks, or over each replica group. Owns the channels for ids and rows."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        keys: Channel,
        rows: Channel,
        owners: Owners,
        replicas: Replicas | None = None,
    ):
        self.tables, self.id_channel, self.row_channel, self.owners = dict(tables), keys, rows, owners
        self.replicas = replicas
        self.row_access: dict[str, RowAccess] = {
            name: rows_where_they_are(table) for name, table in self.tables.items()
        }
        for name, table in self.tables.items():
            if table.config.has_limits and table.num_buckets != owners.num_buckets:
                raise ValueError(
                    f"table '{name}' limits {table.num_buckets} buckets but there are {owners.num_buckets}; "
                    "its limits are divided over buckets, so both must be equal"
                )

    @property
    def rank(self) -> int:
        """This rank among those over which the tables are sharded."""
        return self.row_channel.world.rank

    @property
    def world_size(self) -> int:
        """Ranks over which the tables are sharded: all, or those of a group."""
        return self.row_channel.world.size

    @property
    def group(self) -> int:
        return self.replicas.group if self.replicas else 0

    @property
    def num_groups(self) -> int:
        return self.replicas.num_groups if self.replicas else 1

    @property
    def all_ranks(self) -> Channel:
        """The channel of all ranks that belongs to the thread that sends rows."""
        return self.replicas.all_ranks if self.replicas else self.row_channel

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All channels of the tables."""
        others = (self.replicas.keys, self.replicas.sums, self.replicas.all_ranks) if self.replicas else ()
        return self.id_channel, self.row_channel, *others

    def record_rate(self, batch: int, lr: float) -> None:
        """Notes the learning rate of a batch, before rows of the next one are read."""
        for table in self.tables.values():
            table.record_rate(batch, lr)

    def peek(self, name: str, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of any ids; never admits. Collective, each rank with its own ids."""
        owner = self.owners.owner_of(ids)
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=self.world_size).tolist()
        request_counts = [row[self.rank] for row in self.id_channel.all_gather_ints(counts)]
        requests = [torch.empty(count, dtype=torch.int64) for count in request_counts]
        self.id_channel.exchange(f"peek/{name}", ids.index_select(0, order).split(counts), requests).wait()
        table = self.tables[name]
        rows = table.empty_rows(len(ids))
        self.id_channel.exchange(f"peeked/{name}", [table.peek(one) for one in requests], rows.split(counts)).wait()
        return torch.empty_like(rows).index_copy_(0, order, rows)
