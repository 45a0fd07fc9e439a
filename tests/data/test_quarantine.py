"""From files to typed chunks: every kind of bad record is quarantined, every kind of bad file is an error."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data import quarantine
from nestpipe.data.column_types import parse_time
from nestpipe.data.id_encoding import make_encoders
from nestpipe.data.ingest import write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.quarantine import Quarantine, TypedReader
from nestpipe.data.record_splitter import split_records
from nestpipe.data.schema import Feature, Schema
from nestpipe.errors import DataError
from nestpipe.rng import hash_text

LOW, HIGH = -(2**63), 2**63 - 1
SCHEMA = Schema()
RICH = Schema(
    features=(
        Feature(name="rating", kind="number"),
        Feature(name="price", kind="number", missing="refuse"),
        Feature(name="tags", kind="ids", weights="shares"),
        Feature(name="place", kind="vector", dim=2),
        Feature(name="shop", kind="id"),
    )
)


def run(
    source: LogSource | pl.DataFrame, schema: Schema, share: float = 1.0
) -> tuple[pl.DataFrame, list[dict[str, object]]]:
    """All kept rows and all quarantine entries; checks that nothing is lost."""
    sink = io.StringIO()
    sheet = Quarantine(sink, share)
    kept = pl.concat(list(TypedReader(schema, make_encoders(schema), sheet).log(source)))
    bad = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert sheet.num_read == kept.height + len(bad) == kept.height + sheet.num_bad
    return kept, bad


def rich(**changes: str) -> str:
    """A good CSV record of the rich schema, but for the changes."""
    fields = {
        "user": "1",
        "item": "2",
        "time": "3",
        "rating": "4",
        "price": "5",
        "tags": "6|7",
        "shares": ".5|.5",
        "place": "8|9",
        "shop": "10",
    }
    return ",".join((fields | changes).values())


RICH_HEADER = "user,item,time,rating,price,tags,shares,place,shop"


@dataclass(frozen=True)
class Poison:
    """A log and what must come of it: an error message, or quarantine reasons by record number."""

    text: str | bytes
    name: str = "log.csv"
    error: str = ""
    reasons: dict[int, str] = field(default_factory=dict)
    num_kept: int = 1
    schema: Schema = SCHEMA
    encoding: str = "utf-8"


def zipped(text: str, cut: int = 0) -> bytes:
    data = gzip.compress(text.encode())
    return data[: len(data) - cut]


ISO = Schema(time_unit="iso8601")
HASHED = Schema(user_encoding="hash", features=(Feature(name="tags", kind="ids", encoding="hash"),))
POISONS = {
    "surplus field": Poison("user,item,time\n1,2,3\n1,2,3,4\n", reasons={2: "surplus fields: 4 instead of 3"}),
    "empty surplus field": Poison("user,item,time\n1,2,3,\n1,2,3\n", reasons={1: "surplus fields: 4 instead of 3"}),
    "missing field": Poison("user,item,time\n1,2\n1,2,3\n", reasons={1: "missing fields: 2 instead of 3"}),
    "surplus field, tabs, crlf": Poison(
        "user\titem\ttime\r\n1\t2\t3\r\n1\t2\t3\t4\r\n", "log.tsv", reasons={2: "surplus fields: 4 instead of 3"}
    ),
    "text in user": Poison("user,item,time\nx,2,3\n1,2,3\n", reasons={1: "user is not an int64"}),
    "fraction in item": Poison("user,item,time\n1,2.5,3\n1,2,3\n", reasons={1: "item is not an int64"}),
    "above int64": Poison(f"user,item,time\n1,{HIGH + 1},3\n1,{HIGH},3\n", reasons={1: "item is not an int64"}),
    "below int64": Poison(f"user,item,time\n{LOW - 1},2,3\n{LOW},2,3\n", reasons={1: "user is not an int64"}),
    "no user": Poison("user,item,time\n,2,3\n1,2,3\n", reasons={1: "user is missing"}),
    "no item": Poison('user,item,time\n1,"",3\n1,2,3\n', reasons={1: "item is missing"}),
    "blank item": Poison("user,item,time\n1,  ,3\n1,2,3\n", reasons={1: "item is missing"}),
    "no time": Poison("user,item,time\n1,2,\n1,2,3\n", reasons={1: "time is missing"}),
    "text in time": Poison("user,item,time\n1,2,noon\n1,2,3\n", reasons={1: "time is not a number"}),
    "before 1970": Poison("user,item,time\n1,2,-1\n1,2,0\n", reasons={1: "time is before 1970"}),
    "after 2100": Poison("user,item,time\n1,2,99999999999999999\n1,2,3\n", reasons={1: "time is after the year 2100"}),
    "milliseconds as seconds": Poison(
        "user,item,time\n1,2,1600000000000\n1,2,3\n",
        schema=Schema(time_unit="s"),
        reasons={1: "time is after the year 2100 when read as seconds, but fits"},
    ),
    "any form of time": Poison(
        "user,item,time\n1,2,1600000000\n1,2,1600000000000\n1,2,2020-09-13T12:26:40Z\n1,2,20200913\n1,2,noon\n1,2,5e9\n",
        reasons={5: "time is not a number or an ISO 8601 date", 6: "time is after the year 2100"},
        num_kept=4,
    ),
    "iso dates": Poison(
        "user,item,time\n1,2,1969-12-31\n1,2,9999-12-31\n1,2,31.12.2020\n1,2,2020-12-31\n",
        schema=ISO,
        reasons={
            1: "time is before 1970",
            2: "time is after the year 2100",
            3: "time is not an ISO 8601 date, like 2024-05-01",
        },
    ),
    "number": Poison(
        f"{RICH_HEADER}\n{rich(rating='four')}\n{rich()}\n", schema=RICH, reasons={1: "rating is not a finite float32"}
    ),
    "infinite number": Poison(
        f"{RICH_HEADER}\n{rich(rating='inf')}\n{rich()}\n", schema=RICH, reasons={1: "rating is not a finite float32"}
    ),
    "number above float32": Poison(
        f"{RICH_HEADER}\n{rich(rating='1e39')}\n{rich()}\n", schema=RICH, reasons={1: "rating is not a finite float32"}
    ),
    "refused missing number": Poison(
        f"{RICH_HEADER}\n{rich(price='')}\n{rich()}\n", schema=RICH, reasons={1: "price is missing"}
    ),
    "id list": Poison(
        f"{RICH_HEADER}\n{rich(tags='6|x')}\n{rich()}\n",
        schema=RICH,
        reasons={1: "tags has a value that is not an int64"},
    ),
    "hole in id list": Poison(
        f"{RICH_HEADER}\n{rich(tags='6|')}\n{rich()}\n",
        schema=RICH,
        reasons={1: "tags has a value that is not an int64"},
    ),
    "number of weights": Poison(
        f"{RICH_HEADER}\n{rich(shares='1')}\n{rich()}\n",
        schema=RICH,
        reasons={1: "tags and its weights differ in number"},
    ),
    "weight": Poison(
        f"{RICH_HEADER}\n{rich(shares='1|x')}\n{rich()}\n",
        schema=RICH,
        reasons={1: "tags has a weight that is not a finite float32"},
    ),
    "vector length": Poison(
        f"{RICH_HEADER}\n{rich(place='1|2|3')}\n{rich()}\n", schema=RICH, reasons={1: "place does not have 2 values"}
    ),
    "vector value": Poison(
        f"{RICH_HEADER}\n{rich(place='1|nan')}\n{rich()}\n",
        schema=RICH,
        reasons={1: "place has a value that is not a finite float32"},
    ),
    "id feature": Poison(
        f"{RICH_HEADER}\n{rich(shop='x')}\n{rich()}\n", schema=RICH, reasons={1: "shop is not an int64"}
    ),
    "stray quote": Poison('user,item,time\n1,2"x,3\n1,2,3\n', reasons={1: "stray or unclosed quote"}),
    "unclosed quote": Poison(
        'user,item,time\n"1,2,3\n1,2,3\n1,2,4\n', reasons={1: "stray or unclosed quote"}, num_kept=2
    ),
    "quoted line break is legal": Poison('user,item,time,note\n1,2,3,"a\nb ""c"", d"\n4,5,6,x\n', num_kept=2),
    "bad record after a quoted line break": Poison(
        'user,item,time,note\n1,2,3,"a\nb"\nx,5,6,\n', reasons={2: "user is not an int64"}
    ),
    "blank lines are no records": Poison("user,item,time\n\n1,2,3\n\r\n\n1,2,4\n", num_kept=2),
    "broken json": Poison(
        '{"user":1,"item":2,"time":3}\n{"user":1,\n[1,2]\n{"user":1,"item":2,"time":4}\n',
        "log.jsonl",
        num_kept=2,
        reasons={2: "not a JSON object", 3: "not a JSON object"},
    ),
    "json fields": Poison(
        '{"user":1,"item":2,"time":3}\n{"item":2,"time":3}\n{"user":[1,2],"item":2,"time":3}\n{"user":{},"item":2,"time":3}\n',
        "log.jsonl",
        reasons={2: "user is missing", 3: "user is not an int64", 4: "user is not an int64"},
    ),
    "json values that are no ids": Poison(
        '{"user":"a","item":2,"time":3,"tags":["x", 1]}\n{"user":[1],"item":2,"time":3}\n{"user":{"a":1},"item":2,"time":3}\n'
        '{"user":true,"item":2,"time":3}\n{"user":"a","item":true,"time":3}\n{"user":"a","item":2,"time":3,"tags":[true]}\n'
        '{"user":"a","item":2,"time":3,"tags":[["x"]]}\n{"user":"a","item":2,"time":3,"tags":{"x":1}}\n'
        '{"user":NaN,"item":2,"time":3}\n{"user":-Infinity,"item":2,"time":3}\n',
        "log.jsonl",
        schema=HASHED,
        reasons={
            2: "user is not a text or whole number",
            3: "user is not a text or whole number",
            4: "user is not a text or whole number",
            5: "item is not an int64",
            6: "tags has a value that is not a text or whole number",
            7: "tags has a value that is not a text or whole number",
            8: "tags has a value that is not a text or whole number",
            9: "user is missing",
            10: "user is not a text or whole number",
        },
    ),
    "half a surrogate pair": Poison(
        '{"user":"\\ud83d","item":2,"time":3}\n{"user":"\\ud83d\\ude00","item":2,"time":3}\n',
        "log.jsonl",
        schema=Schema(user_encoding="hash"),
        reasons={1: "not valid text"},
    ),
    "json feature that no record has": Poison(
        '{"user":1,"item":2,"time":3}\n', "log.jsonl", schema=HASHED, error="no column 'tags'"
    ),
    "fraction of zeros is whole": Poison(
        "user,item,time\n1.0,-2.00,3.0\n1.05,2,3\n1.0e0,2,3\n1.,2,3\n",
        reasons={2: "user is not an int64", 3: "user is not an int64", 4: "user is not an int64"},
    ),
    "reserved column": Poison(
        "#record,item,time\n1,2,3\n", schema=Schema(user="#record"), error="'#record' is reserved for record numbers"
    ),
    "truncated gzip": Poison(
        zipped("user,item,time\n" + "1,2,3\n" * 1000, cut=9), "log.csv.gz", error="log.csv.gz is truncated or damaged"
    ),
    "damaged gzip": Poison(b"\x1f\x8b\x08\x00" + b"x" * 50, "log.csv.gz", error="log.csv.gz is truncated or damaged"),
    "truncated zstd": Poison(
        b"\x28\xb5\x2f\xfd\x04\x58\x51", "log.csv.zst", error="log.csv.zst is truncated or damaged"
    ),
    "wrong delimiter": Poison(
        "user;item;time\n1;2;3\n", error="single column with the delimiter ','.*';' would give 3"
    ),
    "empty file": Poison("", error="log.csv is empty"),
    "header only": Poison("user,item,time\n", error="no good record"),
    "missing column": Poison(
        "user,itme,time\n1,2,3\n",
        error="no column 'item' \\(did you mean 'itme'\\?\\). Its columns are: user, itme, time",
    ),
    "missing key in json": Poison('{"user":1,"thing":2,"time":3}\n', "log.jsonl", error="no column 'item'"),
    "column twice": Poison("user,item,time,item\n1,2,3,4\n", error="more than one column named 'item'"),
    "undecodable": Poison(
        b"user,item,time\n1,2,3\n" + b"1,\xe9,3\n", error="not utf-8 text: byte 0xe9 near position 23"
    ),
    "unknown encoding": Poison("user,item,time\n1,2,3\n", encoding="klingon", error="unknown encoding 'klingon'"),
    "unknown ending": Poison("1 2 3\n", "log.xyz", error="its format is unknown"),
    "not parquet": Poison("user,item,time\n1,2,3\n", "log.parquet", error="not a complete Parquet file"),
}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS.keys())
def test_poisoned_log(tmp_path: Path, poison: Poison) -> None:
    path = tmp_path / poison.name
    path.write_bytes(poison.text if isinstance(poison.text, bytes) else poison.text.encode())
    source = LogSource(paths=(str(path),), encoding=poison.encoding)
    if poison.error:
        with pytest.raises(DataError, match=poison.error):
            run(source, poison.schema)
        return
    kept, bad = run(source, poison.schema)
    assert kept.height == poison.num_kept
    assert [entry["record"] for entry in bad] == list(poison.reasons)
    for entry, reason in zip(bad, poison.reasons.values(), strict=True):
        assert str(entry["reason"]).startswith(reason)
        assert entry["file"] == str(path)
        assert entry["values"]


def test_quarantine_keeps_the_raw_text(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('user,item,time\n 1x ,2,3\n7,"a,b",9,surplus\n1,2,3\n')
    _, bad = run(LogSource(paths=(str(path),)), SCHEMA)
    values = {entry["record"]: entry["values"] for entry in bad}
    assert values == {1: {"user": " 1x ", "item": "2", "time": "3"}, 2: '7,"a,b",9,surplus'}


def test_no_file_matches(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches '.*none-\*\.csv'"):
        run(LogSource(paths=(str(tmp_path / "none-*.csv"),)), SCHEMA)
    with pytest.raises(DataError, match="no log was given"):
        run(LogSource(paths=()), SCHEMA)


def test_too_many_bad_records_names_the_reasons(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,item,time\n" + "1,2,3\n" * 97 + "x,2,3\nx,2,3\n1,,3\n")
    assert run(LogSource(paths=(str(path),)), SCHEMA, share=0.03)[0].height == 97
    with pytest.raises(
        DataError,
        match=r"(?s)3 of 100 records are bad \(3.0%\), more than the 2.0%.*2 x user is not an int64; first record 98 .*1 x item is missing",
    ):
        run(LogSource(paths=(str(path),)), SCHEMA, share=0.02)


def test_formats_agree(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": [1, 2, -1], "item": [LOW, HIGH, 0], "time": [10, 20, 30], "tags": [[1, 2], [], [3]]})
    text = frame.with_columns(pl.col("tags").list.eval(pl.element().cast(pl.String)).list.join("|"))
    text.write_csv(tmp_path / "a.csv")
    text.write_csv(tmp_path / "a.tsv", separator="\t")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    text.write_csv(tmp_path / "a.csv.zst", compression="zstd")
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.csv").read_bytes())
    (tmp_path / "wide.csv").write_bytes((tmp_path / "a.csv").read_text().encode("utf-16"))
    frame.write_parquet(tmp_path / "a.parquet")
    frame.write_ndjson(tmp_path / "a.jsonl")
    schema = Schema(features=(Feature(name="tags", kind="ids"),))
    expected = frame.with_columns(time=pl.col("time") * 1000).sort("user")
    for name in ("a.csv", "a.tsv", "a.csv.gz", "a.csv.zst", "bom.csv", "wide.csv", "a.parquet", "a.jsonl"):
        source = LogSource(paths=(str(tmp_path / name),), encoding="utf-16" if name == "wide.csv" else "utf-8")
        kept, bad = run(source, schema)
        assert not bad, name
        assert kept.drop("#order").sort("user").equals(expected), name
    assert run(frame, schema)[0].drop("#order").sort("user").equals(expected)


def test_json_lists_mix_with_scalars_and_keep_the_separator(tmp_path: Path) -> None:
    rows = [{"tags": ["a|b", "c"]}, {"tags": "d"}, {"tags": None}, {}]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"user": 1, "item": 2, "time": 3, **row}) + "\n" for row in rows))
    schema = Schema(features=(Feature(name="tags", kind="ids", encoding="hash"),))
    kept, bad = run(LogSource(paths=(str(path),)), schema)
    assert not bad
    assert kept["tags"].to_list() == [[hash_text("a|b"), hash_text("c")], [hash_text("d")], [], []]


def test_globs_are_read_in_name_order_and_columns_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("item,time,user\n5,1,2\n")
    (tmp_path / "a.csv").write_text("user,item,time\n1,4,1\n")
    kept, _ = run(LogSource(paths=(str(tmp_path / "*.csv"),)), SCHEMA)
    assert kept.select("user", "item", "#order").rows() == [(1, 4, 0), (2, 5, 1)]
    kept, _ = run(LogSource(paths=(str(tmp_path / "b.csv"), str(tmp_path / "a.csv"))), SCHEMA)
    assert kept["user"].to_list() == [2, 1]


def test_long_delimiter_and_no_header(tmp_path: Path) -> None:
    (tmp_path / "log.dat").write_bytes('1::"2::3\n1::2::4\n1::2\n1::2::3::4\n'.encode("latin-1"))
    source = LogSource(
        paths=(str(tmp_path / "log.dat"),), delimiter="::", columns=("user", "item", "time"), block_bytes=3
    )
    kept, bad = run(source, SCHEMA)
    assert kept["time"].to_list() == [4000]
    assert [(entry["record"], entry["reason"]) for entry in bad] == [
        (1, "item is not an int64"),
        (3, "missing fields: 2 instead of 3"),
        (4, "surplus fields: 4 instead of 3"),
    ]
    assert bad[2]["values"] == "1::2::3::4"


@pytest.mark.parametrize(
    ("unit", "text", "milliseconds"),
    [
        ("s", "978300760", 978300760000),
        ("s", "1.5", 1500),
        ("ms", "1649581149287", 1649581149287),
        ("iso8601", "2020-01-02", 1577923200000),
        ("iso8601", "2020-01-02T03:04", 1577934240000),
        ("iso8601", "2020-01-02 03:04:05.678", 1577934245678),
        ("iso8601", "2020-01-02T03:04:05Z", 1577934245000),
        ("iso8601", "2020-01-02T03:04:05+02:00", 1577927045000),
        ("iso8601", "2020-01-02T03:04:05-0130", 1577939645000),
        ("iso8601", "2020-01-02T03:04:05+02", 1577927045000),
        ("iso8601", "2020-01-02 03:04:05 UTC", 1577934245000),
        ("iso8601", "2020-01-02 03:04:05 +02:00", 1577927045000),
        ("iso8601", "2020-01-02t03:04:05z", 1577934245000),
        ("iso8601", "2020-01-02T03:04:05,678", 1577934245678),
        ("iso8601", "20200102T030405Z", 1577934245000),
        ("iso8601", "20200102T0304-0130", 1577939640000),
        ("iso8601", "20200102", 1577923200000),
    ],
)
def test_times_become_milliseconds(unit: str, text: str, milliseconds: int) -> None:
    frame = pl.DataFrame({"user": [1], "item": [1], "time": [text]})
    schema = Schema.from_json({**Schema().to_json(), "time_unit": unit})
    assert run(frame, schema)[0]["time"].to_list() == [milliseconds]


def test_dates_of_parquet_need_no_unit() -> None:
    from datetime import UTC, date, datetime

    for value, expected in ((date(2020, 1, 2), 1577923200000), (datetime(2020, 1, 2, 3, tzinfo=UTC), 1577934000000)):
        assert run(pl.DataFrame({"user": [1], "item": [1], "time": [value]}), SCHEMA)[0]["time"].to_list() == [expected]


@dataclass(frozen=True)
class Column:
    """A typed column of ids, and what must come of it: the kept values and the places that are quarantined."""

    values: pl.Series
    kept: list[str | int]
    bad: dict[int, str]


MISSING, INEXACT = "user is missing", "user is not"
COLUMNS = {
    "categorical": Column(pl.Series(["a", None, " "], dtype=pl.Categorical), ["a"], {2: MISSING, 3: MISSING}),
    "enum": Column(pl.Series(["a", None], dtype=pl.Enum(["a"])), ["a"], {2: MISSING}),
    "text": Column(pl.Series(["1", "", "1.0"]), ["1", "1.0"], {2: MISSING}),
    "float64": Column(
        pl.Series([1.0, 1.5, float("nan"), None, 2.0**53]), [1], {2: INEXACT, 3: MISSING, 4: MISSING, 5: INEXACT}
    ),
    "float32": Column(pl.Series([7, 2**24], dtype=pl.Float32), [7], {2: INEXACT}),
    "decimal": Column(pl.Series(["1.00", "1.50", None]).cast(pl.Decimal(10, 2)), [1], {2: INEXACT, 3: MISSING}),
    "int32": Column(pl.Series([1, None], dtype=pl.Int32), [1], {2: MISSING}),
    "boolean": Column(pl.Series([True, None]), [], {1: INEXACT, 2: MISSING}),
}


@pytest.mark.parametrize("encoding", ["hash", "dictionary", "int64"])
@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS.keys())
def test_typed_ids(column: Column, encoding: str) -> None:
    """Every type of column: what is missing or inexact is quarantined, and a float 1 is the same id as an integer 1."""
    numeric = all(isinstance(value, int) for value in column.kept)
    if encoding == "int64" and not numeric:
        return
    frame = column.values.alias("user").to_frame().with_columns(item=1, time=1)
    schema = Schema.from_json({**Schema().to_json(), "user_encoding": encoding})
    if not column.kept:
        with pytest.raises(DataError, match="no good record"):
            run(frame, schema)
        return
    kept, bad = run(frame, schema)
    assert kept["user"].dtype == pl.Int64
    expected = column.kept if encoding == "int64" else [hash_text(str(one)) for one in column.kept]
    assert kept["user"].to_list() == expected
    assert [entry["record"] for entry in bad] == list(column.bad)
    for entry, reason in zip(bad, column.bad.values(), strict=True):
        assert str(entry["reason"]).startswith(reason)


@pytest.mark.parametrize("encoding", ["hash", "int64"])
def test_typed_lists_of_ids(encoding: str) -> None:
    feature = {**dataclasses.asdict(Feature(name="tags", kind="ids")), "encoding": encoding}
    schema = Schema(features=(Feature(**feature),))
    same = (lambda one: hash_text(str(one))) if encoding == "hash" else (lambda one: one)
    for kind in (pl.List(pl.Float64), pl.List(pl.Int32), pl.Array(pl.Float64, 1), pl.Float64, pl.Int64):
        nested = kind.is_nested() if isinstance(kind, pl.DataType) else False
        tags = pl.Series("tags", [[1], [2]] if nested else [1, 2], dtype=kind)
        kept, bad = run(pl.DataFrame({"user": [1, 1], "item": 1, "time": 1}).with_columns(tags), schema)
        assert not bad
        assert kept["tags"].to_list() == [[same(1)], [same(2)]], kind
    for values in ([[1.0], [1.7]], [[1.0], [float("nan")]], [1.0, 1.7]):
        frame = pl.DataFrame({"user": [1, 1], "item": 1, "time": 1, "tags": values})
        kept, bad = run(frame, schema)
        assert kept["tags"].to_list() == [[same(1)]]
        assert [(entry["record"], str(entry["reason"])[:29]) for entry in bad] == [(2, "tags has a value that is not ")]


UNFIT = {
    "nested list as user": ("user", pl.Series([[[1]]])),
    "list as user": ("user", pl.Series([[1]])),
    "struct as item": ("item", pl.Series([{"a": 1}])),
    "duration as time": ("time", pl.Series([timedelta(days=1)])),
    "duration as number": ("rating", pl.Series([timedelta(days=1)])),
    "structs as ids": ("tags", pl.Series([[{"a": 1}]])),
    "struct as ids": ("tags", pl.Series([{"a": 1}])),
    "lists as weights": ("shares", pl.Series([[[0.5]]])),
}


@pytest.mark.parametrize(("name", "values"), UNFIT.values(), ids=UNFIT.keys())
def test_types_that_hold_no_value(name: str, values: pl.Series) -> None:
    frame = pl.DataFrame({"user": [1], "item": [2], "time": [3], "rating": [1.0], "tags": [[1]], "shares": [[0.5]]})
    schema = Schema(
        features=(Feature(name="rating", kind="number"), Feature(name="tags", kind="ids", weights="shares"))
    )
    with pytest.raises(DataError, match=rf"column '{name}' has type \w+.*Map another column"):
        run(frame.with_columns(values.alias(name)), schema)


def test_times_of_few_bits_are_refused() -> None:
    frame = pl.DataFrame({"user": 1, "item": 1, "time": pl.Series([978300760.0, 1.5, None], dtype=pl.Float32)})
    kept, bad = run(frame, SCHEMA)
    assert kept["time"].to_list() == [1500]
    assert [str(entry["reason"])[:31] for entry in bad] == ["time is too large for Float32, ", "time is missing"]
    exact = frame.with_columns(time=pl.Series([978300760.0, 1.5, None]))
    assert run(exact, SCHEMA)[0]["time"].to_list() == [978300760000, 1500]


def test_json_values_mean_the_same_in_any_block(tmp_path: Path) -> None:
    """A text is cut at the separator and a boolean is a number, whatever stands in the other records."""
    rows: list[dict[str, object]] = [
        {"tags": "1|2", "rating": True},
        {"tags": [3, 4]},
        {"tags": "5", "rating": 0.5},
        {},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"user": 1.0, "item": 2, "time": 3, **row}) + "\n" for row in rows))
    schema = Schema(
        user_encoding="hash", features=(Feature(name="tags", kind="ids"), Feature(name="rating", kind="number"))
    )
    for block in (1, 60, 1 << 20):
        kept, bad = run(LogSource(paths=(str(path),), block_bytes=block), schema)
        assert not bad
        assert kept["user"].to_list() == [hash_text("1")] * 4
        assert kept["tags"].to_list() == [[1, 2], [3, 4], [5], []]
        assert kept["rating"].to_list()[:3:2] == [1.0, 0.5]


def test_json_feature_may_come_late(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"user":1,"item":2,"time":3}\n' * 5 + '{"user":1,"item":2,"time":3,"tags":[7]}\n')
    schema = Schema(features=(Feature(name="tags", kind="ids"),))
    kept, bad = run(LogSource(paths=(str(path),), block_bytes=10), schema)
    assert not bad
    assert kept["tags"].to_list() == [[]] * 5 + [[7]]


def test_quarantine_shows_json_values_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"user":["a",[1]],"item":true,"time":{"x":"y"}}\n{"user":1,"item":2,"time":3}\n')
    _, [bad] = run(LogSource(paths=(str(path),)), SCHEMA)
    assert bad["values"] == {"user": ["a", ["1"]], "item": True, "time": {"x": "y"}}


def test_own_names_do_not_collide(tmp_path: Path) -> None:
    names = ("key", "_order", "_record", "_file")
    (tmp_path / "a.csv").write_text(f"user,item,time,{','.join(names)}\n1,2,3,4,5,6,7\n")
    pl.read_csv(tmp_path / "a.csv").write_parquet(tmp_path / "b.parquet")
    schema = Schema(features=tuple(Feature(name=name, kind="id") for name in names))
    kept, _ = run(LogSource(paths=(str(tmp_path / "*"),)), schema)
    assert kept.select(names).rows() == [(4, 5, 6, 7)] * 2


def test_files_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item,time\n1,4,1\n")
    (tmp_path / "b.TSV").write_text("user\titem\ttime\n2\t4\t1\n")
    (tmp_path / "c.csv").symlink_to(tmp_path / "a.csv")
    paths = (str(tmp_path / "b.TSV"), str(tmp_path / "*"), str(tmp_path / ".." / tmp_path.name / "a.csv"))
    assert run(LogSource(paths=paths), SCHEMA)[0]["user"].to_list() == [2, 1]


def bad_log(path: Path, num_bad: int, num_good: int) -> LogSource:
    path.write_text("user,item,time\n" + "x,2,3\n" * num_bad + "1,2,3\n" * num_good)
    return LogSource(paths=(str(path),), block_bytes=1 << 16)


def test_bad_start_does_not_decide_about_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the whole log decides, wherever it is cut, unless more than half of a long start is bad."""
    monkeypatch.setattr(quarantine, "_EARLY", 1_000)
    source = bad_log(tmp_path / "log.csv", 499, 9_501)
    for block in (1 << 10, 1 << 12, 1 << 20):
        assert run(replace(source, block_bytes=block), SCHEMA, share=0.05)[0].height == 9_501
    with pytest.raises(DataError, match=r"499 of 10,000 records are bad \(5\.0%\), more than the 4\.0%"):
        run(source, SCHEMA, share=0.04)
    hopeless = bad_log(tmp_path / "log.csv", 6_000, 4_000)
    sheet = Quarantine(io.StringIO(), 0.05)
    with pytest.raises(DataError, match=r"records so far are bad \(60\.0%\).*\n.*first record 1 of .*\"x\""):
        list(TypedReader(SCHEMA, make_encoders(SCHEMA), sheet).log(hopeless))
    assert len(str(sheet.file.getvalue()).splitlines()) == 1, "the entries of a chunk are written after the check"  # type: ignore[attr-defined]
    assert run(hopeless, SCHEMA, share=0.6)[0].height == 4_000


