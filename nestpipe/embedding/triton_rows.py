"""Launches of the Triton kernels that copy and add rows on a device; row_ops.py calls them.

Slots, places and sources are on the host, where they are checked, or on the device. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from nestpipe.ops import rows_triton as kernels
from nestpipe.ops.device_memory import upload, used_here


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a program, and its warps."""

    rows: int
    columns: int
    num_warps: int = 4

    def launch(self) -> dict[str, Any]:
        """Constants and options of a launch."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "num_warps": self.num_warps}
        return {**sizes, "num_stages": 1, "enable_fp_fusion": False}


MAX_COLUMNS = 128  # of a program, for kernels that go through the columns of a row block by block
MAX_REGISTERS = 80  # of a thread: 24 warps of a multiprocessor stay resident, to hide the latency of memory
MAX_ELEMENTS = 1024  # of a program: two vectors of 16 bytes for each thread
NARROW, NARROW_ELEMENTS = 4, 128  # up to this width the places and counts of rows take more registers than the rows
# Numbers in the tile of a kernel, for widths above NARROW and above MAX_COLUMNS: the most that these limits allow without spills.
# tests/ops/test_rows_compiled.py compiles all of them.
ELEMENTS = {
    "copy_kernel": (1024, 1024),
    "sum_kernel": (1024, 1024),
    "sgd_kernel": (1024, 1024),
    "adagrad_kernel": (1024, 1024),
    "rowwise_adagrad_kernel": (512, 1024),
    "lazy_adam_kernel": (512, 512),
    "adam_kernel": (512, 512),
    "adam_gather_kernel": (512, 512),
}


def tile(kernel: str, width: int, num_elements: int = 0) -> Tile:
    """How a kernel divides rows of a width among programs [default: numbers of a program as in `ELEMENTS`]."""
    columns = triton.next_power_of_2(width)
    num_elements = NARROW_ELEMENTS if width <= NARROW else num_elements or ELEMENTS[kernel][width > MAX_COLUMNS]
    if kernel != "rowwise_adagrad_kernel":  # which has whole rows
        columns = min(columns, MAX_COLUMNS)
    return Tile(max(num_elements // columns, 1), columns)


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Rows of several tensors, as distances from one of them."""

    base: Tensor
    offsets: Tensor  # [n] in numbers
    aligned: bool  # whether all rows begin at a multiple of 16 bytes from the base

    @staticmethod
    def of(sources: Tensor, columns: Sequence[Tensor]) -> Scattered:
        """Row `sources[i] & 0xffffffff` of column `sources[i] >> 32`."""
        used_here(*columns)
        base = next((one for one in columns if one.numel()), columns[0])
        width, size = math.prod(base.shape[1:]), base.itemsize
        begins = [one.data_ptr() - base.data_ptr() for one in columns]
        first = torch.tensor([begin // size for begin in begins])
        offsets = first.index_select(0, sources >> 32) + (sources & 0xFFFFFFFF) * width
        aligned = width * size % 16 == 0 and all(
            begin % 16 == 0 for begin, one in zip(begins, columns, strict=True) if one.numel()
        )
        return Scattered(base, upload(offsets, base.device), aligned)


def gather(column: Tensor, slots: Tensor, out: Tensor) -> None:
    _copy(column, out, slots, None, len(slots))


def scatter(column: Tensor, slots: Tensor, rows: Tensor) -> None:
    _copy(rows.contiguous(), column, None, slots, len(slots))


def copy_from(target: Tensor, places: Tensor, sources: Tensor, columns: Sequence[Tensor]) -> None:
    if len(places):
        _copy(Scattered.of(sources, columns), target, None, places, len(places))


def add_from(target: Tensor, places: Tensor, sources: Tensor, columns: Sequence[Tensor]) -> None:
    if len(places):
        _sum(target, places, torch.arange(len(places) + 1), Scattered.of(sources, columns), adds=True)


def add(target: Tensor, places: Tensor, rows: Tensor) -> None:
    """target[places[i]] += rows[i], in the order of i; places may repeat."""
    if not len(places):
        return
    rows, order = rows.contiguous(), places.argsort(stable=True)
    ends = torch.arange(len(target) + 1, device=places.device)
    starts = torch.searchsorted(places.index_select(0, order), ends)
    width = math.prod(rows.shape[1:])
    scattered = Scattered(rows, upload(order * width, rows.device), width * rows.itemsize % 16 == 0)
    _sum(target, None, starts, scattered, adds=True)


def sum_arrived(out: Tensor, starts: Tensor, sources: Tensor, segments: Sequence[Tensor]) -> None:
    """out[i] = the sum of the rows starts[i] .. starts[i + 1] of `sources`, in order."""
    if len(out):
        _sum(out, None, starts, Scattered.of(sources, segments), adds=False)


def check(slots: Tensor, num_slots: int, *, lowest: int = 0) -> None:
    """Raises IndexError if one of some slots on the host does not exist."""
    if slots.is_cpu and len(slots):
        low, high = torch.aminmax(slots)
        if int(low) < lowest or int(high) >= num_slots:
            wrong = int(((slots < lowest) | (slots >= num_slots)).nonzero()[0])
            raise IndexError(
                f"slot {int(slots[wrong])} (place {wrong} of {len(slots):,}) is not among {num_slots:,} slots; "
                "nothing was changed"
            )


def _copy(source: Tensor | Scattered, target: Tensor, from_: Tensor | None, to: Tensor | None, num_rows: int) -> None:
    if not num_rows:
        return
    scattered = isinstance(source, Scattered)
    column = source.base if isinstance(source, Scattered) else source
    for slots, rows in ((from_, column), (to, target)):
        if slots is not None:
            check(slots, len(rows))
    width, absent = math.prod(target.shape[1:]), target
    from_ = source.offsets if isinstance(source, Scattered) else from_
    own = [absent if one is None else upload(one, target.device).contiguous() for one in (from_, to)]
    _launch(
        kernels.copy_kernel,
        num_rows,
        width,
        [column, target, *own, num_rows],
        FROM="offsets" if scattered else "places" if from_ is None else "slots",
        TO="places" if to is None else "slots",
        ALIGNED=isinstance(source, Scattered) and source.aligned,
    )


def _sum(target: Tensor, places: Tensor | None, starts: Tensor, rows: Scattered, *, adds: bool) -> None:
    num_rows = len(starts) - 1
    if places is not None:
        check(places, len(target))
    own = [upload(starts, target.device), rows.offsets, target if places is None else upload(places, target.device)]
    _launch(
        kernels.sum_kernel,
        num_rows,
        math.prod(target.shape[1:]),
        [rows.base, target, *own, num_rows],
        ADDS=adds,
        TO="places" if places is None else "slots",
        ALIGNED=rows.aligned,
    )


def _launch(kernel: Any, num_rows: int, width: int, arguments: list[Any], **constants: Any) -> None:
    """One program for each tile of rows and columns."""
    own = tile(kernel.__name__, width)
    grid = (triton.cdiv(num_rows, own.rows), triton.cdiv(width, own.columns))
    kernel[grid](*arguments, D=width, **constants, **own.launch())
