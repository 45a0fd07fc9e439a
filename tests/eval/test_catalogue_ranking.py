"""Ranks and lists of the catalogue against a full sort: one process, blocks, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nestpipe.errors import DataError, TrainError
from nestpipe.eval.catalogue_ranking import rank_targets, top_items
from nestpipe.jagged import Jagged
from nestpipe.ops.catalogue_scan import CataloguePart

whole = CataloguePart.whole
MANY = 2**20


def ordered(query: list[float], items: list[list[float]], seen: list[int]) -> list[int]:
    """The oracle: unseen positions, best score first, ties to the lower position."""
    scores = [sum(q * x for q, x in zip(query, item, strict=True)) for item in items]
    return sorted((p for p in range(len(items)) if p not in seen), key=lambda p: (-scores[p], p))


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Small integer vectors: every product is exact in float32, and most scores are tied."""
    num_samples, num_items, dim = draw(st.integers(1, 7)), draw(st.integers(1, 40)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.integers(0, 3))
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    return {
        "queries": random.integers(-spread, spread + 1, (num_samples, dim)).tolist(),
        "items": random.integers(-spread, spread + 1, (num_items, dim)).tolist(),
        "targets": random.integers(num_items, size=num_samples).tolist(),
        "seen": [np.flatnonzero(random.random(num_items) < share).repeat(2).tolist() for _ in range(num_samples)],
        "top_k": draw(st.integers(1, 45)),
        "max_bytes": draw(st.sampled_from([1, 60, 300, 1000, 3000, MANY])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
    }


@given(problems())
def test_ranks_and_lists_are_those_of_a_full_sort(problem: dict[str, Any]) -> None:
    queries = torch.tensor(problem["queries"], dtype=problem["dtype"])
    items = torch.tensor(problem["items"], dtype=problem["dtype"])
    seen, k, max_bytes = Jagged.from_rows(problem["seen"]), problem["top_k"], problem["max_bytes"]
    ranked = rank_targets(queries, whole(items), torch.tensor(problem["targets"]), seen, top_k=k, max_bytes=max_bytes)
    recommended = top_items(queries, items, seen, k, max_bytes)
    for row, (query, target, removed) in enumerate(
        zip(problem["queries"], problem["targets"], problem["seen"], strict=True)
    ):
        order = ordered(query, problem["items"], removed)
        rank = order.index(target) + 1 if target in order else len(items) + 1
        assert ranked.ranks[row].item() == rank
        assert ranked.top[row].tolist() == (order + [-1] * k)[:k]
    assert torch.equal(recommended.positions, ranked.top)
    shown = recommended.positions >= 0
    exact = (queries @ items.T).gather(1, recommended.positions.clamp(min=0))
    assert torch.equal(recommended.scores[shown], exact[shown])
    assert bool((recommended.scores[~shown] == -math.inf).all())


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes note of the largest tensor that any operation returns, views of the inputs apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return result


@pytest.mark.parametrize("spread", [1, 10_000])  # all ties, hardly any
def test_memory_is_bounded_and_blocks_do_not_change_the_result(spread: int) -> None:
    random = torch.Generator().manual_seed(1)
    queries = torch.randint(-spread, spread + 1, (200, 1), generator=random).double()
    items = torch.randint(-spread, spread + 1, (5000, 1), generator=random).double()
    targets = torch.randint(5000, (200,), generator=random)
    seen = Jagged.from_rows([[row, 4999 - row] for row in range(200)])
    unblocked = rank_targets(queries, whole(items), targets, seen, top_k=10, max_bytes=2**30)
    max_bytes = 2**16  # the whole score matrix would take 8 million bytes
    with LargestTensor() as largest:
        blocked = rank_targets(queries, whole(items), targets, seen, top_k=10, max_bytes=max_bytes)
    assert 0 < largest.num_bytes <= max_bytes
    assert torch.equal(blocked.ranks, unblocked.ranks)
    assert torch.equal(blocked.top, unblocked.top)


def test_target_is_tied_with_itself_in_float32_whatever_the_blocks() -> None:
    random = torch.Generator().manual_seed(2)
    queries, items = torch.randn(50, 37, generator=random), torch.randn(700, 37, generator=random)
    best = (queries @ items.T).argmax(1)
    for max_bytes in (2000, 20_000, MANY):
        ranked = rank_targets(queries, whole(items), best, None, top_k=1, max_bytes=max_bytes)
        assert ranked.ranks.tolist() == [1] * 50
        assert torch.equal(ranked.top[:, 0], best)


def test_nothing_is_removed_without_seen_and_queries_may_need_gradients() -> None:
    queries, items = torch.ones(1, 1, requires_grad=True), torch.tensor([[3.0], [2.0], [1.0]])
    ranked = rank_targets(queries, whole(items), torch.tensor([1]), None, top_k=5, max_bytes=MANY)
    assert ranked.ranks.tolist() == [2]
    assert ranked.top.tolist() == [[0, 1, 2, -1, -1]]
    removed = rank_targets(queries, whole(items), torch.tensor([1]), Jagged.from_rows([[1]]), top_k=5, max_bytes=MANY)
    assert removed.ranks.tolist() == [4]


def test_no_samples_give_empty_results() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    ranked = rank_targets(
        torch.empty(0, 2), whole(torch.ones(3, 2)), empty, Jagged.from_rows([]), top_k=2, max_bytes=MANY
    )
    assert ranked.ranks.shape == (0,)
    assert ranked.top.shape == (0, 2)
    assert top_items(torch.ones(2, 1), torch.empty(0, 1), None, 2, MANY).positions.tolist() == [[-1, -1]] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_bytes", [400, MANY])
def test_scores_that_are_not_finite_name_the_sample(value: float, max_bytes: int) -> None:
    items = torch.ones(50, 1)
    items[45] = value
    queries = torch.ones(9, 1)
    targets = torch.zeros(9, dtype=torch.int64)
    with pytest.raises(TrainError, match=r"sample 0 for the item at catalogue position 45"):
        rank_targets(queries, whole(items), targets, None, top_k=3, max_bytes=max_bytes)
    queries[7] = value
    with pytest.raises(TrainError, match=r"sample 7 for the item at catalogue position 0"):
        top_items(queries, torch.ones(50, 1), None, 3, max_bytes)


def test_positions_outside_of_the_catalogue_are_refused() -> None:
    queries, items = torch.ones(2, 1), torch.ones(3, 1)
    with pytest.raises(DataError, match="target 1 has catalogue position 3, but the catalogue has 3 items"):
        rank_targets(queries, whole(items), torch.tensor([0, 3]), None, top_k=1, max_bytes=MANY)
    with pytest.raises(DataError, match="seen item 0 has catalogue position -1"):
        top_items(queries, items, Jagged.from_rows([[-1], []]), 1, MANY)
    with pytest.raises(DataError, match="2 queries but 1 rows of seen"):
        top_items(queries, items, Jagged.from_rows([[0]]), 1, MANY)
