"""`nestpipe start` proposes columns, runs normal commands that it prints, and goes on where it stopped."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from urllib.parse import quote

import httpx
import polars as pl
import pytest

import nestpipe
from nestpipe.cli import main
from nestpipe.cli.start import propose
from nestpipe.client import Client
from nestpipe.data.log_reader import LogSource
from nestpipe.errors import ConfigError
from nestpipe.training.fit import choose_config
from tests.small_runs import files_naming


def write_dirty_log(path, num_users=40):
    """Text ids with umlauts, three forms of time in one column, two broken records."""
    lines = ["customer,product,when,price"]
    for user in range(num_users):
        for visit in range(4 + user % 4):
            seconds = 1_772_359_200 + 86_400 * visit
            when = (f"2026-03-{1 + visit:02d}T10:00:00Z", str(seconds), str(seconds * 1000))[user % 3]
            lines.append(f"käufer {user},p{(user + 3 * visit) % 12},{when},3.5")
    path.write_text("\n".join([*lines, "x,p3,yesterday,1", "x,p3"]) + "\n")


def wait_for(holds):
    """Services notice within a second; the machine may be busy."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_dirty_log_becomes_a_run_that_recommends(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dirty_log(tmp_path / "log.csv")
    command = ["start", "log.csv", "--out", "shop", "--epochs", "1", "--yes"]
    assert main(command) == 0
    out = capsys.readouterr().out
    shown = re.findall(r"^\$ nestpipe (\w+(?: ingest)?)", out, re.MULTILINE)
    assert shown == ["data ingest", "train", "eval", "report"]
    assert "1 x missing fields: 2 instead of 4" in out
    report = (tmp_path / "shop" / "run" / "report.html").read_text()
    assert report.count('<article class="example"><h3>käufer ') == 6
    assert '<th scope="row">p3</th><td>' in report
    assert "Next: nestpipe recommend shop/run --user 'käufer 0'" in out
    run = nestpipe.load("shop/run")
    assert run.run.sequences.meta["counts"]["kept"] == 40 * 4 + 60
    assert run.users[:2] == ["käufer 0", "käufer 1"]
    assert run.recommend("käufer 3", k=3)["item"].to_list()[0] in run.items

    assert main([*command[:-3], "--epochs", "2", "--yes"]) == 0  # goes on: the log is not read again
    out = capsys.readouterr().out
    assert "shop/data is there already" in out
    assert "--resume" in out
    # The printed command is the one that was run: typed by hand it makes the same configuration.
    (train,) = re.findall(r"^\$ nestpipe (train .*) --run", out, re.MULTILINE)
    assert main([*train.split(), "--run", "again"]) == 0
    assert nestpipe.load("again").run.config == run.run.config.__class__.load(tmp_path / "shop" / "run" / "config.json")


