"""Training on the fake accelerator: bitwise the CPU's for every schedule, without a race, with few waits of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nestpipe.pipeline.stages import Clip
from tests.fake_accelerator.device_training import Content, DeviceCase, train_toy
from tests.fake_accelerator.fake_ranks import run_on_fake
from tests.rank_pool import run_ranks

Scale = Callable[[int, int], int]

SCHEDULES = {
    "sequential": DeviceCase(),
    "serial": DeviceCase(mode="serial"),
    "dual-buffer": DeviceCase(mode="dual-buffer", depth=2),
    "frozen-window": DeviceCase(mode="frozen-window", optimizer="adagrad"),
    "nested": DeviceCase(mode="nested"),
    "nested, deep": DeviceCase(mode="nested", depth=3),
    "nested, chunks": DeviceCase(mode="nested", chunks=3),
    "nested, shared chunks": DeviceCase(mode="nested", chunks="shared", depth=2),
    "nested, clipped": DeviceCase(mode="nested", clip=Clip(0.5)),
    "nested, all clipped": DeviceCase(mode="nested", clip=Clip(0.5, rows=True), optimizer="adagrad"),
    "nested, stale": DeviceCase(mode="nested", stale=True),
    "nested, exact adam": DeviceCase(mode="nested", optimizer="adam"),
    "nested, evicting": DeviceCase(mode="nested", tight=True, admit_after=1, max_rows=0),
    "nested, evicting into files": DeviceCase(mode="nested", tight=True, admit_after=1, max_rows=0, tier="files"),
    "stale, in order": DeviceCase(stale=True),
    "nested, groups": DeviceCase(mode="nested", groups=2),
    "nested, groups and chunks": DeviceCase(mode="nested", groups=2, chunks=2),
}
# In an ordinary run each schedule has one number of ranks; a soak tries all, with three seeds.
RANKS = {name: 2 if "groups" in name else number % 3 + 1 for number, name in enumerate(SCHEDULES)}


def assert_equal(ours: list[Content], theirs: list[Content]) -> None:
    for rank, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own.keys() == other.keys()
        for name, values in own.items():
            is_same = torch.equal(values.nan_to_num(nan=-1.0), other[name].nan_to_num(nan=-1.0))  # a skipped loss
            assert is_same, f"{name} differs on rank {rank}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_bitwise_the_sequential_step_on_the_cpu(name: str, scale: Scale) -> None:
    case = SCHEDULES[name]
    every = [2, 4] if case.groups > 1 else [1, 2, 3]
    for world_size in every if scale(0, 1) else [RANKS[name]]:
        oracle = run_ranks(world_size, train_toy, replace(case, mode=None))
        for seed in range(scale(1, 3)):
            found = run_on_fake(world_size, train_toy, case, delay_us=100, seed=seed)
            assert_equal(found, oracle)
