"""Division of a batch into micro-batches: a pure function of the batch and of the run's settings."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nestpipe.embedding.unique_ids import dedupe, group
from nestpipe.jagged import Batch
from nestpipe.pipeline.config import MicroBatchConfig


def micro_batch_sizes(num_samples: int, num_micro_batches: int, ramp: float = 1.0) -> list[int]:
    """Samples per micro-batch: nearly equal, but the first and the last are `ramp` times the size of the others.

    Remainders go to the middle first. With few samples the middle is empty from its end on, then the last micro-batch.
    """
    if not 0 < ramp <= 1:
        raise ValueError(f"ramp is {ramp}; it must be in (0, 1]")
    if num_micro_batches == 1:
        return [num_samples]
    edge, middle = Fraction(ramp), range(1, num_micro_batches - 1)
    shares = [edge, *(Fraction(1) for _ in middle), edge]
    sizes = [int(num_samples * share / sum(shares)) for share in shares]
    for micro_batch in [*middle, 0, num_micro_batches - 1][: num_samples - sum(sizes)]:
        sizes[micro_batch] += 1
    for micro_batch, needed in ((0, 1), (num_micro_batches - 1, 2)):
        if not sizes[micro_batch] and num_samples >= needed:
            largest = max(middle, key=lambda other: (sizes[other], other))
            sizes[largest] -= 1
            sizes[micro_batch] += 1
    return sizes


def cut_batch(batch: Batch, config: MicroBatchConfig) -> list[Batch]:
    """The micro-batches of a batch; some are empty if there are too few samples. Samples of one group stay together."""
    sizes = micro_batch_sizes(batch.num_samples, config.micro_batches, config.ramp)
    if config.micro_batches == 1:
        return [batch]
    if batch.groups is not None:
        return [batch.select(places) for places in places_of_groups(batch.groups, sizes)]
    edges = [0, *accumulate(sizes)]
    return [batch.slice(begin, end) for begin, end in pairwise(edges)]


def places_of_groups(groups: Tensor, sizes: list[int]) -> list[Tensor]:
    """The places of each micro-batch, ascending: groups [B] in the order of their first samples, cut at the border nearest to each size."""
    distinct, number = dedupe(groups)
    first = torch.full_like(distinct, len(groups)).scatter_reduce_(0, number, torch.arange(len(groups)), "amin")
    turn = torch.empty_like(first).index_copy_(0, first.argsort(), torch.arange(len(first))).index_select(0, number)
    order, counts = group(turn, len(distinct))
    borders = [0, *accumulate(counts.tolist())]
    edges = [min(borders, key=lambda border: abs(border - edge)) for edge in [0, *accumulate(sizes)]]
    return [order[begin:end].sort().values for begin, end in pairwise(edges)]
