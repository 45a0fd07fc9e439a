"""`append_log`: the folder that one ingest of all logs would have written, without reading the old logs again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data import append
from nestpipe.data.append import append_log
from nestpipe.data.folder_merge import first_after, is_among, merge_events
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.schema import Encoding, Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError
from tests.data.test_sequences import contents, rich_frame

ITEM_FEATURES = (
    Feature(name="year", kind="number", scope="item"),
    Feature(name="genres", kind="ids", scope="item", encoding="hash"),
    Feature(name="spot", kind="vector", scope="item", dim=2),
    Feature(name="age", kind="number", scope="user"),
)


def rich_schema(encoding: Encoding, **more: Any) -> Schema:
    return Schema(
        user_encoding=encoding,
        item_encoding=encoding,
        features=(
            Feature(name="rating", kind="number"),
            Feature(name="tags", kind="ids", weights="shares", encoding="hash"),
            Feature(name="place", kind="vector", dim=2),
            Feature(name="shop", kind="id", encoding=encoding),
        ),
        **more,
    )


def rich_files(folder: Path, num: int, seed: int = 0) -> list[str]:
    """A log in several files: users and items of each overlap those of the others, and so do the times."""
    paths = []
    for place in range(num):
        log = rich_frame(60 + 40 * place, seed=seed + place)
        # Some users and items are in one file only; equal records of different files are duplicates.
        log = log.with_columns(
            pl.when(pl.int_range(pl.len()) % 9 == 0).then(pl.col("user") + f"-{place}").otherwise("user").alias("user"),
            pl.when(pl.int_range(pl.len()) % 13 == 0).then(pl.lit(f"i-{place}")).otherwise("item").alias("item"),
        )
        if place:
            log = pl.concat([log, rich_frame(20, seed=seed)])
        log.write_csv(folder / f"log{place}.csv")
        paths.append(str(folder / f"log{place}.csv"))
    return paths


def ingest(out: Path, paths: list[str], schema: Schema, **options: Any) -> Sequences:
    options = {"max_quarantine_share": 0.5, "overwrite": True, **options}
    return write_sequences(out, schema=schema, log=LogSource(paths=tuple(paths)), options=BuildOptions(**options))


def extend(folder: Path, *paths: str, force: bool = False, **options: Any) -> Sequences:
    own = BuildOptions(**{"max_quarantine_share": 0.5, **options})
    return append_log(folder, log=LogSource(paths=paths), options=own, force=force)


def own_events(sequences: Sequences) -> list[tuple[Any, ...]]:
    """Every event with its own ids, in the order of users' own ids."""
    users = sequences.vocabulary("user").own_ids(np.repeat(sequences.users, np.diff(sequences.offsets)))
    items = sequences.vocabulary("item").own_ids(sequences.items)
    shop = sequences.event_features["shop"]
    assert shop.offsets is not None
    shops = sequences.vocabulary("shop").own_ids(shop.values)
    of_row = [tuple(shops[a:b]) for a, b in zip(shop.offsets, shop.offsets[1:], strict=False)]
    rating = sequences.event_features["rating"].values.tolist()
    times = sequences.times.tolist() if sequences.times is not None else [0] * len(users)
    rows = zip(users, range(len(users)), items, times, of_row, map(repr, rating), strict=True)
    return [(user, *rest) for user, _, *rest in sorted(rows, key=lambda row: (row[0], row[1]))]


@pytest.mark.parametrize("dedupe", [False, True])
def test_hashed_logs_append_to_the_bytes_of_one_ingest(tmp_path: Path, dedupe: bool) -> None:
    paths, schema = rich_files(tmp_path, 3), rich_schema("hash")
    whole = ingest(tmp_path / "whole", paths, schema, dedupe=dedupe)
    ingest(tmp_path / "own", paths[:1], schema, dedupe=dedupe)
    for path in paths[1:]:
        grown = extend(tmp_path / "own", path, budget_rows=37)
    assert whole.meta["counts"]["duplicates"] > 0 or not dedupe
    assert contents(tmp_path / "own") == contents(tmp_path / "whole")
    assert grown.digest == whole.digest
    grown.verify()


def test_dictionaries_append_to_the_same_events_and_keep_their_numbers(tmp_path: Path) -> None:
    paths, schema = rich_files(tmp_path, 3), rich_schema("dictionary")
    whole = ingest(tmp_path / "whole", paths, schema)
    first = ingest(tmp_path / "own", paths[:1], schema)
    before = {name: first.vocabulary(name).table for name in ("user", "item", "shop")}
    for path in paths[1:]:
        grown = extend(tmp_path / "own", path)
    assert own_events(grown) == own_events(whole)
    assert grown.meta["counts"] == whole.meta["counts"]
    for name, table in before.items():
        now = grown.vocabulary(name)
        assert now.table.head(table.height).equals(table)
        assert sorted(now.table["text"]) == whole.vocabulary(name).table["text"].to_list()
        assert now.next_id == now.table.height
        assert now.number_of(table["text"][0]) == 0
    assert grown.meta["counts"]["quarantined"] > first.meta["counts"]["quarantined"] > 0
    lines = (tmp_path / "own/quarantine.jsonl").read_text().splitlines()
    assert len(lines) == grown.meta["counts"]["quarantined"]


