"""Events from JSON: weights of multi-valued features, limits of numbers, and what a missing value becomes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import StoredFeature
from nestpipe.errors import DataError
from nestpipe.serve.event_parser import parse_events, parse_feature
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import FileState
from tests.serve.small_rankers import ASKED

TOPICS = Feature(name="topics", kind="ids", weights="w")
LATEST = 2**43 - 1


def test_each_value_has_its_weight():
    events = [
        {"topics": [7, 8], "topics.weights": [0.5, 2]},
        {"topics": []},
        {},
        {"topics": [9]},
        {"topics": [5, 6], "topics.weights": [None, 3]},
    ]
    found = parse_feature(TOPICS, events)
    assert found.values.tolist() == [7, 8, 9, 5, 6]
    assert found.offsets.tolist() == [0, 2, 2, 2, 3, 5]
    assert np.array_equal(found.weights, np.array([0.5, 2, 1, np.nan, 3], np.float32), equal_nan=True)
    assert parse_feature(replace(TOPICS, weights=None), events).weights is None


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], "12", {"a": 1}, 5])
def test_weights_that_are_not_one_for_each_value_are_refused(weights):
    with pytest.raises(DataError, match=r"'topics.weights' must have one number for each of 'topics'"):
        parse_feature(TOPICS, [{"topics": [7, 8], "topics.weights": weights}])


def test_weights_of_served_events_follow_their_events_into_the_history(log, tmp_path):
    """Stored, then logged, one of them late: every event keeps its own values and weights."""
    count = len(log.items)
    stored = StoredFeature(np.arange(2 * count), np.arange(0, 2 * count + 1, 2), np.arange(2 * count, dtype=np.float32))
    own = replace(
        log,
        schema=replace(log.schema, features=(*log.schema.features, TOPICS)),
        event_features={**log.event_features, "topics": stored},
    )
    histories = UserHistories(own, FileState(tmp_path / "events.log"))
    before = histories.of(3)
    late = int(before.times[-1] // 1000) - 1
    histories.add(
        [
            {"id": "a", "user": 3, "item": 5, "time": ASKED, "topics": [1, 2, 3], "topics.weights": [0.1, 0.2, 0.3]},
            {"id": "b", "user": 3, "item": 6, "time": late, "topics": [4], "topics.weights": [0.4]},
        ],
        lambda _: None,
    )
    found = histories.of(3).event_features["topics"]
    rows = np.split(np.stack([found.values, found.weights]), found.offsets[1:-1], axis=1)
    old = before.event_features["topics"]
    expected = np.split(np.stack([old.values, old.weights]), old.offsets[1:-1], axis=1)
    place = int((before.times <= late * 1000).sum())
    expected.insert(place, np.array([[4], [np.float32(0.4)]]))
    expected.append(np.array([[1, 2, 3], np.array([0.1, 0.2, 0.3], np.float32)]))
    assert [row.tolist() for row in rows] == [row.tolist() for row in expected]


def test_the_largest_legal_numbers_are_taken_and_the_next_are_not():
    kinds = {"dwell": "number", "device": "id", "vector": "vector"}
    features = tuple(Feature(name=name, kind=kind, dim=2 * (kind == "vector")) for name, kind in kinds.items())
    schema = Schema(features=features)
    legal = {"item": 2**63 - 1, "time": LATEST, "dwell": 9.9e37, "device": -(2**63), "vector": [-9.9e37, None]}
    items, times, found = parse_events(schema, [legal, {"item": -(2**63), "time": 0}])
    assert items.tolist() == [2**63 - 1, -(2**63)]
    assert times.tolist() == [LATEST * 1000, 0]
    assert found["dwell"].values[0] == np.float32(9.9e37)
    assert np.isnan(found["dwell"].values[1])
    assert found["device"].values.tolist() == [-(2**63)]
    assert np.isnan(found["vector"].values[:, 1]).all()
    for name, value in (
        ("item", 2**63),
        ("item", -(2**63) - 1),
        ("time", LATEST + 1),
        ("time", -1),
        ("dwell", 1e38),
        ("dwell", True),
        ("device", 2**63),
        ("device", True),
        ("vector", [1.0]),
        ("vector", [1.0, 2.0, 3.0]),
        ("colour", 1),
    ):
        with pytest.raises(DataError, match=name):
            parse_events(schema, [legal | {name: value}])
