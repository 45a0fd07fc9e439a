"""Retrieval and pre-rank: what is found, in which order, and what filters take away."""

from __future__ import annotations

import logging
from dataclasses import replace

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
    build_index,
    mean_encoder,
    past_from,
    retriever_of,
)
from nestpipe.rules.compiled_rules import no_rules
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


PAST = PastEvents(ITEMS[:4])


def retriever_with(index):
    return Retriever(
        items=ITEMS,
        vectors=VECTORS,
        index=index,
        encode=mean_encoder(ITEMS, VECTORS),
        past_of=lambda user: PAST,
    )


def test_prerank_scores_what_was_retrieved_exactly():
    retriever = retriever_with(ExactIndex(VECTORS))
    found = retriever.retrieve(PAST, 100)
    assert len(found.places) == 100
    assert not set(found.places.tolist()) & set(range(4)), "what the user has had is not retrieved"
    np.testing.assert_allclose(found.query, VECTORS[:4].mean(0), rtol=1e-6)
    shuffled = replace(found, places=np.random.default_rng(2).permutation(found.places))
    best = retriever.prerank(shuffled, 8)
    assert best.items == ITEMS[found.places[:8]].tolist()
    np.testing.assert_allclose(best.scores, VECTORS[found.places[:8]] @ found.query, rtol=1e-5)


@pytest.mark.parametrize("spec", ["Flat", "HNSW16", "IVF8,Flat"])
def test_an_approximate_index_scans_where_few_items_are_allowed(spec):
    faiss = pytest.importorskip("faiss", reason="faiss is not installed")
    exact, near = retriever_with(ExactIndex(VECTORS)), retriever_with(FaissIndex(VECTORS, spec, faiss))
    draw = np.random.default_rng(3).random(500)
    for share in (0.01, 0.04, 0.3, 0.9):
        allowed = draw < share
        rules = replace(no_rules(500), allowed=allowed, num_allowed=int(allowed.sum()))
        wanted, found = exact.retrieve(PAST, 30, rules).places, near.retrieve(PAST, 30, rules).places
        assert allowed[found].all()
        assert len(found) == len(wanted) == min(30, rules.num_left(np.arange(4)))
        if share < 0.05 or spec == "Flat":
            assert found.tolist() == wanted.tolist()
        else:
            assert len(set(found) & set(wanted)) >= 10, "an approximate index finds many of them"


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
        found, wanted = retriever.prerank(retriever.retrieve(past, 10), 10), scorer.recommend(user, 10)
        assert found.items == wanted.items
        # The scorer multiplies a block of users, we one: float32 sums of eight products in another order.
        np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-6)
    nobody = PastReader(sequences)(10**9)
    assert len(nobody.items) == 0
    assert len(retriever.retrieve(nobody, 5).places) == 5


def test_a_history_of_the_request_replaces_the_one_on_file():
    on_file = PastEvents(ITEMS[:3])
    assert past_from(None, on_file) is on_file
    brought = past_from([{"item": 5, "time": 60}, {"item": 6, "time": 61}], on_file)
    assert brought.items.tolist() == [5, 6]
    assert brought.times_ms is not None
    assert brought.times_ms.tolist() == [60_000, 61_000]
    assert past_from([], on_file).items.tolist() == []
