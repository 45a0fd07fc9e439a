"""Softmax losses as sums over tokens, in segments, so that no [T, items] or [T, negatives, D] tensor ever exists.

Both losses compute their gradients while they score: the gradient of a sum is the sum of the segments' gradients, so
nothing has to be kept or scored again for backward.

Letters: T tokens, I items, U distinct rows, R negatives, C tokens of a segment, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Scoring all U rows by one GEMM and picking R of them beats gathering R rows per token up to about this U / R.
_GEMM_RATIO = 48


def full_softmax(queries: Tensor, items: Tensor, targets: Tensor, *, segment: int) -> Tensor:
    """Sum over tokens of -log softmax(queries [T, D] · items [I, D])[target [T]]."""
    loss: Tensor = _FullSoftmax.apply(queries, items, targets, segment)  # type: ignore[no-untyped-call]
    return loss


def sampled_softmax(
    queries: Tensor, rows: Tensor, positives: Tensor, negatives: Tensor, *, segment: int, use_gemm: bool | None = None
) -> Tensor:
    """Sum over tokens of the softmax loss of one positive among R negatives.

    queries [T, D]; rows [U, D]; positives [T] and negatives [T, R] are places in `rows`. A negative that is the
    token's own positive is left out. `use_gemm` None picks the faster of two ways to the same scores.
    """
    if use_gemm is None:
        use_gemm = len(rows) <= _GEMM_RATIO * negatives.shape[1]
    loss: Tensor = _SampledSoftmax.apply(queries, rows, positives, negatives, segment, use_gemm)  # type: ignore[no-untyped-call]
    return loss


def plain_full_softmax(queries: Tensor, items: Tensor, targets: Tensor) -> Tensor:
    """`full_softmax` by definition; the oracle of its tests."""
    return F.cross_entropy(queries @ items.T, targets, reduction="sum")


def plain_sampled_softmax(queries: Tensor, rows: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """`sampled_softmax` by definition; the oracle of its tests."""
    places = torch.cat([positives.unsqueeze(1), negatives], dim=1)
    scores = (F.embedding(places, rows) * queries.unsqueeze(1)).sum(2)
    own = negatives == positives.unsqueeze(1)
    scores = scores.masked_fill(F.pad(own, (1, 0)), -torch.inf)
    return F.cross_entropy(scores, torch.zeros_like(positives), reduction="sum")


class _FullSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, items: Tensor, targets: Tensor, segment: int) -> Tensor:
        total = queries.new_zeros((), dtype=torch.float64)
        grad_queries, grad_items = torch.zeros_like(queries), torch.zeros_like(items)
        for first in range(0, len(queries), segment):
            part, target = queries[first : first + segment], targets[first : first + segment].unsqueeze(1)
            scores = part @ items.T
            loss, grad = _softmax_at(scores, target)
            total += loss
            torch.mm(grad, items, out=grad_queries[first : first + segment])
            grad_items.addmm_(grad.T, part)
        ctx.save_for_backward(grad_queries, grad_items)
        return total.to(queries.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_queries, grad_items = ctx.saved_tensors
        return grad * grad_queries, grad * grad_items, None, None


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, rows: Tensor, positives: Tensor, negatives: Tensor, segment: int, use_gemm: bool
    ) -> Tensor:
        score = _gemm_segment if use_gemm else _gather_segment
        total = queries.new_zeros((), dtype=torch.float64)
        grad_queries, grad_rows = torch.zeros_like(queries), torch.zeros_like(rows)
        for first in range(0, len(queries), segment):
            part = slice(first, first + segment)
            places = torch.cat([positives[part].unsqueeze(1), negatives[part]], dim=1)
            total += score(queries[part], rows, places, grad_queries[part], grad_rows)
        ctx.save_for_backward(grad_queries, grad_rows)
        return total.to(queries.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_queries, grad_rows = ctx.saved_tensors
        return grad * grad_queries, grad * grad_rows, None, None, None, None


def _gather_segment(queries: Tensor, rows: Tensor, places: Tensor, grad_queries: Tensor, grad_rows: Tensor) -> Tensor:
    """Loss of one segment; adds to both gradients. places [C, 1 + R], the positive first."""
    vectors = rows.index_select(0, places.flatten()).reshape(*places.shape, -1)
    scores = torch.bmm(vectors, queries.unsqueeze(2)).squeeze(2)
    loss, grad = _softmax_of_first(scores, places)
    torch.bmm(grad.unsqueeze(1), vectors, out=grad_queries.unsqueeze(1))
    torch.mul(grad.unsqueeze(2), queries.unsqueeze(1), out=vectors)
    grad_rows.index_add_(0, places.flatten(), vectors.flatten(0, 1))
    return loss


def _gemm_segment(queries: Tensor, rows: Tensor, places: Tensor, grad_queries: Tensor, grad_rows: Tensor) -> Tensor:
    """The same by scoring every row; cheaper when there are few."""
    every = queries @ rows.T
    loss, grad = _softmax_of_first(every.gather(1, places), places)
    spread = every.zero_().scatter_add_(1, places, grad)
    torch.mm(spread, rows, out=grad_queries)
    grad_rows.addmm_(spread.T, queries)
    return loss


def _softmax_of_first(scores: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax at column 0, and its gradient; other columns at the same place are left out."""
    scores[:, 1:].masked_fill_(places[:, 1:] == places[:, :1], -torch.inf)
    return _softmax_at(scores, torch.zeros_like(places[:, :1]))


def _softmax_at(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(scores [C, n]) at target [C, 1], and its gradient in the memory of the scores."""
    scores -= scores.amax(1, keepdim=True)
    at_target = scores.gather(1, target)
    total = scores.exp_().sum(1, keepdim=True)
    loss = (total.log() - at_target).sum(dtype=torch.float64)
    grad = scores.div_(total)
    return loss, grad.scatter_add_(1, target, grad.new_full((), -1).expand_as(target))
