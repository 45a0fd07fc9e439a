"""A device path without one of its waits, joins, edges or record_streams is seen, on the device, in every run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fake_accelerator.device_mutants import (
    WAITS,
    EdgeKind,
    edges,
    sites,
    train_without_edge,
    train_without_sites,
    train_without_wait,
)
from tests.fake_accelerator.device_training import DeviceCase
from tests.fake_accelerator.fake_ranks import run_on_fake, unordered_pairs

NESTED = DeviceCase(mode="nested", num_batches=6)
EVICTING = replace(NESTED, admit_after=1, max_rows=0, tight=True)

# Edges between two streams that no other edge and no order of a stream implies.
NOT_IMPLIED = {
    EdgeKind("post", "retrieve", 0),  # rows are uploaded before they are sent
    EdgeKind("compute", "rows", 0),
    EdgeKind("grads", "compute", 0),
    EdgeKind("dense sum", "backward", 0),
    EdgeKind("dense step", "dense sum", 0),
    EdgeKind("write", "update", 0),  # with evictions: rows are updated before they are downloaded
}


@pytest.mark.parametrize("name", WAITS)
def test_a_missing_start_wait_or_join_is_seen(name: str) -> None:
    assert unordered_pairs(1, train_without_wait, NESTED, name)


@pytest.mark.parametrize("edge", sorted(NOT_IMPLIED), ids=lambda edge: f"{edge.event} after {edge.need}")
def test_a_missing_edge_is_seen(edge: EdgeKind) -> None:
    case = EVICTING if edge.event == "write" else NESTED
    (known,) = run_on_fake(1, edges, case)
    assert edge in known
    assert unordered_pairs(1, train_without_edge, case, edge)


def test_memory_that_is_freed_in_use_is_seen() -> None:
    """All sites left out together, and the two that no other site covers in this schedule, alone."""
    (known,) = run_on_fake(1, sites, NESTED)
    assert {"DenseParams.advance", "Window.local_rows"} <= set(known)
    assert unordered_pairs(1, train_without_sites, NESTED)
    assert unordered_pairs(1, train_without_sites, replace(NESTED, held_back="rows"), "Window.local_rows")
    assert unordered_pairs(1, train_without_sites, replace(NESTED, held_back="compute"), "DenseParams.advance")
