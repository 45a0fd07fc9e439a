"""Read-only row lookup for inference; never admits ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.lookup import Lookup, Rows
from nestpipe.embedding.routing import route
from nestpipe.embedding.table import Table


class RowReader(Protocol):
    """Tables whose rows can be read: of this process (`TableRows`) or sharded over ranks (`ShardedTables`)."""

    @property
    def tables(self) -> Mapping[str, Table]: ...

    def peek(self, name: str, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D]; an id without a row has its initial value, as in training."""
        ...


def read_rows(reader: RowReader, lookups: Mapping[str, Lookup]) -> dict[str, Rows]:
    """The rows of lookups; each distinct id is read once. Collective if the tables are sharded."""
    plan = route([lookups], list(reader.tables), Owners(1, 1))
    return plan.rows(0, {name: reader.peek(name, table.ids) for name, table in plan.tables.items()})


class TableRows:
    """The tables of one process."""

    def __init__(self, tables: Mapping[str, Table]):
        self.tables = dict(tables)

    def peek(self, name: str, ids: Tensor) -> Tensor:
        return self.tables[name].peek(ids)

    def read_each(self, lookups: Mapping[str, Lookup]) -> dict[str, Rows]:
        """The rows of a small request, where deduplication costs more than it saves."""
        rows = {}
        for table in {lookup.table for lookup in lookups.values()}:
            own = {name: lookup for name, lookup in lookups.items() if lookup.table == table}
            ids = torch.cat([lookup.ids.flatten() for lookup in own.values()])
            unique, places = self.peek(table, ids), torch.arange(len(ids))
            for (name, lookup), index in zip(
                own.items(), places.split([lookup.ids.numel() for lookup in own.values()]), strict=True
            ):
                rows[name] = Rows(unique, index.reshape(lookup.ids.shape), lookup)
        return rows
