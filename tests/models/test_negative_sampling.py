"""Draws of negatives depend on seed, step, sample and position, never on the other samples of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import LossConfig
from nestpipe.models.negative_sampling import blocks_of, draw_negatives, group_runs
from nestpipe.rng import Rng

NUM_ITEMS = 50


def batch_of(lengths: dict[int, int], groups: list[int] | None = None) -> Batch:
    """Samples by id, with so many events each."""
    return Batch(
        cursor=Cursor(0, 0),
        sample_ids=torch.tensor(list(lengths)),
        items=Jagged.from_rows([[0] * length for length in lengths.values()]),
        groups=None if groups is None else torch.tensor(groups),
    )


@pytest.mark.parametrize(("source", "own"), [("token", slice(3, 5)), ("sample", slice(1, 2)), ("pool", slice(0, 1))])
def test_batch_mates_do_not_change_draws(source, own):
    loss = LossConfig(source=source, num_negatives=4)
    together = draw_negatives(loss, batch_of({7: 3, 8: 2, 9: 1}), Rng(0, 5), NUM_ITEMS)
    alone = draw_negatives(loss, batch_of({8: 2}), Rng(0, 5), NUM_ITEMS)
    assert together.shape == ({"token": 6, "sample": 3, "pool": 1}[source], 4)
    assert torch.equal(together[own], alone)
    assert not torch.equal(draw_negatives(loss, batch_of({8: 2}), Rng(0, 6), NUM_ITEMS), alone)


def test_draws_cover_the_catalogue_and_nothing_else():
    drawn = draw_negatives(LossConfig(num_negatives=64), batch_of({1: 40}), Rng(0, 0), NUM_ITEMS)
    assert (int(drawn.min()), int(drawn.max())) == (0, NUM_ITEMS - 1)
    assert len(drawn.unique(dim=0)) == 40, "every event has its own block"


def test_blocks_by_source():
    batch = batch_of({7: 3, 8: 2})
    assert blocks_of(LossConfig(), batch, Rng(0, 0)).of_token.tolist() == [[0], [1], [2], [3], [4]]
    assert blocks_of(LossConfig(source="sample"), batch, Rng(0, 0)).of_token.tolist() == [[0], [0], [0], [1], [1]]
    assert blocks_of(LossConfig(source="pool"), batch, Rng(0, 0)).of_token.tolist() == [[0]] * 5


@pytest.mark.parametrize(
    ("share", "units"), [("sample", [range(3), range(3, 5), range(5, 8)]), ("group", [range(5), range(5, 8)])]
)
def test_blocks_are_shared_inside_units(share, units):
    batch = batch_of({7: 3, 8: 2, 9: 3}, groups=[4, 4, 6])
    found = blocks_of(LossConfig(share=share, share_factor=2), batch, Rng(0, 0)).of_token
    assert found.shape == (8, 2)
    for unit in units:
        for token in unit:
            own, other = found[token].tolist()
            assert own == token
            assert other in unit
            assert other != token


def test_a_factor_takes_so_many_blocks():
    found = blocks_of(LossConfig(share="sample", share_factor=4), batch_of({7: 9}), Rng(0, 0)).of_token
    assert found.shape == (9, 4)
    assert all(len(set(row)) == 4 for row in found.tolist())


def test_groups_are_runs_of_samples():
    batch = batch_of({7: 3, 8: 2, 9: 3, 10: 0}, groups=[4, 4, 6, 6])
    offsets, numbers = group_runs(batch)
    assert (offsets.tolist(), numbers.tolist()) == ([0, 5, 8], [4, 6])
    one_per_sample = Jagged.from_rows([[0], [0], [0], [0]])
    assert group_runs(batch, one_per_sample)[0].tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match=r"no groups; set --data\.group-size"):
        group_runs(replace(batch, groups=None))
    with pytest.raises(ValueError, match="not contiguous"):
        group_runs(replace(batch, groups=torch.tensor([4, 6, 4, 6])))
