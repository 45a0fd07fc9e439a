"""The loss of ops/negatives.py in plain PyTorch: for any type and device, and where a GEMM is the fastest way.

    gather    a segment's negatives as vectors [C, k·R, D]
    gemm      all distinct rows are scored and the negatives picked: for few rows
    product   tokens of a unit share one block, which is gathered once: for pools and samples

Letters as in ops/negatives.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Found = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LossTask:
    """What is scored against what, as places."""

    positives: Tensor  # [T]
    negatives: Tensor  # [G, R]
    of_token: Tensor  # [T, k]
    unit_tokens: Tensor  # [N + 1]
    unit_blocks: Tensor  # [N + 1]
    segment: int

    def segments(self, first: int, last: int) -> Iterator[slice]:
        for start in range(first, last, self.segment):
            yield slice(start, min(start + self.segment, last))

    def places(self, part: slice) -> Tensor:
        """The negatives [C, k·R] of some tokens; where there is none, the token's own positive, which is left out."""
        of_token = self.of_token[part]
        found = self.negatives.index_select(0, of_token.clamp(min=0).flatten()).reshape(*of_token.shape, -1)
        return torch.where(of_token.unsqueeze(2) < 0, self.positives[part, None, None], found).flatten(1)


class _LossSums:
    """Where loss and gradients of all segments meet."""

    def __init__(self, queries: Tensor, rows: Tensor, positive_rows: Tensor):
        self.queries, self.positive_rows = queries, positive_rows
        self.loss = queries.new_zeros((), dtype=torch.float64)
        self.grad_queries, self.grad_rows = torch.zeros_like(queries), torch.zeros_like(rows)
        self.grad_positive_rows = self.grad_rows if positive_rows is rows else torch.zeros_like(rows)

    def softmax(self, part: slice, scores: Tensor, left_out: Tensor, positives: Tensor) -> Tensor:
        """Adds what concerns the positives; the gradient [C, n] of the scores of negatives, in their memory."""
        queries = self.queries[part]
        vectors = self.positive_rows.index_select(0, positives[part])
        own = torch.bmm(vectors.unsqueeze(1), queries.unsqueeze(2)).squeeze(2)
        scores.masked_fill_(left_out, -torch.inf)
        largest = torch.maximum(own, scores.amax(1, keepdim=True)) if scores.shape[1] else own
        exp_own = (own - largest).exp_()
        total = scores.sub_(largest).exp_().sum(1, keepdim=True).add_(exp_own)
        self.loss += (total.log() + largest - own).sum(dtype=torch.float64)
        coefficient = exp_own.div_(total).sub_(1)
        self.grad_queries[part].addcmul_(coefficient, vectors)
        self.grad_positive_rows.index_add_(0, positives[part], coefficient * queries)
        return scores.div_(total)

    def found(self) -> Found:
        return self.loss, self.grad_queries, self.grad_rows, self.grad_positive_rows


def gather(queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> Found:
    """Vectors of a segment's negatives, one after the other."""
    sums = _LossSums(queries, rows, positive_rows)
    for part in task.segments(0, len(queries)):
        places = task.places(part)
        vectors = rows.index_select(0, places.flatten()).reshape(*places.shape, -1)
        scores = torch.bmm(vectors, queries[part].unsqueeze(2)).squeeze(2)
        grad = sums.softmax(part, scores, places == task.positives[part].unsqueeze(1), task.positives)
        sums.grad_queries[part] += torch.bmm(grad.unsqueeze(1), vectors).squeeze(1)
        torch.mul(grad.unsqueeze(2), queries[part].unsqueeze(1), out=vectors)
        sums.grad_rows.index_add_(0, places.flatten(), vectors.flatten(0, 1))
    return sums.found()


def gemm(queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> Found:
    """All rows are scored."""
    sums = _LossSums(queries, rows, positive_rows)
    for part in task.segments(0, len(queries)):
        places = task.places(part)
        every = queries[part] @ rows.T
        scores = every.gather(1, places)
        grad = sums.softmax(part, scores, places == task.positives[part].unsqueeze(1), task.positives)
        spread = every.zero_().scatter_add_(1, places, grad)
        sums.grad_queries[part].addmm_(spread, rows)
        sums.grad_rows.addmm_(spread.T, queries[part])
    return sums.found()


def product(queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> Found:
    """The tokens of a unit by the rows of its one block."""
    sums = _LossSums(queries, rows, positive_rows)
    bounds = task.unit_tokens.tolist()
    for block, (first, last) in enumerate(itertools.pairwise(bounds)):
        places = task.negatives[block]
        vectors = rows.index_select(0, places)
        grad_vectors = torch.zeros_like(vectors)
        for part in task.segments(first, last):
            scores = queries[part] @ vectors.T
            grad = sums.softmax(part, scores, places == task.positives[part].unsqueeze(1), task.positives)
            sums.grad_queries[part].addmm_(grad, vectors)
            grad_vectors.addmm_(grad.T, queries[part])
        sums.grad_rows.index_add_(0, places, grad_vectors)
    return sums.found()
