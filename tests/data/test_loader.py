from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from nestpipe.data.batch_builder import BatchBuilder, ModelInputs
from nestpipe.data.config import DataConfig
from nestpipe.data.loader import Loader
from nestpipe.data.splits import make_split, parse_time_ms, train_mask
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Cursor
from tests.small_runs import small_log, write_log

HISTORIES = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("loader") / "log")


def loader(log, **settings):
    config = DataConfig(path="", max_len=8, batch_size=7, **settings)
    return Loader(log, make_split(log, config), config, seed=3)


def rows(batch):
    values, offsets = batch.items.values.tolist(), batch.items.offsets.tolist()
    return {int(s): values[offsets[i] : offsets[i + 1]] for i, s in enumerate(batch.sample_ids)}


@pytest.mark.parametrize(
    ("validation", "train_end", "valid", "test"),
    [(False, [0, 1, 2, 3], [-1] * 4, [-1, 1, 2, 3]), (True, [0, 1, 1, 2], [-1, -1, 1, 2], [-1, 1, 2, 3])],
)
def test_leave_last_out(tmp_path, validation, train_end, valid, test):
    split = make_split(write_log(tmp_path / "log", HISTORIES), DataConfig(path="", validation=validation))
    assert (split.train_end.tolist(), split.validation.tolist(), split.test.tolist()) == (train_end, valid, test)


def test_time_split_tests_the_first_event_since(tmp_path):
    # Events are a minute apart from second 1,000,000 on; the split falls on the third.
    log = write_log(tmp_path / "log", {**HISTORIES, 5: [1] * 9})
    split = make_split(log, DataConfig(path="", split="time", split_time="1000120"))
    assert split.train_end.tolist() == [1, 2, 2, 2, 2]
    assert split.test.tolist() == [-1, -1, 2, 2, 2]
    assert train_mask(log, split).sum() == 9
    none = make_split(log, DataConfig(path="", split="time", split_time="1000000"))
    assert none.train_end.tolist() == [0] * 5
    assert none.test.tolist() == [-1] * 5, "a target needs an event before it"


def test_times_are_read_as_seconds_or_iso():
    assert parse_time_ms("1.5") == 1500
    assert parse_time_ms("1970-01-02") == 86_400_000
    assert parse_time_ms("1970-01-01T01:00:00+01:00") == 0
    with pytest.raises(ConfigError, match="neither seconds since 1970 nor an ISO date"):
        parse_time_ms("yesterday")


def test_time_split_needs_times(tmp_path):
    with pytest.raises(ConfigError, match="order-only"):
        make_split(
            write_log(tmp_path / "log", HISTORIES, times=False), DataConfig(path="", split="time", split_time="0")
        )


