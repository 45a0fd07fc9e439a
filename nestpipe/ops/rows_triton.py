"""Rows by slot in Triton: copies, ordered sums and optimizer updates in place; rows.cpp does the same on the host.

One program has ROWS rows: copies and sums of one block of columns, updates of all columns, block after block. Every element
is computed by exactly rounded operations in the order of rows.cpp (`div_rn`, `sqrt_rn`, no fused multiply-add, no
atomics), so results are bitwise identical to the host's. Launches must say `enable_fp_fusion=False`.

Rows that are added may lie in several tensors: `offsets` are their distances from a base tensor, in numbers.
Widths are constants of a kernel, because a table has one and vector loads need it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(slots, n, ROWS: tl.constexpr):
    """The program's places, their slots, and which places have one."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + place, mask=place < n, other=-1)
    return place, slot, slot >= 0


@triton.jit
def elements(rows, columns, live, D: tl.constexpr):
    """Distances [ROWS, COLUMNS] of some columns of rows from the first row, and which of them exist."""
    return rows[:, None] * D + columns[None, :], live[:, None] & (columns < D)[None, :]


@triton.jit
def sum_of(base, starts, offsets, place, columns, live, D: tl.constexpr, ALIGNED: tl.constexpr):
    """Sums [ROWS, COLUMNS] of the rows of each place, in order, the first being copied."""
    begin = tl.load(starts + place, mask=live, other=0)
    count = tl.load(starts + place + 1, mask=live, other=0) - begin
    real = live[:, None] & (columns < D)[None, :]
    total = tl.load(row_at(base, offsets, begin, live, columns, ALIGNED), mask=real, other=0.0)
    for k in range(1, tl.max(count, 0).to(tl.int32)):
        more = k < count
        row = tl.load(row_at(base, offsets, begin + k, more, columns, ALIGNED), mask=real & more[:, None], other=0.0)
        total = tl.where(more[:, None], total + row, total)
    return total


@triton.jit
def row_at(base, offsets, number, live, columns, ALIGNED: tl.constexpr):
    """Pointers to columns of the rows whose offsets have these numbers."""
    offset = tl.load(offsets + number, mask=live, other=0)
    if ALIGNED:
        offset = tl.multiple_of(offset, 4)
    return base + offset[:, None] + columns[None, :]


@triton.jit
def gradient(
    grads, starts, offsets, place, columns, live, D: tl.constexpr, ARRIVED: tl.constexpr, ALIGNED: tl.constexpr
):
    """The gradients of places: given [n, D], or sums of what arrived."""
    if ARRIVED:
        grad = sum_of(grads, starts, offsets, place, columns, live, D, ALIGNED)
    else:
        at, real = elements(place, columns, live, D)
        grad = tl.load(grads + at, mask=real, other=0.0)
    return grad


@triton.jit(do_not_specialize=["n"])
def copy_kernel(
    source, target, source_rows, target_rows, n, D: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """target[target_rows[i]] = source[source_rows[i]].

    FROM: `source_rows` are "places" (i itself), "slots" or "offsets" in numbers. TO: `target_rows` are "places" or "slots".
    """
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns, live = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), place < n
    if FROM == "offsets":
        from_, real = row_at(source, source_rows, place, live, columns, ALIGNED), live[:, None] & (columns < D)[None, :]
    else:
        row = tl.load(source_rows + place, mask=live, other=0) if FROM == "slots" else place
        at, real = elements(row, columns, live, D)
        from_ = source + at
    row = tl.load(target_rows + place, mask=live, other=0) if TO == "slots" else place
    at, real = elements(row, columns, live, D)
    tl.store(target + at, tl.load(from_, mask=real), mask=real)


