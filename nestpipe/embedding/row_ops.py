"""Copies and sums of rows by slot. Native where that can be built; torch is bitwise identical.

A column [S, ...] holds one row per slot. Sums are added in the order of the places, one after the
other, in every implementation. Native functions release the GIL; they take contiguous columns on
the CPU, and fp32 for sums. On a GPU the kernels of triton_rows.py do the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_int64, c_uint32, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nestpipe.ops.backends import triton_runs
from nestpipe.ops.device_memory import address, upload, used_here
from nestpipe.ops.native_library import Native, library

_SQRT_CHUNK = 1 << 15  # values; stays in the cache


def gather_rows(
    column: Tensor, slots: Tensor, out: Tensor | None = None, *, native: bool | None = None, num_threads: int = 1
) -> Tensor:
    """A copy [n, ...] of the rows at the slots, which may repeat; in `out` if given."""
    out = column.new_empty(len(slots), *column.shape[1:]) if out is None else out
    if out.shape != (len(slots), *column.shape[1:]):
        raise ValueError(
            f"{len(slots):,} rows of a column {list(column.shape)} do not fit into a buffer {list(out.shape)}"
        )
    if (device := triton_for(native, column, out)) is not None and out.dtype == column.dtype:
        device.gather(column, slots, out)
        return out
    functions = _functions_for(native, column, out)
    if functions is None:
        torch.index_select(column, 0, upload(slots, column.device), out=out)
        return out
    slots = slots.contiguous()
    size = len(column), row_bytes(column)
    check_slots(
        functions.gather(address(column), *size, address(slots), len(slots), address(out), num_threads),
        slots,
        len(column),
    )
    return out


def scatter_rows(column: Tensor, slots: Tensor, rows: Tensor, *, native: bool | None = None) -> None:
    """Overwrites the rows at distinct slots with rows [n, ...] of the column's type."""
    _check_shape(column, slots, rows)
    if (device := triton_for(native, column)) is not None and rows.dtype == column.dtype:
        device.scatter(column, slots, rows)
        return
    functions = _functions_for(native, column) if rows.dtype == column.dtype else None
    if functions is None:
        column.index_copy_(0, upload(slots, column.device), rows)
        return
    slots, rows = slots.contiguous(), rows.contiguous()
    size = len(column), row_bytes(column)
    check_slots(
        functions.scatter(address(column), *size, address(slots), len(slots), address(rows)), slots, len(column)
    )


def add_rows(target: Tensor, places: Tensor, rows: Tensor, *, native: bool | None = None) -> None:
    """target[places[i]] += rows[i], in the order of i; places may repeat."""
    _check_shape(target, places, rows)
    if (device := triton_for(native, target)) is not None and target.dtype == rows.dtype == torch.float32:
        device.add(target, places, rows)
        return
    functions = _functions_for(native, target) if target.dtype == rows.dtype == torch.float32 else None
    if functions is None:
        target.index_add_(0, upload(places, target.device), rows)
        return
    places, rows = places.contiguous(), rows.contiguous()
    size = len(target), row_bytes(target) // rows.itemsize
    check_slots(functions.add(address(target), *size, address(places), len(places), address(rows)), places, len(target))


def copy_from(
    target: Tensor, places: Tensor, sources: Tensor, columns: Sequence[Tensor], *, native: bool | None = None
) -> None:
    """target[places[i]] = row `sources[i] & 0xffffffff` of column `sources[i] >> 32`; places are distinct."""
    if (device := triton_for(native, target, *columns)) is not None:
        device.copy_from(target, places, sources, columns)
        return
    if (functions := _functions_for(native, target, *columns)) is not None:
        _move(functions.copy_from, target, places, sources, columns)
        return
    for own, rows in _by_column(sources, columns):
        target.index_copy_(0, upload(places.index_select(0, own), target.device), rows)


def add_from(
    target: Tensor, places: Tensor, sources: Tensor, columns: Sequence[Tensor], *, native: bool | None = None
) -> None:
    """target[places[i]] += row `sources[i] & 0xffffffff` of column `sources[i] >> 32`; places are distinct."""
    if (device := triton_for(native, target, *columns)) is not None and target.dtype == torch.float32:
        device.add_from(target, places, sources, columns)
        return
    functions = _functions_for(native, target, *columns) if target.dtype == torch.float32 else None
    if functions is not None:
        _move(functions.add_from, target, places, sources, columns)
        return
    for own, rows in _by_column(sources, columns):
        target.index_add_(0, upload(places.index_select(0, own), target.device), rows)


