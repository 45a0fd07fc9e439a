"""Labels from the schema to batches: what they are, where they are unobserved, and which window counts them."""

from __future__ import annotations

from math import isnan

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.cli.data import parse_label_flag
from nestpipe.data.batch_builder import ModelInputs
from nestpipe.data.config import DataConfig
from nestpipe.data.ingest import write_sequences
from nestpipe.data.loader import Loader
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.data.splits import disjoint_windows, make_split, overlapping_windows
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Cursor
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.micro_batch import cut_batch

NUMBERS = tuple(Feature(name=name, kind="number") for name in ("watch", "hate", "stars", "shown"))
LABELS = (
    Label(name="hated", kind="binary", feature="hate"),
    Label(name="level", kind="ordinal", feature="stars", lowest=1, num_levels=5, weights="shown"),
    Label(name="seconds", kind="regression", feature="watch", log=True, observed="shown"),
)
SCHEMA = Schema(features=(*NUMBERS, Feature(name="kind", kind="id", scope="item")), labels=LABELS)


def write(out, num=20, **columns):
    """Two users; the number of an event stands in its item."""
    log = {
        "user": [1] * num + [2] * 3,
        "item": [*range(num), *range(3)],
        "time": [*range(1000, 1000 + num), *range(1000, 1003)],
        "watch": [float(k) for k in range(num + 3)],
        "hate": [None if k % 3 == 0 else float(k % 2) for k in range(num + 3)],
        "stars": [float(k % 5 + 1) for k in range(num + 3)],
        "shown": [float(k % 4) for k in range(num + 3)],
        **columns,
    }
    items = pl.DataFrame({"item": range(num), "kind": [k % 3 for k in range(num)]})
    from nestpipe.data.ingest import SideTable

    return write_sequences(out, schema=SCHEMA, log=pl.DataFrame(log), items=SideTable(source=items, key="item"))


def loader(log, **settings):
    config = DataConfig(path="", batch_size=50, **settings)
    names = tuple(label.name for label in LABELS)
    return Loader(log, make_split(log, config), config, seed=0, inputs=ModelInputs(features=("kind",), labels=names))


def test_labels_of_events_and_targets(tmp_path):
    log = write(tmp_path / "log")
    assert Sequences.open(log.path).schema == SCHEMA
    batch = loader(log, max_len=30).batch(Cursor(0, 0))
    row = batch.sample_ids.tolist().index(0)
    own = slice(*batch.items.offsets[row : row + 2].tolist())
    assert batch.items.values[own].tolist() == list(range(18))
    assert batch.targets.values[own].tolist() == list(range(1, 19))
    for features, first in ((batch.event_features, 0), (batch.target_features, 1)):
        numbers = range(first, first + 18)
        hated = features["hated"].values[own].tolist()
        assert [None if isnan(x) else x for x in hated] == [None if k % 3 == 0 else float(k % 2) for k in numbers]
        assert features["level"].values[own].tolist() == [float(k % 5) for k in numbers]
        assert features["level.weights"].values[own].tolist() == [float(k % 4) for k in numbers]
        seconds = features["seconds"].values[own].tolist()
        assert [not isnan(x) for x in seconds] == [k % 4 > 0 for k in numbers], "observed only where it was shown"
        assert all(x == pytest.approx(np.log1p(k)) for x, k in zip(seconds, numbers, strict=True) if not isnan(x))
    assert "kind" in batch.target_features
    assert "watch" not in batch.target_features, "what happened to a candidate is not known before"


def test_features_named_user_and_item_are_ids(tmp_path):
    log = write(tmp_path / "log")
    config = DataConfig(path="", batch_size=50, max_len=30)
    inputs = ModelInputs(features=("user", "item", "watch"), labels=("hated",), layout="events")
    batch = Loader(log, make_split(log, config), config, seed=0, inputs=inputs).batch(Cursor(0, 0))
    assert sorted(batch.sample_features["user"].values.tolist()) == [1, 2]
    assert batch.targets is None
    assert batch.num_tokens == 19 + 2, "every training event is a sample of its own, the first one too"


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(1, 12),
    st.data(),
)
def test_every_row_counts_once_in_the_window_that_serving_would_use(spans, max_len, data):
    block = data.draw(st.integers(1, max_len))
    first, end = (np.array(column) for column in zip(*spans, strict=True))
    windows = overlapping_windows(first, end, max_len=max_len, block=block)
    counted = [
        (int(user), row)
        for user, start, since, stop in zip(windows.user, windows.start, windows.counted, windows.end, strict=True)
        for row in range(since, stop)
        if start == truncate(row + 1, max_len, block) and stop - start <= max_len
    ]
    assert sorted(counted) == [(user, row) for user, span in enumerate(spans) for row in range(*span)]
    events = disjoint_windows(first, end, max_len=max_len)
    rows = [(int(u), row) for u, s, e in zip(events.user, events.start, events.end, strict=True) for row in range(s, e)]
    assert sorted(rows) == sorted(counted)
    assert (events.start == events.counted).all()


