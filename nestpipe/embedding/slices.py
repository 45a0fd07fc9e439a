"""Slices: what an owner holds, cut by its buckets, so that one slice is updated while another is on its way.

Between two batches all ranks wait: the last gradients travel, rows are updated, the first rows of the next batch travel. In slices,
the rows of the first are updated while the gradients of the second travel, and are on their way to the next batch while those are
updated, so that the line is never idle for it. Which slice an id is in is a function of the id, the same for asker and owner and
for every batch: rows of a slice wait for the update of that slice alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.ids import group
from nestpipe.embedding.owner import EIGHTHS
from nestpipe.embedding.route import Counts, TablePlan

MOST_SLICES = EIGHTHS


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """How the messages of one table are cut, as its asker knows it. Sums go home by (owner, slice)."""

    first_counts: Counts  # [owner][part * num + slice]: ids that travel with the part
    leaving: tuple[Tensor, ...]  # for each part: positions of rows whose sums go home with it
    last_counts: tuple[Counts, ...]  # for each part: [owner][slice] of them

    @staticmethod
    def of(plan: TablePlan, num: int) -> Slices:
        """Eighths, which are neighbours in a plan, make up slices of nearly the same size."""
        owners, parts = len(plan.first_counts), len(plan.first_counts[0])
        number = plan.eighths.to(torch.int64).mul_(num).floor_divide_(EIGHTHS)
        place = torch.arange(owners * parts).repeat_interleave(torch.tensor(plan.first_counts).flatten())
        first = torch.bincount(place.mul(num).add_(number), minlength=owners * parts * num)
        key = place.floor_divide_(parts).mul_(num).add_(number)
        leaving, last_counts = [], []
        for part, positions in enumerate(plan.leaving):
            own = (plan.last_part == part).nonzero().flatten()
            order, counts = group(key.index_select(0, own), owners * num)
            leaving.append(positions.index_select(0, order))
            last_counts.append(counts.reshape(owners, num).tolist())
        return Slices(first.reshape(owners, parts * num).tolist(), tuple(leaving), tuple(last_counts))

    def of_last_part(self) -> list[tuple[Tensor, list[int]]]:
        """For each slice: positions of the rows whose sums go home with the last part, and how many of each owner."""
        counts = self.last_counts[-1]
        pieces, num = self.leaving[-1].split([n for own in counts for n in own]), len(counts[0])
        return [(torch.cat(pieces[number::num]), [own[number] for own in counts]) for number in range(num)]