@pytest.fixture
def service(tmp_path, monkeypatch, capsys):
    """`nestpipe serve` of a run that `nestpipe start` made of a dirty log."""
    monkeypatch.chdir(tmp_path)
    write_dirty_log(tmp_path / "log.csv")
    assert main(["start", "log.csv", "--out", "shop", "--epochs", "1", "--yes"]) == 0
    capsys.readouterr()
    command = [sys.executable, "-m", "nestpipe.cli", "serve", "shop/run", "--port", "0", "--admin-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        yield re.search(r" on (http://\S+),", line)[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


def test_http_client_command_and_offline_scoring_agree_in_own_ids(service, capsys, tmp_path):
    offline = nestpipe.load("shop/run")
    with Client(service, timeout_s=60) as client:
        wait_for(client.is_ready)
        for user in ("käufer 0", "käufer 7", "nobody/ß"):
            wanted = offline.recommend(user, k=4)
            answer = client.recommend(user, k=4, deadline_ms=60_000)
            assert answer.items == wanted["item"].to_list()
            got = httpx.get(f"{service}/v1/recommend/{quote(user, safe='')}", params={"k": 4}, timeout=60).json()
            assert (got["items"], got["path"]) == (answer.items, wanted["path"][0])
            assert main(["recommend", "shop/run", "--user", user, "--k", "4", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["items"] == answer.items
        item = answer.items[0]
        assert client.similar(item, k=3).items == offline.similar(item, k=3)["item"].to_list()
        new = {"id": "e1", "user": "käufer 0", "item": item, "time": 1_790_000_000}
        client.send_events([new])
        assert item not in client.recommend("käufer 0", k=12, deadline_ms=60_000).items
    assert files_naming(tmp_path / "shop", "käufer 0")
    assert main(["forget", "shop/run", "--user", "käufer 0"]) == 0
    assert "4 stored and 1 logged events were erased" in capsys.readouterr().out
    assert not files_naming(tmp_path / "shop", "käufer 0")
    wait_for(lambda: httpx.get(f"{service}/v1/recommend/{quote('käufer 0')}", timeout=60).json()["path"] == "popular")


def test_without_yes_and_terminal_nothing_is_run(tmp_path, capsys):
    write_dirty_log(tmp_path / "log.csv")
    assert main(["start", str(tmp_path / "log.csv"), "--out", str(tmp_path / "shop")]) == 0
    out = capsys.readouterr().out
    assert "nestpipe data ingest" in out
    assert "Nothing was run: add --yes." in out
    assert not (tmp_path / "shop").exists()


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"user_id": [1, 2], "item_id": [3, 4], "ts": [5, 6]}, ("user_id", "item_id", "ts", "int64", "int64")),
        (
            {"title": ["x"], "asin": ["B1"], "reviewer_account": ["a"]},
            ("reviewer_account", "asin", "none", "dictionary", "dictionary"),
        ),
        (
            {"userName": ["a"], "user": [7], "movie": [2], "date": ["2026-01-01"]},
            ("user", "movie", "date", "int64", "int64"),
        ),
        ({"user": [1, None], "item": ["007", "8"]}, ("user", "item", "none", "int64", "dictionary")),
        ({"user": ["1"] * 9 + ["one"], "item": [2] * 10}, ("user", "item", "none", "dictionary", "int64")),
    ],
)
def test_columns_are_proposed_from_names_and_values(tmp_path, columns, wanted):
    pl.DataFrame(columns).write_parquet(tmp_path / "log.parquet")
    found = propose(LogSource(paths=(str(tmp_path / "log.parquet"),)))
    assert (found.user, found.item, found.time, found.user_encoding, found.item_encoding) == wanted


def test_the_printed_command_makes_the_chosen_configuration(tmp_path, monkeypatch, capsys):
    """Also with sampled softmax, whose settings differ from the recipe's in more than numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nestpipe.training.fit._FULL_SOFTMAX_ITEMS", 5)
    write_dirty_log(tmp_path / "log.csv")
    assert main(["start", "log.csv", "--out", "shop", "--epochs", "1", "--yes"]) == 0
    assert "--loss.normalise" in capsys.readouterr().out
    run = nestpipe.load("shop/run").run
    wanted = choose_config(run.sequences, epochs=1)
    made = replace(run.config, data=replace(run.config.data, path=wanted.data.path))
    assert replace(made, train=replace(made.train, num_threads=wanted.train.num_threads)) == wanted


def test_a_log_that_tells_nothing_is_asked_about(tmp_path):
    pl.DataFrame({"a": [1], "b": [2]}).write_parquet(tmp_path / "log.parquet")
    source = LogSource(paths=(str(tmp_path / "log.parquet"),))
    with pytest.raises(
        ConfigError,
        match=r"which column holds the user and item ids; the log has \['a', 'b'\]. Say it with --user COLUMN --item",
    ):
        propose(source)
    assert propose(source, user="a", item="b").time == "none"
    with pytest.raises(ConfigError, match=r"no column \['c'\]"):
        propose(source, user="c", item="b")


@pytest.mark.parametrize("delimiter", [";", "\t", "|", ","])
def test_the_delimiter_is_proposed_from_the_first_line(tmp_path, capsys, delimiter):
    """Spreadsheets write semicolons where a number has a comma."""
    rows = ["customer;product;when;price", "a;p1;2026-03-01;3,50", "b;p2;2026-03-02;4,50"]
    (tmp_path / "log.csv").write_text("\n".join(row.replace(";", delimiter) for row in rows))
    if delimiter == ",":
        (tmp_path / "log.csv").write_text("\n".join(row.rpartition(";")[0].replace(";", ",") for row in rows))
    assert main(["start", str(tmp_path / "log.csv"), "--out", str(tmp_path / "shop")]) == 0
    words = shlex.split(capsys.readouterr().out.partition("nestpipe ")[2].partition("\n")[0])
    assert ("--delimiter" in words) == (delimiter != ",")
    assert main(words) == 0
    assert "2 records read = 2 kept" in capsys.readouterr().out
