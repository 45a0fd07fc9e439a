"""Softmax losses as sums over tokens, in segments, so that no [T, items] tensor ever exists; sampled ones: ops/negatives.py.
And Q2I, which brings instructions near the items they lead to.

Both softmax losses compute their gradients while they score: the gradient of a sum is the sum of the segments' gradients, so
nothing has to be kept or scored again for backward.

Letters: T tokens, I items, U distinct rows, N groups, C tokens of a segment, D width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.embedding.unique_ids import dedupe

_LEAST_VARIANCE = 1e-4


def full_softmax(queries: Tensor, items: Tensor, targets: Tensor, *, segment: int) -> Tensor:
    """Sum over tokens of -log softmax(queries [T, D] · items [I, D])[target [T]]."""
    loss: Tensor = _FullSoftmax.apply(queries, items, targets, segment)  # type: ignore[no-untyped-call]
    return loss


def in_batch_softmax(
    queries: Tensor, items: Tensor, positives: Tensor, log_q: Tensor, offsets: Tensor, *, segment: int
) -> Tensor:
    """Sum over tokens of the softmax loss of a token's positive among those of all tokens of its group.

    queries [T, D]; items [U, D]; positives [T] are places in `items`; log_q [T] is the log probability with which each
    positive is drawn as a negative, which its score is corrected by; groups have the tokens between `offsets` [N + 1]. A
    negative that is the token's own positive is left out.
    """
    loss: Tensor = _InBatch.apply(queries, items, positives, log_q, offsets, segment)  # type: ignore[no-untyped-call]
    return loss


def query_to_item(
    queries: Tensor, targets: Tensor, weights: Tensor, same: Tensor, offsets: Tensor, *, spread: float, apart: float
) -> Tensor:
    """Sum over groups of (weight of the group) * L_Q2I, so that divided by the weight of all it is their mean.

        L_Q2I = -mean q·t  -  spread * log(Var Q * Var T)  +  apart * mean over i != j of (q_i·q_j)^2

    queries and targets [T, D] are unit vectors, Var is the biased variance summed over D and at least 1e-4. Tokens with the same
    number in `same` [T] have one instruction: such pairs are not pushed apart. Groups are between `offsets` [N + 1].
    """
    total = queries.new_zeros(())
    for first, last in pairwise(offsets.tolist()):
        if first == last:
            continue
        q, t, key = queries[first:last], targets[first:last], same[first:last]
        loss = -(q * t).sum(1).mean()
        for vectors in (q, t):
            variance = (vectors - vectors.mean(0)).square().mean(0).sum()
            loss = loss - spread * variance.clamp(min=_LEAST_VARIANCE).log()
        other = (key.unsqueeze(1) != key).to(q.dtype)
        loss = loss + apart * ((q @ q.T).square() * other).sum() / other.sum().clamp(min=1)
        total = total + weights[first:last].sum() * loss
    return total


def plain_full_softmax(queries: Tensor, items: Tensor, targets: Tensor) -> Tensor:
    """`full_softmax` by definition; the oracle of its tests."""
    return F.cross_entropy(queries @ items.T, targets, reduction="sum")


def plain_in_batch_softmax(queries: Tensor, items: Tensor, positives: Tensor, log_q: Tensor, offsets: Tensor) -> Tensor:
    """`in_batch_softmax` by definition, with a column for every token of the group; the oracle of its tests."""
    total = queries.new_zeros(())
    for first, last in pairwise(offsets.tolist()):
        own = positives[first:last]
        scores = queries[first:last] @ F.embedding(own, items).T - log_q[first:last]
        same = (own.unsqueeze(1) == own) & ~torch.eye(len(own), dtype=torch.bool)
        total = total + F.cross_entropy(scores.masked_fill(same, -torch.inf), torch.arange(len(own)), reduction="sum")
    return total


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


class _InBatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, items: Tensor, positives: Tensor, log_q: Tensor, offsets: Tensor, segment: int
    ) -> Tensor:
        total = queries.new_zeros((), dtype=torch.float64)
        grad_queries, grad_items = torch.zeros_like(queries), torch.zeros_like(items)
        for first, last in pairwise(offsets.tolist()):
            distinct, places = dedupe(positives[first:last])
            some = torch.empty_like(distinct).index_copy_(0, places, torch.arange(first, last))  # a token of each
            counts = torch.bincount(places, minlength=len(distinct)).to(queries.dtype).log_()
            vectors, bias = items.index_select(0, distinct), counts - log_q.index_select(0, some)
            grad_vectors = torch.zeros_like(vectors)
            for start in range(first, last, segment):
                part = slice(start, min(start + segment, last))
                target = places[start - first : part.stop - first].unsqueeze(1)
                scores = torch.addmm(bias, queries[part], vectors.T)
                scores.scatter_add_(1, target, -counts.index_select(0, target.flatten()).unsqueeze(1))  # itself, once
                loss, grad = _softmax_at(scores, target)
                total += loss
                torch.mm(grad, vectors, out=grad_queries[part])
                grad_vectors.addmm_(grad.T, queries[part])
            grad_items.index_add_(0, distinct, grad_vectors)
        ctx.save_for_backward(grad_queries, grad_items)
        return total.to(queries.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_queries, grad_items = ctx.saved_tensors
        return grad * grad_queries, grad * grad_items, None, None, None, None


def _softmax_at(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(scores [C, n]) at target [C, 1], and its gradient in the memory of the scores."""
    scores -= scores.amax(1, keepdim=True)
    at_target = scores.gather(1, target)
    total = scores.exp_().sum(1, keepdim=True)
    loss = (total.log() - at_target).sum(dtype=torch.float64)
    grad = scores.div_(total)
    return loss, grad.scatter_add_(1, target, grad.new_full((), -1).expand_as(target))
