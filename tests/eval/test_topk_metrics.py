"""Metrics and statistics of ranks against cases worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import DataError
from nestpipe.eval.eval_ranks import OneRank
from nestpipe.eval.topk_metrics import (
    Coverage,
    Interval,
    bootstrap,
    paired_difference,
    tertiles,
    user_metrics,
)


def test_metrics_of_known_ranks() -> None:
    metrics = user_metrics(np.array([1, 2, 3, 11]), (1, 2, 50), 10)  # rank 11 of 10: removed, a miss for any k
    assert metrics["hr@1"].tolist() == [1, 0, 0, 0]
    assert metrics["hr@2"].tolist() == [1, 1, 0, 0]
    assert metrics["hr@50"].tolist() == [1, 1, 1, 0]
    assert metrics["ndcg@2"].tolist() == [1, 1 / math.log2(3), 0, 0]
    assert metrics["ndcg@50"].tolist() == [1, 1 / math.log2(3), 0.5, 0]
    assert metrics["mrr"].tolist() == [1, 1 / 2, 1 / 3, 0]


def test_coverage_counts_distinct_items_and_no_padding() -> None:
    coverage = Coverage(4)
    coverage.add(torch.tensor([[3, 1, -1], [3, 2, 1]]))
    coverage.add(torch.tensor([[1, 3, -1]]))
    assert coverage.shares((1, 2, 3), OneRank()) == {"coverage@1": 0.5, "coverage@2": 0.75, "coverage@3": 0.75}


def test_bootstrap_interval_has_the_width_of_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 4000)
    interval = bootstrap(values, seed=7)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    # 1000 resamplings place a 2.5 % quantile to about 8 % of the half width (one deviation: 0.04).
    assert interval.low == pytest.approx(values.mean() - half, abs=0.2 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.2 * half)
    assert bootstrap(values, seed=7) == interval
    assert bootstrap(values, seed=8) != interval


def test_bootstrap_covers_the_truth_about_95_times_in_100() -> None:
    random = np.random.default_rng(3)
    held = sum(
        interval.low <= 0.2 <= interval.high
        for interval in (bootstrap((random.random(300) < 0.2).astype(float), seed, 300) for seed in range(200))
    )
    assert 180 <= held <= 198  # 190 expected, deviation 3; the seeds are fixed


def test_pairing_sees_what_two_separate_intervals_cannot() -> None:
    random = np.random.default_rng(1)
    a = random.random(500)
    b = a + 0.01 + 0.001 * random.normal(size=500)
    paired = paired_difference(a, b, seed=0)
    assert 0.009 < paired.low < paired.mean < paired.high < 0.011
    assert bootstrap(a, 0).high > bootstrap(b, 0).low
    assert paired_difference(a, a, seed=0) == Interval(0.0, 0.0, 0.0)
    with pytest.raises(DataError, match="there are 500 and 499"):
        paired_difference(a, b[1:], seed=0)


def test_paired_intervals_cover_the_difference_about_95_times_in_100() -> None:
    random = np.random.default_rng(5)
    held = 0
    for seed in range(100):
        easy = random.random(200)
        a, b = (np.less(random.random(200), 0.6 * easy + more).astype(float) for more in (0.1, 0.15))
        interval = paired_difference(a, b, seed=seed, num=200)
        held += interval.low <= 0.05 <= interval.high
    assert 89 <= held <= 100  # 95 expected, deviation 2.2; the seeds are fixed


def test_no_users_is_an_error() -> None:
    with pytest.raises(DataError, match="no users"):
        bootstrap(np.empty(0), seed=0)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60))
def test_tertiles_hold_each_user_once_and_never_split_a_length(lengths: list[int]) -> None:
    parts = tertiles(np.array(lengths))
    assert np.sum([part.mask for part in parts], axis=0).tolist() == [1] * len(lengths)
    for part in parts:
        inside = np.array(lengths)[part.mask]
        assert (part.low, part.high) == (inside.min(), inside.max())
    assert all(left.high < right.low for left, right in pairwise(parts))


def test_tertiles_of_distinct_lengths_are_thirds() -> None:
    parts = tertiles(np.arange(1, 301))
    assert [(part.name, part.low, part.high) for part in parts] == [
        ("short", 1, 100),
        ("medium", 101, 200),
        ("long", 201, 300),
    ]
