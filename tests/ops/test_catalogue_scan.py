"""The scan of the catalogue: both backends against each other and against a full sort, in parts and in threads."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.jagged import Jagged
from nestpipe.ops.catalogue_scan import CataloguePart, PartScan, Targets, Top, block_items, merge_tops, scan, scores_at

MAX_BYTES = 2**16
BLOCK = block_items(MAX_BYTES)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Queries, items, targets and seen items; small integers, so that most scores are tied, or real numbers."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_queries, num_items = draw(st.sampled_from([0, 1, 5, 6, 7, 40])), draw(st.sampled_from([1, 31, 32, 33, 95, 300]))
    width, spread = draw(st.sampled_from([1, 3, 8, 17])), draw(st.sampled_from([0, 1, 3, None]))
    draws = [random.normal(size=(n, width)) if spread is None else random.integers(-spread, spread + 1, (n, width))
             for n in (num_queries, num_items)]  # fmt: skip
    share = draw(st.sampled_from([0.0, 0.2, 1.0]))
    seen = [np.flatnonzero(random.random(num_items) < share) for _ in range(num_queries)]
    return {
        "queries": torch.from_numpy(draws[0]).float(),
        "items": torch.from_numpy(draws[1]).float(),
        "targets": torch.from_numpy(random.integers(num_items, size=num_queries)),
        "seen": Jagged.from_rows([random.permutation(one.repeat(2)).tolist() for one in seen]),
        "k": draw(st.sampled_from([1, 2, 10, 200, 400])),
    }


def all_scores(queries: Tensor, items: Tensor) -> Tensor:
    """The native score of every pair."""
    part, num = CataloguePart.whole(items), len(items)
    return torch.stack(
        [
            scores_at(one.expand(num, -1), part, torch.arange(num), max_bytes=MAX_BYTES, backend="native")
            for one in queries
        ]
        or [torch.empty(0)]
    )


def sorted_scan(problem: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """The oracle: unseen items sorted by score, ties by position; items before the target, and the first k."""
    before, tops = [], []
    scores = all_scores(problem["queries"], problem["items"]).tolist()
    offsets, values = problem["seen"].offsets.tolist(), problem["seen"].values.tolist()
    for row, target in enumerate(problem["targets"].tolist()):
        own, seen = scores[row], set(values[offsets[row] : offsets[row + 1]])
        order = sorted((item for item in range(len(own)) if item not in seen), key=lambda item: (-own[item], item))
        before.append(sum((-own[item], item) < (-own[target], target) for item in order))
        tops.append((order + [-1] * problem["k"])[: problem["k"]])
    return before, tops


def scanned(problem: dict[str, Any], part: CataloguePart, backend: str) -> PartScan:
    queries, targets = problem["queries"], problem["targets"]
    whole = CataloguePart.whole(problem["items"])
    own = Targets(targets, scores_at(queries, whole, targets, max_bytes=MAX_BYTES, backend=backend))
    return scan(queries, part, problem["seen"], k=problem["k"], targets=own, max_bytes=MAX_BYTES, backend=backend)


@given(problems())
def test_native_scan_is_a_full_sort_whatever_the_parts(problem: dict[str, Any]) -> None:
    items, (before, tops) = problem["items"], sorted_scan(problem)
    for edges in ([0, len(items)], [0, len(items) // 3, len(items) // 3, len(items)]):
        parts = [
            scanned(problem, CataloguePart(items[first:last], first, len(items)), "native")
            for first, last in pairwise(edges)
        ]
        assert sum(part.before for part in parts).tolist() == before
        merged = merge_tops([part.top for part in parts], problem["k"])
        assert merged.positions.tolist() == tops
        assert not any(bool(part.not_finite.any()) for part in parts)


@given(problems())
def test_torch_scan_is_bitwise_the_same_in_aligned_parts(problem: dict[str, Any]) -> None:
    items = problem["items"]
    whole = scanned(problem, CataloguePart.whole(items), "torch")
    parts = [
        scanned(problem, CataloguePart(items[first : first + BLOCK], first, len(items)), "torch")
        for first in range(0, len(items), BLOCK)
    ]
    merged = merge_tops([part.top for part in parts], problem["k"])
    assert torch.equal(sum(part.before for part in parts), whole.before)
    assert torch.equal(merged.positions, whole.top.positions)
    assert torch.equal(merged.scores, whole.top.scores)
    if bool((items == items.round()).all()) and bool((problem["queries"] == problem["queries"].round()).all()):
        native = scanned(problem, CataloguePart.whole(items), "native")  # products of small integers are exact
        assert torch.equal(native.before, whole.before)
        assert torch.equal(native.top.positions, whole.top.positions)
        assert torch.equal(native.top.scores, whole.top.scores)


def test_scores_are_one_chain_of_fused_multiply_adds() -> None:
    random = torch.Generator().manual_seed(0)
    queries, items = torch.randn(3, 9, generator=random), torch.randn(4, 9, generator=random)
    for query, row in zip(queries, all_scores(queries, items), strict=True):
        for item, score in zip(items, row, strict=True):
            chain = np.float32(0)
            for q, x in zip(query.tolist(), item.tolist(), strict=True):
                chain = _rounded(Fraction(q) * Fraction(x) + Fraction(float(chain)))
            assert score.item() == chain


def _rounded(value: Fraction) -> np.float32:
    """The float32 nearest to a number; ties, which random numbers do not have, aside."""
    near = np.float32(float(value))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(candidates, key=lambda one: abs(Fraction(float(one)) - value))


@pytest.mark.parametrize("num_queries", [1, 24, 50, 129])
def test_a_score_depends_on_neither_the_other_queries_nor_the_threads(num_queries: int) -> None:
    random = torch.Generator().manual_seed(1)
    queries, items = torch.randn(129, 33, generator=random), torch.randn(700, 33, generator=random)
    part, before = CataloguePart.whole(items), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        all_of_them = scan(queries, part, None, k=30, max_bytes=MAX_BYTES, backend="native")
        torch.set_num_threads(4)
        some = scan(queries[:num_queries], part, None, k=30, max_bytes=MAX_BYTES, backend="native")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(some.top.scores, all_of_them.top.scores[:num_queries])
    assert torch.equal(some.top.positions, all_of_them.top.positions[:num_queries])
    assert torch.equal(some.top.scores, all_scores(queries[:num_queries], items).topk(30).values)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_scores_that_are_not_finite_are_marked(backend: str, value: float) -> None:
    queries, items = torch.full((7, 2), 2.0), torch.ones(600, 2)
    queries[3:] = 0.001
    items[555] = value
    found = scan(queries, CataloguePart.whole(items), None, k=5, max_bytes=MAX_BYTES, backend=backend)
    assert found.not_finite.tolist() == [True] * 3 + [abs(value) != 3e38] * 4


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_ascending_scores_and_lists_longer_than_the_catalogue(backend: str) -> None:
    queries, items = torch.ones(2, 1), torch.arange(100.0).unsqueeze(1)
    found = scan(queries, CataloguePart(items, 50, 150), None, k=120, max_bytes=MAX_BYTES, backend=backend)
    assert found.top.positions.tolist() == [[*range(149, 49, -1), *[-1] * 20]] * 2
    assert found.top.scores[0, :100].tolist() == [float(score) for score in range(99, -1, -1)]
    assert bool((found.top.scores[:, 100:] == -math.inf).all())


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_zero_and_minus_zero_are_one_score(backend: str) -> None:
    queries, items = torch.full((1, 1), 1e-30), torch.tensor([[-1e-30], [0.0], [-1e-30], [0.0]])
    part, targets = CataloguePart.whole(items), torch.tensor([2])
    scores = scores_at(queries, part, targets, max_bytes=MAX_BYTES, backend=backend)
    assert math.copysign(1.0, scores.item()) == -1.0
    own = Targets(targets, scores)
    found = scan(queries, part, None, k=3, targets=own, max_bytes=MAX_BYTES, backend=backend)
    assert found.before.tolist() == [2]
    assert found.top.positions.tolist() == [[0, 1, 2]]


def test_merged_lists_keep_the_lower_position_first() -> None:
    first = Top(torch.tensor([[2, 0, -1]]), torch.tensor([[5.0, 1.0, -math.inf]]))
    later = Top(torch.tensor([[7, 9, 8]]), torch.tensor([[5.0, 3.0, 1.0]]))
    assert merge_tops([first, later], 4).positions.tolist() == [[2, 7, 9, 0]]