def test_an_epoch_holds_every_sample_once_in_a_new_order(log):
    source = loader(log)
    epochs = [
        [int(s) for i in range(source.num_batches(e)) for s in source.batch(Cursor(e, i)).sample_ids] for e in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [u for u in range(40) if 3 + u % 13 - 1 >= 2]
    assert epochs[0] != epochs[1]


def test_samples_hold_the_last_events_with_their_next_ones(log):
    source = loader(log)
    for index in range(source.num_batches(0)):
        batch = source.batch(Cursor(0, index))
        for jagged in (batch.items, batch.times, batch.query_times, batch.targets):
            jagged.check("batch")
        for user, items in rows(batch).items():
            full = [(user + 7 * k) % 30 for k in range(3 + user % 13)][:-1]  # the last one is the test target
            assert items == full[:-1][-8:]
        assert torch.equal(batch.query_times.values, batch.times.values + 60)
        followed = batch.targets.values[:-1][batch.items.row_of_value()[:-1] == batch.items.row_of_value()[1:]]
        assert torch.equal(followed, batch.items.values[1:][batch.items.positions()[1:] > 0])


def test_batches_are_a_function_of_the_cursor(log):
    ahead = list(islice(loader(log).iterate(Cursor(0, 2)), 9))
    source = loader(log)
    assert [batch.cursor for batch in ahead][:5] == [
        Cursor(0, 2),
        Cursor(0, 3),
        Cursor(0, 4),
        Cursor(0, 5),
        Cursor(1, 0),
    ]
    for batch in ahead:
        again = source.batch(batch.cursor)
        assert torch.equal(batch.sample_ids, again.sample_ids)
        assert torch.equal(batch.items.values, again.items.values)


def test_token_budget_fills_batches_without_losing_samples(log):
    source = loader(log, batch_tokens=25)
    batches = [source.batch(Cursor(0, i)) for i in range(source.num_batches(0))]
    assert all(batch.num_tokens <= 25 for batch in batches)
    assert sum(batch.num_samples for batch in batches) == source.num_samples
    assert all(a.num_tokens + int(b.items.lengths()[0]) > 25 for a, b in pairwise(batches))


def test_drop_last(log):
    assert loader(log).num_batches(0) == -(-loader(log).num_samples // 7)
    assert loader(log, drop_last=True).num_batches(0) == loader(log).num_samples // 7


def test_truncation_in_blocks_keeps_a_multiple_from_the_start(log):
    source = loader(log, truncate_block=4)
    batch = source.batch(Cursor(0, 0))
    for user, items in rows(batch).items():
        full = [(user + 7 * k) % 30 for k in range(3 + user % 13)][:-2]
        start = -(-(max(len(full) - 8, 0)) // 4) * 4
        assert items == full[start:]


def test_order_only_logs_have_no_times(tmp_path):
    batch = loader(small_log(tmp_path / "log", times=False)).batch(Cursor(0, 0))
    assert batch.times is None
    assert batch.query_times is None


def test_a_log_without_anything_to_predict_is_refused(tmp_path):
    log = write_log(tmp_path / "log", {1: [1, 2], 2: [3]})
    with pytest.raises(DataError, match="nothing to predict"):
        loader(log)


def test_an_error_while_reading_ahead_reaches_the_consumer(log):
    source = loader(log)
    source.batch = lambda cursor: (_ for _ in ()).throw(OSError("disk gone"))
    with pytest.raises(OSError, match="disk gone"):
        next(source.iterate(Cursor(0, 0)))


def test_features_follow_their_events(tmp_path):
    from nestpipe.data.synthetic_sequences import SyntheticConfig, ingest_synthetic

    log = ingest_synthetic(tmp_path / "log", SyntheticConfig(num_users=30, num_items=60, max_len=30))
    config = DataConfig(path="", max_len=6, batch_size=9)
    split = make_split(log, config)
    source = Loader(
        log, split, config, seed=0, inputs=ModelInputs(features=("watch", "action", "tags", "price", "age"))
    )
    batch = source.batch(Cursor(0, 0))
    actions, tags = log.event_features["action"], log.item_features["tags"]
    place = 0
    for row, user in enumerate(batch.sample_ids.tolist()):
        end = int(log.offsets[user]) + int(split.train_end[user]) - 1
        for event in range(end - int(batch.items.lengths()[row]), end):
            own = batch.event_features["action"]
            assert (
                own.values[own.offsets[place] : own.offsets[place + 1]].tolist()
                == actions.values[actions.offsets[event] : actions.offsets[event + 1]].tolist()
            )
            item = int(np.searchsorted(log.catalogue, log.items[event]))
            own = batch.event_features["tags"]
            assert (
                own.values[own.offsets[place] : own.offsets[place + 1]].tolist()
                == tags.values[tags.offsets[item] : tags.offsets[item + 1]].tolist()
            )
            place += 1
    assert place == batch.num_tokens == len(batch.event_features["watch"].values)
    assert batch.sample_features["age"].num_rows == batch.num_samples
    with pytest.raises(ConfigError, match=r"but .* has only"):
        Loader(log, split, config, seed=0, inputs=ModelInputs(features=("wtach",)))


def test_number_statistics_see_only_training_events(tmp_path):
    """Poisoned held-out events must not move them."""
    import polars as pl

    from nestpipe.data.ingest import write_sequences
    from nestpipe.data.schema import Feature, Schema

    values = [float(k) for k in range(12)]
    log = pl.DataFrame({"user": [1] * 6 + [2] * 6, "item": range(12), "time": list(range(100, 112)), "x": values})
    schema = Schema(features=(Feature(name="x", kind="number", transform="standardise"),))
    poisoned = log.with_columns(pl.when(pl.col("item").is_in([5, 11])).then(1e6).otherwise(pl.col("x")).alias("x"))
    means = []
    for name, frame in (("clean", log), ("poisoned", poisoned)):
        sequences = write_sequences(tmp_path / name, schema=schema, log=frame)
        config = DataConfig(path="")
        source = Loader(sequences, make_split(sequences, config), config, seed=0, inputs=ModelInputs(features=("x",)))
        means.append(source._builder.statistics["x"])
    assert means[0] == means[1]
    assert means[0].mean == pytest.approx(np.mean([0, 1, 2, 3, 4, 6, 7, 8, 9, 10]))


def test_config_problems_are_all_named():
    config = replace(DataConfig(), max_len=0, batch_tokens=-1, split="time")
    assert len(list(config.problems())) == 4


def test_targets_have_what_their_request_would_name(tmp_path):
    """The features of the target's own event, not of the event before it; what is missing is an empty row."""
    import polars as pl

    from nestpipe.data.ingest import write_sequences
    from nestpipe.data.schema import Feature, Schema

    schema = Schema(
        features=(Feature(name="scenario", kind="id"), Feature(name="reasoning", kind="vector", dim=2)),
    )
    log = pl.DataFrame(
        {
            "user": [1] * 5,
            "item": range(5),
            "time": range(100, 105),
            "scenario": [9, 0, None, 2, 3],
            "reasoning": [[9.0, 9.0], [1.0, 2.0], [3.0, 4.0], None, [5.0, 6.0]],
        }
    )
    sequences, config = write_sequences(tmp_path / "log", schema=schema, log=log), DataConfig(path="")
    inputs = ModelInputs(requests=("scenario", "reasoning"))
    source = Loader(sequences, make_split(sequences, config), config, seed=0, inputs=inputs)
    batch = source.batch(Cursor(0, 0))
    assert batch.targets.values.tolist() == [1, 2, 3]
    assert not batch.event_features
    scenario, reasoning = (batch.target_features[name] for name in ("scenario", "reasoning"))
    assert (scenario.values.tolist(), scenario.lengths().tolist()) == ([0, 2], [1, 0, 1])
    assert (reasoning.values.tolist(), reasoning.lengths().tolist()) == ([[1, 2], [3, 4]], [1, 1, 0])
    asked = source._builder.requests(np.array([4]))
    assert (asked["scenario"].values.tolist(), asked["reasoning"].values.tolist()) == ([3], [[5, 6]])
    with pytest.raises(ConfigError, match=r"but .* has only"):
        Loader(sequences, make_split(sequences, config), config, seed=0, inputs=ModelInputs(requests=("trigger",)))


def test_the_last_query_time_of_a_history_is_that_of_the_request(tmp_path):
    log = write_log(tmp_path / "log", HISTORIES)
    builder = BatchBuilder(log, make_split(log, DataConfig(path="")))
    users, start, end = torch.tensor([0, 2, 3]), np.array([0, 0, 1]), np.array([0, 1, 4])  # 0, 1 and 3 events
    second = log.times // 1000
    third, fourth = log.offsets[2], log.offsets[3]
    plain = builder.history(users, start, end, request_ms=None)
    after = [second[third + 1], second[fourth + 2], second[fourth + 3], second[fourth + 3]]
    assert plain.query_times.values.tolist() == after
    timed = builder.history(users, start, end, request_ms=np.array([1, 7_000_999, 8_000_000]))
    assert timed.query_times.values.tolist() == [7000, *after[1:3], 8000]
    assert timed.times.values.tolist() == plain.times.values.tolist()
    untimed = write_log(tmp_path / "untimed", HISTORIES, times=False)
    other = BatchBuilder(untimed, make_split(untimed, DataConfig(path="")))
    assert other.history(users, start, end, request_ms=np.array([1, 2, 3])).query_times is None


@pytest.mark.parametrize("text", ["1960-01-01", "1970-01-12", "2030-05-01"])
def test_a_split_time_outside_of_the_log_names_both_dates(tmp_path, text):
    log = small_log(tmp_path / "log")  # the first quarter of an hour of 1970-01-12 13:46:40 UTC
    config = DataConfig(path=str(log.path), split="time", split_time=text)
    with pytest.raises(ConfigError, match=rf"split_time is {text}.* from 1970-01-12 13:46:40 UTC to 1970-01-12 14:0"):
        make_split(log, config)


def test_a_split_time_without_a_time_split_and_the_reverse_name_the_flag():
    (alone,) = DataConfig(split_time="2024-06-01").problems()
    assert "add --data.split time" in alone
    (without,) = DataConfig(split="time").problems()
    assert "--data.split-time 2024-06-01" in without