def largest(values: Tensor, *, native: bool | None = None) -> float:
    """The largest |value|; nan if any value is, 0 without values."""
    functions = _functions_for(native, values) if values.dtype == torch.float32 else None
    if functions is not None:
        bits = functions.largest(address(values), values.numel())
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])
    return float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ArrivedGrads:
    """Gradients [K, D] as sums, not yet added, of rows that arrive in segments; rows are numbered across segments."""

    segments: Sequence[Tensor]  # [n, D] each
    starts: Tensor  # [K + 1]: where each sum starts in `order`; each has at least one row
    order: Tensor  # numbers of the rows, in the order in which they are added
    addresses: Tensor | None = None  # result of `pointers`, computed early

    def at(self, places: Tensor) -> ArrivedGrads:
        """Only the sums at these places, in this order; row addresses are computed now."""
        begins, ends = self.starts.index_select(0, places), self.starts.index_select(0, places + 1)
        counts = ends - begins
        starts = torch.zeros(len(places) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=starts[1:])
        places_in_order = (begins - starts[:-1]).repeat_interleave(counts).add_(torch.arange(int(starts[-1])))
        return ArrivedGrads(self.segments, starts, self.order.index_select(0, places_in_order)).located()

    def located(self) -> ArrivedGrads:
        """The same, with row addresses computed now; rows on a device have none."""
        is_host = all(one.device.type == "cpu" for one in self.segments)
        return replace(self, addresses=self.pointers()) if is_host else self

    def total(self, out: Tensor | None = None, *, native: bool | None = None) -> Tensor:
        """The sums [K, D]; in `out` if given."""
        first = self.segments[0]
        out = first.new_empty(len(self.starts) - 1, *first.shape[1:]) if out is None else out
        if (device := triton_for(native, out, *self.segments)) is not None and first.dtype == torch.float32:
            device.sum_arrived(out, self.starts, self.sources(), self.segments)
            return out
        functions = _functions_for(native, out, *self.segments) if first.dtype == torch.float32 else None
        if functions is None:
            return out.copy_(self._total())
        pointers, starts = self.pointers(), self.starts.contiguous()
        size = len(out), row_bytes(out) // out.itemsize
        functions.sum(address(out), *size, address(starts), address(pointers))
        return out

    def _total(self) -> Tensor:
        used_here(*self.segments)
        number = torch.arange(len(self.starts) - 1).repeat_interleave(self.starts.diff())
        # Only the rows of these sums: on a device others may still be in flight.
        first = self.segments[0]
        rows = first.new_empty(len(self.order), *first.shape[1:])
        copy_from(rows, torch.arange(len(rows)), self.sources(), self.segments, native=False)
        # -0.0 is the neutral element: 0.0 would turn a sum of -0.0 into 0.0.
        sums = rows.new_full((len(self.starts) - 1, *rows.shape[1:]), -0.0)
        return sums.index_add_(0, upload(number, rows.device), rows)

    def sources(self) -> Tensor:
        """The segment and the row in it of each row, as `copy_from` takes them."""
        ends = torch.tensor([len(one) for one in self.segments]).cumsum(0)
        segment = torch.searchsorted(ends, self.order, right=True)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        return (segment << 32) + self.order - begins.index_select(0, segment)

    def pointers(self) -> Tensor:
        """Addresses of the rows, in the order in which they are added; for native code."""
        if self.addresses is not None:
            return self.addresses
        ends = [(address(one), address(one) + one.nbytes, row_bytes(one)) for one in self.segments]
        return torch.cat([torch.arange(*own) for own in ends]).index_select(0, self.order)


