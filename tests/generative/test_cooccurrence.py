"""Vectors from histories: near items are near, and what validation and test ask for is never looked at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from nestpipe.data.config import DataConfig
from nestpipe.data.splits import make_split
from nestpipe.generative.cooccurrence import behaviour_vectors, fuse
from tests.small_runs import write_log


def world(tmp_path, num_users=60):
    """Two kinds of users, each with ten items of its own kind."""
    rng = np.random.default_rng(0)
    return write_log(
        tmp_path / "log", {user: (rng.integers(0, 10, size=12) + 10 * (user % 2)).tolist() for user in range(num_users)}
    )


def test_items_of_one_kind_of_user_are_near(tmp_path):
    sequences = world(tmp_path)
    split = make_split(sequences, DataConfig(validation=True))
    vectors = behaviour_vectors(sequences, split, dim=2)
    near = vectors @ vectors.T
    kind = torch.arange(20) // 10
    same = kind.unsqueeze(0) == kind.unsqueeze(1)
    assert float(near[same].min()) > float(near[~same].max()) + 0.5
    assert torch.equal(vectors, behaviour_vectors(sequences, split, dim=2))


def test_events_that_are_asked_for_are_not_looked_at(tmp_path):
    sequences = world(tmp_path)
    split = make_split(sequences, DataConfig(validation=True))
    poisoned = sequences.items.copy()
    for end in sequences.offsets[1:]:
        poisoned[end - 2 : end] = sequences.catalogue[0]
    plain = behaviour_vectors(sequences, split, dim=4)
    assert torch.equal(behaviour_vectors(replace(sequences, items=poisoned), split, dim=4), plain)
    trained = sequences.items.copy()
    trained[0] = sequences.catalogue[19]
    assert not torch.equal(behaviour_vectors(replace(sequences, items=trained), split, dim=4), plain)


def test_an_item_without_neighbours_has_no_behaviour_and_more_dimensions_than_items_are_empty(tmp_path):
    sequences = write_log(tmp_path / "log", {0: [0, 1, 0, 1, 2, 2], 1: [1, 0, 1, 0, 2, 2]})
    vectors = behaviour_vectors(sequences, make_split(sequences, DataConfig(validation=True)), dim=5)
    assert vectors.shape == (3, 5)
    assert vectors[2].tolist() == [0.0] * 5
    assert vectors[:2].norm(dim=1).tolist() == [1.0, 1.0]
    fused = fuse(torch.tensor([[3.0, 4.0]] * 3), vectors, 0.25)
    torch.testing.assert_close(fused[:, :2], torch.tensor([[0.45, 0.6]] * 3))


def by_definition(histories, num_items):
    """Cosines of the vectors: PPMI by loops, then a dense SVD in double precision."""
    counts = np.zeros((num_items, num_items))
    for items in histories:
        for first, last in ((a, b) for b in range(len(items)) for a in range(b) if b - a <= 5):
            counts[items[first], items[last]] += 1 / (last - first)
            counts[items[last], items[first]] += 1 / (last - first)
    by_item = counts.sum(1)
    expected = np.outer(by_item, by_item**0.75 / (by_item**0.75).sum())
    ppmi = np.log(np.divide(counts, expected, out=np.ones_like(counts), where=counts > 0)).clip(min=0)
    left, strength, _ = np.linalg.svd(ppmi)
    vectors = left * np.sqrt(strength)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


def test_vectors_equal_their_definition(tmp_path):
    rng = np.random.default_rng(1)
    histories = {user: rng.integers(0, 6, size=9).tolist() for user in range(5)} | {5: [6, 7, 0, 0]}  # 6 and 7: once
    sequences = write_log(tmp_path / "log", histories)
    vectors = behaviour_vectors(sequences, make_split(sequences, DataConfig(validation=True)), dim=8)
    expected = by_definition([items[:-2] for items in histories.values()], 8)
    # The truncated SVD is exact up to fp32 rounding when it keeps all dimensions.
    np.testing.assert_allclose((vectors @ vectors.T).numpy(), expected, atol=1e-5)
