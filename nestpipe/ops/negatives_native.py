"""Sampled softmax (negatives.py) in C++ (csrc/negatives.cpp), for fp32 on the CPU.

A token's loss and gradient depend on its unit alone. A row's gradient is summed in the order of blocks and tokens. So
results are bitwise independent of the segment size and the number of threads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.embedding.unique_ids import group
from nestpipe.jagged import offsets_of
from nestpipe.ops.device_memory import address
from nestpipe.ops.native_library import library
from nestpipe.ops.negatives_torch import LossAndGrads, LossTask

_LINE = 16  # floats of a cache line; rows are padded to whole lines


class _Negatives(ctypes.Structure):
    """`struct nestpipe_negatives` of negatives.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "rows", "positive_rows", "positives", "negatives")),
        *((name, c_void_p) for name in ("receiver_offsets", "receivers", "unit_tokens", "unit_blocks")),
        *((name, c_int64) for name in ("num_tokens", "num_rows", "num_blocks", "num_negatives", "num_units")),
        *((name, c_int64) for name in ("stride", "width", "segment", "num_threads")),
        *((name, c_void_p) for name in ("d_queries", "d_rows", "d_positive_rows", "losses")),
    )


def run(queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> LossAndGrads:
    """Loss and gradients; raises IndexError for a place that does not exist."""
    native = library()
    if native is None:
        raise RuntimeError("native negatives were requested but cannot be built; 'nestpipe doctor' explains")
    width, same = queries.shape[1], positive_rows is rows
    own_queries, own_rows = _whole_lines(queries), _whole_lines(rows)
    own_positive_rows = own_rows if same else _whole_lines(positive_rows)
    d_queries, d_rows = torch.empty_like(own_queries), torch.zeros_like(own_rows)
    d_positive_rows = d_rows if same else torch.zeros_like(own_rows)
    losses = torch.empty(len(queries), dtype=torch.float64)
    offsets, receivers = _receivers(task)
    tensors = {
        "queries": own_queries,
        "rows": own_rows,
        "positive_rows": own_positive_rows,
        "positives": task.positives.contiguous(),
        "negatives": task.negatives.contiguous(),
        "receiver_offsets": offsets,
        "receivers": receivers,
        "unit_tokens": task.unit_tokens.contiguous(),
        "unit_blocks": task.unit_blocks.contiguous(),
        "d_queries": d_queries,
        "d_rows": d_rows,
        "d_positive_rows": d_positive_rows,
        "losses": losses,
    }
    call = _Negatives(
        **{name: address(tensor) for name, tensor in tensors.items()},
        num_tokens=len(queries),
        num_rows=len(rows),
        num_blocks=len(task.negatives),
        num_negatives=task.negatives.shape[1],
        num_units=len(task.unit_tokens) - 1,
        stride=own_queries.shape[1],
        width=width,
        segment=task.segment,
        num_threads=torch.get_num_threads(),
    )
    error = native.function("nestpipe_negatives_run", c_int64, ctypes.POINTER(_Negatives))(ctypes.byref(call))
    if error == -1:
        raise MemoryError(
            f"cannot allocate the scores of {task.segment} tokens with {task.negatives.shape[1]} negatives each"
        )
    if error:
        raise IndexError(f"a positive or a negative is outside of the {len(rows):,} rows")
    return losses.sum(), d_queries[:, :width], d_rows[:, :width], d_positive_rows[:, :width]


def _whole_lines(values: Tensor) -> Tensor:
    """Rows [n, D] padded to whole cache lines; copied only if they need padding."""
    values = values.detach()
    pad = -values.shape[1] % _LINE
    return F.pad(values, (0, pad)) if pad else values.contiguous()


def _receivers(task: LossTask) -> tuple[Tensor, Tensor]:
    """The tokens for which each block is scored, ascending, and where each block's begin."""
    blocks, count = task.of_token.flatten(), task.of_token.shape[1]
    entries = (blocks >= 0).nonzero().flatten()
    order, counts = group(blocks.index_select(0, entries), len(task.negatives))
    return offsets_of(counts), entries.index_select(0, order).div_(count, rounding_mode="floor")
