"""What the attention kernels share: loads, products, the mask, the biases and the weights of a tile, in Triton.

A tile is B queries times B keys of one sequence and head. The rules are those of kernel_args.py. Tuples of the functions:

    queries, keys   places [B] in the sequence, and which of them exist [B]
    source          a tensor at place 0 of the sequence, for one head, and the elements between two of its rows
    tables          position, its length, time, decay, boundaries of buckets, number of buckets
    times           times of queries and of keys, at place 0 of the sequence; None if no bias uses them

An absent tensor is None: Triton compiles a kernel for each combination. Offsets in a sequence are 32 bits wide, which
takes half the registers; attention_triton.py refuses what does not fit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.ops.kernel_args import BUCKET_WIDTH, MASKED

_INVERSE_WIDTH = tl.constexpr(1.0 / BUCKET_WIDTH)
_LOG_ERROR = tl.constexpr(1e-3)  # in buckets; float32 and the device's logarithm are off by less than 1e-4
masked = tl.constexpr(MASKED)


@triton.jit
def sequence_of(programs, query_offsets, key_offsets, num_targets):
    """Of this program's sequence: the rows of place 0 among queries and keys, numbers of keys, of keys without a query
    and of history; and the second number that the plan has for the program."""
    number = tl.load(programs + 2 * tl.program_id(0))
    q0, k0 = tl.load(query_offsets + number), tl.load(key_offsets + number)
    num_keys = (tl.load(key_offsets + number + 1) - k0).to(tl.int32)
    prefix = num_keys - (tl.load(query_offsets + number + 1) - q0).to(tl.int32)
    history = num_keys - tl.load(num_targets + number).to(tl.int32)
    return q0 - prefix, k0, num_keys, prefix, history, tl.load(programs + 2 * tl.program_id(0) + 1)


@triton.jit
def times_of(query_times, key_times, q0, k0):
    if query_times is None:
        times = (None, None)
    else:
        times = (query_times + q0, key_times + k0)
    return times


@triton.jit
def source_of(tensor, row, stride, width):
    """Of this program's head."""
    return tensor + row * stride + tl.program_id(1) * width, stride


@triton.jit
def block_of(first, num_keys, B: tl.constexpr):
    places = first + tl.arange(0, B)
    return places, (places >= 0) & (places < num_keys)


@triton.jit
def load_rows(source, block, first, width: tl.constexpr, W: tl.constexpr):
    """Columns first … first + W - 1 of a block's rows; zeros where there is no such row or column."""
    columns = first + tl.arange(0, W)
    real = block[1][:, None]
    if width % W != 0:
        real = real & (columns < width)[None, :]
    return tl.load(source[0] + (block[0][:, None] * source[1] + columns[None, :]), mask=real, other=0.0)


@triton.jit
def store_rows(source, block, width: tl.constexpr, values, W: tl.constexpr):
    columns = tl.arange(0, W)
    real = block[1][:, None]
    if width % W != 0:
        real = real & (columns < width)[None, :]
    at = block[0][:, None] * source[1] + columns[None, :]
    tl.store(source[0] + at, values.to(source[0].dtype.element_ty), mask=real)


@triton.jit
def products(
    a, a_block, held_a, b, b_block, held_b, width: tl.constexpr, W: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr
):
    """Rows of a times rows of b, [B, B] in float32, in steps of CHUNK columns.

    Triton unrolls the products of float32: over a whole width their operands would not fit into registers. If there is
    one step, the operand that is the same in all tiles is loaded before (`held_a` or `held_b`, else None).
    """
    total = tl.zeros((B, B), tl.float32)
    for first in range(0, width, CHUNK):
        if CHUNK == W and held_a is not None:
            a_columns = held_a
        else:
            a_columns = load_rows(a, a_block, first, width, CHUNK)
        if CHUNK == W and held_b is not None:
            b_columns = held_b
        else:
            b_columns = load_rows(b, b_block, first, width, CHUNK)
        total = tl.dot(a_columns, tl.trans(b_columns), total, input_precision="ieee")
    return total


