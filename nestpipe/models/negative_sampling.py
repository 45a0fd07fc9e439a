"""Negative sampling. Draws depend on (seed, step, sample, position), never on the other samples of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.jagged import Batch, Jagged
from nestpipe.models.config import LossConfig
from nestpipe.ops.negatives import Blocks, draw_shifts
from nestpipe.rng import Rng, integers

_MAX_SHIFT = 2**31 - 1


def draw_negatives(loss: LossConfig, batch: Batch, rng: Rng, num_items: int) -> Tensor:
    """Uniform catalogue positions [G, R]: one block of R per event, per sample, or one for the global batch."""
    match loss.source:
        case "token":
            keys = rng.keys("negatives", batch.sample_of_token(), batch.items.positions())
        case "sample":
            keys = rng.keys("negatives", batch.sample_ids)
        case "pool":
            keys = rng.keys("pool", torch.zeros(1, dtype=torch.int64))
    return integers(keys, width=loss.num_negatives, high=num_items)


def blocks_of(loss: LossConfig, batch: Batch, rng: Rng) -> Blocks:
    """The blocks of negatives that each event is scored against; on the host."""
    batch = batch.on_host
    offsets = batch.items.offsets
    if loss.source == "pool":
        return Blocks.of_rows(torch.tensor([0, batch.num_tokens]))
    if loss.source == "sample":
        return Blocks.of_rows(offsets)
    if loss.share == "none":
        return Blocks.own(batch.num_tokens)
    units, numbers = (offsets, batch.sample_ids) if loss.share == "sample" else group_runs(batch)
    drawn = integers(rng.keys("shifts", numbers), width=loss.share_factor - 1, high=_MAX_SHIFT)
    return Blocks.shifted(units, draw_shifts(drawn, units.diff()))


def group_runs(batch: Batch, rows: Jagged | None = None) -> tuple[Tensor, Tensor]:
    """Event offsets of the declared groups [N + 1] and their numbers [N], on the host; raises ValueError if one is not contiguous.

    With `rows` (one per sample), the offsets are those of their values.
    """
    if batch.groups is None:
        raise ValueError("the loss mixes the samples of a group, but the batch has no groups; set --data.group-size")
    rows, groups = rows or batch.items, batch.on_host.groups
    assert groups is not None
    numbers, counts = torch.unique_consecutive(groups, return_counts=True)
    if len(numbers.unique()) < len(numbers):
        raise ValueError("the samples of a group are not contiguous in the batch")
    first_samples = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return rows.host_offsets.index_select(0, first_samples), numbers
