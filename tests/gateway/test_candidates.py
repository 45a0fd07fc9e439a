"""Retrieval and pre-rank: what is found, in which order, and what filters take away."""

from __future__ import annotations

import logging

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nestpipe.eval.predictor import RetrievalPredictor
from nestpipe.gateway.candidates import (
    ExactIndex,
    FaissIndex,
    PastEvents,
    PastReader,
    Retriever,
    at_most,
    build_index,
    mean_encoder,
    past_from,
    retriever_of,
    without,
)
from nestpipe.training.loop import train
from nestpipe.training.run_folder import Run
from tests.small_runs import small_config, small_log

VECTORS = np.random.default_rng(1).standard_normal((500, 12), dtype=np.float32)
ITEMS = np.arange(500) * 3 + 7


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.integers(-3, 3)), st.integers(1, 50))
def test_exact_search_is_a_stable_sort(scores, k):
    """Many ties: one-dimensional vectors make the scores what they are."""
    found = ExactIndex(scores[:, None]).search(np.ones(1, dtype=np.float32), k)
    assert found.tolist() == np.argsort(-scores, kind="stable")[:k].tolist()


def test_faiss_finds_what_exact_search_finds():
    faiss = pytest.importorskip("faiss", reason="faiss is not installed")
    flat, exact = FaissIndex(VECTORS, "Flat", faiss), ExactIndex(VECTORS)
    near = FaissIndex(VECTORS, "HNSW16", faiss)
    for query in VECTORS[:20]:
        assert flat.search(query, 30).tolist() == exact.search(query, 30).tolist()
        shared = set(near.search(query, 30)) & set(exact.search(query, 30))
        assert len(shared) >= 15, "an approximate index finds most of them"
    assert len(flat.search(VECTORS[0], 10_000)) == 500


def test_without_faiss_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with caplog.at_level(logging.WARNING, "nestpipe"):
        assert isinstance(build_index(VECTORS), ExactIndex)
    assert [record.message for record in caplog.records] == [
        "retrieval index: exact search with numpy over 500 items (faiss is not installed: pip install 'nestpipe[serve]')"
    ]


def test_prerank_scores_exactly_and_filters_in_order_of_score():
    past = PastEvents(ITEMS[:4])
    retriever = Retriever(
        items=ITEMS,
        vectors=VECTORS,
        index=ExactIndex(VECTORS),
        encode=mean_encoder(ITEMS, VECTORS),
        past_of=lambda user: past,
    )
    query, places = retriever.retrieve(past, 100)
    assert len(places) == 104
    np.testing.assert_allclose(query, VECTORS[:4].mean(0), rtol=1e-6)
    shuffled = np.random.default_rng(2).permutation(places)
    rules = (without([int(ITEMS[places[10]])]), at_most(2, lambda items: items % 5))
    found = retriever.prerank(query, shuffled, past, 8, filters=rules)
    left: list[int] = []
    for place in places.tolist():  # the same rules, one item after the other
        item = int(ITEMS[place])
        if item not in past.items and place != places[10] and sum(one % 5 == item % 5 for one in left) < 2:
            left.append(item)
    assert found.items == left[:8]
    np.testing.assert_allclose(found.scores, [VECTORS[(item - 7) // 3] @ query for item in left[:8]], rtol=1e-5)


def test_who_has_no_events_gets_the_mean_of_all_items():
    encode = mean_encoder(ITEMS, VECTORS)
    for items in ([], [8], [2**62]):
        np.testing.assert_array_equal(encode(PastEvents(np.array(items, dtype=np.int64)), None), VECTORS.mean(0))


def test_a_trained_run_retrieves_what_its_scorer_recommends(tmp_path):
    sequences = small_log(tmp_path / "log")
    train(small_config(tmp_path / "log", epochs=1), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    scorer, retriever = run.predictor(), retriever_of(run)
    assert isinstance(scorer, RetrievalPredictor)
    for user in (3, 17, 39):
        past = retriever.past_of(user)
        assert past.items.tolist() == sequences.items[sequences.offsets[user] : sequences.offsets[user + 1]].tolist()
        query, places = retriever.retrieve(past, 10)
        found, wanted = retriever.prerank(query, places, past, 10), scorer.recommend(user, 10)
        assert found.items == wanted.items
        # The scorer multiplies a block of users, we one: float32 sums of eight products in another order.
        np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-6)
    nobody = PastReader(sequences)(10**9)
    assert len(nobody.items) == 0
    assert len(retriever.retrieve(nobody, 5)[1]) == 5


def test_a_history_of_the_request_replaces_the_one_on_file():
    on_file = PastEvents(ITEMS[:3])
    assert past_from(None, on_file) is on_file
    brought = past_from([{"item": 5, "time": 60}, {"item": 6, "time": 61}], on_file)
    assert brought.items.tolist() == [5, 6]
    assert brought.times_ms is not None
    assert brought.times_ms.tolist() == [60_000, 61_000]
    assert past_from([], on_file).items.tolist() == []
