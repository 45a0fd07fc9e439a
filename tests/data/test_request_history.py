"""The history of one request, which is built without kernels, is that of the same user in a batch of several."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.data.batch_builder import BatchBuilder, ModelInputs
from nestpipe.data.synthetic_clicks import ClicksConfig, ingest_clicks


@pytest.mark.parametrize("num_kept", [0, 1, 5])
def test_one_sample_equals_its_row_of_a_batch(tmp_path, num_kept):
    own = ingest_clicks(tmp_path / "log", ClicksConfig(num_users=6, num_items=20, num_events=200))
    builder = BatchBuilder(own, None, ModelInputs(features=("category", "tags")), statistics={})
    end = np.diff(own.offsets)[[2, 3]]
    start = np.maximum(end - num_kept, 0)
    asked = np.array([1_900_000_000_000, 1_900_000_001_000])
    both = builder.history(torch.tensor([2, 3]), start, end, request_ms=asked)
    for row, user in enumerate((2, 3)):
        one = slice(row, row + 1)
        alone = builder.history(torch.tensor([user]), start[one], end[one], request_ms=asked[one])
        wanted = both.select(torch.tensor([row]))
        for name in ("items", "times", "query_times"):
            assert torch.equal(getattr(alone, name).values, getattr(wanted, name).values), name
            assert torch.equal(getattr(alone, name).offsets, getattr(wanted, name).offsets), name
        for name, feature in wanted.event_features.items():
            assert torch.equal(alone.event_features[name].values, feature.values), name
            assert torch.equal(alone.event_features[name].offsets, feature.offsets), name