def test_windows_have_every_training_target_once(tmp_path):
    log = write(tmp_path / "log")
    source = loader(log, max_len=6, truncate_block=3, windows="all")
    batch = source.batch(Cursor(0, 0))
    assert source.num_samples == 6
    seen = batch.target_features["level"].values.isnan().logical_not()
    assert sorted(batch.targets.values[seen].tolist()) == sorted([*range(1, 19), 1])
    assert len(batch.sample_ids.unique()) == 6, "draws belong to a window, not to a user"
    micro_batches = cut_batch(batch, MicroBatchConfig(micro_batches=3))
    assert torch.equal(
        torch.cat([micro_batch.target_features["level"].values for micro_batch in micro_batches]).nan_to_num(-1),
        batch.target_features["level"].values.nan_to_num(-1),
    )


def test_every_mistake_in_a_schema_is_named():
    schema = Schema(
        features=NUMBERS,
        labels=(
            Label(name="watch", kind="binary", feature="watch"),
            Label(name="a", kind="ordinal", feature="stars"),
            Label(name="b", kind="binary", feature="nothing", log=True, weight=0.0),
        ),
    )
    text = "\n".join(schema.problems())
    for micro_batch in (
        "'watch': the name is taken",
        "num_levels 0",
        "['nothing'] are not among the number",
        "log needs",
        "weight is 0.0",
    ):
        assert micro_batch in text
    with pytest.raises(ConfigError, match=r"the labels \['x'\], but the log has \['hated', 'level', 'seconds'\]"):
        SCHEMA.labels_named(("x",))


def test_levels_and_weights_outside_their_range_are_refused(tmp_path):
    log = write(tmp_path / "a", stars=[7.0] * 23)
    with pytest.raises(DataError, match=r"label 'level' has the value 7 \(feature 'stars'\).*1 .. 5"):
        loader(log, max_len=30).batch(Cursor(0, 0))
    log = write(tmp_path / "b", shown=[-1.0] * 23)
    with pytest.raises(DataError, match="weight -1"):
        loader(log, max_len=30).batch(Cursor(0, 0))


def test_a_folder_without_labels_opens_as_before(tmp_path):
    content = SCHEMA.to_json()
    content.pop("labels")
    assert Schema.from_json(content).labels == ()


def test_the_first_event_since_a_time_starts_the_test(tmp_path):
    log = write(tmp_path / "log")
    split = make_split(log, DataConfig(path="", split="time", split_time="1002"))
    assert split.test_start.tolist() == split.train_end.tolist() == [2, 2]
    later = make_split(log, DataConfig(path="", split="time", split_time="1002", validation=True))
    assert later.test_start.tolist() == [2, 2]
    assert later.validation.tolist() == later.train_end.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("liked", "is not of the form name:kind:feature=NUMBER"),
        ("liked:binary", "is not of the form"),
        ("liked:binary:feature=x:treshold=4", "unknown option 'treshold'"),
        ("liked:binary:feature=x:threshold=high", "threshold is 'high', but it must be a number"),
        ("liked:binary:feature=x:log=1", "log is '1', but it must be true or false"),
        ("liked:binary:feature=x:lowest=1.5", "lowest is '1.5', but it must be a whole number"),
        ("liked:maybe:feature=x", "kind is 'maybe', but it must be one of binary, regression, ordinal"),
    ],
)
def test_label_flags_that_are_wrong_say_where(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_label_flag(text)


def test_a_label_flag_has_every_field():
    text = "stars:ordinal:feature=rating:lowest=-1:num_levels=5:weight=0.5:weights=w:observed=seen"
    expected = Label(
        name="stars",
        kind="ordinal",
        feature="rating",
        lowest=-1,
        num_levels=5,
        weight=0.5,
        weights="w",
        observed="seen",
    )
    assert parse_label_flag(text) == expected
    assert parse_label_flag("t:regression:feature=x:log=true").log
