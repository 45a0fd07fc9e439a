"""The sequence folder: order, counts, side tables, digests, and that a crash leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.array_files import save_array
from nestpipe.data.external_sort import Spool
from nestpipe.data.features import NumberStats, apply_number, fit_number
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.quarantine import ORDER
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences, StoredFeature, truncate
from nestpipe.errors import ConfigError, DataError
from nestpipe.rng import hash_text

LOW, HIGH = -(2**63), 2**63 - 1
RICH = Schema(
    user_encoding="dictionary",
    item_encoding="dictionary",
    features=(
        Feature(name="rating", kind="number"),
        Feature(name="tags", kind="ids", weights="shares", encoding="hash"),
        Feature(name="place", kind="vector", dim=2),
        Feature(name="shop", kind="id", encoding="dictionary"),
    ),
)


def frame(rows: list[tuple[Any, ...]], *names: str) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=list(names or ("user", "item", "time")), orient="row")


def rich_frame(num_rows: int, seed: int = 0) -> pl.DataFrame:
    """A log with every kind of feature, ties, missing values, and a duplicate and a bad record now and then."""
    rng = np.random.default_rng(seed)
    rows = []
    for place in range(num_rows):
        tags = ["red", "green", "blue"][: rng.integers(0, 4)]
        row = (
            f"u{rng.integers(40)}",
            f"i{rng.integers(30)}" if place % 50 else "",
            str(rng.integers(0, 50)),
            str(rng.integers(5)) if place % 7 else "",
            "|".join(tags),
            "|".join("0.5" for _ in tags),
            "1|2" if place % 5 else "",
            f"s{rng.integers(3)}" if place % 3 else "",
        )
        rows += [row] * (2 if place % 11 == 0 else 1)
    return frame(rows, "user", "item", "time", "rating", "tags", "shares", "place", "shop")


def contents(folder: Path) -> dict[str, bytes]:
    """All files; a folder that was appended to differs from one ingest in the digests that it had before."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    meta = json.loads(found["meta.json"])
    meta.pop("ancestors", None)
    return {**found, "meta.json": json.dumps(meta, indent=1, ensure_ascii=False).encode()}


def rows_of(stored: StoredFeature) -> list[list[int]]:
    assert stored.offsets is not None
    return [
        stored.values[start:end].tolist() for start, end in zip(stored.offsets[:-1], stored.offsets[1:], strict=True)
    ]


def write(out: Path, log: pl.DataFrame | LogSource, schema: Schema | None = None, **options: Any) -> Sequences:
    return write_sequences(
        out, schema=schema or Schema(), log=log, options=BuildOptions(**{"max_quarantine_share": 0.5, **options})
    )


def test_users_ascend_and_equal_times_keep_the_order_of_the_log(tmp_path: Path) -> None:
    log = frame([(5, 1, 9), (-3, 2, 7), (5, 3, 2), (5, 4, 9), (-3, 5, 7), (-3, 6, 6)])
    sequences = write(tmp_path / "out", log)
    assert sequences.users.tolist() == [-3, 5]
    assert sequences.offsets.tolist() == [0, 3, 6]
    assert sequences.items.tolist() == [6, 2, 5, 3, 1, 4]
    assert sequences.times is not None
    assert sequences.times.tolist() == [6000, 7000, 7000, 2000, 9000, 9000]
    assert sequences.catalogue.tolist() == [1, 2, 3, 4, 5, 6]
    assert sequences.meta["time_span_ms"] == [2000, 9000]
    assert sequences.meta["tie_rule"] == "equal times keep the order of the log"
    assert not sequences.items.flags.writeable


def test_any_int64_is_an_id(tmp_path: Path) -> None:
    ids = [HIGH, -1, 0, LOW, 1]
    sequences = write(tmp_path / "out", frame([(one, one, 0) for one in ids]))
    assert sequences.users.tolist() == sequences.catalogue.tolist() == sorted(ids)
    assert sequences.items.tolist() == sorted(ids)


def test_order_only_log(tmp_path: Path) -> None:
    log = frame([(1, 9), (2, 8), (1, 7), (1, 9)], "user", "item")
    sequences = write(tmp_path / "out", log, Schema(time=None))
    assert sequences.times is None
    assert sequences.items.tolist() == [9, 7, 9, 8]
    assert "order-only" in sequences.meta["notes"][0]
    with pytest.raises(ConfigError, match="two equal records are two events"):
        write(tmp_path / "other", log, Schema(time=None), dedupe=True)