def test_share_is_shown_with_the_digits_it_takes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"bad \(1\.003%\), more than the 1\.000%"):
        run(bad_log(tmp_path / "log.csv", 1003, 98_997), SCHEMA, share=0.01)


def test_bad_records_are_written_in_bulk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`DataFrame.row` costs 50 microseconds a call, which for a million bad records is a minute."""
    monkeypatch.setattr(pl.DataFrame, "row", lambda *_, **__: pytest.fail("a frame was asked for a single row"))
    assert len(run(bad_log(tmp_path / "log.csv", 20, 1), SCHEMA)[1]) == 20


def test_missing_features_are_not_errors(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(f"{RICH_HEADER}\n{rich(rating='NaN', tags='', shares='', place='', shop='')}\n")
    kept, bad = run(LogSource(paths=(str(tmp_path / "log.csv"),)), RICH)
    assert not bad
    assert kept["rating"].is_nan().all()
    assert kept.select("tags", "place", "shop").rows() == [([], None, None)]


def test_every_form_of_one_time_is_that_time() -> None:
    texts = [
        "1600000000",
        "1600000000.0",
        "1600000000000",
        "2020-09-13T12:26:40Z",
        "2020-09-13 14:26:40+02:00",
        "1.6e9",
    ]
    assert set(parse_time(pl.Series(texts), "auto").columns["time"].to_list()) == {1_600_000_000_000}
    for date in ("20200913", 20200913):
        assert parse_time(pl.Series([date]), "auto").columns["time"].to_list() == [1_599_955_200_000]
    assert parse_time(pl.Series([1_600_000_000, 1_600_000_000_000]), "auto").columns["time"].n_unique() == 1


def test_quarantined_records_add_nothing_to_a_dictionary() -> None:
    schema = Schema(item_encoding="dictionary")
    encoders = make_encoders(schema)
    frame = pl.DataFrame({"user": ["1", "x"], "item": ["good", "bad"], "time": ["1", "1"]})
    kept = pl.concat(list(TypedReader(schema, encoders, Quarantine(io.StringIO(), 1.0)).log(frame)))
    assert kept["item"].to_list() == [hash_text("good")]
    assert encoders["item"].vocabulary().table.rows() == [(0, "good")]


FIELD = st.sampled_from(
    [
        "1",
        "-1",
        "0",
        str(LOW),
        str(HIGH),
        str(HIGH + 1),
        "",
        "x",
        " 7 ",
        '"8"',
        '"a\nb"',
        '"',
        "é",
        "4102444800000",
        "1.5",
    ]
)


@settings(max_examples=settings.default.max_examples // 2)
@given(rows=st.lists(st.lists(FIELD, min_size=1, max_size=5), min_size=1, max_size=20), block=st.integers(1, 200))
def test_nothing_is_lost_and_blocks_do_not_matter(
    rows: list[list[str]], block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """read = kept + quarantined (checked in `run`), whatever stands in the log and wherever it is cut."""
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_text("user,item,time\n1,1,1\n" + "\n".join(",".join(row) for row in rows) + "\n", newline="")
    whole, bad = run(LogSource(paths=(str(path),)), SCHEMA)
    cut, cut_bad = run(LogSource(paths=(str(path),), block_bytes=block), SCHEMA)
    assert whole.drop("#order").equals(cut.drop("#order"))
    assert cut["#order"].is_sorted()
    assert cut["#order"].is_unique().all()
    assert bad == cut_bad


@given(
    rows=st.lists(st.lists(st.text(alphabet='ab",\n é', max_size=5), min_size=2, max_size=4), min_size=1, max_size=8),
    block=st.integers(1, 30),
)
def test_quoted_records_are_cut_where_they_end(rows: list[list[str]], block: int) -> None:
    quoted = [",".join('"' + text.replace('"', '""') + '"' for text in row) for row in rows]
    data = ("\n".join(quoted) + "\n").encode()
    blocks = (data[place : place + block] for place in range(0, len(data), block))
    found = [
        pair
        for chunk in split_records(blocks, delimiter=",", quoted=True)
        for pair in zip(chunk.texts, chunk.num_fields, strict=True)
    ]
    assert found == [(text.encode(), len(row)) for text, row in zip(quoted, rows, strict=True)]


def test_the_share_that_is_allowed_is_allowed():
    quarantine = Quarantine(io.StringIO(), 0.25)
    quarantine.count(8, {"a": 2})
    quarantine.check_share()
    quarantine.count(0, {"a": 1})
    quarantine.write("log", [(3, "a", {})])
    with pytest.raises(DataError, match=r"3 of 8 records are bad \(37\.5%\), more than the 25\.0%"):
        quarantine.check_share()


def test_the_five_most_common_reasons_are_listed():
    quarantine = Quarantine(io.StringIO(), 0.0)
    quarantine.count(28, {f"reason {number}": number for number in range(1, 8)})
    quarantine.write("log", [(number, f"reason {number}", {}) for number in range(1, 8)])
    lines = [line for line in str(quarantine.too_many("")).splitlines() if line.startswith("  - ")]
    assert [line.split(";")[0] for line in lines] == [f"  - {number} x reason {number}" for number in (7, 6, 5, 4, 3)]


@pytest.mark.parametrize(
    ("num_read", "num_bad", "max_share", "is_hopeless"),
    [
        (100_000, 50_001, 0.01, True),
        (100_000, 50_000, 0.01, False),
        (99_999, 99_999, 0.01, False),
        (100_000, 50_001, 0.5, False),
    ],
)
def test_reading_stops_early_only_if_more_than_half_is_bad(num_read, num_bad, max_share, is_hopeless):
    quarantine = Quarantine(io.StringIO(), max_share)
    quarantine.count(num_read, {"bad": num_bad})
    assert quarantine.is_hopeless() is is_hopeless


def test_texts_as_ids_propose_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,time\n" + "".join(f"user {n},{n},1\n" for n in range(20)))
    with pytest.raises(DataError, match="Texts as user ids need --user-encoding dictionary") as caught:
        write_sequences(tmp_path / "out", schema=Schema(), log=LogSource(paths=(str(tmp_path / "log.csv"),)))
    assert "--item-encoding" not in str(caught.value)
    (tmp_path / "log.csv").write_text("user,item,time\n" + "".join(f"user {n},item {n},1\n" for n in range(20)))
    with pytest.raises(
        DataError, match=r"--user-encoding dictionary. Texts as item ids need --item-encoding dictionary"
    ):
        write_sequences(tmp_path / "out", schema=Schema(), log=LogSource(paths=(str(tmp_path / "log.csv"),)))
