"""How a batch is cut into parts (micro-batches): a pure function of the batch and of settings that belong to the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from nestpipe.jagged import Batch
from nestpipe.pipeline.cluster import cluster, part_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsConfig:
    """How a batch is cut; decides the order of sums, hence the bits, in every mode."""

    parts: int = 1
    """Micro-batches per batch: rows stay as they are until all of them are done."""
    ramp: float = 1.0
    """First and last part are so many times as large as the others: what they send is not hidden."""
    cluster: bool = False
    """Samples that share ids go to one part, so that the first and the last part need few rows."""

    def problems(self) -> Iterator[str]:
        if not 1 <= self.parts <= 256:
            yield f"parts is {self.parts}; it must be in 1 .. 256"
        if not 0 < self.ramp <= 1:
            yield f"ramp is {self.ramp}; it must be in (0, 1]"

    def cut(self, batch: Batch) -> list[Batch]:
        """The parts of a batch; some are empty if there are too few samples. Samples of one group stay together."""
        sizes = part_sizes(batch.num_samples, self.parts, self.ramp)
        if self.parts == 1:
            return [batch]
        if self.cluster or batch.groups is not None:
            keys = batch.items if self.cluster else batch.items.with_values(torch.zeros_like(batch.items.values))
            return [batch.select(places) for places in cluster(keys, sizes, groups=batch.groups).places()]
        edges = [0, *accumulate(sizes)]
        return [batch.slice(begin, end) for begin, end in pairwise(edges)]
