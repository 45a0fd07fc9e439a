"""Metrics of lists against plain loops; their intervals cover what they estimate; several seeds as one result."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.splits import make_split
from nestpipe.errors import DataError
from nestpipe.eval import list_metrics
from nestpipe.eval.baselines import evaluate_baselines
from nestpipe.eval.item_neighbours import TrainingEvents
from nestpipe.eval.list_metrics import coverage, diversity, gini, novelty, weighted, with_list_metrics
from nestpipe.eval.seed_summary import SeedValue, student_quantile, summarise
from nestpipe.eval.topk_metrics import bootstrap, user_metrics
from tests.small_runs import small_config, write_log

NUM_ITEMS = 9
LISTS = st.lists(st.permutations(range(NUM_ITEMS)), min_size=1, max_size=8)


def cut(rows: list[list[int]], lengths: list[int]) -> np.ndarray:
    """Lists of 4 places, of which some are padded."""
    kept = [row[: 1 + length % 4] for row, length in zip(rows, itertools.cycle(lengths), strict=False)]
    return np.array([row + [-1] * (4 - len(row)) for row in kept], np.int32)


def plain_gini(shown: list[int]) -> float:
    """Mean absolute difference over twice the mean."""
    differences = sum(abs(a - b) for a in shown for b in shown)
    return differences / (2 * len(shown) * sum(shown))


@settings(max_examples=60)
@given(
    LISTS, st.lists(st.integers(0, 3), min_size=1), st.lists(st.integers(0, 9), min_size=NUM_ITEMS, max_size=NUM_ITEMS)
)
def test_metrics_of_lists_equal_plain_loops(rows: list[list[int]], lengths: list[int], counts: list[int]) -> None:
    lists = cut(rows, lengths)
    items = [[item for item in row if item >= 0] for row in lists.tolist()]
    shown = [sum(row.count(item) for row in items) for item in range(NUM_ITEMS)]
    assert gini(lists, NUM_ITEMS).mean() == pytest.approx(plain_gini(shown))
    assert coverage(lists, NUM_ITEMS).mean() == pytest.approx(len(set().union(*items)) / NUM_ITEMS)
    share = [(count + 1) / (sum(counts) + NUM_ITEMS) for count in counts]
    expected = [statistics.mean(-math.log2(share[item]) for item in row) for row in items]
    assert novelty(lists, np.array(counts)) == pytest.approx(expected)


@settings(max_examples=60)
@given(
    LISTS,
    st.lists(st.integers(0, 3), min_size=1),
    st.lists(st.sets(st.integers(0, NUM_ITEMS - 1)), min_size=1, max_size=6),
)
def test_diversity_equals_the_mean_over_pairs(rows: list[list[int]], lengths: list[int], users: list[set[int]]) -> None:
    lists = cut(rows, lengths)
    offsets = np.cumsum([0, *map(len, users)])
    events = TrainingEvents(np.array([item for user in users for item in user], np.int64), offsets, NUM_ITEMS)
    owners = [{number for number, user in enumerate(users) if item in user} for item in range(NUM_ITEMS)]

    def alike(a: int, b: int) -> float:
        size = len(owners[a]) * len(owners[b])
        return len(owners[a] & owners[b]) / math.sqrt(size) if size else 0.0

    found = diversity(lists, events, np.arange(len(users)))
    for row, one in zip(lists.tolist(), found, strict=True):
        pairs = list(itertools.combinations([item for item in row if item >= 0], 2))
        assert one == pytest.approx(1 - (statistics.mean(alike(*pair) for pair in pairs) if pairs else 0))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 3)), min_size=1, max_size=20))
def test_rank_metrics_and_weights_equal_plain_sums(pairs: list[tuple[int, float]]) -> None:
    ranks, weights = [rank for rank, _ in pairs], [weight for _, weight in pairs]
    found = user_metrics(np.array(ranks), (3,), 11)  # rank 12 of 11: removed
    hits = [float(rank <= 3) for rank in ranks]
    assert found["hr@3"].tolist() == hits
    assert found["ndcg@3"].tolist() == pytest.approx(
        [hit / math.log2(rank + 1) for hit, rank in zip(hits, ranks, strict=True)]
    )
    assert found["mrr"].tolist() == pytest.approx([1 / rank if rank <= 11 else 0 for rank in ranks])
    expected = sum(w * h for w, h in zip(weights, hits, strict=True)) / sum(weights)
    assert weighted(np.array(hits), np.array(weights)).mean() == pytest.approx(expected)


def draws(random: np.random.Generator, num_users: int) -> np.ndarray:
    """Lists of three items of thirty, of which few are shown often."""
    popular = 1 / np.arange(1, 31)
    return np.stack([random.choice(30, 3, replace=False, p=popular / popular.sum()) for _ in range(num_users)]).astype(
        np.int32
    )


@pytest.mark.parametrize("metric", [gini, coverage])
def test_intervals_of_lists_cover_at_their_rate(metric: Callable[[np.ndarray, int], np.ndarray]) -> None:
    """The expected metric of 60 users is in the interval of 60 users about 95 times in 100."""
    random = np.random.default_rng(2)
    truth = np.mean([metric(draws(random, 60), 30).mean() for _ in range(150)])
    found = [bootstrap(metric(draws(random, 60), 30), seed, 200) for seed in range(80)]
    held = sum(one.low <= truth <= one.high for one in found)
    assert 71 <= held <= 80  # 76 expected, deviation 1.9; leave-one-out is cautious for coverage


def test_intervals_of_weighted_hits_cover_at_their_rate() -> None:
    random = np.random.default_rng(4)

    def sample(num: int) -> tuple[np.ndarray, np.ndarray]:
        weights = random.choice([0.2, 1.0], num)
        return (random.random(num) < 0.1 + 0.4 * weights).astype(float), weights

    truth = (0.2 * 0.18 + 1.0 * 0.5) / 1.2
    found = [bootstrap(weighted(*sample(200)), seed, 200) for seed in range(100)]
    assert 89 <= sum(one.low <= truth <= one.high for one in found) <= 100  # 95 expected, deviation 2.2


def test_intervals_over_seeds_cover_at_their_rate() -> None:
    random = np.random.default_rng(3)
    for num_seeds in (2, 3, 5):
        found = [SeedValue.of(random.normal(0.3, 0.01, num_seeds).tolist()) for _ in range(500)]
        held = sum(one.low <= 0.3 <= one.high for one in found)
        assert 462 <= held <= 488  # 475 expected, deviation 4.9
    table = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 30: 2.042}
    assert {freedom: round(student_quantile(freedom), 3) for freedom in table} == table


def test_a_report_gets_all_metrics_and_slices_of_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_log(tmp_path / "log", {user: [user % 3, 3 + user % 9, 12 + user % 17, user % 31] for user in range(60)})
    config = small_config(log.path)
    split = make_split(log, config.data)
    report = evaluate_baselines(log, split, config, names=["transitions"])["transitions"]
    found = with_list_metrics(report, log, split, config)
    assert list(found.metrics)[5:] == ["novelty@10", "ild@10", "gini@10", "coverage@10", "hr@10/ips", "ndcg@10/ips"]
    assert report.coverage["coverage@10"] == pytest.approx(found.metrics["coverage@10"].mean)
    trained = Counter(item for user in range(60) for item in (user % 3, 3 + user % 9, 12 + user % 17))
    targets = [trained[user % 31] for user in range(60)]
    cold, warm = found.slices[-2:]
    assert (cold.name, cold.by, cold.num_users) == ("cold", "target", sum(count == 0 for count in targets))
    assert cold.num_users > 0
    assert (warm.low, warm.high) == (min(c for c in targets if c), max(targets))
    found.save(tmp_path / "eval")
    loaded = type(found).load(tmp_path / "eval")
    assert loaded.to_json() == found.to_json()
    assert loaded.extra.keys() == found.extra.keys()
    monkeypatch.setattr(list_metrics, "_AT_ONCE", 1)
    again = with_list_metrics(report, log, split, config)
    assert again.to_json() == found.to_json()

    other = replace(found, metrics={**found.metrics, "mrr": replace(found.metrics["mrr"], mean=0.5)})
    summary = summarise({"a": found, "b": other})
    assert summary.metrics["mrr"].mean == pytest.approx((found.metrics["mrr"].mean + 0.5) / 2)
    assert summary.metrics["hr@10"].deviation == 0
    with pytest.raises(DataError, match="at least two runs"):
        summarise({"a": found})
    assert found.protocol is not None
    with pytest.raises(DataError, match="ties: file in a, meta in b"):
        summarise({"a": found, "b": replace(found, protocol=replace(found.protocol, ties="meta"))})
