"""A device path without one of its waits, joins, edges or record_streams is seen, on the device, in every run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.fake_accelerator.device_edges import EdgeKind, necessary_edges, schedule_of
from tests.fake_accelerator.device_mutants import (
    WAITS,
    sites,
    train_without_edge,
    train_without_sites,
    train_without_wait,
)
from tests.fake_accelerator.device_training import DeviceCase
from tests.fake_accelerator.fake_ranks import run_on_fake, unordered_pairs
from tests.fake_accelerator.test_schedules import SCHEDULES

# Rows leave the device as soon as no batch holds them, so that downloads follow updates.
EVICTING = {
    name: replace(case, num_batches=7, barrier=1, tight=True, admit_after=1, max_rows=0)
    for name, case in SCHEDULES.items()
    if case.mode not in (None, "serial")
}
NESTED = EVICTING["nested"]


@pytest.mark.parametrize("name", WAITS)
def test_a_missing_wait_or_join_is_seen(name: str) -> None:
    assert unordered_pairs(2 if name == "collective" else 1, train_without_wait, NESTED, name)


def is_seen(num_ranks: int, case: DeviceCase, edge: EdgeKind) -> bool:
    """Whether reports name the stage that is not waited for."""
    stage = "compute" if edge.need == "backward" else edge.need
    return any(f" {stage}(" in one for one in unordered_pairs(num_ranks, train_without_edge, case, edge))


def test_the_edges_of_nested_are_those_that_it_needs() -> None:
    """The distance between batches is in the last: a row that leaves was updated by the last batch that held it."""
    assert [str(edge) for edge in necessary_edges(schedule_of(NESTED))] == [
        "compute after rows",
        "dense step after dense sum",
        "dense sum after backward",
        "grads after compute",
        "post after retrieve",
        "write after update",
    ]


@pytest.mark.parametrize("edge", necessary_edges(schedule_of(NESTED)), ids=str)
def test_a_missing_edge_of_nested_is_seen(edge: EdgeKind) -> None:
    assert is_seen(1, NESTED, edge)


@pytest.mark.parametrize("name", EVICTING)
def test_a_missing_edge_of_any_schedule_is_seen(name: str, scale: Callable[[int, int], int]) -> None:
    case = EVICTING[name]
    edges = necessary_edges(schedule_of(case))
    assert edges
    num_ranks = (2,) if case.groups > 1 else (1, 2)  # rows that stay here and rows that travel have other orders
    for edge in edges if scale(0, 1) else ():  # an ordinary run tries those of nested
        assert any(is_seen(number, case, edge) for number in num_ranks), str(edge)


# A case in which a site is needed, and on how many ranks.
SITES: dict[str, tuple[str, int]] = {
    "DenseParams.advance": ("nested", 1),
    "Window.local_rows": ("nested", 1),
    "Window._sums": ("nested, all clipped", 1),
    "ArrivedGrads._total": ("nested, groups and chunks", 2),
    "Handle._launch_all_to_all.<locals>.scatter": ("nested, shared chunks", 2),
    "Handle.wait_arrived": ("nested, shared chunks", 2),
    "Window.launch_grads": ("nested, groups and chunks", 2),
}
LATE = ("", "rows", "compute", "table", "fetch")


@pytest.mark.parametrize("site", SITES)
def test_memory_that_is_freed_in_use_is_seen(site: str) -> None:
    """Which thread frees memory, and when, is up to the host: others are late until it is freed early."""
    name, num_ranks = SITES[site]
    tries = (replace(SCHEDULES[name], num_batches=5, barrier=1, held_back=late) for late in LATE * 2)
    assert any(unordered_pairs(num_ranks, train_without_sites, case, site) for case in tries)


def test_every_site_has_a_mutant() -> None:
    known: set[str] = set()
    for name in ("nested, groups and chunks", "nested, all clipped"):
        known.update(*run_on_fake(2, sites, replace(SCHEDULES[name], num_batches=3, barrier=1)))
    assert known == set(SITES)