@triton.jit(do_not_specialize=["n"])
def sum_kernel(
    base, target, starts, offsets, target_rows, n, D: tl.constexpr, ADDS: tl.constexpr, TO: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """target[target_rows[i]] = the sum of the rows of place i, or with ADDS each of them added to it, in order."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns, live = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), place < n
    row = tl.load(target_rows + place, mask=live, other=0) if TO == "slots" else place
    at, real = elements(row, columns, live, D)
    if ADDS:
        begin = tl.load(starts + place, mask=live, other=0)
        count = tl.load(starts + place + 1, mask=live, other=0) - begin
        total = tl.load(target + at, mask=real, other=0.0)
        for k in range(0, tl.max(count, 0).to(tl.int32)):
            more = k < count
            row_k = tl.load(
                row_at(base, offsets, begin + k, more, columns, ALIGNED), mask=real & more[:, None], other=0.0
            )
            total = tl.where(more[:, None], total + row_k, total)
    else:
        total = sum_of(base, starts, offsets, place, columns, live, D, ALIGNED)
    tl.store(target + at, total, mask=real)


@triton.jit(do_not_specialize=["n"])
def sgd_kernel(
    weights, slots, grads, starts, offsets, n, lr, keep, D: tl.constexpr, ARRIVED: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    place, slot, live = slots_of(slots, n, ROWS)
    for begin in range(0, D, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        at, real = elements(slot, columns, live, D)
        grad = gradient(grads, starts, offsets, place, columns, live, D, ARRIVED, ALIGNED)
        tl.store(weights + at, tl.load(weights + at, mask=real) * keep - grad * lr, mask=real)


@triton.jit(do_not_specialize=["n"])
def adagrad_kernel(
    weights, sums, slots, grads, starts, offsets, n, lr, keep, eps, D: tl.constexpr, ARRIVED: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    place, slot, live = slots_of(slots, n, ROWS)
    for begin in range(0, D, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        at, real = elements(slot, columns, live, D)
        grad = gradient(grads, starts, offsets, place, columns, live, D, ARRIVED, ALIGNED)
        total = tl.load(sums + at, mask=real, other=0.0) + grad * grad
        tl.store(sums + at, total, mask=real)
        moved = tl.div_rn(grad * lr, tl.sqrt_rn(total) + eps)
        tl.store(weights + at, tl.load(weights + at, mask=real) * keep - moved, mask=real)


@triton.constexpr_function
def levels(columns):
    """How often a power of two is halved until it is 1."""
    return columns.bit_length() - 1


@triton.jit
def fold_order(D: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns in an order in which neighbours, their pairs and so on are what `fold` of rows.cpp adds; D where there is none.

    A level of `fold` halves a width, rounded up: level l adds column c + ceil(D / 2 ** (l + 1)) to c. So bit l of a position
    says whether its column is in the upper half of level l.
    """
    LEVELS: tl.constexpr = levels(COLUMNS)
    position = tl.arange(0, COLUMNS)
    column, real = position * 0, position >= 0
    for step in tl.static_range(LEVELS):
        level = LEVELS - 1 - step
        column += ((position >> level) & 1) * ((D + (2 << level) - 1) >> (level + 1))
        real = real & (column < ((D + (1 << level) - 1) >> level))
    return tl.where(real, column, D)


@triton.jit
def fold(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row sums [ROWS, 1] of values in the order of `fold_order`."""
    for level in tl.static_range(levels(COLUMNS)):
        values = tl.sum(tl.reshape(values, (ROWS, COLUMNS >> (level + 1), 2)), 2)
    return values


@triton.jit(do_not_specialize=["n"])
def rowwise_adagrad_kernel(
    weights, sums, slots, grads, starts, offsets, n, lr, keep, eps, D: tl.constexpr, ARRIVED: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Whole rows at a time: `sums` has one number per row."""
    place, slot, live = slots_of(slots, n, ROWS)
    columns = fold_order(D, COLUMNS)
    at, real = elements(slot, columns, live, D)
    grad = gradient(grads, starts, offsets, place, columns, live, D, ARRIVED, ALIGNED)
    own = slot[:, None]
    mean = tl.div_rn(fold(grad * grad, ROWS, COLUMNS), D * 1.0)
    total = tl.load(sums + own, mask=live[:, None], other=0.0) + mean
    tl.store(sums + own, total, mask=live[:, None])
    moved = tl.div_rn(grad * lr, tl.sqrt_rn(total) + eps)
    tl.store(weights + at, tl.load(weights + at, mask=real) * keep - moved, mask=real)
