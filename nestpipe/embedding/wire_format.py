"""Rows sent in 16 bits: those whose uses in a window all allow it.

A lookup may name a 16-bit `wire` type (negatives do). An id is *narrow* if all its uses in a window
have that type. A message holds its full rows, then its narrow ones, as bytes; both ends know which
are which. Chunked messages (chunked_exchange.py) send all rows in full, and the reader rounds them
(`Rows.rounded`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nestpipe.embedding.lookup import Lookup
from nestpipe.embedding.routing import Plan, TablePlan
from nestpipe.ops.device_memory import upload


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NarrowRows:
    """The narrow ids among the ids [n] of a table, which are in (peer, micro-batch) order, and their 16-bit type."""

    wire: torch.dtype
    mask: Tensor  # [n] bool
    counts: list[list[int]]  # [peer][micro-batch]

    def of(self, peer: int, micro_batch: int) -> Tensor:
        """The mask of one message."""
        begin = sum(map(sum, self.counts[:peer])) + sum(self.counts[peer][:micro_batch])
        return self.mask[begin : begin + self.counts[peer][micro_batch]]

    def buffers(self, micro_batch: int, rows: Sequence[Tensor]) -> list[Tensor]:
        """Byte buffers for the messages of a micro-batch, one per peer; `rows` are the unpacked shapes."""
        return [
            torch.empty(self._num_bytes(peer, micro_batch, one), dtype=torch.uint8, device=one.device)
            for peer, one in enumerate(rows)
        ]

    def _num_bytes(self, peer: int, micro_batch: int, like: Tensor) -> int:
        narrow = self.of(peer, micro_batch)
        num_narrow = int(narrow.sum())
        return like.shape[1] * ((len(narrow) - num_narrow) * like.itemsize + num_narrow * self.wire.itemsize)

    def pack(self, rows: Tensor, peer: int, micro_batch: int) -> Tensor:
        """Rows [n, D] as the bytes of a message."""
        narrow = self.of(peer, micro_batch)
        full, rounded = _masked(rows, ~narrow), _masked(rows, narrow).to(self.wire)
        return torch.cat([one.reshape(-1).view(torch.uint8) for one in (full, rounded)])

    def unpack(self, data: Tensor, peer: int, micro_batch: int, into: Tensor) -> None:
        """Writes the bytes of a message into rows [n, D]."""
        narrow = self.of(peer, micro_batch)
        num_bytes = int((~narrow).sum()) * into.shape[1] * into.itemsize
        for mask, dtype, chunk in (
            (~narrow, into.dtype, data[:num_bytes]),
            (narrow, self.wire, data[num_bytes:]),
        ):
            rows = chunk.view(dtype).reshape(-1, into.shape[1]).to(into.dtype)
            into.index_copy_(0, upload(mask.nonzero().flatten(), into.device), rows)

    def round_(self, rows: Tensor, peer: int, micro_batch: int) -> None:
        """Rounds rows [n, D] that were copied instead of sent, as if they had been sent."""
        places = upload(self.of(peer, micro_batch).nonzero().flatten(), rows.device)
        rows.index_copy_(0, places, rows.index_select(0, places).to(self.wire).to(rows.dtype))


def narrow_of(plan: Plan) -> dict[str, NarrowRows]:
    """The tables with a narrow lookup; the model declares them, so they are the same on every rank."""
    tables = {}
    for table, own in plan.tables.items():
        if wire := _wire(plan.lookups, table):
            tables[table] = NarrowRows(wire, _mask(plan.lookups, table, own), own.first_counts)
    return tables


def _wire(micro_batches: Sequence[Mapping[str, Lookup]], table: str) -> torch.dtype | None:
    wires = {lookup.wire for lookups in micro_batches for lookup in lookups.values() if lookup.table == table} - {None}
    if len(wires) > 1:
        raise ValueError(
            f"lookups in table '{table}' name several wire types: {sorted(map(str, wires))}; a table can have one"
        )
    return next(iter(wires), None)


def _mask(micro_batches: Sequence[Mapping[str, Lookup]], table: str, plan: TablePlan) -> Tensor:
    full = [
        lookup.ids.flatten()
        for lookups in micro_batches
        for lookup in lookups.values()
        if lookup.table == table and lookup.wire is None
    ]
    return ~torch.isin(plan.ids, torch.cat([plan.ids.new_empty(0), *full]))


def _masked(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.index_select(0, upload(mask.nonzero().flatten(), rows.device))
