"""Every kind of negatives through the engine: all modes have the bits of sequential, all numbers of ranks and parts train alike."""

from __future__ import annotations

import pytest
import torch

from tests.pipeline.runs import differences
from tests.pipeline_ranks import merged, train_steps
from tests.ranks import run_ranks
from tests.worlds import write_log

KINDS = {
    "sample": {},
    "pool": {},
    "shared": {},
    "shared in groups": {"group_size": 3, "batch_size": 12},
    "in batch": {"group_size": 4, "batch_size": 12},
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Enough items that many are negatives only."""
    histories = {user: [(31 * user + 7 * k) % 211 for k in range(3 + user % 9)] for user in range(60)}
    return write_log(tmp_path_factory.mktemp("negatives") / "log", histories).path


def settings_of(kind):
    return {"loss": kind, "batch_size": 7, "optimizer": "adagrad", **KINDS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_has_the_bits_of_sequential(log, kind):
    arms = [
        {"mode": "nested", "pool": True, "depth": 2, "seed": 0},
        {"mode": "dual-buffer", "pool": False, "depth": 1, "seed": 1},
        {"mode": "frozen-window", "pool": False, "depth": 1, "seed": 2},
    ]
    found = run_ranks(3, differences, log, {**settings_of(kind), "parts": 3}, 5, arms)
    assert [line for lines in found for line in lines] == []


# fp64: sums of the same numbers in another order.
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_ranks_and_parts_trains_the_same(log, kind):
    one = merged(run_ranks(1, train_steps, log, settings_of(kind), 4))
    for world_size, parts in ((2, 3), (3, 1)):
        other = merged(run_ranks(world_size, train_steps, log, {**settings_of(kind), "parts": parts}, 4))
        for name, value in one.items():
            assert torch.allclose(value.double(), other[name].double(), rtol=1e-11, atol=1e-12), (
                world_size,
                parts,
                name,
            )
