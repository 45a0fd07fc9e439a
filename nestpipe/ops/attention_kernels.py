"""Triton kernels of the attention op: forward, and the gradients of queries, keys and values.

    forward        a program per block of B queries and head     loops over tiles of B keys: channel of the content
    bias_channels  the same, in channel mode                     channels of position and time
    query_grads    the same                                      d_q
    key_grads      a program per block of B keys and head        loops over blocks of queries that see one: d_k
    value_grads    the same                                      d_v

attention_bias_kernels.py has the gradients of the biases, attention_tiles.py what happens in a tile. Each kernel
recomputes the scores. Two results of one kernel would save that, but their sums would not fit into registers at width 128.
Products of float32 are IEEE float32, those of bfloat16 are summed in float32. Every sum has a fixed order and none is
atomic, so equal launches give equal bits.

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
    source_of,
    store_rows,
    time_bias,
    times_of,
    visible,
    weights_of,
)


@triton.jit
def _key_tiles(first, num_keys, history, B: tl.constexpr):
    """Number of key tiles of a query block, those in the history, and how many behind them no target of it sees."""
    end = tl.minimum(num_keys, first + B)
    in_history = tl.cdiv(tl.minimum(history, end), B)
    skipped = tl.maximum(first // B - in_history, 0)
    return tl.cdiv(end, B) - skipped, in_history, skipped


@triton.jit
def _query_range(first, num_keys, prefix, history, B: tl.constexpr):
    """Places of the queries that see a key block; a target is seen by itself alone."""
    begin = prefix + tl.maximum(first - prefix, 0) // B * B
    return begin, tl.where(first >= history, tl.minimum(first + B, num_keys), num_keys)


@triton.jit
def forward(
    q, k, v, out, saved, blocks, query_offsets, key_offsets, num_targets, query_times, key_times, boundaries, position,
    time, decay, heads, channels, num_position, num_buckets, scale, inverse_norm, qk_width: tl.constexpr,
    v_width: tl.constexpr, q_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr,
    SOFTMAX: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, V: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    q0, k0, num_keys, prefix, history, first = sequence_of(blocks, query_offsets, key_offsets, num_targets)
    tables = (position, num_position, time, decay, boundaries, num_buckets)
    times = times_of(query_times, key_times, q0, k0)
    q_source, k_source = source_of(q, q0, q_stride, qk_width), source_of(k, k0, k_stride, qk_width)
    v_source = source_of(v, k0, v_stride, v_width)
    queries = block_of(prefix + first, num_keys, B)
    held = load_rows(q_source, queries, 0, qk_width, CHUNK)
    largest, sums = tl.full((B,), masked, tl.float32), tl.zeros((B,), tl.float32)
    total = tl.zeros((B, V), tl.float32)
    num_tiles, in_history, skipped = _key_tiles(prefix + first, num_keys, history, B)
    for tile in range(0, num_tiles):
        keys = block_of((tile + tl.where(tile >= in_history, skipped, 0)) * B, num_keys, B)
        seen = visible(queries, keys, history)
        x = products(q_source, queries, held, k_source, keys, None, qk_width, D, CHUNK, B) * scale
        if not CHANNEL:
            x = add_biases(x, tables, times, queries, keys, history)
        if SOFTMAX:  # relative to the largest score so far
            larger = tl.maximum(largest, tl.max(tl.where(seen, x, masked), 1))
            shrink = tl.exp(largest - larger)
            weights = weights_of(x, seen, larger, inverse_norm)
            sums, largest = sums * shrink + tl.sum(weights, 1), larger
            total *= shrink[:, None]
        else:
            weights = weights_of(x, seen, None, inverse_norm)
        total = add_product(total, weights, load_rows(v_source, keys, 0, v_width, V))
    if SOFTMAX:
        sums = tl.where(queries[1], sums, 1.0)
        total /= sums[:, None]
        at = saved + q0 * heads + tl.program_id(1) + queries[0] * heads
        tl.store(at, largest + tl.log(sums), mask=queries[1])
    store_rows(source_of(out, q0, channels * heads * v_width, v_width), queries, v_width, total, V)


@triton.jit
def bias_channels(
    v, out, blocks, query_offsets, key_offsets, num_targets, query_times, key_times, boundaries, position, time, decay,
    heads, channels, num_position, num_buckets, v_width: tl.constexpr, v_stride: tl.constexpr, V: tl.constexpr,
    B: tl.constexpr
):  # fmt: skip
    q0, k0, num_keys, prefix, history, first = sequence_of(blocks, query_offsets, key_offsets, num_targets)
    tables = (position, num_position, time, decay, boundaries, num_buckets)
    times = times_of(query_times, key_times, q0, k0)
    v_source = source_of(v, k0, v_stride, v_width)
    queries = block_of(prefix + first, num_keys, B)
    by_position, by_time = tl.zeros((B, V), tl.float32), tl.zeros((B, V), tl.float32)
    num_tiles, in_history, skipped = _key_tiles(prefix + first, num_keys, history, B)
    for tile in range(0, num_tiles):
        keys = block_of((tile + tl.where(tile >= in_history, skipped, 0)) * B, num_keys, B)
        seen = visible(queries, keys, history)
        v_block = load_rows(v_source, keys, 0, v_width, V)
        if position is not None:
            bias = tl.where(seen, position_bias(tables, queries, keys, history), 0.0)
            by_position = add_product(by_position, bias, v_block)
        if query_times is not None:
            bias = tl.where(seen, time_bias(tables, times, queries, keys), 0.0)
            by_time = add_product(by_time, bias, v_block)
    channel = heads * v_width
    if position is not None:
        store_rows(source_of(out + channel, q0, channels * channel, v_width), queries, v_width, by_position, V)
    if query_times is not None:
        last = out + (channels - 1) * channel
        store_rows(source_of(last, q0, channels * channel, v_width), queries, v_width, by_time, V)


@triton.jit
def query_grads(
    q, k, v, grad, saved, row_dots, d_q, blocks, query_offsets, key_offsets, num_targets, query_times, key_times,
    boundaries, position, time, decay, heads, channels, num_position, num_buckets, scale, inverse_norm,
    qk_width: tl.constexpr, v_width: tl.constexpr, q_stride: tl.constexpr, k_stride: tl.constexpr,
    v_stride: tl.constexpr, SOFTMAX: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    B: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    q0, k0, num_keys, prefix, history, first = sequence_of(blocks, query_offsets, key_offsets, num_targets)
    tables = (position, num_position, time, decay, boundaries, num_buckets)
    times = times_of(query_times, key_times, q0, k0)
    q_source, k_source = source_of(q, q0, q_stride, qk_width), source_of(k, k0, k_stride, qk_width)
    v_source = source_of(v, k0, v_stride, v_width)
    g_source = source_of(grad, q0, channels * heads * v_width, v_width)
    queries = block_of(prefix + first, num_keys, B)
    held_q, held_g = load_rows(q_source, queries, 0, qk_width, CHUNK), load_rows(g_source, queries, 0, v_width, CHUNK)
    sums, dots = load_sums(saved, row_dots, q0, queries, heads, SOFTMAX)
    total = tl.zeros((B, D), tl.float32)
    num_tiles, in_history, skipped = _key_tiles(prefix + first, num_keys, history, B)
    for tile in range(0, num_tiles):
        keys = block_of((tile + tl.where(tile >= in_history, skipped, 0)) * B, num_keys, B)
        x = products(q_source, queries, held_q, k_source, keys, None, qk_width, D, CHUNK, B) * scale
        if not CHANNEL:
            x = add_biases(x, tables, times, queries, keys, history)
        d_weights = products(g_source, queries, held_g, v_source, keys, None, v_width, V, CHUNK, B)
        d_x = score_grads(x, d_weights, visible(queries, keys, history), sums, dots, inverse_norm)
        total = add_product(total, d_x, load_rows(k_source, keys, 0, qk_width, D))
    store_rows(source_of(d_q, q0, heads * qk_width, qk_width), queries, qk_width, total * scale, D)


@triton.jit
def key_grads(
    q, k, v, grad, saved, row_dots, d_k, blocks, query_offsets, key_offsets, num_targets, query_times, key_times,
    boundaries, position, time, decay, heads, channels, num_position, num_buckets, scale, inverse_norm,
    qk_width: tl.constexpr, v_width: tl.constexpr, q_stride: tl.constexpr, k_stride: tl.constexpr,
    v_stride: tl.constexpr, SOFTMAX: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    B: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    q0, k0, num_keys, prefix, history, first = sequence_of(blocks, query_offsets, key_offsets, num_targets)
    tables = (position, num_position, time, decay, boundaries, num_buckets)
    times = times_of(query_times, key_times, q0, k0)
    q_source, k_source = source_of(q, q0, q_stride, qk_width), source_of(k, k0, k_stride, qk_width)
    v_source = source_of(v, k0, v_stride, v_width)
    g_source = source_of(grad, q0, channels * heads * v_width, v_width)
    keys = block_of(first, num_keys, B)
    held_k, held_v = load_rows(k_source, keys, 0, qk_width, CHUNK), load_rows(v_source, keys, 0, v_width, CHUNK)
    total = tl.zeros((B, D), tl.float32)
    begin, end = _query_range(first, num_keys, prefix, history, B)
    for start in range(begin, end, B):
        queries = block_of(start, num_keys, B)
        x = products(q_source, queries, None, k_source, keys, held_k, qk_width, D, CHUNK, B) * scale
        if not CHANNEL:
            x = add_biases(x, tables, times, queries, keys, history)
        d_weights = products(g_source, queries, None, v_source, keys, held_v, v_width, V, CHUNK, B)
        sums, dots = load_sums(saved, row_dots, q0, queries, heads, SOFTMAX)
        d_x = score_grads(x, d_weights, visible(queries, keys, history), sums, dots, inverse_norm)
        total = add_product(total, tl.trans(d_x), load_rows(q_source, queries, 0, qk_width, D))
    store_rows(source_of(d_k, k0, heads * qk_width, qk_width), keys, qk_width, total * scale, D)


@triton.jit
def value_grads(
    q, k, grad, saved, row_dots, d_v, blocks, query_offsets, key_offsets, num_targets, query_times, key_times,
    boundaries, position, time, decay, heads, channels, num_position, num_buckets, scale, inverse_norm,
    qk_width: tl.constexpr, v_width: tl.constexpr, q_stride: tl.constexpr, k_stride: tl.constexpr,
    SOFTMAX: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, V: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    q0, k0, num_keys, prefix, history, first = sequence_of(blocks, query_offsets, key_offsets, num_targets)
    tables = (position, num_position, time, decay, boundaries, num_buckets)
    times = times_of(query_times, key_times, q0, k0)
    q_source, k_source = source_of(q, q0, q_stride, qk_width), source_of(k, k0, k_stride, qk_width)
    channel = heads * v_width
    g_source = source_of(grad, q0, channels * channel, v_width)
    keys = block_of(first, num_keys, B)
    held = load_rows(k_source, keys, 0, qk_width, CHUNK)
    total = tl.zeros((B, V), tl.float32)
    begin, end = _query_range(first, num_keys, prefix, history, B)
    for start in range(begin, end, B):
        queries = block_of(start, num_keys, B)
        seen = visible(queries, keys, history)
        x = products(q_source, queries, None, k_source, keys, held, qk_width, D, CHUNK, B) * scale
        if not CHANNEL:
            x = add_biases(x, tables, times, queries, keys, history)
        sums, _ = load_sums(saved, row_dots, q0, queries, heads, SOFTMAX)
        weights = weights_of(x, seen, sums, inverse_norm)
        total = add_product(total, tl.trans(weights), load_rows(g_source, queries, 0, v_width, V))
        if CHANNEL:
            if position is not None:
                bias = tl.where(seen, position_bias(tables, queries, keys, history), 0.0)
                g_block = load_rows((g_source[0] + channel, g_source[1]), queries, 0, v_width, V)
                total = add_product(total, tl.trans(bias), g_block)
            if query_times is not None:
                bias = tl.where(seen, time_bias(tables, times, queries, keys), 0.0)
                last = (g_source[0] + (channels - 1) * channel, g_source[1])
                total = add_product(total, tl.trans(bias), load_rows(last, queries, 0, v_width, V))
    store_rows(source_of(d_v, k0, channel, v_width), keys, v_width, total, V)
