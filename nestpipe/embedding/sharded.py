"""Tables on many ranks: who holds which rows, and the lanes on which they travel. What a batch does with them: window.py."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.comm import Lane
from nestpipe.embedding.groups import Replicas
from nestpipe.embedding.held import Holder, InPlace
from nestpipe.embedding.owner import Owners
from nestpipe.embedding.table import Table


class Sharded:
    """All tables of a model, each rank holding the rows of its buckets; with `replicas` in each group of ranks once more."""

    def __init__(
        self, tables: Mapping[str, Table], keys: Lane, rows: Lane, owners: Owners, replicas: Replicas | None = None
    ):
        self.tables, self.keys, self.rows, self.owners = dict(tables), keys, rows, owners
        self.replicas = replicas
        self.holders: dict[str, Holder] = {name: InPlace(table) for name, table in self.tables.items()}
        for name, table in self.tables.items():
            if table.config.has_limits and table.config.num_buckets != owners.num_buckets:
                raise ValueError(
                    f"table '{name}' limits {table.config.num_buckets} buckets but there are {owners.num_buckets}; "
                    "with another number every rank would decide on its own"
                )

    @property
    def rank(self) -> int:
        """This rank among those that share the tables."""
        return self.rows.world.rank

    @property
    def world_size(self) -> int:
        """How many ranks share the tables: all, or those of a group."""
        return self.rows.world.size

    @property
    def group(self) -> int:
        return self.replicas.group if self.replicas else 0

    @property
    def num_groups(self) -> int:
        return self.replicas.num_groups if self.replicas else 1

    @property
    def everyone(self) -> Lane:
        """The lane of all ranks that belongs to the thread of the rows."""
        return self.replicas.everyone if self.replicas else self.rows

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All that the tables' messages use."""
        others = (self.replicas.keys, self.replicas.sums, self.replicas.everyone) if self.replicas else ()
        return self.keys, self.rows, *others

    def peek(self, name: str, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of any ids; admits nothing. Every rank must call it, each with ids of its own."""
        owner = self.owners.owner_of(ids)
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=self.world_size).tolist()
        wanted = [row[self.rank] for row in self.rows.all_gather_ints(counts)]
        asked = [torch.empty(count, dtype=torch.int64) for count in wanted]
        self.rows.exchange(f"peek/{name}", ids.index_select(0, order).split(counts), asked).wait()
        table = self.tables[name]
        rows = table.empty_rows(len(ids))
        self.rows.exchange(f"peeked/{name}", [table.peek(part) for part in asked], rows.split(counts)).wait()
        return torch.empty_like(rows).index_copy_(0, order, rows)
