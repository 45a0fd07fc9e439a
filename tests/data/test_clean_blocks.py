"""The fast readers of CSV and JSONL against the record splitter: the same rows, the same quarantine, on any file."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestpipe.data import csv_reader, record_splitter
from nestpipe.data.clean_blocks import cut_clean
from nestpipe.data.id_encoding import make_encoders
from nestpipe.data.log_reader import LogSource
from nestpipe.data.quarantine import Quarantine, TypedReader
from nestpipe.data.schema import Feature, Schema

SCHEMA = Schema(
    user_encoding="dictionary", features=(Feature(name="rating", kind="number"), Feature(name="shop", kind="id"))
)


def read(source: LogSource, schema: Schema) -> tuple[pl.DataFrame, str, int, list[str]]:
    """All kept rows, the quarantine as written, the number read, and the chunks' sizes."""
    sink = io.StringIO()
    sheet = Quarantine(sink, 1.0)
    chunks = []
    error = ""
    try:
        for chunk in TypedReader(schema, make_encoders(schema), sheet).log(source):
            chunks.append(chunk)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    kept = pl.concat(chunks) if chunks else pl.DataFrame()
    if not error:
        assert sheet.num_read == kept.height + sheet.num_bad
    return kept, sink.getvalue() + error, sheet.num_read, [str(chunk.height) for chunk in chunks]


def assert_same(path: Path, schema: Schema, block: int) -> None:
    fast = LogSource(paths=(str(path),), block_bytes=block)
    own, oracle = read(fast, schema), read(replace(fast, split_all=True), schema)
    assert own[1:] == oracle[1:]
    assert own[0].schema == oracle[0].schema
    assert own[0].equals(oracle[0])


NUMBER = st.sampled_from(["1", "-1", "0", "7", "007", "+3", "12345", "20240501", "0020240501", "1700000000", "4.0"])
SPELLINGS = [
    "",
    "x",
    " 7 ",
    "1.5",
    "nan",
    "inf",
    "1e400",
    "1e5",
    "é",
    "\r",
    "-",
    "true",
    "16777217",
    str(2**63),
    "9007199254740993",
]
QUOTED = ['"8"', '"a,b"', '"a\nb"', '"a\r\nb"', '"a""b"', '""', '""""', '"', 'a"b', '"a"b']
ODD = st.sampled_from([*SPELLINGS, *QUOTED])
LINE_END = st.sampled_from(["\n", "\n", "\n", "\r\n", "\n\n", "\r\r\n"])


@st.composite
def csv_text(draw: st.DrawFn) -> str:
    """Mostly regular records, with odd fields, missing and surplus ones, blank lines and returns here and there."""
    odd = draw(st.sampled_from([0, 0, 1, 3]))
    rows = []
    for _ in range(draw(st.integers(0, 12))):
        num_fields = 5 if not odd or draw(st.integers(0, 9)) else draw(st.integers(1, 7))
        fields = [draw(ODD if odd > draw(st.integers(0, 9)) else NUMBER) for _ in range(num_fields)]
        rows.append(",".join(fields))
    ends = [draw(LINE_END) if odd else "\n" for _ in rows]
    header = draw(st.sampled_from(["user,item,time,rating,shop", '"user",item,"time",rating,shop']))
    body = "".join(row + end for row, end in zip(rows, ends, strict=True))
    return header + draw(st.sampled_from(["\n", "\r\n"])) + body + draw(st.sampled_from(["", "1,1,1,1,1"]))


