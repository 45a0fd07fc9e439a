"""How a batch is cut into parts (micro-batches): a pure function of the batch and of settings that belong to the run."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from nestpipe.jagged import Batch
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.sample_clustering import cluster, micro_batch_sizes


def cut_batch(batch: Batch, config: MicroBatchConfig) -> list[Batch]:
    """The parts of a batch; some are empty if there are too few samples. Samples of one group stay together."""
    sizes = micro_batch_sizes(batch.num_samples, config.micro_batches, config.ramp)
    if config.micro_batches == 1:
        return [batch]
    if config.cluster or batch.groups is not None:
        keys = batch.items if config.cluster else batch.items.with_values(torch.zeros_like(batch.items.values))
        return [batch.select(places) for places in cluster(keys, sizes, groups=batch.groups).places()]
    edges = [0, *accumulate(sizes)]
    return [batch.slice(begin, end) for begin, end in pairwise(edges)]