def gather_each(unique: Tensor, index: Tensor, *, native: bool | None = None) -> Tensor:
    """unique[index] [*index.shape, D]; its gradient sums the occurrences of a row in their order."""
    fits = (_functions_for(native, unique) or triton_for(native, unique)) is not None
    if not fits or unique.dtype != torch.float32:
        # Not unique[index]: the backward of advanced indexing is not deterministic.
        return torch.nn.functional.embedding(index, unique)
    rows: Tensor = _Gather.apply(unique, index.reshape(-1))  # type: ignore[no-untyped-call]
    return rows.reshape(*index.shape, unique.shape[1])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unique: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(unique)
        return gather_rows(unique, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        sums = grads.new_zeros(ctx.num_rows, grads.shape[1])
        add_rows(sums, index, grads)
        return sums, None


def exact_sqrt(values: Tensor) -> Tensor:
    """The square root, exactly rounded for fp32: the fp64 root is close enough to round correctly."""
    roots = torch.empty_like(values, memory_format=torch.contiguous_format)
    for out, chunk in zip(roots.view(-1).split(_SQRT_CHUNK), values.reshape(-1).split(_SQRT_CHUNK), strict=True):
        out.copy_(chunk.double().sqrt_())
    return roots


def row_bytes(column: Tensor) -> int:
    return math.prod(column.shape[1:]) * column.itemsize


class _Moves(Structure):
    """nestpipe_moves of rows.cpp."""

    _fields_ = (
        ("target", c_void_p),
        ("num_rows", c_int64),
        ("row_bytes", c_int64),
        ("places", c_void_p),
        ("sources", c_void_p),
        ("n", c_int64),
        ("bases", c_void_p),
    )


def _move(function: Any, target: Tensor, places: Tensor, sources: Tensor, columns: Sequence[Tensor]) -> None:
    if not len(places):
        return
    bases = torch.tensor([address(column) for column in columns])
    moves = _Moves(
        *(address(target), len(target), row_bytes(target)),
        *(address(places), address(sources), len(places), address(bases)),
    )
    check_slots(function(byref(moves)), places, len(target))


def _by_column(sources: Tensor, columns: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Per column: which sources are in it, and their rows."""
    number, position = sources >> 32, sources & 0xFFFFFFFF
    for own, column in enumerate(columns):
        members = (number == own).nonzero().flatten()
        if not len(members):
            continue
        yield members, column.index_select(0, upload(position.index_select(0, members), column.device))


class _RowFunctions:
    """The functions of rows.cpp for copies and sums."""

    def __init__(self, native: Native):
        rows = slots = c_void_p
        number = c_int64
        sized = rows, number, number, slots, number, rows
        self.gather = native.function("nestpipe_rows_gather", number, *sized, number)
        self.scatter = native.function("nestpipe_rows_scatter", number, *sized)
        self.add = native.function("nestpipe_rows_add", number, *sized)
        self.copy_from = native.function("nestpipe_rows_copy_from", number, POINTER(_Moves))
        self.add_from = native.function("nestpipe_rows_add_from", number, POINTER(_Moves))
        self.largest = native.function("nestpipe_rows_largest", c_uint32, rows, number)
        self.sum = native.function("nestpipe_rows_sum", None, rows, number, number, slots, rows)


@cache
def _functions() -> _RowFunctions | None:
    native = library()
    return _RowFunctions(native) if native else None


def _functions_for(native: bool | None, *columns: Tensor) -> _RowFunctions | None:
    """The native functions if they are enabled, built, and support these columns."""
    fits = all(column.is_contiguous() and column.device.type == "cpu" for column in columns)
    return _functions() if fits and (native is None or native) else None


def triton_for(native: bool | None, *columns: Tensor) -> ModuleType | None:
    """triton_rows.py if its kernels are enabled, run on the columns' device, and support these columns."""
    fits = (native is None or native) and triton_runs(columns[0].device.type)
    if not fits or not all(column.is_contiguous() for column in columns):
        return None
    from nestpipe.embedding import triton_rows  # Triton is there where a device is

    return triton_rows


def _check_shape(column: Tensor, slots: Tensor, rows: Tensor) -> None:
    if rows.shape != (len(slots), *column.shape[1:]):
        raise ValueError(
            f"rows {list(rows.shape)} for {len(slots):,} slots do not fit a column {list(column.shape)}; one row per slot is needed"
        )


def check_slots(done: int, slots: Tensor, num_slots: int) -> None:
    """Raises IndexError if a native function stopped at a slot that does not exist."""
    if done < len(slots):
        raise IndexError(
            f"slot {int(slots[done])} (place {done} of {len(slots):,}) is not among {num_slots:,} slots; nothing was changed"
        )
