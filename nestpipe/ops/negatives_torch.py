"""Sampled softmax (negatives.py) in plain PyTorch: for any dtype and device, and where a GEMM is fastest.

    gather    gathers a segment's negatives as vectors [C, k·R, D]
    gemm      scores all distinct rows and picks the negatives: for few rows
    product   gathers the one block of a unit and multiplies it with all its tokens: for pools and samples

Shapes as in negatives.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LossAndGrads = tuple[Tensor, Tensor, Tensor, Tensor]  # of queries, rows and positive rows


@dataclass(frozen=True, slots=True, eq=False)
class LossTask:
    """Positives and negatives as row numbers, and the tokens that each block is scored with."""

    positives: Tensor  # [T]
    negatives: Tensor  # [G, R]
    of_token: Tensor  # [T, k]
    unit_tokens: Tensor  # [N + 1]
    unit_blocks: Tensor  # [N + 1]
    segment: int

    def segments(self, first: int, last: int) -> Iterator[slice]:
        for start in range(first, last, self.segment):
            yield slice(start, min(start + self.segment, last))

    def negatives_of(self, tokens: slice) -> Tensor:
        """Row numbers [C, k·R] of some tokens' negatives; where there is none, the token's own positive, which is masked."""
        of_token = self.of_token[tokens]
        rows = self.negatives.index_select(0, of_token.clamp(min=0).flatten()).reshape(*of_token.shape, -1)
        return torch.where(of_token.unsqueeze(2) < 0, self.positives[tokens, None, None], rows).flatten(1)


class _LossSums:
    """Accumulates loss and gradients of all segments."""

    def __init__(self, queries: Tensor, rows: Tensor, positive_rows: Tensor):
        self.queries, self.positive_rows = queries, positive_rows
        self.loss = queries.new_zeros((), dtype=torch.float64)
        self.grad_queries, self.grad_rows = torch.zeros_like(queries), torch.zeros_like(rows)
        self.grad_positive_rows = self.grad_rows if positive_rows is rows else torch.zeros_like(rows)

    def softmax(self, tokens: slice, scores: Tensor, left_out: Tensor, positives: Tensor) -> Tensor:
        """Adds loss and positive gradients; returns the gradient [C, n] of the negative scores, computed in place."""
        queries = self.queries[tokens]
        vectors = self.positive_rows.index_select(0, positives[tokens])
        own = torch.bmm(vectors.unsqueeze(1), queries.unsqueeze(2)).squeeze(2)
        scores.masked_fill_(left_out, -torch.inf)
        largest = torch.maximum(own, scores.amax(1, keepdim=True)) if scores.shape[1] else own
        exp_own = (own - largest).exp_()
        total = scores.sub_(largest).exp_().sum(1, keepdim=True).add_(exp_own)
        self.loss += (total.log() + largest - own).sum(dtype=torch.float64)
        coefficient = exp_own.div_(total).sub_(1)
        self.grad_queries[tokens].addcmul_(coefficient, vectors)
        self.grad_positive_rows.index_add_(0, positives[tokens], coefficient * queries)
        return scores.div_(total)

    def result(self) -> LossAndGrads:
        return self.loss, self.grad_queries, self.grad_rows, self.grad_positive_rows


def gather(queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> LossAndGrads:
    """Gathers each segment's negatives as vectors."""
    sums = _LossSums(queries, rows, positive_rows)
    for tokens in task.segments(0, len(queries)):
        negatives = task.negatives_of(tokens)
        vectors = rows.index_select(0, negatives.flatten()).reshape(*negatives.shape, -1)
        scores = torch.bmm(vectors, queries[tokens].unsqueeze(2)).squeeze(2)
        grad = sums.softmax(tokens, scores, negatives == task.positives[tokens].unsqueeze(1), task.positives)
        sums.grad_queries[tokens] += torch.bmm(grad.unsqueeze(1), vectors).squeeze(1)
        torch.mul(grad.unsqueeze(2), queries[tokens].unsqueeze(1), out=vectors)
        sums.grad_rows.index_add_(0, negatives.flatten(), vectors.flatten(0, 1))
    return sums.result()


def gemm(queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> LossAndGrads:
    """Scores all rows by one GEMM per segment."""
    sums = _LossSums(queries, rows, positive_rows)
    for tokens in task.segments(0, len(queries)):
        negatives = task.negatives_of(tokens)
        all_scores = queries[tokens] @ rows.T
        scores = all_scores.gather(1, negatives)
        grad = sums.softmax(tokens, scores, negatives == task.positives[tokens].unsqueeze(1), task.positives)
        spread = all_scores.zero_().scatter_add_(1, negatives, grad)
        sums.grad_queries[tokens].addmm_(spread, rows)
        sums.grad_rows.addmm_(spread.T, queries[tokens])
    return sums.result()


def product(queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> LossAndGrads:
    """Multiplies the tokens of each unit with the rows of its one block."""
    sums = _LossSums(queries, rows, positive_rows)
    bounds = task.unit_tokens.tolist()
    for block, (first, last) in enumerate(itertools.pairwise(bounds)):
        negatives = task.negatives[block]
        vectors = rows.index_select(0, negatives)
        grad_vectors = torch.zeros_like(vectors)
        for tokens in task.segments(first, last):
            scores = queries[tokens] @ vectors.T
            grad = sums.softmax(tokens, scores, negatives == task.positives[tokens].unsqueeze(1), task.positives)
            sums.grad_queries[tokens].addmm_(grad, vectors)
            grad_vectors.addmm_(grad.T, queries[tokens])
        sums.grad_rows.index_add_(0, negatives, grad_vectors)
    return sums.result()
