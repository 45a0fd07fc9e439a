"""Rank processes with the fake accelerator: `run_on_fake(3, function, *args)`, as `run_ranks`, on device `fake`.

They are a pool of their own, because a device once registered stays in its process. Each call ends with a check that no two
accesses were unordered; `unordered_pairs` returns them instead, for mutants.
"""

from __future__ import annotations

import gc
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from nestpipe.distributed.process_group import World
from nestpipe.ops.native_library import load as load_native
from tests.fake_accelerator import accelerator
from tests.fake_accelerator.build import library
from tests.rank_pool import Function, RankPool

_POOL: list[RankPool] = []


def run_on_fake(world_size: int, function: Function, *args: Any, delay_us: int = 0, seed: int = 0) -> list[Any]:
    """function(world, *args) in each rank; the world's device is the fake accelerator. Results by rank."""
    return [value for value, _ in _run(world_size, function, args, delay_us, seed, True)]


def unordered_pairs(world_size: int, function: Function, *args: Any, delay_us: int = 0, seed: int = 0) -> list[str]:
    """The unordered pairs of a call, on all ranks."""
    outcomes = _run(world_size, function, args, delay_us, seed, False)
    return [one for _, reports in outcomes for one in reports]


def _run(
    world_size: int, function: Function, args: tuple[Any, ...], delay_us: int, seed: int, check: bool
) -> list[tuple[Any, list[str]]]:
    library()  # compiled here, if need be: ranks have deadlines
    load_native()
    if not _POOL:
        _POOL.append(RankPool())
    return _POOL[0].run(world_size, _on_device, function, args, delay_us, seed, check)


def _on_device(
    world: World, function: Function, args: tuple[Any, ...], delay_us: int, seed: int, check: bool
) -> tuple[Any, list[str]]:
    accelerator.load(delay_us=delay_us, seed=seed)
    accelerator.take_reports()
    with closing(replace(world, device=torch.device(accelerator.NAME))) as on_device:
        value = function(on_device, *args)
    gc.collect()  # so that what the call has allocated is freed, and checked
    reports = accelerator.take_reports()
    if check and reports:
        raise AssertionError("the fake accelerator saw races:\n  " + "\n  ".join(reports))
    return value, reports


def close_fake_ranks() -> None:
    """Ends the pool."""
    while _POOL:
        _POOL.pop().close()
