"""Ranks and best items of queries over (a part of) the catalogue, in one pass and bounded memory; and the choice of its backend.

    queries [B, D]  x  part of the catalogue [n, D]  ->  how many items rank before each target, the best k items

Ties: the lower catalogue position goes first. Ties are bitwise, so a target's score comes from `scores_at`, which rounds as the
scan does. Two backends compute the same:

    native   C++ (csrc/catalogue_scan.cpp), fp32 on the CPU: scores are compared where they are computed, never stored
    torch    any type and device; the readable one: matrix products of a fixed shape, then comparisons

A score depends on its query, its item and, in torch, on the shape of the product. That shape is a function of `max_bytes` alone:
blocks of `block_items(max_bytes)` positions, the last one padded. So parts that begin at a multiple of it give the same bits as the
whole catalogue, and results of parts add up: `merge_tops`, and the sum of `before`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nestpipe.jagged import Jagged
from nestpipe.ops import catalogue_scan_native, catalogue_scan_torch
from nestpipe.ops.native_library import Native, load

log = logging.getLogger("nestpipe")

ScanBackend = Literal["native", "torch"]
block_items = catalogue_scan_torch.block_items


class Top(NamedTuple):
    """Best items first: positions [B, k] and scores [B, k]; -1 and -inf where there are fewer candidates."""

    positions: Tensor
    scores: Tensor


class Targets(NamedTuple):
    """The item to rank for each query: catalogue positions [B] and scores [B]."""

    positions: Tensor
    scores: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CataloguePart:
    """Item vectors [n, D] of the catalogue positions first .. first + n - 1, of num_items in all."""

    vectors: Tensor
    first: int
    num_items: int

    @staticmethod
    def whole(vectors: Tensor) -> CataloguePart:
        return CataloguePart(vectors, 0, len(vectors))

    def holds(self, positions: Tensor) -> Tensor:
        """Whether each position is in this part."""
        return (positions >= self.first) & (positions < self.first + len(self.vectors))


class PartScan(NamedTuple):
    """What one part says: items that rank before each target [B], its best items, and queries with a score that is not finite [B]."""

    before: Tensor
    top: Top
    not_finite: Tensor


@torch.no_grad()
def scan(
    queries: Tensor,
    part: CataloguePart,
    seen: Jagged | None,
    *,
    k: int,
    targets: Targets | None = None,
    max_bytes: int,
    backend: ScanBackend | None = None,
) -> PartScan:
    """Scans a part for queries [B, D] without the items in `seen`, one row of catalogue positions for each query.

    Without targets `before` is zero. Seen items may repeat and lie outside of the part.
    """
    chosen = backend or choose(queries)
    run = catalogue_scan_native.run if chosen == "native" else catalogue_scan_torch.run
    before, positions, scores, not_finite = run(
        queries,
        part.vectors,
        None if seen is None else (seen.values.to(queries.device), seen.offsets.to(queries.device)),
        None if targets is None else (targets.positions.to(queries.device), targets.scores),
        first=part.first,
        k=k,
        max_bytes=max_bytes,
    )
    return PartScan(before, Top(positions, scores), not_finite)


@torch.no_grad()
def scores_at(
    queries: Tensor, part: CataloguePart, positions: Tensor, *, max_bytes: int, backend: ScanBackend | None = None
) -> Tensor:
    """The score [B] of each query for one catalogue position, bitwise that of `scan`; -inf where the part does not hold it."""
    scores = queries.new_full((len(queries),), -torch.inf)
    rows = part.holds(positions).nonzero().squeeze(1).to(queries.device)
    if len(rows):
        chosen = backend or choose(queries)
        run = catalogue_scan_native.scores if chosen == "native" else catalogue_scan_torch.scores
        places = positions.to(queries.device)[rows] - part.first
        scores[rows] = run(queries, part.vectors, rows, places, max_bytes=max_bytes)
    return scores


def merge_tops(tops: Sequence[Top], k: int) -> Top:
    """The k best of several lists; those of lower positions come first, so a stable sort breaks ties correctly."""
    scores, order = torch.cat([top.scores for top in tops], 1).sort(dim=1, descending=True, stable=True)
    positions = torch.cat([top.positions for top in tops], 1).gather(1, order)
    return Top(positions[:, :k], scores[:, :k])


def choose(queries: Tensor) -> ScanBackend:
    """The fastest backend that supports the queries; logged once with the reason."""
    backend, reason = _decide(queries.device.type, queries.dtype)
    _log_once(backend, reason)
    return backend


@cache
def _decide(device: str, dtype: torch.dtype) -> tuple[ScanBackend, str]:
    if device != "cpu":
        return "torch", f"there is no kernel for {device}"
    if dtype != torch.float32:
        return "torch", f"the native kernel computes in float32, not {str(dtype).removeprefix('torch.')}"
    if isinstance(native := load(), Native):
        return "native", "float32 on the CPU"
    return "torch", f"{native}; 'nestpipe doctor' explains. Expect about 9x slower"


@cache
def _log_once(backend: str, reason: str) -> None:
    log.info("catalogue scan: %s (%s)", backend, reason)