def test_seconds_read_as_milliseconds_get_a_note(tmp_path: Path) -> None:
    sequences = write(tmp_path / "out", frame([(1, 2, 978300760)]), Schema(time_unit="ms"))
    assert "ingest it with time unit s" in sequences.meta["notes"][0]


def test_string_ids(tmp_path: Path) -> None:
    log = frame([("zoe", "b", 1), ("ann", "a", 2), ("zoe", "c", 3)])
    numbered = write(tmp_path / "numbered", log, Schema(user_encoding="dictionary", item_encoding="dictionary"))
    assert numbered.users.tolist() == [0, 1]
    assert numbered.items.tolist() == [0, 1, 2]
    texts = numbered.vocabulary("user").table
    assert texts.rows() == [(0, "ann"), (1, "zoe")]
    hashed = write(tmp_path / "hashed", log, Schema(user_encoding="hash", item_encoding="hash"))
    assert sorted(hashed.users.tolist()) == hashed.users.tolist() == sorted([hash_text("ann"), hash_text("zoe")])
    names = hashed.vocabulary("item").table
    assert dict(names.rows()) == {hash_text(text): text for text in "abc"}
    assert hashed.meta["encodings"]["user"]["encoding"] == "hash"
    assert hashed.vocabulary("user").own_ids(hashed.users) == sorted(["ann", "zoe"], key=hash_text)


def test_duplicates_are_removed_only_on_request(tmp_path: Path) -> None:
    log = rich_frame(200)
    kept = write(tmp_path / "all", log, RICH).meta["counts"]
    counts = write(tmp_path / "once", log, RICH, dedupe=True).meta["counts"]
    good = log.filter(pl.col("item") != "")
    assert kept["duplicates"] == 0
    assert kept["events"] == good.height
    assert counts["events"] == good.unique().height < good.height
    assert counts["read"] == log.height == counts["kept"] + counts["quarantined"] + counts["duplicates"]


@pytest.mark.parametrize("dedupe", [False, True])
@pytest.mark.parametrize("budget_rows", [1, 37, 150])
def test_larger_than_memory_gives_the_same_files(tmp_path: Path, budget_rows: int, dedupe: bool) -> None:
    log = rich_frame(400)
    log.write_csv(tmp_path / "log.csv")
    source = LogSource(paths=(str(tmp_path / "log.csv"),), block_bytes=2000)
    write(tmp_path / "whole", source, RICH, dedupe=dedupe)
    write(tmp_path / "parts", source, RICH, dedupe=dedupe, budget_rows=budget_rows)
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["1", "-1", "x", "", str(HIGH)]),
        st.sampled_from(["3", "4", "4.5"]),
        st.sampled_from(["0", "5", "-5"]),
    ),
    max_size=30,
)


