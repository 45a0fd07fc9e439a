"""Losses, each a sum over tokens: full softmax, in-batch softmax, and Q2I (query to item). Sampled softmax: ops/negatives.py.

The softmax losses work in segments of tokens, so a [T, items] tensor never exists. They compute gradients in the forward
pass: the gradient of a sum is the sum of the segments' gradients, so backward neither stores nor recomputes scores.

Letters: T tokens, I items, U distinct rows, N groups, C tokens of a segment, D width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.embedding.unique_ids import dedupe
from nestpipe.ops.device_memory import upload
from nestpipe.ops.precision import full_precision, widened

_MIN_VARIANCE = 1e-4


def full_softmax(queries: Tensor, items: Tensor, targets: Tensor, *, segment: int) -> Tensor:
    """Sum over tokens of -log softmax(queries [T, D] · items [I, D])[target [T]]."""
    loss: Tensor = _FullSoftmax.apply(queries, items, targets, segment)  # type: ignore[no-untyped-call]
    return loss


def in_batch_softmax(
    queries: Tensor, items: Tensor, positives: Tensor, log_q: Tensor, offsets: Tensor, *, segment: int
) -> Tensor:
    """Sum over tokens of the softmax loss of a token's positive among those of all tokens of its group.

    queries [T, D]; items [U, D]; positives [T] index `items`; log_q [T] is the log probability of drawing each positive as a
    negative (logQ correction). Group n has the tokens between offsets[n] and offsets[n + 1]. A negative that equals the token's
    positive is left out. Positives, log_q and offsets are on the host, wherever the vectors are.
    """
    loss: Tensor = _InBatch.apply(queries, items, positives, log_q, offsets, segment)  # type: ignore[no-untyped-call]
    return loss


def query_to_item(
    queries: Tensor,
    targets: Tensor,
    weights: Tensor,
    same: Tensor,
    offsets: Tensor,
    *,
    variance_weight: float,
    orthogonality_weight: float,
) -> Tensor:
    """Sum over groups of (weight of the group) * L_Q2I; divided by the total weight it is their mean.

        L_Q2I = -mean q·t  -  variance_weight * log(Var Q * Var T)  +  orthogonality_weight * mean over i != j of (q_i·q_j)^2

    queries and targets [T, D] are unit vectors. Var is the biased variance summed over D, at least 1e-4. Tokens with equal
    numbers in `same` [T] have the same instruction; such pairs are not in the last term. Offsets [N + 1] as above.
    """
    queries, targets = widened(queries), widened(targets)
    total = queries.new_zeros(())
    for first, last in pairwise(offsets.tolist()):
        if first == last:
            continue
        q, t, key = queries[first:last], targets[first:last], same[first:last]
        loss = -(q * t).sum(1).mean()
        for vectors in (q, t):
            variance = (vectors - vectors.mean(0)).square().mean(0).sum()
            loss = loss - variance_weight * variance.clamp(min=_MIN_VARIANCE).log()
        other = (key.unsqueeze(1) != key).to(q.dtype)
        with full_precision(q.device):
            products = q @ q.T
        loss = loss + orthogonality_weight * (products.square() * other).sum() / other.sum().clamp(min=1)
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
            query, target = queries[first : first + segment], targets[first : first + segment].unsqueeze(1)
            scores = query @ items.T
            loss, grad = _softmax_at(scores, target)
            total += loss
            torch.mm(grad, items, out=grad_queries[first : first + segment])
            grad_items.addmm_(grad.T, query)
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
            some = torch.empty_like(distinct).index_copy_(
                0, places, torch.arange(first, last)
            )  # one token per distinct positive
            counts = torch.bincount(places, minlength=len(distinct)).to(queries.dtype).log_()
            bias = counts - log_q.index_select(0, some)
            distinct, places, counts, bias = (upload(one, items.device) for one in (distinct, places, counts, bias))
            vectors = items.index_select(0, distinct)
            grad_vectors = torch.zeros_like(vectors)
            for start in range(first, last, segment):
                own = slice(start, min(start + segment, last))
                target = places[start - first : own.stop - first].unsqueeze(1)
                scores = torch.addmm(bias, queries[own], vectors.T)
                scores.scatter_add_(
                    1, target, -counts.index_select(0, target.flatten()).unsqueeze(1)
                )  # the positive counts once
                loss, grad = _softmax_at(scores, target)
                total += loss
                torch.mm(grad, vectors, out=grad_queries[own])
                grad_vectors.addmm_(grad.T, queries[own])
            grad_items.index_add_(0, distinct, grad_vectors)
        ctx.save_for_backward(grad_queries, grad_items)
        return total.to(queries.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_queries, grad_items = ctx.saved_tensors
        return grad * grad_queries, grad * grad_items, None, None, None, None


def _softmax_at(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(scores [C, n]) at target [C, 1], and its gradient, which overwrites the scores."""
    scores -= scores.amax(1, keepdim=True)
    at_target = scores.gather(1, target)
    total = scores.exp_().sum(1, keepdim=True)
    loss = (total.log() - at_target).sum(dtype=torch.float64)
    grad = scores.div_(total)
    return loss, grad.scatter_add_(1, target, grad.new_full((), -1).expand_as(target))