def test_an_order_only_log_grows_at_its_end(tmp_path: Path) -> None:
    schema = rich_schema("hash", time=None)
    paths = rich_files(tmp_path, 2)
    ingest(tmp_path / "whole", paths, schema)
    ingest(tmp_path / "own", paths[:1], schema)
    extend(tmp_path / "own", paths[1])
    assert contents(tmp_path / "own") == contents(tmp_path / "whole")


LOGS = st.lists(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=12),
    min_size=2,
    max_size=3,
)


@settings(max_examples=settings.default.max_examples // 4)
@given(logs=LOGS, dedupe=st.booleans(), range_rows=st.sampled_from([1, 5, 1000]))
def test_any_logs_append_to_the_bytes_of_one_ingest(
    logs: list[list[tuple[int, ...]]], dedupe: bool, range_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("append")
    frames = [pl.DataFrame(rows, schema=["user", "item", "time"], orient="row") for rows in logs]
    own = BuildOptions(dedupe=dedupe)
    write_sequences(folder / "whole", schema=Schema(), log=pl.concat(frames), options=own)
    write_sequences(folder / "own", schema=Schema(), log=frames[0], options=own)
    with mock.patch.object(append, "merge_events", partial(merge_events, range_rows=range_rows)):
        for one in frames[1:]:
            append_log(folder / "own", log=one)
    skipped = {"meta.json"}  # says how many frames there were
    found, wanted = contents(folder / "own"), contents(folder / "whole")
    assert {name: found[name] for name in found.keys() - skipped} == {
        name: wanted[name] for name in wanted.keys() - skipped
    }
    metas = [json.loads(one["meta.json"]) for one in (found, wanted)]
    assert {**metas[0], "sources": None} == {**metas[1], "sources": None}


@given(
    data=st.data(),
    lists=st.lists(st.lists(st.integers(0, 6), max_size=6).map(sorted), min_size=1, max_size=4),
)
def test_places_behind_equal_times(data: st.DataObject, lists: list[list[int]]) -> None:
    offsets = np.cumsum([0, *map(len, lists)])
    times = np.array([time for one in lists for time in one], np.int64)
    which = np.array(data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=8)), np.int64)
    wanted = np.array(data.draw(st.lists(st.integers(-1, 7), min_size=len(which), max_size=len(which))), np.int64)
    found = first_after(times, offsets[which], offsets[which + 1], wanted) if len(times) else offsets[which]
    expected = [
        offsets[one] + np.searchsorted(lists[one], time, "right") for one, time in zip(which, wanted, strict=True)
    ]
    assert found.tolist() == [int(place) for place in expected]


def table(rows: list[tuple[Any, ...]], *names: str) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=list(names), orient="row")


def test_new_items_and_users_take_their_attributes(tmp_path: Path) -> None:
    """As one ingest of both logs and of both tables, of which the first row of an id counts."""
    schema = Schema(features=ITEM_FEATURES)
    logs = [
        table([(1, 10, 5), (2, 11, 6)], "user", "item", "time"),
        table([(3, 12, 1), (1, 13, 9)], "user", "item", "time"),
    ]
    columns = ("item", "year", "genres", "spot")
    items = [table([(10, 1980, "a|b", "1|2"), (20, 1990, "", "")], *columns)]
    items.append(table([(11, 1985, "c", "3|4"), (12, 2000, "a", ""), (21, 2001, "", "5|6")], *columns))
    users = [table([(1, 30)], "user", "age"), table([(3, 40), (2, 50), (9, 60)], "user", "age")]
    tables = [
        (SideTable(source=one, key="item"), SideTable(source=two, key="user"))
        for one, two in zip(items, users, strict=True)
    ]
    joined = SideTable(source=pl.concat(items), key="item"), SideTable(source=pl.concat(users), key="user")
    whole = write_sequences(tmp_path / "whole", schema=schema, log=pl.concat(logs), items=joined[0], users=joined[1])
    write_sequences(tmp_path / "own", schema=schema, log=logs[0], items=tables[0][0], users=tables[0][1])
    grown = append_log(tmp_path / "own", log=logs[1], items=tables[1][0], users=tables[1][1])
    found, wanted = contents(tmp_path / "own"), contents(tmp_path / "whole")
    assert {name for name in found if found[name] != wanted[name]} == {"meta.json"}
    for name in ("counts", "tables", "digest"):
        assert grown.meta[name] == whole.meta[name]


