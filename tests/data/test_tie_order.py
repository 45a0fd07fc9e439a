"""Orders of equal times: Meta's against a plain quicksort, and folders that keep the rule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.append import append_log
from nestpipe.data.ingest import BuildOptions, write_sequences
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.tie_order import check_ties, order_numbers
from nestpipe.errors import ConfigError, DataError


def plain_quicksort(times: list[int]) -> list[int]:
    """numpy's introsort as published: median of three, insertion up to 16 values; these inputs never need its heapsort."""
    places, stack = list(range(len(times))), [(0, len(times) - 1)]
    while stack:
        low, high = stack.pop()
        if high - low > 15:
            at = partition(times, places, low, high)
            stack += [(low, at - 1), (at + 1, high)]
        else:
            places[low : high + 1] = sorted(
                places[low : high + 1], key=lambda place: times[place]
            )  # stable, as insertion is
    return places


def partition(times: list[int], places: list[int], low: int, high: int) -> int:
    def swap(a: int, b: int) -> None:
        places[a], places[b] = places[b], places[a]

    def key(at: int) -> int:
        return times[places[at]]

    middle = low + ((high - low) >> 1)
    for a, b in ((low, middle), (middle, high), (low, middle)):
        if key(b) < key(a):
            swap(a, b)
    pivot, left, right = key(middle), low + 1, high - 2
    swap(middle, high - 1)
    while True:
        while key(left) < pivot:
            left += 1
        while pivot < key(right):
            right -= 1
        if left >= right:
            break
        swap(left, right)
        left, right = left + 1, right - 1
    swap(left, high - 1)
    return left


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 60))
def test_metas_order_is_numpys_scalar_quicksort(seed: int, num_events: int, num_times: int) -> None:
    times = np.random.default_rng(seed).integers(num_times, size=num_events) * 1000
    numbers = order_numbers("meta", times)
    assert np.argsort(numbers).tolist() == plain_quicksort(times.tolist())


def log(num_events: int = 300) -> pl.DataFrame:
    random = np.random.default_rng(0)
    return pl.DataFrame(
        {
            "user": random.integers(5, size=num_events),
            "item": np.arange(num_events),
            "time": 1_000_000 + random.integers(12, size=num_events),
        }
    )


def ingest(out: Path, ties: str, budget_rows: int = 1000) -> Sequences:
    options = BuildOptions(ties=ties, budget_rows=budget_rows)
    return write_sequences(out, schema=Schema(), log=log(), options=options)


@pytest.mark.parametrize("ties", ["file", "meta", "shuffle:3"])
@pytest.mark.parametrize("budget_rows", [40, 1000])
def test_events_of_a_user_are_in_the_order_of_the_rule(tmp_path: Path, ties: str, budget_rows: int) -> None:
    found = ingest(tmp_path / "out", ties, budget_rows)
    frame = log().with_columns(number=order_numbers(ties, log()["time"].to_numpy()))
    assert found.items.tolist() == frame.sort("user", "time", "number")["item"].to_list()
    assert found.ties == json.loads((tmp_path / "out" / "meta.json").read_text())["ties"] == ties


def test_rules_differ_and_shuffles_depend_on_their_seed(tmp_path: Path) -> None:
    folders = [ingest(tmp_path / str(n), ties) for n, ties in enumerate(("file", "meta", "shuffle:1", "shuffle:2"))]
    assert len({one.digest for one in folders}) == 4
    assert ingest(tmp_path / "again", "shuffle:1").digest == folders[2].digest


def test_rules_that_cannot_be_followed_are_refused(tmp_path: Path) -> None:
    for ties in ("newest", "shuffle:", "shuffle:-1"):
        with pytest.raises(ConfigError, match="it must be file, meta or shuffle:SEED"):
            check_ties(ties)
    with pytest.raises(ConfigError, match="the log has no times"):
        write_sequences(
            tmp_path / "a", schema=Schema(time=None), log=log().drop("time"), options=BuildOptions(ties="meta")
        )
    sequences = ingest(tmp_path / "b", "meta")
    with pytest.raises(DataError, match="made with ties 'meta', which orders the whole log"):
        append_log(sequences.path, log=log().head(3))
    assert write_sequences(tmp_path / "c", schema=Schema(time=None), log=log().drop("time")).ties == "none"
