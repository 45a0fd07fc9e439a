"""Every mode is bitwise identical to the sequential step: each row of each update, and the final state."""

from __future__ import annotations

import pytest

from nestpipe.pipeline.stages import Clip
from tests.pipeline.recorded_runs import differences
from tests.rank_pool import run_ranks
from tests.small_runs import write_log

MODES = ("serial", "dual-buffer", "frozen-window", "nested")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Batches of which neighbours share some items, second neighbours others, and that hold some alone."""
    histories = {user: [(31 * user + 7 * k) % 97 for k in range(3 + user % 9)] for user in range(60)}
    return write_log(tmp_path_factory.mktemp("equality") / "log", histories).path


@pytest.fixture(scope="module")
def wide_log(tmp_path_factory):
    """Enough items that a batch sees a small part of them."""
    histories = {user: [(31 * user + 7 * k) % 600 for k in range(3 + user % 13)] for user in range(80)}
    return write_log(tmp_path_factory.mktemp("equality") / "wide", histories).path


def check(world_size, log, settings, arms, num_steps=8):
    for first in range(0, len(arms), 10):
        found = run_ranks(world_size, differences, log, settings, num_steps, arms[first : first + 10])
        assert [line for lines in found for line in lines] == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_delays_change_no_bit(log, scale, world_size):
    arms = [
        {"mode": MODES[1 + seed % 3], "buffered": seed % 2 == 0, "depth": 1 + seed // 3 % 3, "seed": seed}
        | ({"chunks": ("shared", 3, 1)[seed // 9 % 3]} if seed % 3 == 2 else {})
        for seed in range(scale(27, 500))
    ]
    check(world_size, log, {"optimizer": "adagrad", "batch_size": 7, "micro_batches": 3}, arms)


CROSS = {
    "adam": {"optimizer": "adam"},
    "lazy adam": {"optimizer": "lazy_adam"},
    "clip dense": {"clip": Clip(0.05)},
    "clip all": {"clip": Clip(0.05, rows=True)},
    "admission and eviction": {
        "limits": {"num_buckets": 8, "admit_after": 2, "max_rows": 243, "evict": "lfu", "protect_steps": 3},
        "batch_size": 3,
        "num_steps": 14,
    },
    "one micro-batch": {"micro_batches": 1},
    "more micro-batches than samples": {"micro_batches": 6, "batch_size": 2},
    "all items": {"loss": "full"},
}


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("more", CROSS.values(), ids=CROSS.keys())
def test_every_mode_and_setting(log, wide_log, scale, world_size, more):
    is_one = world_size == 1
    every = [(True, "shared"), (False, "shared"), (True, 2), (False, 3)]
    arms = [
        {"mode": mode, "buffered": buffered, "chunks": chunks, "depth": depth, "seed": seed}
        for depth in scale([2], [1, 2])
        for seed in range(scale(1, 8))
        for mode, buffered, chunks in [
            ("serial", True, 1),
            ("dual-buffer", True, 1),
            ("frozen-window", False, 1),
            ("nested", not is_one, 1),
            *(("nested", *one) for one in scale([(is_one, "shared"), (not is_one, 2 + is_one)], every)),
        ]
    ]
    settings = {"batch_size": 7, "micro_batches": 3, **more}
    check(world_size, wide_log if "limits" in more else log, settings, arms, num_steps=settings.pop("num_steps", 6))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "lazy_adam"])
def test_nested_with_both_adams(wide_log, world_size, optimizer):
    arms = [{"mode": "nested", "buffered": True, "depth": 2}, {"mode": "nested", "buffered": False, "chunks": "shared"}]
    check(world_size, wide_log, {"batch_size": 5, "micro_batches": 2, "optimizer": optimizer}, arms, num_steps=10)


def test_barriers_leave_no_trace(log):
    arms = [{"mode": mode, "buffered": True, "barriers": (1, 4), "depth": 2} for mode in MODES]
    arms += [{**arms[-1], "chunks": "shared"}, {**arms[-1], "chunks": 2}]
    check(2, log, {"batch_size": 7, "micro_batches": 2}, arms, num_steps=7)
