"""The attention op in C++ (csrc/attention.cpp), for fp32 on the CPU.

A row's result is bitwise independent of other rows, sequences and targets, of cached prefixes and of the number of
threads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from nestpipe.ops.device_memory import address
from nestpipe.ops.kernel_args import Gradients, KernelInputs, Layout, bucket_boundaries
from nestpipe.ops.native_library import library


class _Attention(ctypes.Structure):
    """`struct Attention` of attention.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_row", "k_row", "v_row")),
        *((name, c_void_p) for name in ("query_offsets", "key_offsets", "num_targets", "position")),
        ("num_position", c_int64),
        ("time", c_void_p),
        ("num_time", c_int64),
        *((name, c_void_p) for name in ("decay", "starts", "buckets", "log_gaps")),
        *((name, c_int64) for name in ("num_sequences", "num_heads", "qk_width", "v_width", "num_channels")),
        *((name, c_int64) for name in ("kind", "mode", "num_threads")),
        *((name, c_double) for name in ("scale", "norm")),
        *((name, c_void_p) for name in ("out", "kept", "grad", "d_q", "d_k", "d_v", "d_position", "d_time", "d_decay")),
    )


def plan(layout: Layout) -> list[Tensor]:
    """Where each query's pairs begin, and their time buckets (bytes) and log gaps (fp32), if a bias needs them."""
    num_buckets, decay = layout.num_buckets, layout.decay
    if layout.times is None or not (num_buckets or decay):
        return []
    offsets = [one.contiguous() for one in (layout.query_offsets, layout.key_offsets, layout.num_targets)]
    query_times, key_times = (one.contiguous() for one in layout.times)
    starts = torch.empty(len(query_times) + 1, dtype=torch.int64)
    arguments = _Attention(
        num_sequences=len(layout.num_targets), **_pointers(("query_offsets", "key_offsets", "num_targets"), offsets)
    )
    _call("nestpipe_attention_starts", None, arguments, starts)
    arguments.starts = address(starts)
    num_pairs = int(starts[-1])
    boundaries = bucket_boundaries(num_buckets)
    buckets = torch.zeros(num_pairs if num_buckets else 0, dtype=torch.uint8)
    log_gaps = torch.ones(num_pairs if decay else 0, dtype=torch.float32)
    pair_arguments = (
        query_times,
        key_times,
        boundaries,
        num_buckets,
        buckets if num_buckets else None,
        log_gaps if decay else None,
    )
    _call("nestpipe_attention_pairs", None, arguments, *pair_arguments)
    return [starts, buckets, log_gaps]


def forward(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """The output [Q, channels, H, V], and for softmax the logsumexp of each row [Q, H]."""
    out = inputs.new_output()
    saved = inputs.q.new_empty(inputs.q.shape[:2] if inputs.kind == "softmax" else 0)
    call = _AttentionCall(inputs)
    _checked("nestpipe_attention_forward", call.arguments(out=out, kept=saved))
    return out, saved


def backward(inputs: KernelInputs, grad: Tensor, out: Tensor, saved: Tensor) -> Gradients:
    q, k, v = (one.new_zeros(one.shape) for one in (inputs.q, inputs.k, inputs.v))
    biases = (inputs.position, inputs.time, inputs.decay)
    grads = Gradients(q, k, v, *(None if one is None else one.new_zeros(one.shape) for one in biases))
    call = _AttentionCall(inputs)
    outputs = {f"d_{name}": one for name, one in grads._asdict().items() if one is not None}
    _checked("nestpipe_attention_backward", call.arguments(out=out, kept=saved, grad=grad, **outputs))
    return grads


class _AttentionCall:
    """The arguments of forward and backward; keeps the tensors alive that they point to."""

    def __init__(self, inputs: KernelInputs):
        self._inputs = inputs
        # Heads must be contiguous; rows may be strided, as views of one projection are.
        rows = [
            one if one.stride()[1:] == (one.shape[2], 1) else one.contiguous() for one in (inputs.q, inputs.k, inputs.v)
        ]
        offsets = [inputs.query_offsets, inputs.key_offsets, inputs.num_targets]
        biases = [None if one is None else one.contiguous() for one in (inputs.position, inputs.time, inputs.decay)]
        names = ("q", "k", "v", "query_offsets", "key_offsets", "num_targets", "position", "time", "decay")
        self._tensors = dict(zip(names, [*rows, *(one.contiguous() for one in offsets), *biases], strict=True))
        if inputs.uses_time:
            self._tensors |= dict(zip(("starts", "buckets", "log_gaps"), inputs.plan, strict=True))
        self._rows = {
            f"{name}_row": one.stride(0) if len(one) > 1 else 0 for name, one in zip("qkv", rows, strict=True)
        }

    def arguments(self, **more: Tensor) -> _Attention:
        inputs = self._inputs
        tensors = {name: one for name, one in (self._tensors | more).items() if one is not None}
        return _Attention(
            **_pointers(tensors.keys(), tensors.values()),
            **self._rows,
            num_position=0 if inputs.position is None else len(inputs.position),
            num_time=0 if inputs.time is None else len(inputs.time),
            num_sequences=len(inputs.num_targets),
            num_heads=inputs.q.shape[1],
            qk_width=inputs.q.shape[2],
            v_width=inputs.v.shape[2],
            num_channels=inputs.num_channels,
            kind=int(inputs.kind == "softmax"),
            mode=int(inputs.mode == "channel"),
            num_threads=torch.get_num_threads(),
            scale=inputs.scale,
            norm=inputs.norm,
        )


def _pointers(names: Any, tensors: Any) -> dict[str, int]:
    return {name: address(one) for name, one in zip(names, tensors, strict=True)}


def _call(name: str, result: Any, arguments: _Attention, *more: Tensor | int | None) -> Any:
    native = library()
    if native is None:
        raise RuntimeError("the native attention was requested but cannot be built; 'nestpipe doctor' explains")
    kinds = [c_int64 if isinstance(one, int) else c_void_p for one in more]
    values = [address(one) if isinstance(one, Tensor) else one for one in more]
    return native.function(name, result, ctypes.POINTER(_Attention), *kinds)(ctypes.byref(arguments), *values)


def _checked(name: str, arguments: _Attention) -> None:
    if _call(name, c_int64, arguments) != 0:
        raise MemoryError(f"{name}: cannot allocate its tiles")
