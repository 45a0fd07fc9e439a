"""Logs and folders in an S3 server on loopback: read, written, cached once, damage and faults found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nestpipe.atomic_files import read_jsonl
from nestpipe.data import remote_files
from nestpipe.data.append import append_log
from nestpipe.data.array_files import file_entry
from nestpipe.data.ingest import BuildOptions, write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.training.loop import train
from nestpipe.training.run_folder import Run
from tests.data.test_append import ingest, rich_files, rich_schema
from tests.data.test_sequences import contents
from tests.small_runs import small_config, small_log

pytestmark = pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None, reason="needs: pip install 'moto[server]' s3fs"
)
LOOSE = BuildOptions(max_quarantine_share=0.5)
SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.communicate("\n")


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket 'shop', and a cache of its own."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    if system.exists("shop"):
        system.rm("shop", recursive=True)
    system.mkdir("shop")
    yield system
    s3fs.S3FileSystem.clear_instance_cache()


def test_logs_and_folders_of_a_store(bucket: Any, tmp_path: Path) -> None:
    """From logs in a store to a folder in a store: the files of one local ingest; sources and quarantine have URLs."""
    paths, schema = rich_files(tmp_path, 2), rich_schema("dictionary")
    whole = ingest(tmp_path / "whole", paths, schema)
    for path in paths:
        bucket.put_file(path, f"shop/logs/{Path(path).name}")
    log = LogSource(paths=("s3://shop/logs/log*.csv",))
    own = write_sequences("s3://shop/data/own", schema=schema, log=log, options=LOOSE)
    assert own.digest == whole.digest
    assert [entry["file"] for entry in own.meta["sources"]] == ["s3://shop/logs/log0.csv", "s3://shop/logs/log1.csv"]
    bad = [json.loads(line)["file"] for line in (own.path / "quarantine.jsonl").read_text().splitlines()]
    assert set(bad) == {"s3://shop/logs/log0.csv", "s3://shop/logs/log1.csv"}
    assert own.path.is_relative_to(tmp_path / "cache")
    own.verify()
    with pytest.raises(DataError, match="s3://shop/data/own exists already"):
        write_sequences("s3://shop/data/own", schema=schema, log=log, options=LOOSE)
    small = LogSource(paths=("s3://shop/logs/log0.csv",))
    replaced = write_sequences(
        "s3://shop/data/own",
        schema=Schema(user_encoding="hash", item_encoding="hash"),
        log=small,
        options=BuildOptions(max_quarantine_share=0.5, overwrite=True),
    )
    assert {Path(name).name for name in bucket.ls("shop/data/own")} == {"meta.json", *replaced.meta["files"]}
    assert Sequences.open("s3://shop/data/own").digest == replaced.digest
    with pytest.raises(ConfigError, match="is in an object store"):
        append_log("s3://shop/data/own", log=small)


def test_a_folder_is_copied_once(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a host share one copy; a changed folder and a changed log are copied again."""
    paths = rich_files(tmp_path, 1)
    local = ingest(tmp_path / "local", paths, rich_schema("hash"))
    remote_files.push_folder(local.path, "s3://shop/data")
    fetched: list[str] = []

    def counted(path: Path) -> dict[str, Any]:
        fetched.append(path.name)
        return file_entry(path)

    monkeypatch.setattr(remote_files, "file_entry", counted)
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(Sequences.open, ["s3://shop/data"] * 4))
    assert len({one.path for one in opened}) == 1
    assert sorted(fetched) == sorted(local.meta["files"])
    assert contents(opened[0].path) == contents(tmp_path / "local")
    bucket.put_file(paths[0], "shop/log.csv")
    [copy] = remote_files.fetch_files("s3://shop/log.csv")
    assert copy.read_bytes() == Path(paths[0]).read_bytes()
    copied = copy.stat().st_ino
    [copy] = remote_files.fetch_files("s3://shop/log.csv")
    assert copy.stat().st_ino == copied
    time.sleep(1.1)  # the store's times have seconds
    bucket.pipe_file("shop/log.csv", b"user,item,time\n1,2,3\n")
    [copy] = remote_files.fetch_files("s3://shop/log.csv")
    assert copy.read_bytes() == b"user,item,time\n1,2,3\n"


def test_what_a_store_lacks_or_damages_is_said(bucket: Any, tmp_path: Path) -> None:
    local = ingest(tmp_path / "local", rich_files(tmp_path, 1), rich_schema("hash"))
    remote_files.push_folder(local.path, "s3://shop/data")
    with pytest.raises(DataError, match=r"s3://shop/none has no meta.json"):
        Sequences.open("s3://shop/none")
    with pytest.raises(DataError, match=r"no file matches 's3://shop/\*.csv'"):
        ingest(tmp_path / "out", ["s3://shop/*.csv"], Schema())
    with pytest.raises(ConfigError, match="nowhere://shop cannot be reached"):
        Sequences.open("nowhere://shop")
    bucket.pipe_file("shop/data/items.npy", b"x" * local.meta["files"]["items.npy"]["bytes"])
    with pytest.raises(DataError, match=r"s3://shop/data/items.npy is not the file that meta.json describes"):
        Sequences.open("s3://shop/data")
    bucket.rm_file("shop/data/items.npy")
    with pytest.raises(DataError, match=r"s3://shop/data could not be read \(FileNotFoundError"):
        Sequences.open("s3://shop/data")
    assert not list((tmp_path / "cache/nestpipe/objects/folders").glob("[!.]*"))
    shutil.rmtree(tmp_path / "cache")


def test_a_run_trains_on_a_folder_in_a_store(bucket: Any, tmp_path: Path) -> None:
    """The run keeps the URL, and its bits are those of a run on the local folder."""
    local = small_log(tmp_path / "local")
    remote_files.push_folder(local.path, "s3://shop/data")
    config = small_config(tmp_path / "local", epochs=1)
    own = train(config, tmp_path / "own", quiet=True)
    far = train(replace(config, data=replace(config.data, path="s3://shop/data")), tmp_path / "far", quiet=True)
    assert far.config.data.path == "s3://shop/data"
    losses = [[row.get("loss") for row in read_jsonl(run.folder / "metrics.jsonl")] for run in (own, far)]
    assert losses[0] == losses[1]
    assert Run.open(tmp_path / "far").sequences.digest == local.digest
