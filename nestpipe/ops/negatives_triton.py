"""Sampled softmax (negatives.py) in Triton, by segments of tokens: forward and backward without float atomics.

    score_kernel    one program for each token: scores its negatives, keeps a running maximum and sum, and adds the rows,
                    weighted, to the gradient of its query
    spread_kernel   one program for each few rows: adds the queries of the pairs (token, negative) that score a row, weighted

A row's gradient is summed over tokens and their negatives, ascending, then over the tokens whose positive it is: bitwise
independent of the segment size. Inputs may be bf16 or fp16; scores and sums are fp32. A segment keeps one number for each
pair, never a vector.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestpipe.ops.negatives_torch import LossAndGrads, LossTask

OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
TILE = 2048  # numbers of negatives that a program holds at a time
SPREAD_TILE = 512  # numbers of row gradients


@triton.jit
def score_kernel(
    queries, rows, positive_rows, positives, numbers, scores, largest, totals, coefficients, losses, d_queries, num,
    width, D: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Scores [C, num] of the rows `numbers` [C, num], what makes them probabilities, the loss and the query's gradient."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, D)
    real = columns < width
    query = tl.load(queries + token * width + columns, mask=real, other=0.0).to(tl.float32)
    positive = tl.load(positives + token)
    own_row = tl.load(positive_rows + positive * width + columns, mask=real, other=0.0).to(tl.float32)
    own = tl.sum(own_row * query, 0)
    high, total = own, own * 0.0 + 1.0
    grad = tl.zeros((D,), tl.float32)
    for begin in range(0, num, N):
        places = begin + tl.arange(0, N)
        number = tl.load(numbers + token * num + places, mask=places < num, other=0)
        counts = (places < num) & (number != positive)
        row = tl.load(
            rows + number[:, None] * width + columns[None, :], mask=counts[:, None] & real[None, :], other=0.0
        )
        row = row.to(tl.float32)
        score = tl.where(counts, tl.sum(row * query[None, :], 1), -float("inf"))
        tl.store(scores + token * num + places, score, mask=places < num)
        higher = tl.maximum(high, tl.max(score, 0))
        shrink, weight = tl.exp(high - higher), tl.exp(score - higher)
        total = total * shrink + tl.sum(weight, 0)
        grad = grad * shrink + tl.sum(row * weight[:, None], 0)
        high = higher
    coefficient = tl.exp(own - high) / total - 1.0
    grad = grad / total + coefficient * own_row
    tl.store(d_queries + token * width + columns, grad, mask=real)
    tl.store(largest + token, high)
    tl.store(totals + token, total)
    tl.store(coefficients + token, coefficient)
    tl.store(losses + token, tl.log(total) + high - own)


@triton.jit
def spread_kernel(
    queries, weights, largest, totals, order, starts, d_rows, num_rows, num, width, ARE_SCORES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """d_rows[u] += weights[pair] * queries[pair // num] for the pairs order[starts[u]:starts[u + 1]], one after the other."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, inside = row < num_rows, columns < width
    begin = tl.load(starts + row, mask=live, other=0)
    count = tl.load(starts + row + 1, mask=live, other=0) - begin
    most = tl.max(count, 0).to(tl.int32)
    if most > 0:
        at = row[:, None] * width + columns[None, :]
        grad = tl.load(d_rows + at, mask=live[:, None] & inside[None, :], other=0.0)
        for k in range(0, most):
            more = k < count
            pair = tl.load(order + begin + k, mask=more, other=0)
            token = pair // num
            weight = tl.load(weights + pair, mask=more, other=0.0)
            if ARE_SCORES:
                high, total = (
                    tl.load(largest + token, mask=more, other=0.0),
                    tl.load(totals + token, mask=more, other=1.0),
                )
                weight = tl.exp(weight - high) / total
            real = more[:, None] & inside[None, :]
            query = tl.load(queries + token[:, None] * width + columns[None, :], mask=real, other=0.0).to(tl.float32)
            grad = tl.where(more[:, None], grad + query * weight[:, None], grad)
        tl.store(d_rows + at, grad, mask=live[:, None] & inside[None, :])


def run(queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> LossAndGrads:
    """Loss and gradients; on the device of the rows, which no launch waits for."""
    same = positive_rows is rows
    queries, rows = queries.detach().contiguous(), rows.detach().contiguous()
    positive_rows = rows if same else positive_rows.detach().contiguous()
    width, numbers = queries.shape[1], queries.new_empty(4, len(queries), dtype=torch.float32)
    largest, totals, coefficients, losses = numbers
    d_queries = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
    d_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    d_positive_rows = d_rows if same else torch.zeros_like(d_rows)
    ends = torch.arange(len(rows) + 1, device=rows.device)
    for tokens in task.segments(0, len(queries)):
        negatives = task.negatives_of(tokens).contiguous()
        scores = torch.empty(negatives.shape, dtype=torch.float32, device=rows.device)
        per_token = (one[tokens] for one in (largest, totals, coefficients, losses, d_queries))
        own = (queries[tokens], rows, positive_rows, task.positives[tokens], negatives, scores)
        score_kernel[(len(negatives),)](
            *own, *per_token, negatives.shape[1], width, **score_constants(width), **OPTIONS
        )
        _spread(queries[tokens], scores, (largest[tokens], totals[tokens]), negatives, ends, d_rows)
    _spread(queries, coefficients.unsqueeze(1), None, task.positives.unsqueeze(1), ends, d_positive_rows)
    grads = d_rows.to(rows.dtype), d_positive_rows.to(rows.dtype)
    return losses.sum(dtype=torch.float64), d_queries.to(queries.dtype), grads[0], grads[0] if same else grads[1]


def score_constants(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"D": padded, "N": max(TILE // padded, 1)}


def spread_constants(width: int) -> dict[str, int]:
    columns = min(triton.next_power_of_2(width), 128)
    return {"ROWS": SPREAD_TILE // columns, "COLUMNS": columns}


def _spread(
    queries: Tensor, weights: Tensor, scale: tuple[Tensor, Tensor] | None, numbers: Tensor, ends: Tensor, d_rows: Tensor
) -> None:
    """Adds the gradients of rows `numbers` [C, n] to `d_rows`: the weights [C, n], or exp(weights - scale[0]) / scale[1]."""
    if not numbers.numel():
        return
    order = numbers.flatten().argsort(stable=True)
    starts = torch.searchsorted(numbers.flatten().index_select(0, order), ends)
    constants: dict[str, Any] = {"ARE_SCORES": scale is not None, **spread_constants(queries.shape[1])}
    grid = (triton.cdiv(len(d_rows), constants["ROWS"]), triton.cdiv(queries.shape[1], constants["COLUMNS"]))
    sizes = (len(d_rows), numbers.shape[1], queries.shape[1])
    spread_kernel[grid](
        queries, weights, *(scale or (weights, weights)), order, starts, d_rows, *sizes, **constants, **OPTIONS
    )
