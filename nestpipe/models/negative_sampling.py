"""Which negatives a batch gets: draws that depend on (seed, step, sample, position), never on who else is in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.jagged import Batch, Jagged
from nestpipe.models.config import LossConfig
from nestpipe.ops.negatives import Blocks, draw_shifts
from nestpipe.rng import Rng, integers

_NUMBERS = 2**31 - 1


def draw_negatives(loss: LossConfig, batch: Batch, rng: Rng, num_items: int) -> Tensor:
    """Places in the catalogue [G, R], uniform: a block for each event, for each sample, or one for the global batch."""
    match loss.source:
        case "token":
            keys = rng.keys("negatives", batch.sample_of_token(), batch.items.positions())
        case "sample":
            keys = rng.keys("negatives", batch.sample_ids)
        case "pool":
            keys = rng.keys("pool", torch.zeros(1, dtype=torch.int64))
    return integers(keys, width=loss.num_negatives, high=num_items)


def blocks_of(loss: LossConfig, batch: Batch, rng: Rng) -> Blocks:
    """Which of the blocks each event is scored against."""
    offsets = batch.items.offsets
    if loss.source == "pool":
        return Blocks.of_rows(torch.tensor([0, batch.num_tokens]))
    if loss.source == "sample":
        return Blocks.of_rows(offsets)
    if loss.share == "none":
        return Blocks.own(batch.num_tokens)
    units, numbers = (offsets, batch.sample_ids) if loss.share == "sample" else group_runs(batch)
    drawn = integers(rng.keys("shifts", numbers), width=loss.share_factor - 1, high=_NUMBERS)
    return Blocks.shifted(units, draw_shifts(drawn, units.diff()))


def group_runs(batch: Batch, rows: Jagged | None = None) -> tuple[Tensor, Tensor]:
    """Where the events of each declared group begin [N + 1], and the groups' numbers [N]; raises ValueError if one is torn.

    With `rows` (one per sample) it is where their values begin.
    """
    if batch.groups is None:
        raise ValueError("the samples of the batch have no groups; set --data.group-size")
    numbers, counts = torch.unique_consecutive(batch.groups, return_counts=True)
    if len(numbers.unique()) < len(numbers):
        raise ValueError("samples of one group do not stand together in the batch")
    first_samples = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return (rows or batch.items).offsets.index_select(0, first_samples), numbers
