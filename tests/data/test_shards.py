"""Shards of a log, merged, are the folder of one ingest, byte for byte."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import polars as pl
import pytest

from nestpipe.data import ray_ingest
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.ray_ingest import RayShards
from nestpipe.data.schema import Encoding, Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.shards import merge_shards, write_shard
from nestpipe.errors import ConfigError, DataError
from tests.data.test_append import ingest, rich_files, rich_schema
from tests.data.test_sequences import contents

LOOSE = BuildOptions(max_quarantine_share=0.5)


def cut(folder: Path, paths: list[str], schema: Schema, num: int, **tables: SideTable) -> list[Path]:
    shards = []
    for number in range(1, num + 1):
        shards.append(folder / f"shard{number}")
        write_shard(
            shards[-1], shard=(number, num), schema=schema, log=LogSource(paths=tuple(paths)), options=LOOSE, **tables
        )
    return shards


@pytest.mark.parametrize("encoding", ["hash", "dictionary"])
@pytest.mark.parametrize("num", [1, 3, 4])
def test_merged_shards_are_one_ingest(tmp_path: Path, encoding: Encoding, num: int) -> None:
    paths, schema = rich_files(tmp_path, 5), rich_schema(encoding)
    whole = ingest(tmp_path / "whole", paths, schema)
    merged = merge_shards(tmp_path / "merged", reversed(cut(tmp_path, paths, schema, num)))
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert merged.digest == whole.digest
    assert merged.meta["counts"]["quarantined"] > 4


def test_duplicates_in_different_shards_are_found(tmp_path: Path) -> None:
    paths, schema = rich_files(tmp_path, 4), rich_schema("dictionary")
    options = BuildOptions(max_quarantine_share=0.5, dedupe=True)
    whole = ingest(tmp_path / "whole", paths, schema, dedupe=True)
    shards = [tmp_path / f"shard{number}" for number in (1, 2, 3, 4)]
    for number, shard in enumerate(shards, 1):
        write_shard(shard, shard=(number, 4), schema=schema, log=LogSource(paths=tuple(paths)), options=options)
    merge_shards(tmp_path / "merged", shards)
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert whole.meta["counts"]["duplicates"] > 20


def test_side_tables_are_read_by_the_first_shard(tmp_path: Path) -> None:
    paths = rich_files(tmp_path, 4)
    features = (
        Feature(name="genres", kind="ids", scope="item", encoding="dictionary"),
        Feature(name="maker", kind="id", scope="item", encoding="dictionary"),
        Feature(name="age", kind="number", scope="user"),
    )
    rows = [(f"i{number}", "b|a" if number % 2 else "c", f"m{number % 5}") for number in range(0, 60, 2)]
    items = pl.DataFrame([*rows, ("i2", "z", "z"), ("", "y", "y")], schema=["item", "genres", "maker"], orient="row")
    users = pl.DataFrame({"user": [f"u{number}" for number in range(0, 80, 3)], "age": range(27)})
    items.write_csv(tmp_path / "items.csv")
    schema = Schema(user_encoding="dictionary", item_encoding="dictionary", features=features)
    tables = {
        "items": SideTable(source=LogSource(paths=(str(tmp_path / "items.csv"),)), key="item"),
        "users": SideTable(source=users, key="user"),
    }
    log = LogSource(paths=tuple(paths))
    whole = write_sequences(tmp_path / "whole", schema=schema, log=log, options=LOOSE, **tables)
    merge_shards(tmp_path / "merged", cut(tmp_path, paths, schema, 4, **tables))
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert whole.meta["tables"]["item"]["quarantined"] == 2


def test_only_all_shards_of_one_log_merge(tmp_path: Path) -> None:
    paths, schema = rich_files(tmp_path, 3), rich_schema("hash")
    shards = cut(tmp_path, paths, schema, 3)
    with pytest.raises(DataError, match="shards 2/3 are missing"):
        merge_shards(tmp_path / "out", [shards[0], shards[2]])
    with pytest.raises(DataError, match="shards 1/3 are there twice"):
        merge_shards(tmp_path / "out", [*shards, shards[0]])
    other = cut(tmp_path / "other", paths, rich_schema("dictionary"), 3)
    with pytest.raises(DataError, match="another schema than"):
        merge_shards(tmp_path / "out", [*shards[:2], other[2]])
    with pytest.raises(DataError, match=r"is shard 1/3 of a log.*nestpipe data merge"):
        Sequences.open(shards[0])
    (shards[1] / "items.npy").write_bytes((shards[1] / "items.npy").read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"shard2: items.npy changed"):
        merge_shards(tmp_path / "out", shards)
    with pytest.raises(DataError, match="is no shard of a log"):
        merge_shards(tmp_path / "out", [tmp_path])
    with pytest.raises(ConfigError, match=r"shard 1/4 of a log of 3 files.*fewer shards"):
        cut(tmp_path, paths, schema, 4)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(find_spec("ray") is None, reason="needs: pip install nestpipe[ray]")
def test_ray_reads_shards_and_merges_them(tmp_path: Path) -> None:
    """A real Ray on this machine, in a process of its own: the folder of one ingest, and no shard is left."""
    for number in range(3):
        rows = "".join(f"u{n},i{n % 7 * number},{n % 5}\n" for n in range(50))
        (tmp_path / f"log{number}.csv").write_text(f"user,item,time\n{rows}")
    schema = Schema(user_encoding="dictionary", item_encoding="dictionary")
    ingest(tmp_path / "whole", [str(tmp_path / "log*.csv")], schema)
    flags = ["ingest", "log*.csv", "--user-encoding", "dictionary", "--item-encoding", "dictionary", "--ray", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "nestpipe.cli", "data", *flags, "--out", "own"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    own, whole = contents(tmp_path / "own"), contents(tmp_path / "whole")
    assert own == whole
    assert Sequences.open(tmp_path / "own").digest == Sequences.open(tmp_path / "whole").digest
    assert not (tmp_path / "own.shards").exists()


def test_what_ray_cannot_do_is_said(tmp_path: Path) -> None:
    paths, schema = rich_files(tmp_path, 3), rich_schema("hash")
    log = LogSource(paths=tuple(paths))
    with pytest.raises(ConfigError, match="4 shards of a log of 3 files"):
        RayShards(4).ingest(tmp_path / "bad", schema=schema, log=log)
    job = {"schema": schema, "log": log, "options": BuildOptions(max_quarantine_share=0)}
    found = ray_ingest._write([tmp_path / "one", tmp_path / "two"], 1, job)
    assert re.match(r"shard 2/2: \d+ of [\d,]+ records are bad", found)
