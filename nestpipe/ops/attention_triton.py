"""The attention op in Triton: silu with added position and time tables, forward and backward, float32.

One program per block of queries and head; the gradients of keys and values take one per block of keys and head. Backward
recomputes the scores. The kernels follow the rules of kernel_args.py, prefixes and targets included. Gradients of the bias
tables are added atomically into a private row per program, then summed in order: repeated runs agree to rounding. All
other gradients are bitwise reproducible.

Tests run it in Triton's interpreter (TRITON_INTERPRET=1). It has not been run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestpipe.ops.kernel_args import BUCKET_WIDTH, Gradients, KernelInputs, Layout, bucket_boundaries

_BLOCK = 32
_INVERSE_WIDTH = tl.constexpr(1.0 / BUCKET_WIDTH)


@triton.jit
def _scores(
    q, k, query_places, key_places, history, query_times, key_times, boundaries, position, time, scale,
    num_position, num_buckets, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr
):  # fmt: skip
    """Scores with biases, the mask, and the indices of the biases."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    own = key_places[None, :] == query_places[:, None]
    seen = (key_places[None, :] <= query_places[:, None]) & ((key_places[None, :] < history) | own)
    distance = tl.minimum(query_places, history)[:, None] - tl.minimum(key_places, history)[None, :]
    distance = tl.minimum(tl.maximum(distance, 0), num_position - 1)
    bucket = distance * 0
    if HAS_POSITION:
        x += tl.load(position + distance)
    if HAS_TIME:
        gap = tl.maximum(tl.abs(query_times[:, None] - key_times[None, :]), 1)
        bucket = tl.minimum((tl.log(gap.to(tl.float32)) * _INVERSE_WIDTH).to(tl.int32), num_buckets)
        # The logarithm may be off by one bucket at a boundary; the integer boundaries decide.
        below = tl.load(boundaries + tl.maximum(bucket - 1, 0))
        bucket = tl.where((bucket > 0) & (gap < below), bucket - 1, bucket)
        above = tl.load(boundaries + tl.minimum(bucket, num_buckets - 1))
        bucket = tl.where((bucket < num_buckets) & (gap >= above), bucket + 1, bucket)
        x += tl.load(time + bucket)
    return x, seen, distance, bucket


@triton.jit
def _sequence(map_, query_offsets, key_offsets, num_targets):
    """The program's sequence: first query, number of queries, first key, number of keys, history, first of its block."""
    number = tl.load(map_ + 2 * tl.program_id(0))
    first = tl.load(map_ + 2 * tl.program_id(0) + 1)
    q0, k0 = tl.load(query_offsets + number), tl.load(key_offsets + number)
    num_queries, num_keys = tl.load(query_offsets + number + 1) - q0, tl.load(key_offsets + number + 1) - k0
    return q0, num_queries, k0, num_keys, num_keys - tl.load(num_targets + number), first


@triton.jit
def _rows(start, rows, limit, head, heads, width, W: tl.constexpr):
    """Addresses of rows of [n, heads, width], and which of them exist."""
    columns = tl.arange(0, W)
    places = ((start + rows)[:, None] * heads + head) * width + columns[None, :]
    return places, (rows < limit)[:, None] & (columns < width)[None, :]