@settings(max_examples=settings.default.max_examples // 4)
@given(rows=EVENTS, budget_rows=st.integers(1, 40))
def test_counts_add_up_and_order_holds(
    rows: list[tuple[str, str, str]], budget_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against the obvious version: filter, then a stable sort."""
    rows = [("0", "0", "0"), *rows]
    out = tmp_path_factory.mktemp("folder") / "out"
    options = BuildOptions(max_quarantine_share=1.0, budget_rows=budget_rows)
    sequences = write_sequences(out, schema=Schema(), log=frame(rows), options=options)
    good = [
        (int(user), int(item), int(when))
        for user, item, when in rows
        if user not in {"x", ""} and item != "4.5" and when != "-5"
    ]
    good.sort(key=lambda row: (row[0], row[2]))
    counts = sequences.meta["counts"]
    assert counts["read"] == len(rows) == counts["kept"] + counts["quarantined"]
    assert counts["kept"] == len(good) == sequences.offsets[-1]
    assert sequences.items.tolist() == [row[1] for row in good]
    assert np.repeat(sequences.users, np.diff(sequences.offsets)).tolist() == [row[0] for row in good]
    bad = (out / "quarantine.jsonl").read_text().splitlines()
    assert len(bad) == counts["quarantined"] == sum(sequences.meta["quarantine"].values())


def test_event_features(tmp_path: Path) -> None:
    log = frame(
        [("1", "1", "2", "4.5", "a|b", ".5|2", "1|2", "7"), ("1", "1", "1", "", "", "", "", "")],
        "user",
        "item",
        "time",
        "rating",
        "tags",
        "shares",
        "place",
        "shop",
    )
    schema = replace(RICH, user_encoding="int64", item_encoding="int64")
    features = write(tmp_path / "out", log, schema).event_features
    np.testing.assert_array_equal(features["rating"].values, np.array([np.nan, 4.5], np.float32))
    np.testing.assert_array_equal(features["place"].values, np.array([[np.nan, np.nan], [1, 2]], np.float32))
    assert features["rating"].offsets is None
    assert rows_of(features["tags"]) == [[], [hash_text("a"), hash_text("b")]]
    assert features["tags"].weights is not None
    assert features["tags"].weights.tolist() == [0.5, 2.0]
    assert rows_of(features["shop"]) == [[], [0]]


def test_side_tables(tmp_path: Path) -> None:
    schema = Schema(
        features=(
            Feature(name="genres", kind="ids", scope="item", encoding="dictionary"),
            Feature(name="price", kind="number", scope="item", column="cost"),
            Feature(name="age", kind="id", scope="user"),
        )
    )
    items = frame(
        [("30", "b|a", "1.5"), ("10", "", ""), ("30", "c", "9"), ("99", "c", "2"), ("x", "d", "1")],
        "id",
        "genres",
        "cost",
    )
    users = frame([("2", "40"), ("7", "50")], "user", "age")
    sequences = write_sequences(
        tmp_path / "out",
        schema=schema,
        log=frame([(1, 30, 1), (2, 20, 1), (2, 10, 2)]),
        items=SideTable(source=items, key="id"),
        users=SideTable(source=users, key="user"),
        options=BuildOptions(max_quarantine_share=0.5),
    )
    assert sequences.catalogue.tolist() == [10, 20, 30, 99]
    assert rows_of(sequences.item_features["genres"]) == [[], [], [1, 0], [2]]
    np.testing.assert_array_equal(
        sequences.item_features["price"].values, np.array([np.nan, np.nan, 1.5, 2], np.float32)
    )
    assert rows_of(sequences.user_features["age"]) == [[], [40]]
    table = sequences.meta["tables"]["item"]
    assert (table["read"], table["kept"], table["quarantined"]) == (5, 3, 2)
    assert (table["without_attributes"], table["not_in_log"]) == (1, 1)
    assert sequences.meta["tables"]["user"]["not_in_log"] == 1
    assert sequences.meta["counts"]["items"] == 4
    assert sequences.meta["counts"]["logged_items"] == 3
    entries = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["record"], entry["reason"]) for entry in entries] == [
        (5, "item is not an int64"),
        (3, "item appears again in the table"),
    ]


def test_side_table_shares_the_dictionary_of_the_log(tmp_path: Path) -> None:
    schema = Schema(item_encoding="dictionary", features=(Feature(name="price", kind="number", scope="item"),))
    items = SideTable(source=frame([("apple", "1"), ("pear", "2")], "item", "price"), key="item")
    sequences = write_sequences(
        tmp_path / "out", schema=schema, log=frame([(1, "pear", 1), (1, "fig", 2)]), items=items
    )
    assert sequences.catalogue.tolist() == [0, 1, 2]
    assert sequences.items.tolist() == [2, 1]
    np.testing.assert_array_equal(sequences.item_features["price"].values, np.array([1, np.nan, 2], np.float32))


def test_feature_without_its_table_is_refused(tmp_path: Path) -> None:
    schema = Schema(features=(Feature(name="price", kind="number", scope="item"),))
    with pytest.raises(ConfigError, match="'price' has scope 'item', but there is no item table"):
        write(tmp_path / "out", frame([(1, 2, 3)]), schema)


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text("user,item,time\n" + "1,2,3\n" * 100)
    (tmp_path / "late.csv").write_text("user,item\n1,2\n")
    with pytest.raises(DataError, match="no column 'time'"):
        write(
            tmp_path / "new" / "out",
            LogSource(paths=(str(tmp_path / "good.csv"), str(tmp_path / "late.csv"))),
            budget_rows=10,
        )
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(DataError, match="nothing was written"):
        write(tmp_path / "new" / "out", frame([("x", "1", "1")] * 3 + [("1", "1", "1")]))
    assert list((tmp_path / "new").iterdir()) == []


CRASH = """
import os, sys, time
import polars as pl
from nestpipe.data.ingest import BuildOptions, write_sequences
from nestpipe.data.schema import Schema

def stop(phase, num_rows):
    if phase == "writing events":
        print("half written", flush=True)
        time.sleep(60)

write_sequences(sys.argv[1], schema=Schema(), log=pl.DataFrame({"user": [1], "item": [2], "time": [3]}), options=BuildOptions(progress=stop, overwrite=True))
"""


def test_killed_process_leaves_nothing_but_a_stale_folder_that_the_next_one_removes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = write(out, frame([(7, 7, 7)])).digest
    process = subprocess.Popen(
        [sys.executable, "-c", CRASH, str(out)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half written\n"
    busy = [path.name for path in tmp_path.iterdir()]
    assert f".out.tmp-{process.pid}" in busy
    write(out, frame([(7, 7, 7)]), overwrite=True)
    assert f".out.tmp-{process.pid}" in [path.name for path in tmp_path.iterdir()], "a living process keeps its folder"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert Sequences.open(out).digest == before
    write(out, frame([(7, 7, 7)]), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_crash_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    digest = write(tmp_path / "out", frame([(7, 7, 7)])).digest
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    (tmp_path / "out").rename(tmp_path / f".out.old-{dead.stdout.strip()}")
    with pytest.raises(DataError, match="exists already"):
        write(tmp_path / "out", frame([(1, 2, 3)]))
    assert Sequences.open(tmp_path / "out").digest == digest


def test_existing_folder_is_refused_unless_overwritten(tmp_path: Path) -> None:
    first = write(tmp_path / "out", frame([(1, 2, 3)]))
    with pytest.raises(DataError, match="exists already"):
        write(tmp_path / "out", frame([(4, 5, 6)]))
    assert Sequences.open(tmp_path / "out").digest == first.digest
    second = write(tmp_path / "out", frame([(4, 5, 6)]), overwrite=True)
    assert second.users.tolist() == [4]
    assert second.digest != first.digest


def test_only_sequence_folders_are_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = frame([(1, 2, 3)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.csv").write_text("user,item,time\n1,2,3\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "meta.json").write_text('{"format": "another"}')
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    for name in ("mine", "run"):
        with pytest.raises(DataError, match=r"no meta\.json of a sequence folder"):
            write(tmp_path / name, log, overwrite=True)
    with pytest.raises(DataError, match="is a file"):
        write(tmp_path / "file", log, overwrite=True)
    with pytest.raises(DataError, match=r"x cannot be created, because .*file is a file"):
        write(tmp_path / "file" / "x", log)
    monkeypatch.chdir(tmp_path / "empty")
    for out in (Path(), Path("..")):
        with pytest.raises(DataError, match="is or contains the working folder"):
            write(out, log, overwrite=True)
    monkeypatch.chdir(tmp_path)
    assert write(tmp_path / "empty", log, overwrite=True).users.tolist() == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "mine", "run"]
    assert (tmp_path / "mine" / "log.csv").exists()


def test_the_folder_that_is_read_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "out", frame([(1, 2, 3)]))
    (tmp_path / "out" / "log.csv").write_text("user,item,time\n1,2,3\n")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    inside = LogSource(paths=(str(tmp_path / "link" / "log.csv"),))
    schema = Schema(features=(Feature(name="price", kind="number", scope="item", column="time"),))
    for log, items in ((inside, None), (frame([(1, 2, 3)]), SideTable(source=inside, key="item"))):
        for out in ("out", "link"):
            with pytest.raises(DataError, match=r"contains the input .*log\.csv, which replacing it would delete"):
                write_sequences(
                    tmp_path / out,
                    schema=schema if items else Schema(),
                    log=log,
                    items=items,
                    options=BuildOptions(overwrite=True),
                )
    assert (tmp_path / "out" / "log.csv").exists()


def test_a_link_is_written_through(tmp_path: Path) -> None:
    write(tmp_path / "out", frame([(1, 2, 3)]))
    (tmp_path / "link").symlink_to(tmp_path / "out")
    write(tmp_path / "link", frame([(4, 5, 6)]), overwrite=True)
    assert Sequences.open(tmp_path / "out").users.tolist() == [4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


def test_missing_ids_of_typed_columns_are_quarantined(tmp_path: Path) -> None:
    users = pl.Series("user", ["a", None, "b", ""], dtype=pl.Categorical)
    log = pl.DataFrame({"item": [1.0, 2.0, float("nan"), 4.0], "time": [1, 2, 3, 4]}).with_columns(users)
    sequences = write(
        tmp_path / "out", log, Schema(user_encoding="dictionary", item_encoding="hash"), max_quarantine_share=1.0
    )
    assert sequences.users.dtype == np.int64
    assert sequences.items.tolist() == [hash_text("1")]
    assert sequences.meta["quarantine"] == {"user is missing": 2, "item is missing": 1}


def test_a_range_of_users_may_fill_the_budget(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", budget_rows=10)
    for first, counts in ((0, (3, 2, 3, 2)), (10, (2, 3, 2, 3))):  # five events of each user
        users = np.repeat([1, 2, 3, 4], counts)
        spool.add(pl.DataFrame({"user": users, "item": users, ORDER: range(first, first + 10)}))
    found = list(spool.ranges(lambda frame: frame, None))
    assert [frame["user"].to_list() for frame in found] == [[1] * 5 + [2] * 5, [3] * 5 + [4] * 5]
    assert found[0][ORDER].to_list() == [0, 1, 2, 10, 11, 3, 4, 12, 13, 14]


def test_nulls_and_floats_never_reach_the_arrays(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", budget_rows=10)
    with pytest.raises(AssertionError, match="user: Int64 with 1 nulls instead of ids"):
        spool.add(pl.DataFrame({"user": [1, None], "item": [1, 2]}))
    with pytest.raises(AssertionError, match=r"users\.npy: float64 instead of int64"):
        save_array(tmp_path / "users.npy", np.array([1.0]))


def test_budget_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="budget_rows is 0"):
        write(tmp_path / "out", frame([(1, 2, 3)]), budget_rows=0)


def test_digest_does_not_depend_on_the_place_of_the_log(tmp_path: Path) -> None:
    digests = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.csv").write_text("user,item,time\n1,2,3\nx,2,3\n")
        sequences = write(tmp_path / name / "out", LogSource(paths=(str(tmp_path / name / "log.csv"),)))
        sequences.verify()
        digests.append(sequences.digest)
    assert digests[0] == digests[1]
    (tmp_path / "here" / "out" / "quarantine.jsonl").write_bytes(
        (tmp_path / "here" / "out" / "quarantine.jsonl").read_bytes().replace(b"x", b"y")
    )
    with pytest.raises(DataError, match=r"quarantine\.jsonl changed"):
        Sequences.open(tmp_path / "here" / "out").verify()


def test_repeated_keys_are_told_with_file_and_record(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("item,key\n1,5\n2,6\n")
    pl.DataFrame({"item": [3, 1], "key": [7, 8]}).write_parquet(tmp_path / "b.parquet")
    schema = Schema(features=(Feature(name="key", kind="id", scope="item"),))
    items = SideTable(source=LogSource(paths=(str(tmp_path / "[ab].*"),)), key="item")
    options = BuildOptions(max_quarantine_share=0.5)
    sequences = write_sequences(tmp_path / "out", schema=schema, log=frame([(1, 1, 1)]), items=items, options=options)
    assert rows_of(sequences.item_features["key"]) == [[5], [6], [7]]
    [entry] = map(json.loads, (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines())
    assert entry == {
        "file": str(tmp_path / "b.parquet"),
        "record": 2,
        "reason": "item appears again in the table",
        "values": {"item": 1, "key": 8},
    }


def test_damage_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sequences = write(out, frame([(1, 2, 3), (1, 4, 5)]))
    sequences.verify()
    path = out / "items.npy"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"\x01")
    with pytest.raises(DataError, match=r"items.npy changed since ingest"):
        Sequences.open(out).verify()
    path.write_bytes(good[:-1])
    with pytest.raises(DataError, match=r"items.npy has 143 bytes, but meta.json records 144"):
        Sequences.open(out)
    path.unlink()
    with pytest.raises(DataError, match=r"items.npy is missing"):
        Sequences.open(out)


def test_folders_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Make one with 'nestpipe data ingest"):
        Sequences.open(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no meta\.json"):
        Sequences.open(tmp_path / "empty")
    write(tmp_path / "out", frame([(1, 2, 3)]))
    shutil.copytree(tmp_path / "out", tmp_path / "later")
    meta = json.loads((tmp_path / "later" / "meta.json").read_text())
    (tmp_path / "later" / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(DataError, match="version 99; this nestpipe reads nestpipe-sequences version 2"):
        Sequences.open(tmp_path / "later")
    (tmp_path / "later" / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta\.json is no JSON"):
        Sequences.open(tmp_path / "later")


def test_the_same_log_gives_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "one", rich_frame(100), RICH)
    time.sleep(0.01)
    write(tmp_path / "two", rich_frame(100), RICH)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@given(length=st.integers(0, 10_000), max_len=st.integers(1, 500), block=st.integers(1, 500))
def test_truncate(length: int, max_len: int, block: int) -> None:
    start = truncate(length, max_len, block)
    assert start == (
        0
        if length <= max_len
        else next(place for place in range(0, length + block, block) if place >= length - max_len)
    )
    assert truncate(np.array([length, 0]), max_len, block).tolist() == [start, 0]


def number(**changes: Any) -> Feature:
    return Feature(name="price", kind="number", **changes)


VALUES = np.array([1, 3, np.nan, 8], np.float32)


def test_number_statistics_and_missing_rules() -> None:
    stats = fit_number(number(transform="standardise"), VALUES)
    assert (stats.num_values, stats.num_missing) == (3, 1)
    assert stats.mean == pytest.approx(4.0)
    assert stats.std == pytest.approx(np.std([1, 3, 8]))
    assert NumberStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats
    np.testing.assert_array_equal(apply_number(number(), stats, VALUES), np.array([1, 3, 0, 8], np.float32))
    np.testing.assert_array_equal(
        apply_number(number(missing="mean"), stats, VALUES), np.array([1, 3, 4, 8], np.float32)
    )
    standard = apply_number(number(missing="mean", transform="standardise"), stats, VALUES)
    assert standard.dtype == np.float32
    assert standard[2] == 0
    assert standard[[0, 1, 3]].std() == pytest.approx(1, abs=1e-6)  # float32 results
    with pytest.raises(DataError, match="missing in 1 of 4 rows, first in row 2"):
        apply_number(number(missing="refuse"), stats, VALUES)


def test_number_log_is_safe_for_signs_and_constants() -> None:
    feature = number(transform="log")
    values = np.array([-3, 0, 3], np.float32)
    logged = apply_number(feature, fit_number(feature, values), values)
    np.testing.assert_allclose(logged, [-np.log(4), 0, np.log(4)], rtol=1e-6)  # float32 results
    constant = number(transform="log_standardise")
    same = np.full(3, 7, np.float32)
    # the mean of equal values may differ from them in the last bit
    np.testing.assert_allclose(apply_number(constant, fit_number(constant, same), same), 0, atol=1e-6)
    nothing = fit_number(constant, np.array([np.nan]))
    assert apply_number(constant, nothing, np.array([np.nan])).tolist() == [0]


def test_number_buckets_are_quantiles() -> None:
    feature = number(transform="bucketise", num_buckets=4)
    values = np.arange(100, dtype=np.float32)
    stats = fit_number(feature, values)
    buckets = apply_number(feature, stats, values)
    assert buckets.dtype == np.int64
    assert np.bincount(buckets).tolist() == [25, 25, 25, 25]
    assert apply_number(feature, stats, np.array([-1e9, 1e9, np.nan])).tolist() == [0, 3, 0]
    tied = fit_number(feature, np.zeros(10))
    around = apply_number(feature, tied, np.array([-1.0, 0.0, 1.0]))
    assert around.tolist() == [0, 1, 1], "a boundary belongs to the upper bucket"
