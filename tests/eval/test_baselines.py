"""Baselines against the same definitions worked out with dictionaries, one user at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.eval import item_neighbours
from nestpipe.eval.baselines import BASELINES, Baseline, evaluate_baselines, rank_by_scores
from nestpipe.jagged import Jagged
from tests.small_runs import small_config, write_log

Edges = dict[int, dict[int, float]]


def plain_edges(name: Baseline, histories: list[list[int]]) -> Edges:
    edges: Edges = defaultdict(lambda: defaultdict(float))
    count: dict[int, int] = defaultdict(int)
    if name == "item_knn":
        for history in histories:
            for item in set(history):
                count[item] += 1
                for other in set(history) - {item}:
                    edges[item][other] += 1
        cosine = {
            item: {other: shared / math.sqrt(count[item] * count[other]) for other, shared in own.items()}
            for item, own in edges.items()
        }
        return {
            item: dict(sorted(own.items(), key=lambda one: (-one[1], one[0]))[:100]) for item, own in cosine.items()
        }
    for history in histories:
        for place, item in enumerate(history):
            count[item] += 1
            for distance, other in enumerate(history[place + 1 : place + 6], 1):
                edges[item][other] += 1 / distance
    return {item: {other: one / count[item] for other, one in own.items()} for item, own in edges.items()}


def plain_order(
    name: Baseline, edges: Edges, trained: list[list[int]], history: list[int], num_items: int
) -> list[int]:
    popular = [sum(one.count(item) for one in trained) for item in range(num_items)]
    scores: dict[int, float] = defaultdict(float)
    num_recent = {"popularity": 0, "last_item": 1, "transitions": 5, "item_knn": 50}[name]
    recent = history[-num_recent:] if num_recent else []
    for place, item in enumerate(recent):
        for other, weight in edges.get(item, {}).items():
            scores[other] += 1 / (len(recent) - place) * weight
    unseen = [item for item in range(num_items) if item not in history]
    return sorted(unseen, key=lambda item: (-scores[item], -popular[item], item))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    random = np.random.default_rng(5)
    histories = {user: random.zipf(1.4, 3 + user % 11).clip(1, 25).tolist() for user in range(60)}
    histories |= {99: [3, 3, 7, 25]}
    return write_log(tmp_path_factory.mktemp("log") / "log", histories)


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "content_knn"])  # it has a file of its own
@pytest.mark.parametrize("pairs", [1, 1 << 23])
def test_every_rank_is_that_of_the_definition(
    log: Sequences, name: Baseline, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_neighbours, "_AT_ONCE", pairs)
    config = small_config(log.path)
    config = replace(config, data=replace(config.data, max_len=60), eval=replace(config.eval, max_bytes=2**16))
    items = np.searchsorted(log.catalogue, log.items).tolist()
    histories = [items[low:high] for low, high in zip(log.offsets[:-1], log.offsets[1:], strict=True)]
    trained = [history[:-1] for history in histories]
    edges = {} if name == "popularity" else plain_edges(name, trained)
    report = evaluate_baselines(log, make_split(log, config.data), config, names=[name])[name]
    num_items = len(log.catalogue)
    assert report.lists is not None
    for history, rank, best in zip(histories, report.rank.tolist(), report.lists.tolist(), strict=True):
        order = plain_order(name, edges, trained, history[:-1], num_items)
        assert rank == (num_items + 1 if history[-1] in history[:-1] else order.index(history[-1]) + 1)
        assert best == (order + [-1] * 10)[:10]
    assert report.protocol is not None
    assert report.protocol.candidates == f"all {num_items} items"


@settings(max_examples=60)
@given(st.data())
def test_ranking_by_scores_breaks_ties_by_counts_then_position(data: st.DataObject) -> None:
    num_items = data.draw(st.integers(2, 8))
    numbers = st.integers(0, 2)
    scores = np.array(data.draw(st.lists(numbers, min_size=num_items, max_size=num_items)), float)
    counts = np.array(data.draw(st.lists(numbers, min_size=num_items, max_size=num_items)))
    target = data.draw(st.integers(0, num_items - 1))
    seen = data.draw(st.lists(st.integers(0, num_items - 1), max_size=4))
    k = data.draw(st.integers(1, 10))
    found = rank_by_scores(scores[None], counts, np.array([target]), Jagged.from_rows([seen]), k=k)
    order = sorted(set(range(num_items)) - set(seen), key=lambda item: (-scores[item], -counts[item], item))
    assert found.ranks.tolist() == [num_items + 1 if target in seen else order.index(target) + 1]
    assert found.top.tolist() == [(order + [-1] * k)[:k]]
