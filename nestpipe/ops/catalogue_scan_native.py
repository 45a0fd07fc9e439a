"""Scan of the catalogue (catalogue_scan.py) in C++ (csrc/catalogue_scan.cpp), for fp32 on the CPU.

A score is one chain of fused multiply-adds, so it depends on its query and its item alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nestpipe.ops.device_memory import address
from nestpipe.ops.native_library import library


class _Scan(ctypes.Structure):
    """`struct nestpipe_scan` of catalogue_scan.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "items", "targets", "target_scores", "seen_offsets", "seen")),
        *((name, c_int64) for name in ("num_queries", "num_items", "width", "first", "k", "num_threads")),
        *((name, c_void_p) for name in ("before", "positions", "scores", "not_finite")),
    )


def run(
    queries: Tensor,
    items: Tensor,
    seen: tuple[Tensor, Tensor] | None,
    targets: tuple[Tensor, Tensor] | None,
    *,
    first: int,
    k: int,
    max_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`before`, positions, scores, `not_finite` as `scan` returns them; `max_bytes` has no effect, as no scores are kept."""
    num_queries = len(queries)
    before = torch.zeros(num_queries, dtype=torch.int64)
    positions = torch.empty(num_queries, k, dtype=torch.int64)
    scores = torch.empty(num_queries, k)
    not_finite = torch.empty(num_queries, dtype=torch.bool)
    tensors = {"queries": queries, "items": items}
    if seen is not None:
        tensors |= {"seen": seen[0], "seen_offsets": seen[1]}
    if targets is not None:
        tensors |= {"targets": targets[0], "target_scores": targets[1]}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    tensors |= {"before": before, "positions": positions, "scores": scores, "not_finite": not_finite}
    call = _Scan(
        **{name: address(tensor) for name, tensor in tensors.items()},
        num_queries=num_queries,
        num_items=len(items),
        width=queries.shape[1],
        first=first,
        k=k,
        num_threads=torch.get_num_threads(),
    )
    if _function("nestpipe_catalogue_scan", c_int64, c_void_p)(ctypes.byref(call)):
        raise MemoryError(f"no memory for the {k:,} best items of {num_queries:,} queries")
    return before, positions, scores, not_finite


def scores(queries: Tensor, items: Tensor, rows: Tensor, places: Tensor, *, max_bytes: int) -> Tensor:
    """The score [m] of query rows[i] and item places[i], as the scan computes it."""
    queries, items, places = queries[rows].contiguous(), items.contiguous(), places.contiguous()
    found = torch.empty(len(rows))
    function = _function("nestpipe_catalogue_scores", None, *[c_void_p] * 3, *[c_int64] * 2, c_void_p)
    pointers = (address(queries), address(items), address(places))
    function(*pointers, len(rows), queries.shape[1], address(found))
    return found


@cache
def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    native = library()
    if native is None:
        raise RuntimeError("the native catalogue scan was requested but cannot be built; 'nestpipe doctor' explains")
    return native.function(name, result, *arguments)
