"""An index that changes finds what a new index of the same vectors finds, whatever was added, replaced and removed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.gateway.candidates import ExactIndex, build_index
from nestpipe.gateway.live_index import LiveIndex

QUERY = np.array([1.0, -0.5, 0.25], np.float32)


def drawn(number, count):
    return np.random.default_rng(number).normal(size=(count, 3)).astype(np.float32)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_it_finds_what_a_scan_of_the_present_vectors_finds(data):
    index, alive = LiveIndex.of(drawn(0, 40), ExactIndex), set(range(40))
    for step in range(data.draw(st.integers(1, 4))):
        size = len(index.vectors)
        places = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=4))), np.int64)
        places = np.concatenate([places, np.arange(size, size + data.draw(st.integers(0, 2)))])
        removed = np.array(sorted(data.draw(st.sets(st.sampled_from(range(size)), max_size=3)) - set(places)), np.int64)
        index = index.changed(places, drawn(step + 1, len(places)), removed=removed)
        alive = (alive | set(places.tolist())) - set(removed.tolist())
        k = data.draw(st.integers(1, 50))
        wanted = sorted(alive, key=lambda place: (-float(index.vectors[place] @ QUERY), place))[:k]
        assert index.search(QUERY, k).tolist() == wanted


def test_an_index_of_faiss_forgets_and_learns():
    pytest.importorskip("faiss")
    index = LiveIndex.of(drawn(0, 300), lambda vectors: build_index(vectors, "HNSW16"))
    best = index.search(QUERY, 3)
    gone = index.changed(best[:1], QUERY[None] * -9, removed=best[1:2])
    assert gone.search(QUERY, 1).tolist() == best[2:3].tolist()
    new = gone.changed(np.array([300]), QUERY[None] * 9, removed=np.empty(0, np.int64))
    assert new.search(QUERY, 1).tolist() == [300]
    assert index.search(QUERY, 3).tolist() == best.tolist()
