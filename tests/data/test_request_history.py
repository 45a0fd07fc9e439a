"""The history of one request, which is built from slices, is that of the same user in a batch of several."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.data.batch_builder import BatchBuilder, ModelInputs
from nestpipe.data.config import DataConfig
from nestpipe.data.sequences import StoredFeature
from nestpipe.data.splits import make_split
from nestpipe.data.synthetic_clicks import ClicksConfig, ingest_clicks
from nestpipe.jagged import Jagged
from nestpipe.serve.user_history import UserEvents, of_user

INPUTS = ModelInputs(
    features=("user", "device", "hour", "category", "tags", "price", "segment"), labels=("clicked", "dwelled")
)


def assert_same_rows(found: Jagged, wanted: Jagged, name: str) -> None:
    torch.testing.assert_close(found.values, wanted.values, rtol=0, atol=0, equal_nan=True)  # unobserved labels are NaN
    assert torch.equal(found.offsets, wanted.offsets), name
    found.check(name)


@pytest.mark.parametrize("num_kept", [0, 1, 5])
@pytest.mark.parametrize("query_s", [None, 1_900_000_000])
def test_one_request_equals_its_row_of_a_batch(tmp_path, num_kept, query_s):
    own = ingest_clicks(tmp_path / "log", ClicksConfig(num_users=6, num_items=20, num_events=200))
    builder = BatchBuilder(own, make_split(own, DataConfig(split="last")), INPUTS)
    users, end = [2, 3, 5], np.diff(own.offsets)[[2, 3, 5]]
    start = end - num_kept
    asked = None if query_s is None else np.full(3, query_s * 1000)
    batch = builder.history(torch.tensor(users), start, end, request_ms=asked)
    for row, user in enumerate(users):
        events = UserEvents(own.items, own.times, own.event_features).between(*own.offsets[user : user + 2].tolist())
        alone = builder.request(of_user(own, int(own.users[user]), events), int(start[row]), query_s=query_s)
        wanted = batch.select(torch.tensor([row]))
        assert alone.sample_ids.tolist() == [own.users[user]]
        assert_same_rows(alone.items, wanted.items, "items")
        assert_same_rows(alone.times, wanted.times, "times")
        for name, feature in {**wanted.event_features, **wanted.sample_features}.items():
            assert_same_rows({**alone.event_features, **alone.sample_features}[name], feature, name)
        if query_s is None:  # then the last one is unknown: a batch has the time of whatever follows in the folder
            assert torch.equal(alone.query_times.values[:-1], wanted.query_times.values[:-1])
        else:
            assert_same_rows(alone.query_times, wanted.query_times, "query_times")


def test_rows_between_keep_their_values_and_weights():
    weights = np.arange(6, dtype=np.float32)
    stored = StoredFeature(np.arange(10, 16), np.array([0, 2, 2, 5, 6]), weights)
    found = stored.between(1, 4)
    assert found.values.tolist() == [12, 13, 14, 15]
    assert found.offsets.tolist() == [0, 0, 3, 4]
    assert found.weights.tolist() == [2, 3, 4, 5]
    assert StoredFeature(weights).between(1, 3).values.tolist() == [1, 2]