@triton.jit
def _forward_kernel(
    q, k, v, out, map_, query_offsets, key_offsets, num_targets, query_times, key_times, boundaries, position, time,
    heads, qk_width, v_width, num_position, num_buckets, scale, inverse_norm,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, D: tl.constexpr, V: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    q0, num_queries, k0, num_keys, history, first = _sequence(map_, query_offsets, key_offsets, num_targets)
    head = tl.program_id(1)
    rows = first + tl.arange(0, B)
    query_places = num_keys - num_queries + rows
    at, real = _rows(q0, rows, num_queries, head, heads, qk_width, D)
    q_block = tl.load(q + at, mask=real, other=0.0)
    t_query = tl.load(query_times + q0 + rows, mask=(rows < num_queries) & HAS_TIME, other=0)
    total = tl.zeros((B, V), dtype=tl.float32)
    for start in range(0, tl.minimum(num_keys, num_keys - num_queries + first + B), B):
        keys = start + tl.arange(0, B)
        at, real = _rows(k0, keys, num_keys, head, heads, qk_width, D)
        k_block = tl.load(k + at, mask=real, other=0.0)
        at, real = _rows(k0, keys, num_keys, head, heads, v_width, V)
        v_block = tl.load(v + at, mask=real, other=0.0)
        t_key = tl.load(key_times + k0 + keys, mask=(keys < num_keys) & HAS_TIME, other=0)
        x, seen, _, _ = _scores(
            q_block, k_block, query_places, keys, history, t_query, t_key, boundaries, position, time, scale,
            num_position, num_buckets, HAS_POSITION, HAS_TIME
        )  # fmt: skip
        weights = tl.where(seen, x * inverse_norm / (1.0 + tl.exp(-x)), 0.0)
        total += tl.dot(weights, v_block, input_precision="ieee")
    at, real = _rows(q0, rows, num_queries, head, heads, v_width, V)
    tl.store(out + at, total, mask=real)


@triton.jit
def _query_grads_kernel(
    q, k, v, grad, d_q, d_position, d_time, map_, query_offsets, key_offsets, num_targets, query_times, key_times,
    boundaries, position, time, heads, qk_width, v_width, num_position, num_buckets, scale, inverse_norm,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, D: tl.constexpr, V: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    q0, num_queries, k0, num_keys, history, first = _sequence(map_, query_offsets, key_offsets, num_targets)
    head = tl.program_id(1)
    private = tl.program_id(0) * heads + head
    rows = first + tl.arange(0, B)
    query_places = num_keys - num_queries + rows
    at, real = _rows(q0, rows, num_queries, head, heads, qk_width, D)
    q_block = tl.load(q + at, mask=real, other=0.0)
    at, real = _rows(q0, rows, num_queries, head, heads, v_width, V)
    grad_block = tl.load(grad + at, mask=real, other=0.0)
    t_query = tl.load(query_times + q0 + rows, mask=(rows < num_queries) & HAS_TIME, other=0)
    total = tl.zeros((B, D), dtype=tl.float32)
    for start in range(0, tl.minimum(num_keys, num_keys - num_queries + first + B), B):
        keys = start + tl.arange(0, B)
        at, real = _rows(k0, keys, num_keys, head, heads, qk_width, D)
        k_block = tl.load(k + at, mask=real, other=0.0)
        at, real = _rows(k0, keys, num_keys, head, heads, v_width, V)
        v_block = tl.load(v + at, mask=real, other=0.0)
        t_key = tl.load(key_times + k0 + keys, mask=(keys < num_keys) & HAS_TIME, other=0)
        x, seen, distance, bucket = _scores(
            q_block, k_block, query_places, keys, history, t_query, t_key, boundaries, position, time, scale,
            num_position, num_buckets, HAS_POSITION, HAS_TIME
        )  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp(-x))
        d_weights = tl.dot(grad_block, tl.trans(v_block), input_precision="ieee")
        d_scores = tl.where(seen, d_weights * inverse_norm * gate * (1.0 + x * (1.0 - gate)), 0.0)
        total += tl.dot(d_scores, k_block, input_precision="ieee") * scale
        wanted = seen & (rows < num_queries)[:, None]
        if HAS_POSITION:
            tl.atomic_add(d_position + private * num_position + distance, d_scores, mask=wanted)
        if HAS_TIME:
            tl.atomic_add(d_time + private * (num_buckets + 1) + bucket, d_scores, mask=wanted)
    at, real = _rows(q0, rows, num_queries, head, heads, qk_width, D)
    tl.store(d_q + at, total, mask=real)


@triton.jit
def _key_grads_kernel(
    q, k, v, grad, d_k, d_v, map_, query_offsets, key_offsets, num_targets, query_times, key_times, boundaries,
    position, time, heads, qk_width, v_width, num_position, num_buckets, scale, inverse_norm,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, D: tl.constexpr, V: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    q0, num_queries, k0, num_keys, history, first = _sequence(map_, query_offsets, key_offsets, num_targets)
    head = tl.program_id(1)
    keys = first + tl.arange(0, B)
    at_k, real_k = _rows(k0, keys, num_keys, head, heads, qk_width, D)
    at_v, real_v = _rows(k0, keys, num_keys, head, heads, v_width, V)
    k_block, v_block = tl.load(k + at_k, mask=real_k, other=0.0), tl.load(v + at_v, mask=real_v, other=0.0)
    t_key = tl.load(key_times + k0 + keys, mask=(keys < num_keys) & HAS_TIME, other=0)
    total_k, total_v = tl.zeros((B, D), dtype=tl.float32), tl.zeros((B, V), dtype=tl.float32)
    for start in range(tl.maximum(first - (num_keys - num_queries), 0) // B * B, num_queries, B):
        rows = start + tl.arange(0, B)
        at, real = _rows(q0, rows, num_queries, head, heads, qk_width, D)
        q_block = tl.load(q + at, mask=real, other=0.0)
        at, real = _rows(q0, rows, num_queries, head, heads, v_width, V)
        grad_block = tl.load(grad + at, mask=real, other=0.0)
        t_query = tl.load(query_times + q0 + rows, mask=(rows < num_queries) & HAS_TIME, other=0)
        x, seen, _, _ = _scores(
            q_block, k_block, num_keys - num_queries + rows, keys, history, t_query, t_key, boundaries, position, time,
            scale, num_position, num_buckets, HAS_POSITION, HAS_TIME
        )  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp(-x))
        total_v += tl.dot(tl.trans(tl.where(seen, x * gate * inverse_norm, 0.0)), grad_block, input_precision="ieee")
        d_weights = tl.dot(grad_block, tl.trans(v_block), input_precision="ieee")
        d_scores = tl.where(seen, d_weights * inverse_norm * gate * (1.0 + x * (1.0 - gate)), 0.0)
        total_k += tl.dot(tl.trans(d_scores), q_block, input_precision="ieee") * scale
    tl.store(d_k + at_k, total_k, mask=real_k)
    tl.store(d_v + at_v, total_v, mask=real_v)


def plan(layout: Layout) -> list[Tensor]:
    """(sequence, first row) for every block of queries and of keys, and the boundaries of time buckets."""
    boundaries = bucket_boundaries(max(layout.num_buckets, 1)).to(layout.query_offsets.device)
    return [_blocks(layout.query_offsets), _blocks(layout.key_offsets), boundaries]


def forward(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    _check(inputs)
    out = inputs.new_output()
    q, k, v = (one.contiguous() for one in (inputs.q, inputs.k, inputs.v))
    blocks = inputs.plan[0]
    if len(blocks):
        _forward_kernel[(len(blocks), q.shape[1])](q, k, v, out, blocks, *_shared(inputs), **_constants(inputs))
    return out, q.new_empty(0)


def backward(inputs: KernelInputs, grad: Tensor, out: Tensor, saved: Tensor) -> Gradients:
    q, k, v = (one.contiguous() for one in (inputs.q, inputs.k, inputs.v))
    d_q, d_k, d_v = (torch.zeros_like(one) for one in (q, k, v))
    queries, keys, _ = inputs.plan
    shape = (len(queries) * q.shape[1],)
    private = [None if one is None else one.new_zeros(*shape, len(one)) for one in (inputs.position, inputs.time)]
    table_grads = [q if one is None else one for one in private]
    if len(queries):
        shared, constants = _shared(inputs), _constants(inputs)
        _query_grads_kernel[(len(queries), q.shape[1])](q, k, v, grad, d_q, *table_grads, queries, *shared, **constants)
        _key_grads_kernel[(len(keys), q.shape[1])](q, k, v, grad, d_k, d_v, keys, *shared, **constants)
    position, time = (None if one is None else one.sum(0) for one in private)
    return Gradients(d_q, d_k, d_v, position, time)


def _check(inputs: KernelInputs) -> None:
    if (inputs.kind, inputs.mode, inputs.decay, inputs.q.dtype) != ("silu", "add", None, torch.float32):
        raise ValueError("the triton kernel supports only silu with added tables in float32.")


def _shared(inputs: KernelInputs) -> list[Any]:
    """Arguments of all kernels; an absent tensor is replaced by one that is not read."""
    absent = inputs.query_offsets
    times = [absent if one is None else one for one in (inputs.query_times, inputs.key_times)]
    tables = [inputs.q if one is None else one.contiguous() for one in (inputs.position, inputs.time)]
    num_position = 1 if inputs.position is None else len(inputs.position)
    num_buckets = 1 if inputs.time is None else len(inputs.time) - 1
    return [
        *(inputs.query_offsets, inputs.key_offsets, inputs.num_targets, *times, inputs.plan[2], *tables),
        *(inputs.q.shape[1], inputs.q.shape[2], inputs.v.shape[2], num_position, num_buckets),
        *(inputs.scale, 1.0 / inputs.norm),
    ]


def _constants(inputs: KernelInputs) -> dict[str, Any]:
    return {
        "HAS_POSITION": inputs.position is not None,
        "HAS_TIME": inputs.uses_time,
        "D": max(16, triton.next_power_of_2(inputs.q.shape[2])),
        "V": max(16, triton.next_power_of_2(inputs.v.shape[2])),
        "B": _BLOCK,
    }


def _blocks(offsets: Tensor) -> Tensor:
    counts = (offsets.diff() + _BLOCK - 1) // _BLOCK
    number = torch.arange(len(counts), device=offsets.device).repeat_interleave(counts)
    first = torch.arange(len(number), device=offsets.device) - (counts.cumsum(0) - counts).index_select(0, number)
    return torch.stack([number, first * _BLOCK], dim=1)
