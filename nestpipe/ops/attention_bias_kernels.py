"""Triton kernels for the gradients of the biases, without atomics.

A bias is shared by all pairs of a distance or time bucket, so its gradient sums over many tiles. Band b of a sequence has
the tiles whose queries are b · B places behind their keys, so all its tiles have the same 2 B - 1 distances:

    keys ->        band 0 on the diagonal, band 1 below it, …        a tile of band b:  distance of (i, j) = b · B + i - j
    q   0                                                           skewed[i, r] = tile[i, (i - r) mod B]
    |   1 0                                                         upper[r] sums i >= r, at distance b · B + r
    v   2 1 0                                                       lower[r] sums i <  r, at distance (b - 1) · B + r

`bias_grads` has a program per band and head. It sums its tiles in order, in registers, and stores one row per table.
`sum_groups` adds the rows of all sequences and heads, in order, for each band. Band -1 has the pairs of a target with
itself, whose distance is 0. The place of a target is the end of the history, as everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.ops.attention_tiles import (
    add_biases,
    block_of,
    buckets_of,
    load_sums,
    products,
    score_grads,
    sequence_of,
    source_of,
    time_gaps,
    times_of,
    visible,
)


@triton.jit
def _diagonals(grads, shifts, B: tl.constexpr):
    """Sums `upper` and `lower` of a tile's diagonals; `shifts` [B] are the places of its queries in the band."""
    steps = tl.arange(0, B)
    behind = shifts[:, None] - steps[None, :]
    skewed = tl.gather(grads, behind & (B - 1), 1)
    return tl.sum(tl.where(behind >= 0, skewed, 0.0), 0), tl.sum(tl.where(behind < 0, skewed, 0.0), 0)


@triton.jit
def _add_buckets(total, grads, buckets, seen, T: tl.constexpr):
    """Adds a tile's sum of each bucket that occurs in it, in the order of buckets."""
    last = tl.max(tl.where(seen, buckets, -1))
    for bucket in range(tl.min(tl.where(seen, buckets, T)), last + 1):
        of_bucket = tl.sum(tl.where(buckets == bucket, grads, 0.0))
        total += tl.where(tl.arange(0, T) == bucket, of_bucket, 0.0)
    return total


@triton.jit
def bias_grads(
    q, k, v, grad, saved, row_dots, d_position, d_time, d_decay, blocks, query_offsets, key_offsets, num_targets,
    query_times, key_times, boundaries, position, time, decay, heads, channels, num_position, num_buckets, scale,
    inverse_norm, qk_width: tl.constexpr, v_width: tl.constexpr, q_stride: tl.constexpr, k_stride: tl.constexpr,
    v_stride: tl.constexpr, SOFTMAX: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    T: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    q0, k0, num_keys, prefix, history, band = sequence_of(blocks, query_offsets, key_offsets, num_targets)
    tables = (position, num_position, time, decay, boundaries, num_buckets)
    times = times_of(query_times, key_times, q0, k0)
    q_source, k_source = source_of(q, q0, q_stride, qk_width), source_of(k, k0, k_stride, qk_width)
    v_source = source_of(v, k0, v_stride, v_width)
    channel = heads * v_width
    g_source = source_of(grad, q0, channels * channel, v_width)
    upper, lower, by_bucket = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32), tl.zeros((T,), tl.float32)
    by_alpha, by_rate, by_beta = upper, upper, upper
    own = band < 0
    # From the first block of queries with a key in the band.
    begin = tl.where(own, tl.maximum(history - prefix, 0) // B, tl.cdiv(tl.maximum((band - 1) * B + 1 - prefix, 0), B))
    for first in range(prefix + begin * B, num_keys, B):
        queries = block_of(first, num_keys, B)
        placed = tl.where(own, queries[0], tl.minimum(queries[0], history))
        start = tl.where(own, first, tl.minimum(first, history))
        keys = block_of(start - tl.maximum(band, 0) * B, num_keys, B)
        seen = visible(queries, keys, history) & (own == (keys[0] >= history))[None, :]
        if CHANNEL:
            if position is not None:
                source = (g_source[0] + channel, g_source[1])
                for_position = products(source, queries, None, v_source, keys, None, v_width, V, CHUNK, B)
                for_position = tl.where(seen, for_position, 0.0)
            if query_times is not None:
                source = (g_source[0] + (channels - 1) * channel, g_source[1])
                for_time = products(source, queries, None, v_source, keys, None, v_width, V, CHUNK, B)
                for_time = tl.where(seen, for_time, 0.0)
        else:
            x = products(q_source, queries, None, k_source, keys, None, qk_width, D, CHUNK, B) * scale
            x = add_biases(x, tables, times, queries, keys, history)
            d_weights = products(g_source, queries, None, v_source, keys, None, v_width, V, CHUNK, B)
            sums, dots = load_sums(saved, row_dots, q0, queries, heads, SOFTMAX)
            for_position = score_grads(x, d_weights, seen, sums, dots, inverse_norm)
            for_time = for_position
        if position is not None:
            above, below = _diagonals(for_position, placed - start, B)
            upper, lower = upper + above, lower + below
        if query_times is not None:
            gaps = time_gaps(times, queries, keys)
            if time is not None:
                by_bucket = _add_buckets(by_bucket, for_time, buckets_of(tables, gaps), seen, T)
            if decay is not None:
                log_gaps = tl.log(gaps.to(tl.float32))
                power = tl.exp(tl.load(decay + 2) * log_gaps)
                faded = for_time * tl.exp(-tl.load(decay + 1) * power)
                by_power = faded * power * -tl.load(decay)
                by_alpha, by_rate = by_alpha + tl.sum(faded, 0), by_rate + tl.sum(by_power, 0)
                by_beta += tl.sum(by_power * log_gaps, 0) * tl.load(decay + 1)
    row = tl.program_id(0) * heads + tl.program_id(1)
    if position is not None:
        tl.store(d_position + row * 2 * B + tl.arange(0, B), upper)
        tl.store(d_position + row * 2 * B + B + tl.arange(0, B), lower)
    if query_times is not None:
        if time is not None:
            tl.store(d_time + row * T + tl.arange(0, T), by_bucket)
        if decay is not None:
            tl.store(d_decay + row * 4, tl.sum(by_alpha))
            tl.store(d_decay + row * 4 + 1, tl.sum(by_rate))
            tl.store(d_decay + row * 4 + 2, tl.sum(by_beta))


@triton.jit
def sum_groups(rows, starts, out, heads, W: tl.constexpr, R: tl.constexpr):
    """Sums of the rows [n, W] of each group, in order; group g has rows starts[g] · heads … starts[g + 1] · heads - 1."""
    group, columns = tl.program_id(0), tl.arange(0, W)
    begin, end = tl.load(starts + group) * heads, tl.load(starts + group + 1) * heads
    total = tl.zeros((R, W), tl.float32)
    for first in range(begin, end, R):
        numbers = first + tl.arange(0, R)
        at = numbers[:, None].to(tl.int64) * W + columns[None, :]
        total += tl.load(rows + at, mask=(numbers < end)[:, None], other=0.0)
    tl.store(out + group * W + columns, tl.sum(total, 0))