@settings(max_examples=settings.default.max_examples // 2)
@given(text=csv_text(), block=st.sampled_from([1 << 20, 100, 37]), encoded=st.booleans())
def test_csv_reads_as_record_by_record(
    text: str, block: int, encoded: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_text(text, newline="")
    assert_same(path, SCHEMA if encoded else replace(SCHEMA, user_encoding="int64"), block)


FIELDS = st.sampled_from(
    ["a", "", "b", '"a"', '""', '"a,b"', '"a\nb"', '"a\r\nb"', '"a""b"', '""""', 'a""', '""a', '"a"b', '"', "\r"]
)


@settings(max_examples=settings.default.max_examples * 2)
@given(
    rows=st.lists(st.lists(FIELDS, min_size=1, max_size=3), min_size=1, max_size=3),
    ends=st.sampled_from(["\n", "\r\n"]),
    columns=st.integers(2, 3),
    cut=st.integers(0, 9),
)
@example(rows=[['"a"', 'a""']], ends="\n", columns=2, cut=0)
@example(rows=[['""a', '"a"']], ends="\n", columns=2, cut=0)
def test_regular_blocks_have_the_splitter_s_records(rows: list[list[str]], ends: str, columns: int, cut: int) -> None:
    """Whatever `cut_clean` takes as regular, the splitter cuts into records of as many fields, at the same place."""
    data = "".join(",".join(row) + ends for row in rows).encode()
    data = data[: len(data) - cut]
    found = cut_clean(data, separator=b",", num_columns=columns, quoted=True)
    records, used = record_splitter._cut(data, separator=b",", quoted=True, final=False)
    if found is not None:
        assert found[1] == used
        assert records.num_fields == [columns] * found[0].num_records
        assert b"".join(text + b"\n" for text in records.texts) == found[0].body


VALUE = st.one_of(
    st.integers(-5, 3000).map(str),
    st.sampled_from(["4.0", "-0", "-0.0", "4.50", "1e5", "12.0e1", "true", "false", "null", "NaN", "Infinity", "[1]"]),
    st.sampled_from(
        ['"a"', '"é"', '"a\\u00e9"', '"\\ud800"', '""', '" 7 "', '"a\tb"', '{"a": 1}', "01", "nul", str(2**70)]
    ),
)


@st.composite
def json_line(draw: st.DrawFn, plain: bool) -> str:
    keys = ["user", "item", "time", "rating", "shop"]
    if plain or draw(st.integers(0, 4)):
        values = [str(draw(st.integers(0, 999))) if plain or draw(st.integers(0, 3)) else draw(VALUE) for _ in keys]
    else:
        keys = draw(st.lists(st.sampled_from([*keys, "more", 'k"']), max_size=6))
        values = [draw(VALUE) for _ in keys]
    space = "" if plain else draw(st.sampled_from(["", " ", "\t"]))
    fields = [f"{json.dumps(key)}:{space}{value}" for key, value in zip(keys, values, strict=True)]
    return "{" + f",{space}".join(fields) + "}" + ("" if plain else draw(st.sampled_from(["", " ", "x", "\r"])))


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data(), plain=st.booleans(), block=st.sampled_from([1 << 20, 150]))
def test_jsonl_reads_as_line_by_line(
    data: st.DataObject, plain: bool, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = data.draw(st.lists(json_line(plain), min_size=1, max_size=8))
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    text = "\n".join(['{"user": 1, "item": 1, "time": 1, "rating": 1, "shop": 1}', *lines])
    path.write_text(text.encode(errors="surrogatepass").decode(), newline="")
    assert_same(path, SCHEMA, block)


def test_regular_blocks_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and quoted logs never reach the record splitter, and numbers are read at once."""
    path = tmp_path / "log.csv"
    text = "".join(f'{n},"a, ""{n}""",{n},{n}.5,2\n' for n in range(1000))
    path.write_text("user,item,time,rating,shop\n" + text)
    monkeypatch.setattr(record_splitter, "_cut", None)
    kinds = []
    parse = csv_reader.CsvReader._parse

    def spied(self: csv_reader.CsvReader, *args: object, **more: object) -> pl.DataFrame:
        kinds.append(args[2])
        return parse(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(csv_reader.CsvReader, "_parse", spied)
    kept, _, num_read, _ = read(
        LogSource(paths=(str(path),), block_bytes=5000), Schema(item_encoding="hash", features=SCHEMA.features)
    )
    assert num_read == kept.height == 1000
    assert len(kinds) > 2
    assert all(set(kind) == {"user", "time", "rating"} for kind in kinds)  # type: ignore[call-overload]
