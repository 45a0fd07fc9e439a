"""Adam on rows in Triton, lazy and exact; adam.cpp does the same on the host, bitwise.

Rows of a program have missed different numbers of batches. Those that walk do so together, as many steps as the one that
has most to make; the others are masked. rows_triton.py has the rules.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.ops.rows_triton import elements, gradient, slots_of

ORDER = tl.constexpr(8)  # of the series; kOrder in adam.cpp
SHORT = tl.constexpr(4)  # terms of the short series; kShort in adam.cpp
_ENTRY = tl.constexpr(2 + 8 + 1 + 4)  # centre, keep, coefficients of both


@triton.jit
def _step(weight, mean, square, grad, first, second, lr, keep, beta1, rest1, beta2, rest2, eps):
    """One step with bias corrections `first` and `second`: weights, means and squares."""
    mean = mean * beta1 + grad * rest1
    square = square * beta2 + grad * grad * rest2
    moved = tl.div_rn(tl.div_rn(mean, first) * lr, tl.sqrt_rn(tl.div_rn(square, second)) + eps)
    return weight * keep - moved, mean, square


@triton.jit
def _walk(weight, mean, square, seen, last, rates, keeps, corrections, beta1, beta2, eps):
    """The steps seen .. last of each row one by one, with zero gradients; a row that has seen no batch only decays."""
    has_moments = (seen > 0)[:, None]
    for k in range(0, tl.max(last - seen, 0)):
        step = seen + k
        active = step < last
        lr = tl.load(rates + step, mask=active, other=0.0)[:, None]
        keep = tl.load(keeps + step, mask=active, other=1.0)[:, None]
        first = tl.load(corrections + 2 * (step + 1), mask=active, other=1.0)[:, None]
        second = tl.load(corrections + 2 * (step + 1) + 1, mask=active, other=1.0)[:, None]
        active = active[:, None]
        mean, square = tl.where(active, mean * beta1, mean), tl.where(active, square * beta2, square)
        moved = tl.div_rn(tl.div_rn(mean, first) * lr, tl.sqrt_rn(tl.div_rn(square, second)) + eps)
        decayed = weight * keep
        weight = tl.where(active, tl.where(has_moments, decayed - moved, decayed), weight)
    return weight


@triton.jit
def _polynomial(coefficients, at, jumps, NUM: tl.constexpr):
    """The polynomial of each row's NUM coefficients at [ROWS, COLUMNS]."""
    total = tl.load(coefficients + NUM - 1, mask=jumps, other=0.0)[:, None]
    for step in tl.static_range(1, NUM):
        total = total * at + tl.load(coefficients + NUM - 1 - step, mask=jumps, other=0.0)[:, None]
    return total


@triton.jit
def _jump(weight, mean, square, entry, jumps, eps, short_square):
    """All steps at once, by the series whose entry is at `entry`."""
    centre = tl.load(entry, mask=jumps, other=1.0)[:, None]
    keep = tl.load(entry + 1, mask=jumps, other=1.0)[:, None]
    root = tl.sqrt_rn(square)
    scaled = root * centre
    below = tl.div_rn(1.0, scaled + eps)
    whole = _polynomial(entry + 2, (eps - scaled) * below, jumps, ORDER + 1) * below
    is_whole = square < short_square
    inverse = tl.div_rn(1.0, tl.where(is_whole, 1.0, root))
    short = _polynomial(entry + 3 + ORDER, inverse * -eps, jumps, SHORT) * inverse
    return tl.where(jumps[:, None], weight * keep - mean * tl.where(is_whole, whole, short), weight)


@triton.jit
def _catch_up(
    weight, mean, square, seen, live, step, settled, recent, late, rates, keeps, corrections, num_settled, horizon,
    first_series, short_square, beta1, beta2, eps, DECAYS: tl.constexpr
):  # fmt: skip
    """Weights [ROWS, COLUMNS] as of `step`; `seen` [ROWS] are the batches that each row has seen."""
    behind = live & (seen < step)
    jumps = behind & (seen >= first_series) & (seen > 0)
    walks = behind & (seen < first_series) & (seen > 0)
    if DECAYS:
        walks = walks | (behind & (seen == 0))
    last = tl.where(walks, tl.minimum(seen + horizon, step), seen)
    weight = _walk(weight, mean, square, seen, last, rates, keeps, corrections, beta1, beta2, eps)
    number = seen.to(tl.int64)
    entry = tl.where(seen < num_settled, settled + number * _ENTRY, recent + (number - num_settled) * _ENTRY)
    weight = _jump(weight, mean, square, entry, jumps, eps, short_square)
    if DECAYS:
        is_late = behind & (seen < num_settled)
        weight = weight * tl.load(late + seen, mask=is_late, other=1.0)[:, None]
    return weight