def test_items_without_a_table_have_no_attributes(tmp_path: Path) -> None:
    schema = Schema(features=ITEM_FEATURES[:1])
    first = table([(1, 10, 5)], "user", "item", "time")
    attributes = SideTable(source=table([(10, 1980), (11, 1985)], "item", "year"), key="item")
    write_sequences(tmp_path / "own", schema=schema, log=first, items=attributes)
    grown = append_log(tmp_path / "own", log=table([(1, 12, 6), (1, 11, 7)], "user", "item", "time"))
    assert grown.item_features["year"].values.tolist()[:2] == [1980, 1985]
    assert np.isnan(grown.item_features["year"].values[2])
    assert grown.meta["counts"]["logged_items"] == 3
    assert grown.meta["tables"]["item"]["without_attributes"] == 1
    assert grown.meta["tables"]["item"]["not_in_log"] == 0


def test_a_file_is_appended_once(tmp_path: Path) -> None:
    paths, schema = rich_files(tmp_path, 2), rich_schema("hash")
    ingest(tmp_path / "own", paths[:1], schema)
    extend(tmp_path / "own", paths[1])
    before = contents(tmp_path / "own")
    for path in paths:
        with pytest.raises(DataError, match=rf"{path} is in .*own already.*twice.*--force"):
            extend(tmp_path / "own", path)
    (tmp_path / "copy.csv").write_bytes(Path(paths[0]).read_bytes())
    with pytest.raises(DataError, match=r"copy.csv \(the same bytes as .*log0.csv\) is in"):
        extend(tmp_path / "own", str(tmp_path / "copy.csv"))
    assert contents(tmp_path / "own") == before
    num_events = Sequences.open(tmp_path / "own").meta["counts"]["events"]
    again = extend(tmp_path / "own", paths[1], force=True)
    assert again.meta["counts"]["events"] > num_events
    assert [Path(entry["file"]).name for entry in again.meta["sources"]] == ["log0.csv", "log1.csv", "log1.csv"]


def test_an_error_leaves_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, schema = rich_files(tmp_path, 2), rich_schema("hash")
    ingest(tmp_path / "own", paths[:1], schema)
    before = contents(tmp_path / "own")
    with pytest.raises(DataError, match="are bad"):
        extend(tmp_path / "own", paths[1], max_quarantine_share=0.0)

    def replaced(folder: Path) -> tuple[int, int]:
        return time.monotonic_ns(), 0

    monkeypatch.setattr(append, "folder_version", replaced)
    with pytest.raises(DataError, match="replaced by another process"):
        extend(tmp_path / "own", paths[1])
    assert contents(tmp_path / "own") == before
    assert [path.name for path in tmp_path.glob(".own*")] == []


def test_a_filtered_folder_does_not_grow(tmp_path: Path) -> None:
    paths, schema = rich_files(tmp_path, 2), rich_schema("hash")

    def halved(runs: Any) -> tuple[list[Any], dict[str, int]]:
        masks = [np.arange(run.height) % 2 == 0 for run in runs()]
        return masks, {"odd": sum(int((~mask).sum()) for mask in masks)}

    ingest(tmp_path / "own", paths[:1], schema, row_filter=halved)
    with pytest.raises(DataError, match=r"was filtered \(odd\).*Ingest both logs together"):
        extend(tmp_path / "own", paths[1])


KILLED = """
import os, signal, sys
from nestpipe.data import append, array_files, ingest
from nestpipe.data.log_reader import LogSource
spot, folder, log = sys.argv[1:]
def kill(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)
if spot == "merge":
    append.merge_events = kill
else:
    array_files.flush = lambda path: kill() if path == array_files.Path(folder).resolve().parent else None
append.append_log(folder, log=LogSource(paths=(log,)), options=ingest.BuildOptions(max_quarantine_share=0.5))
"""


@pytest.mark.parametrize("spot", ["merge", "swap"])
def test_a_killed_append_is_all_or_nothing(tmp_path: Path, spot: str) -> None:
    paths, schema = rich_files(tmp_path, 2), rich_schema("hash")
    ingest(tmp_path / "whole", paths, schema)
    ingest(tmp_path / "own", paths[:1], schema)
    before = contents(tmp_path / "own")
    command = [sys.executable, "-c", KILLED, spot, str(tmp_path / "own"), paths[1]]
    assert subprocess.run(command, check=False, env=os.environ).returncode == -signal.SIGKILL
    if spot == "swap":
        assert contents(tmp_path / "own") == contents(tmp_path / "whole")
        with pytest.raises(DataError, match="already"):
            extend(tmp_path / "own", paths[1])
    else:
        assert contents(tmp_path / "own") == before
        extend(tmp_path / "own", paths[1])
        assert contents(tmp_path / "own") == contents(tmp_path / "whole")
    assert [path.name for path in tmp_path.glob(".own*")] == []


@pytest.mark.parametrize("known", [[], [7], [3, 4, 5, 6], [3, 5, 6], [-(2**63), 2**63 - 1], [3, 4, 6, 7]])
def test_is_among_equals_a_plain_search(known):
    wanted = np.array([*range(-2, 9), -(2**63), 2**63 - 1], np.int64)
    found = is_among(wanted, np.array(known, np.int64))
    assert found.tolist() == [one in known for one in wanted.tolist()]
