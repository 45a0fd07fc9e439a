"""Triton kernels of the attention op: forward, and the gradients of queries, keys and values.

    forward       a program per block of B queries and head     loops over tiles of B visible keys
    query_grads   the same programs and tiles                   d_q
    key_grads     a program per block of B keys and head        loops over blocks of queries that see one: d_k, d_v

attention_bias_kernels.py has the gradients of the biases, attention_tiles.py what happens in a tile. Each kernel
recomputes the scores. Products of float32 are IEEE float32, those of bfloat16 are summed in float32. Every sum has a fixed
order and none is atomic, so equal launches give equal bits.

SOFTMAX chooses the kind, CHANNEL the mode. D and V are the widths of a head, rounded up to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.ops.attention_tiles import (
    add_biases,
    add_product,
    block_of,
    load_rows,
    load_sums,
    masked,
    position_bias,
    products,
    score_grads,
    sequence_of,
    store_rows,
    time_bias,
    visible,
    weights_of,
)


@triton.jit
def _tiles_of(first_place, num_keys, history, B: tl.constexpr):
    """Number of key tiles of a query block, those in the history, and how many behind them no target of it sees."""
    end = tl.minimum(num_keys, first_place + B)
    in_history = tl.cdiv(tl.minimum(history, end), B)
    skipped = tl.maximum(first_place // B - in_history, 0)
    return tl.cdiv(end, B) - skipped, in_history, skipped


@triton.jit
def forward(
    q, k, v, out, saved, blocks, query_offsets, key_offsets, num_targets, query_times, key_times, boundaries,
    position, time, decay, heads, channels, qk_width, v_width, q_stride, k_stride, v_stride, num_position, num_buckets,
    scale, inverse_norm, SOFTMAX: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    B: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    number, first, head = (
        tl.load(blocks + 2 * tl.program_id(0)),
        tl.load(blocks + 2 * tl.program_id(0) + 1),
        tl.program_id(1),
    )
    q0, k0, num_keys, prefix, history = sequence_of(number, query_offsets, key_offsets, num_targets)
    tables, times = (position, num_position, time, decay, boundaries, num_buckets), (query_times, key_times)
    queries = block_of(prefix + first + tl.arange(0, B), q0 - prefix, num_keys)
    q_source, k_source, v_source = (
        (q + head * qk_width, q_stride),
        (k + head * qk_width, k_stride),
        (v + head * v_width, v_stride),
    )
    held = load_rows(q_source, queries, 0, qk_width, CHUNK)
    largest, sums = tl.full((B,), masked, tl.float32), tl.zeros((B,), tl.float32)
    content = tl.zeros((B, V), tl.float32)
    by_position, by_time = content, content
    num_tiles, in_history, skipped = _tiles_of(prefix + first, num_keys, history, B)
    for tile in range(0, num_tiles):
        start = (tile + tl.where(tile >= in_history, skipped, 0)) * B
        keys = block_of(start + tl.arange(0, B), k0, num_keys)
        seen = visible(queries, keys, history)
        x = products(q_source, queries, held, k_source, keys, None, qk_width, D, CHUNK, B) * scale
        v_block = load_rows(v_source, keys, 0, v_width, V)
        if CHANNEL:
            if position is not None:
                bias = tl.where(seen, position_bias(tables, queries, keys, history), 0.0)
                by_position = add_product(by_position, bias, v_block)
            if query_times is not None:
                bias = tl.where(seen, time_bias(tables, times, queries, keys), 0.0)
                by_time = add_product(by_time, bias, v_block)
        else:
            x = add_biases(x, tables, times, queries, keys, history)
        if SOFTMAX:  # relative to the largest score so far
            larger = tl.maximum(largest, tl.max(tl.where(seen, x, masked), 1))
            shrink = tl.exp(largest - larger)
            weights = weights_of(x, seen, larger, inverse_norm)
            sums, largest = sums * shrink + tl.sum(weights, 1), larger
            content *= shrink[:, None]
        else:
            weights = weights_of(x, seen, None, inverse_norm)
        content = add_product(content, weights, v_block)
    if SOFTMAX:
        sums = tl.where(queries[2], sums, 1.0)
        content /= sums[:, None]
        tl.store(saved + queries[1] * heads + head, largest + tl.log(sums), mask=queries[2])
    channel = heads * v_width
    out += head * v_width
    store_rows((out, channels * channel), queries, v_width, content, V)
    if CHANNEL:
        if position is not None:
            store_rows((out + channel, channels * channel), queries, v_width, by_position, V)
        if query_times is not None:
            store_rows((out + (channels - 1) * channel, channels * channel), queries, v_width, by_time, V)


@triton.jit
def query_grads(
    q, k, v, grad, saved, row_dots, d_q, blocks, query_offsets, key_offsets, num_targets, query_times, key_times,
    boundaries, position, time, decay, heads, channels, qk_width, v_width, q_stride, k_stride, v_stride, num_position,
    num_buckets, scale, inverse_norm, SOFTMAX: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    B: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    number, first, head = (
        tl.load(blocks + 2 * tl.program_id(0)),
        tl.load(blocks + 2 * tl.program_id(0) + 1),
        tl.program_id(1),
    )
    q0, k0, num_keys, prefix, history = sequence_of(number, query_offsets, key_offsets, num_targets)
    tables, times = (position, num_position, time, decay, boundaries, num_buckets), (query_times, key_times)
    queries = block_of(prefix + first + tl.arange(0, B), q0 - prefix, num_keys)
    q_source, k_source, v_source = (
        (q + head * qk_width, q_stride),
        (k + head * qk_width, k_stride),
        (v + head * v_width, v_stride),
    )
    g_source = (grad + head * v_width, channels * heads * v_width)
    held_q, held_g = load_rows(q_source, queries, 0, qk_width, CHUNK), load_rows(g_source, queries, 0, v_width, CHUNK)
    sums, dots = load_sums(saved, row_dots, queries, heads, head, SOFTMAX)
    total = tl.zeros((B, D), tl.float32)
    num_tiles, in_history, skipped = _tiles_of(prefix + first, num_keys, history, B)
    for tile in range(0, num_tiles):
        start = (tile + tl.where(tile >= in_history, skipped, 0)) * B
        keys = block_of(start + tl.arange(0, B), k0, num_keys)
        x = products(q_source, queries, held_q, k_source, keys, None, qk_width, D, CHUNK, B) * scale
        if not CHANNEL:
            x = add_biases(x, tables, times, queries, keys, history)
        d_weights = products(g_source, queries, held_g, v_source, keys, None, v_width, V, CHUNK, B)
        d_x = score_grads(x, d_weights, visible(queries, keys, history), sums, dots, inverse_norm)
        total = add_product(total, d_x, load_rows(k_source, keys, 0, qk_width, D))
    store_rows((d_q + head * qk_width, heads * qk_width), queries, qk_width, total * scale, D)


@triton.jit
def key_grads(
    q, k, v, grad, saved, row_dots, d_k, d_v, blocks, query_offsets, key_offsets, num_targets, query_times, key_times,
    boundaries, position, time, decay, heads, channels, qk_width, v_width, q_stride, k_stride, v_stride, num_position,
    num_buckets, scale, inverse_norm, SOFTMAX: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    B: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    number, first, head = (
        tl.load(blocks + 2 * tl.program_id(0)),
        tl.load(blocks + 2 * tl.program_id(0) + 1),
        tl.program_id(1),
    )
    q0, k0, num_keys, prefix, history = sequence_of(number, query_offsets, key_offsets, num_targets)
    tables, times = (position, num_position, time, decay, boundaries, num_buckets), (query_times, key_times)
    keys = block_of(first + tl.arange(0, B), k0, num_keys)
    q_source, k_source, v_source = (
        (q + head * qk_width, q_stride),
        (k + head * qk_width, k_stride),
        (v + head * v_width, v_stride),
    )
    channel = heads * v_width
    grad += head * v_width
    held_k, held_v = load_rows(k_source, keys, 0, qk_width, CHUNK), load_rows(v_source, keys, 0, v_width, CHUNK)
    total_k, total_v = tl.zeros((B, D), tl.float32), tl.zeros((B, V), tl.float32)
    end = tl.where(first >= history, tl.minimum(first + B, num_keys), num_keys)  # a target is seen by itself alone
    for start in range(prefix + tl.maximum(first - prefix, 0) // B * B, end, B):
        queries = block_of(start + tl.arange(0, B), q0 - prefix, num_keys)
        seen = visible(queries, keys, history)
        g_source = (grad, channels * channel)
        x = products(q_source, queries, None, k_source, keys, held_k, qk_width, D, CHUNK, B) * scale
        if CHANNEL:
            if position is not None:
                bias = tl.where(seen, position_bias(tables, queries, keys, history), 0.0)
                g_block = load_rows((grad + channel, channels * channel), queries, 0, v_width, V)
                total_v = add_product(total_v, tl.trans(bias), g_block)
            if query_times is not None:
                bias = tl.where(seen, time_bias(tables, times, queries, keys), 0.0)
                g_block = load_rows((grad + (channels - 1) * channel, channels * channel), queries, 0, v_width, V)
                total_v = add_product(total_v, tl.trans(bias), g_block)
        else:
            x = add_biases(x, tables, times, queries, keys, history)
        sums, dots = load_sums(saved, row_dots, queries, heads, head, SOFTMAX)
        weights = weights_of(x, seen, sums, inverse_norm)
        total_v = add_product(total_v, tl.trans(weights), load_rows(g_source, queries, 0, v_width, V))
        d_weights = products(g_source, queries, None, v_source, keys, held_v, v_width, V, CHUNK, B)
        d_x = score_grads(x, d_weights, seen, sums, dots, inverse_norm)
        total_k = add_product(total_k, tl.trans(d_x), load_rows(q_source, queries, 0, qk_width, D))
    store_rows((d_k + head * qk_width, heads * qk_width), keys, qk_width, total_k * scale, D)
    store_rows((d_v + head * v_width, channel), keys, v_width, total_v, V)