@triton.jit(do_not_specialize=["n", "num_corrections"])
def lazy_adam_kernel(
    weights, mean, square, steps, corrections, num_corrections, slots, grads, starts, offsets, n, lr, keep, beta1, rest1,
    beta2, rest2, eps, D: tl.constexpr, ARRIVED: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """`steps` are a row's own. Corrections behind the end of the table are 1, as its last ones."""
    place, slot, live = slots_of(slots, n, ROWS)
    step = tl.load(steps + slot, mask=live, other=0) + 1
    known = tl.minimum(step, num_corrections - 1)
    first = tl.load(corrections + 2 * known, mask=live, other=1.0)[:, None]
    second = tl.load(corrections + 2 * known + 1, mask=live, other=1.0)[:, None]
    for begin in range(0, D, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        at, real = elements(slot, columns, live, D)
        grad = gradient(grads, starts, offsets, place, columns, live, D, ARRIVED, ALIGNED)
        w = tl.load(weights + at, mask=real, other=0.0)
        m = tl.load(mean + at, mask=real, other=0.0)
        v = tl.load(square + at, mask=real, other=0.0)
        w, m, v = _step(w, m, v, grad, first, second, lr, keep, beta1, rest1, beta2, rest2, eps)
        tl.store(weights + at, w, mask=real)
        tl.store(mean + at, m, mask=real)
        tl.store(square + at, v, mask=real)
    tl.store(steps + slot, step, mask=live)


@triton.jit(do_not_specialize=["n", "step", "num_settled", "horizon", "first_series"])
def adam_kernel(
    weights, mean, square, num_batches, slots, grads, starts, offsets, n, lr, keep, beta1, rest1, beta2, rest2, eps,
    step, settled, recent, late, rates, keeps, powers, corrections, num_settled, horizon, first_series,
    short_square,
    D: tl.constexpr, DECAYS: tl.constexpr, ARRIVED: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """Catches rows up to `step`, then makes the step of the batch."""
    place, slot, live = slots_of(slots, n, ROWS)
    seen = tl.load(num_batches + slot, mask=live, other=0)
    missed = live & (seen < step)
    power1 = tl.load(powers + 2 * (step - seen), mask=missed, other=1.0)[:, None]
    power2 = tl.load(powers + 2 * (step - seen) + 1, mask=missed, other=1.0)[:, None]
    first, second = tl.load(corrections + 2 * (step + 1)), tl.load(corrections + 2 * (step + 1) + 1)
    for begin in range(0, D, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        at, real = elements(slot, columns, live, D)
        w = tl.load(weights + at, mask=real, other=0.0)
        m = tl.load(mean + at, mask=real, other=0.0)
        v = tl.load(square + at, mask=real, other=0.0)
        w = _catch_up(
            w, m, v, seen, live, step, settled, recent, late, rates, keeps, corrections, num_settled, horizon,
            first_series, short_square, beta1, beta2, eps, DECAYS
        )  # fmt: skip
        grad = gradient(grads, starts, offsets, place, columns, live, D, ARRIVED, ALIGNED)
        w, m, v = _step(
            w, m * power1, v * power2, grad, first, second, lr, keep, beta1, rest1, beta2, rest2, eps
        )  # fmt: skip
        tl.store(weights + at, w, mask=real)
        tl.store(mean + at, m, mask=real)
        tl.store(square + at, v, mask=real)
    tl.store(num_batches + slot, tl.full((ROWS,), 1, tl.int32) + step, mask=live)


@triton.jit(do_not_specialize=["n", "step", "num_settled", "horizon", "first_series"])
def adam_gather_kernel(
    out, weights, mean, square, num_batches, slots, n, beta1, beta2, eps,
    step, settled, recent, late, rates, keeps, powers, corrections, num_settled, horizon, first_series,
    short_square,
    D: tl.constexpr, DECAYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[i] = the weights of slots[i] as of `step`; nothing else changes."""
    place, slot, live = slots_of(slots, n, ROWS)
    seen = tl.load(num_batches + slot, mask=live, other=0)
    for begin in range(0, D, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        at, real = elements(slot, columns, live, D)
        w = tl.load(weights + at, mask=real, other=0.0)
        m = tl.load(mean + at, mask=real, other=0.0)
        v = tl.load(square + at, mask=real, other=0.0)
        w = _catch_up(
            w, m, v, seen, live, step, settled, recent, late, rates, keeps, corrections, num_settled, horizon,
            first_series, short_square, beta1, beta2, eps, DECAYS
        )  # fmt: skip
        at, real = elements(place, columns, live, D)
        tl.store(out + at, w, mask=real)
