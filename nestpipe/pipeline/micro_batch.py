"""Division of a batch into micro-batches: a pure function of the batch and of the run's settings."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise

import torch

from nestpipe.jagged import Batch
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.sample_clustering import cluster


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
    if config.cluster or batch.groups is not None:
        keys = batch.items if config.cluster else batch.items.with_values(torch.zeros_like(batch.items.values))
        return [batch.select(places) for places in cluster(keys, sizes, groups=batch.groups).places()]
    edges = [0, *accumulate(sizes)]
    return [batch.slice(begin, end) for begin, end in pairwise(edges)]
