"""The content key of a KV prefix, computed from a whole history, is the one of the prefix cut out of it."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from nestpipe.jagged import Batch, Jagged, offsets_of
from nestpipe.models.kv_prefix import InputDigest, _mixed_records, _records, same_events
from tests.models.small_ranking import build, history, ranker

SINGLE = ("hour", "hated", "level", "seconds", "price")  # one value per event, NaN among them


def of_one_value(batch: Batch) -> Batch:
    return replace(batch, event_features={name: batch.event_features[name] for name in SINGLE})


def is_equal(a: Batch, b: Batch) -> bool:
    """Whether two requests are alike, with their own query times and the features of the user."""
    names = [one.name for one in fields(Batch)]
    same = all((getattr(a, name) is None) == (getattr(b, name) is None) for name in names)
    same &= same_events(a, b) and a.cursor == b.cursor and a.sample_features.keys() == b.sample_features.keys()
    pairs = [(a.items, b.items), (a.times, b.times), (a.query_times, b.query_times)]
    pairs += [(a.event_features[name], b.event_features[name]) for name in a.event_features]
    pairs += [(a.sample_features[name], b.sample_features[name]) for name in a.sample_features]
    for one, other in pairs:
        if one is not None and other is not None:
            same &= torch.equal(one.offsets, other.offsets) and torch.equal(
                one.values.nan_to_num(-7), other.values.nan_to_num(-7)
            )
    return same


@pytest.mark.parametrize("kind", [lambda batch: batch, of_one_value], ids=["any features", "one value each"])
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 12])
def test_the_key_of_a_request_is_that_of_its_prefix(kind, timed, length):
    own, batch = ranker(build()), kind(history([length], seed=length))
    if not timed:
        batch = replace(batch, times=None, query_times=None)
    _, wanted = own.split(batch)
    found = own.suffix_of(batch)
    assert found.follows == wanted.follows
    assert [one.text() for one in found.digests] == [one.text() for one in wanted.digests]
    assert is_equal(found.batch, wanted.batch)
    if length:
        longer = InputDigest().over(batch, 0, length)
        assert found.digests[0].then(found.batch, 0).text() == longer.text() != found.digests[0].text()


def test_records_of_one_value_per_event_are_those_of_any_number():
    batch = of_one_value(history([5, 9]))
    assert bool(batch.event_features["hated"].values.isnan().any())
    for first, last in ((0, 14), (0, 0), (3, 4), (5, 14)):
        found, wanted = _records(batch, first, last), _mixed_records(batch, first, last)
        assert found.dtype == wanted.dtype == np.int64
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("lengths", [[0, 2], [2, 0], [1, 0], [0, 1]])
def test_which_event_a_value_belongs_to_is_part_of_the_digest(lengths):
    """Two events with two values, and two with one: the values alone do not say whose they are."""
    batch, digests = history([2]), set()
    for counts in (lengths, lengths[::-1]):
        hour = Jagged(torch.arange(sum(counts)), offsets_of(torch.tensor(counts)), max(counts))
        other = replace(batch, event_features={"hour": hour})
        assert _records(other, 0, 2).tobytes() == _mixed_records(other, 0, 2).tobytes()
        digests.add(InputDigest().over(other, 0, 2).text())
    assert len(digests) == 2


def test_numbers_of_any_size_are_told_apart():
    batch = history([3])
    for dtype in (torch.float16, torch.float32, torch.float64):
        digests = set()
        for value in (0.25, 0.5, -0.5, torch.nan):
            seconds = Jagged.singles(torch.full((3,), value, dtype=dtype))
            digests.add(InputDigest().over(replace(batch, event_features={"seconds": seconds}), 0, 3).text())
        assert len(digests) == 4
