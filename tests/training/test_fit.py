"""`nestpipe.fit` on frames of three libraries gives one result, in own ids, and can be saved and loaded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import nestpipe
from nestpipe.data.column_types import parse_time
from nestpipe.errors import ConfigError
from nestpipe.training.fit import as_polars, choose_config, schema_of


def shop(num_users: int = 30) -> pl.DataFrame:
    """Customers who go round a shop of 12 products, each from another shelf on."""
    start = datetime(2026, 3, 1, tzinfo=UTC)
    rows = [
        (f"käufer {user}", f"p{(user + 5 * visit) % 12}", start + timedelta(days=visit, minutes=user))
        for user in range(num_users)
        for visit in range(4 + user % 3)
    ]
    return pl.DataFrame(rows, schema=["customer", "product", "when"], orient="row")


def fit(frame, folder):
    return nestpipe.fit(frame, user="customer", item="product", time="when", epochs=2, folder=folder, quiet=True)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return fit(shop(), tmp_path_factory.mktemp("fit"))


def test_recommendations_come_in_own_ids(fitted):
    found = fitted.recommend(["käufer 3", "nobody"], k=2)
    assert found.columns == ["user", "rank", "item", "score", "path"]
    assert found["user"].to_list() == ["käufer 3"] * 2 + ["nobody"] * 2
    assert found["path"].to_list() == ["model"] * 2 + ["popular"] * 2
    assert set(found["item"]) <= set(fitted.items)
    assert not set(fitted.recommend("käufer 3")["item"]) & set(shop().filter(customer="käufer 3")["product"])
    assert len(fitted.users) == 30
    assert fitted.similar("p7", k=3)["rank"].to_list() == [1, 2, 3]
    assert 0 <= fitted.evaluate().scalars()["hr@10"] <= 1


@pytest.mark.parametrize("library", ["pandas", "pandas object", "pyarrow", "polars lazy", "ISO text"])
def test_every_kind_of_frame_gives_the_same_items(fitted, library, tmp_path):
    frame = shop()
    if library.startswith("pandas"):
        pandas = pytest.importorskip("pandas")
        columns = {name: frame[name].to_list() for name in frame.columns}
        given = pandas.DataFrame(columns)
        if library == "pandas object":
            given["customer"] = given["customer"].astype(object)
    elif library == "pyarrow":
        given = pytest.importorskip("pyarrow").table({name: frame[name].to_list() for name in frame.columns})
    elif library == "ISO text":
        given = frame.with_columns(pl.col("when").dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
    else:
        given = frame.lazy()
    again = fit(given, tmp_path)
    assert again.recommend(fitted.users, k=5).equals(fitted.recommend(fitted.users, k=5))


@pytest.mark.parametrize("dtype", ["object", "category", "string", "Int64"])
def test_missing_values_of_pandas_are_missing(dtype):
    pandas = pytest.importorskip("pandas")
    values = [1, None, 3] if dtype == "Int64" else ["a", None, "ß"]
    frame = pandas.DataFrame({"x": pandas.Series(values, dtype=dtype)})
    assert as_polars(frame, ["x"])["x"].to_list() == values


def test_times_and_mixed_columns_of_pandas_are_read():
    pandas = pytest.importorskip("pandas")
    zoned = pandas.Series(pandas.to_datetime(["2026-03-01T10:00:00+02:00", None], utc=True))
    plain = pandas.Series(pandas.to_datetime(["2026-03-01T08:00:00", "2026-03-02T08:00:00"]))
    mixed = pandas.Series(["2026-03-01T08:00:00Z", 1_772_352_000], dtype=object)
    frame = as_polars(pandas.DataFrame({"zoned": zoned, "plain": plain, "mixed": mixed}), ["zoned", "plain", "mixed"])
    expected = 1_772_352_000_000
    assert [parse_time(frame[name], "auto").columns["time"][0] for name in frame.columns] == [expected] * 3
    assert frame["zoned"][1] is None
    assert parse_time(frame["mixed"], "auto").columns["time"].to_list() == [expected] * 2


def test_saved_and_loaded_it_answers_the_same(fitted, tmp_path):
    fitted.save(tmp_path / "shop")
    again = nestpipe.load(tmp_path / "shop")
    assert again.recommend(fitted.users, k=5).equals(fitted.recommend(fitted.users, k=5))
    once_more = again.save(tmp_path / "twice")
    assert once_more.recommend(fitted.users, k=5).equals(fitted.recommend(fitted.users, k=5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shop", "twice"]
    assert again.run.sequences.path == (tmp_path / "shop" / "data").resolve()
    with pytest.raises(ConfigError, match="exists already"):
        fitted.save(tmp_path / "shop")


def test_columns_are_read_by_their_types():
    log = pl.DataFrame({"who": [1, 2], "what": ["a", "b"], "s": [1_700_000_000, 1], "ms": [1_700_000_000_000, 1]})
    schema = schema_of(log, user="who", item="what", time="ms")
    assert (schema.user_encoding, schema.item_encoding, schema.time_unit) == ("int64", "dictionary", "auto")
    assert schema_of(log, user="who", item="what", time=None).time is None


def test_a_missing_column_names_those_that_are_there():
    with pytest.raises(ConfigError, match=r"no column \['item'\]; it has \['customer', 'product', 'when'\]"):
        nestpipe.fit(shop(), user="customer", time="when")


def test_sizes_follow_counts(fitted):
    config = choose_config(fitted.run.sequences)
    assert config == choose_config(fitted.run.sequences)
    assert (config.data.max_len, config.loss.kind) == (8, "full")
    assert choose_config(fitted.run.sequences, model="hstu", epochs=3).train.epochs == 3
    with pytest.raises(ConfigError, match="must be one of sasrec, hstu, fuxi"):
        choose_config(fitted.run.sequences, model="gru")  # type: ignore[arg-type]
