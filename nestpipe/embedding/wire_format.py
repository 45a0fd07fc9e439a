"""Rows on their way in 16 bits: those that a window uses only where that is good enough.

A lookup may name a 16-bit type (negatives do). An id is *narrow* if all its uses in a window have that type; its row travels in
it. Others travel once, whole. A message holds its whole rows, then its narrow ones, as bytes; both ends know which are which.
Messages in halves or slices (pieces.py) bring all rows whole: who reads them rounds them (`Rows.rounded`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nestpipe.embedding.lookup import Lookup
from nestpipe.embedding.routing import Plan, TablePlan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NarrowRows:
    """Which ids [n] of a table travel in which 16-bit type, message after message: peer by peer, part by part."""

    wire: torch.dtype
    mask: Tensor  # [n] bool
    counts: list[list[int]]  # [peer][part]

    def of(self, peer: int, micro_batch: int) -> Tensor:
        """Of one message."""
        begin = sum(map(sum, self.counts[:peer])) + sum(self.counts[peer][:micro_batch])
        return self.mask[begin : begin + self.counts[peer][micro_batch]]

    def buffers(self, micro_batch: int, rows: Sequence[Tensor]) -> list[Tensor]:
        """Room for the bytes of each peer's message of a part, which become these rows."""
        return [
            torch.empty(self._num_bytes(peer, micro_batch, one), dtype=torch.uint8) for peer, one in enumerate(rows)
        ]

    def _num_bytes(self, peer: int, micro_batch: int, like: Tensor) -> int:
        narrow = self.of(peer, micro_batch)
        num_narrow = int(narrow.sum())
        return like.shape[1] * ((len(narrow) - num_narrow) * like.itemsize + num_narrow * self.wire.itemsize)

    def pack(self, rows: Tensor, peer: int, micro_batch: int) -> Tensor:
        """Rows [n, D] as the bytes of a message."""
        narrow = self.of(peer, micro_batch)
        micro_batches = (_picked(rows, ~narrow), _picked(rows, narrow).to(self.wire))
        return torch.cat([one.reshape(-1).view(torch.uint8) for one in micro_batches])

    def unpack(self, data: Tensor, peer: int, micro_batch: int, into: Tensor) -> None:
        """The bytes of a message into rows [n, D]."""
        narrow = self.of(peer, micro_batch)
        num_bytes = int((~narrow).sum()) * into.shape[1] * into.itemsize
        for mask, dtype, chunk in (
            (~narrow, into.dtype, data[:num_bytes]),
            (narrow, self.wire, data[num_bytes:]),
        ):
            rows = chunk.view(dtype).reshape(-1, into.shape[1]).to(into.dtype)
            into.index_copy_(0, mask.nonzero().flatten(), rows)

    def round_(self, rows: Tensor, peer: int, micro_batch: int) -> None:
        """Rows [n, D] that did not travel, as if they had."""
        places = self.of(peer, micro_batch).nonzero().flatten()
        rows.index_copy_(0, places, rows.index_select(0, places).to(self.wire).to(rows.dtype))


def narrow_of(plan: Plan) -> dict[str, NarrowRows]:
    """The tables of which some lookup has a wire; the model decides, so they are the same on every rank."""
    found = {}
    for table, own in plan.tables.items():
        if wire := _wire(plan.lookups, table):
            found[table] = NarrowRows(wire, _mask(plan.lookups, table, own), own.first_counts)
    return found


def _wire(micro_batches: Sequence[Mapping[str, Lookup]], table: str) -> torch.dtype | None:
    found = {lookup.wire for lookups in micro_batches for lookup in lookups.values() if lookup.table == table} - {None}
    if len(found) > 1:
        raise ValueError(
            f"lookups in table '{table}' ask for several wires: {sorted(map(str, found))}; one is possible"
        )
    return next(iter(found), None)


def _mask(micro_batches: Sequence[Mapping[str, Lookup]], table: str, plan: TablePlan) -> Tensor:
    whole = [
        lookup.ids.flatten()
        for lookups in micro_batches
        for lookup in lookups.values()
        if lookup.table == table and lookup.wire is None
    ]
    return ~torch.isin(plan.ids, torch.cat([plan.ids.new_empty(0), *whole]))


def _picked(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.index_select(0, mask.nonzero().flatten())