@triton.jit
def add_product(total, weights, rows):
    """total + weights · rows, in float32; weights are rounded to the type of rows."""
    return tl.dot(weights.to(rows.dtype), rows, total, input_precision="ieee")


@triton.jit
def visible(queries, keys, history):
    """Which queries see which keys: an event itself and earlier events, a target the history and itself."""
    query, key = queries[0][:, None], keys[0][None, :]
    return queries[1][:, None] & keys[1][None, :] & (key <= query) & ((key < history) | (key == query))


@triton.jit
def position_bias(tables, queries, keys, history):
    distance = tl.minimum(queries[0], history)[:, None] - tl.minimum(keys[0], history)[None, :]
    return tl.load(tables[0] + tl.minimum(tl.maximum(distance, 0), tables[1] - 1))


@triton.jit
def time_gaps(times, queries, keys):
    """Seconds between queries and keys, at least 1."""
    of_queries = tl.load(times[0] + queries[0], mask=queries[1], other=0)
    of_keys = tl.load(times[1] + keys[0], mask=keys[1], other=0)
    return tl.maximum(tl.abs(of_queries[:, None] - of_keys[None, :]), 1)


@triton.jit
def buckets_of(tables, gaps):
    """floor(ln(gap) / 0.301). A guess that is right or too small by one, then the integer boundaries decide."""
    boundaries, num_buckets = tables[4], tables[5]
    guess = tl.maximum(tl.log(gaps.to(tl.float32)) * _INVERSE_WIDTH - _LOG_ERROR, 0.0).to(tl.int32)
    guess = tl.minimum(guess, tl.maximum(num_buckets - 1, 0))
    return tl.where((gaps >= tl.load(boundaries + guess)) & (num_buckets > 0), guess + 1, guess)


@triton.jit
def decay_bias(decay, gaps):
    """alpha · exp(-rate · T^beta)."""
    power = tl.exp(tl.load(decay + 2) * tl.log(gaps.to(tl.float32)))
    return tl.load(decay) * tl.exp(-tl.load(decay + 1) * power)


@triton.jit
def time_bias(tables, times, queries, keys):
    """Table plus decay, whichever is there."""
    gaps = time_gaps(times, queries, keys)
    if tables[2] is None:
        bias = decay_bias(tables[3], gaps)
    else:
        bias = tl.load(tables[2] + buckets_of(tables, gaps))
        if tables[3] is not None:
            bias += decay_bias(tables[3], gaps)
    return bias


@triton.jit
def add_biases(x, tables, times, queries, keys, history):
    """Add mode: scores with the biases that are there."""
    if tables[0] is not None:
        x += position_bias(tables, queries, keys, history)
    if times[0] is not None:
        x += time_bias(tables, times, queries, keys)
    return x


@triton.jit
def load_sums(saved, row_dots, q0, queries, heads, SOFTMAX: tl.constexpr):
    """The logsumexp of each query, and the softmax Jacobian's term; None for silu."""
    if SOFTMAX:
        first, at = q0 * heads + tl.program_id(1), queries[0] * heads
        sums = tl.load(saved + first + at, mask=queries[1], other=0.0)
        dots = tl.load(row_dots + first + at, mask=queries[1], other=0.0)
    else:
        sums, dots = None, None
    return sums, dots


@triton.jit
def weights_of(x, seen, sums, inverse_norm):
    """Attention weights: softmax if there are `sums`, else silu."""
    if sums is None:
        weights = x * inverse_norm / (1.0 + tl.exp(-x))
    else:
        weights = tl.exp(x - sums[:, None])
    return tl.where(seen, weights, 0.0)


@triton.jit
def score_grads(x, d_weights, seen, sums, dots, inverse_norm):
    """Gradients of the scores from those of the weights."""
    if sums is None:
        gate = 1.0 / (1.0 + tl.exp(-x))
        d_x = d_weights * inverse_norm * gate * (1.0 + x * (1.0 - gate))
    else:
        d_x = tl.exp(x - sums[:, None]) * (d_weights - dots[:, None])
    return tl.where(seen, d_x, 0.0)
