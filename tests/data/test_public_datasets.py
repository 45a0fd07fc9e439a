"""The readers of the public data sets, on tiny files in their formats, and the command line."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from nestpipe.cli import run
from nestpipe.cli.data import parse_feature_flag
from nestpipe.data import public_datasets
from nestpipe.data.ingest import BuildOptions
from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError


def main(arguments: list[str]) -> int:
    """`nestpipe data ARGUMENTS`; errors propagate."""
    return run(["data", *arguments])


@pytest.fixture
def ml_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ml"
    folder.mkdir()
    (folder / "ratings.dat").write_text(
        "2::10::5::978300760\n1::10::3::978300761\n1::30::4::978300761\n1::20::1::978300000\n"
    )
    (folder / "movies.dat").write_bytes(
        '10::Toy Story (1995)::Animation|Comedy\n20::Mis\xe9rables, Les (1995)::Drama\n30::No Year::Comedy\n40::Unseen: A "Film" (1950)::Drama\n'.encode(
            "latin-1"
        )
    )
    (folder / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072-1234\n")
    return folder


def test_movielens(tmp_path: Path, ml_folder: Path) -> None:
    sequences = public_datasets.ingest_movielens(ml_folder, tmp_path / "out")
    assert sequences.users.tolist() == [1, 2]
    assert sequences.items.tolist() == [20, 10, 30, 10]
    assert sequences.times is not None
    assert sequences.times[0] == 978300000000
    assert sequences.event_features["rating"].values.tolist() == [1, 3, 4, 5]
    assert sequences.catalogue.tolist() == [10, 20, 30, 40]
    np.testing.assert_array_equal(
        sequences.item_features["year"].values, np.array([1995, 1995, np.nan, 1950], np.float32)
    )
    genres = sequences.vocabulary("genres").table
    assert genres["text"].to_list() == ["Animation", "Comedy", "Drama"]
    assert sequences.item_features["genres"].values.tolist() == [0, 1, 2, 1, 2]
    assert sequences.user_features["age"].values.tolist() == [1, 56]


def test_movielens_broken_records_and_files(tmp_path: Path, ml_folder: Path) -> None:
    with (ml_folder / "ratings.dat").open("a") as file:
        file.write("1::10::3\n1::10::3::4::5\n")
    sequences = public_datasets.ingest_movielens(
        ml_folder, tmp_path / "out", options=BuildOptions(max_quarantine_share=0.5)
    )
    assert sequences.meta["quarantine"] == {"missing fields: 3 instead of 4": 1, "surplus fields: 5 instead of 4": 1}
    (ml_folder / "ratings.dat").write_text("1,10,3,978300000\n")
    with pytest.raises(DataError, match=r"single column with the delimiter '::'.*',' would give 4"):
        public_datasets.ingest_movielens(ml_folder, tmp_path / "other")
    (ml_folder / "users.dat").unlink()
    with pytest.raises(DataError, match=r"has no users\.dat"):
        public_datasets.ingest_movielens(ml_folder, tmp_path / "other")


def kuairand_log(path: Path) -> None:
    header = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,play_time_ms,duration_ms,tab"
    rows = []
    for place, (user, video, click, hate) in enumerate(
        [
            (1, 10, 1, 0),
            (1, 11, 1, 0),
            (2, 10, 1, 0),
            (2, 11, 1, 0),  # a 2-core
            (3, 10, 1, 0),
            (3, 12, 1, 0),  # video 12 is rare; without it so is user 3
            (1, 13, 1, 1),
            (2, 13, 0, 0),
            (2, 10, 0, 0),  # disliked, no signal, no signal
            (1, 10, "", 0),  # a missing signal is none
            (2, 11, 1, ""),  # nor is a missing dislike one
        ]
    ):
        rows.append(f"{user},{video},20220410,1700,{1649581149287 + place},{click},0,0,0,0,{hate},0,100,200,1")
    path.write_bytes(gzip.compress("\n".join([header, *rows, ""]).encode()))


@pytest.mark.parametrize("budget_rows", [2, 1000])
def test_kuairand_filter(tmp_path: Path, budget_rows: int) -> None:
    kuairand_log(tmp_path / "log.csv.gz")
    plain = public_datasets.ingest_kuairand(str(tmp_path / "log.csv.gz"), tmp_path / "plain")
    assert plain.meta["counts"]["kept"] == plain.meta["counts"]["read"] == 11
    assert set(plain.event_features) >= {"is_click", "is_hate", "tab", "play_time_ms"}
    assert "profile_stay_time" not in plain.event_features
    assert plain.times is not None
    assert plain.times.min() == 1649581149287
    options = BuildOptions(budget_rows=budget_rows)
    filtered = public_datasets.ingest_kuairand(
        str(tmp_path / "log.csv.gz"), tmp_path / "filtered", published_filter=True, core=2, options=options
    )
    assert filtered.meta["filtered"] == {"disliked": 1, "no positive signal": 3, "below 2-core": 2}
    counts = filtered.meta["counts"]
    assert counts["read"] == counts["kept"] + counts["quarantined"] + counts["filtered"] == 11
    assert filtered.users.tolist() == [1, 2]
    assert filtered.items.tolist() == [10, 11, 10, 11, 11]
    with pytest.raises(DataError, match="dropped all 11 events"):
        public_datasets.ingest_kuairand(
            str(tmp_path / "log.csv.gz"), tmp_path / "none", published_filter=True, core=5, options=options
        )


def test_kuairand_needs_its_columns(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,video,time_ms\n1,2,3\n")
    with pytest.raises(DataError, match=r"no column 'video_id' \(did you mean 'video'\?\)"):
        public_datasets.ingest_kuairand(str(tmp_path / "log.csv"), tmp_path / "out")


def test_amazon(tmp_path: Path) -> None:
    (tmp_path / "sequences.txt.gz").write_bytes(gzip.compress(b"2 5 4 5\n1 9 8\n3\n4 x 7\n"))
    texts = pl.DataFrame({"item_id": [4, 5], "asin": ["A", "B"], "title": ["Soap", None]})
    texts.write_parquet(tmp_path / "items.parquet")
    options = BuildOptions(max_quarantine_share=0.5)
    sequences = public_datasets.ingest_amazon(
        tmp_path / "sequences.txt.gz", tmp_path / "out", texts=tmp_path / "items.parquet", options=options
    )
    assert sequences.users.tolist() == [1, 2, 4]
    assert sequences.items.tolist() == [9, 8, 5, 4, 5, 7]
    assert sequences.times is None
    assert sequences.meta["counts"]["read"] == 8
    bad = [json.loads(line) for line in (sequences.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["record"], entry["reason"]) for entry in bad] == [
        (3, "item is missing"),
        (4, "item is not an int64"),
    ]
    assert pl.read_parquet(sequences.path / "text.parquet")["title"].to_list() == ["Soap", None]
    sequences.verify()
    (tmp_path / "items.parquet").rename(tmp_path / "out" / "items.parquet")
    with pytest.raises(DataError, match="contains the input"):
        public_datasets.ingest_amazon(
            tmp_path / "sequences.txt.gz",
            tmp_path / "out",
            texts=tmp_path / "out" / "items.parquet",
            options=replace(options, overwrite=True),
        )


def test_command_ingest_inspect_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text(
        "who;what;when;stars\n1;a;2020-01-02;5\n1;b;2020-01-03;\n2;a;2020-01-02;4\n2;a;2020-01-02;4\n"
    )
    (tmp_path / "things.jsonl").write_text('{"what": "a", "kinds": ["x", "y"]}\n{"what": "c", "kinds": []}\n')
    out = str(tmp_path / "out")
    arguments = [
        "ingest",
        str(tmp_path / "log.csv"),
        "--delimiter",
        ";",
        "--user",
        "who",
        "--item",
        "what",
        "--time",
        "when",
        "--time-unit",
        "iso8601",
    ]
    arguments += [
        "--item-encoding",
        "dictionary",
        "--dedupe",
        "--items-table",
        str(tmp_path / "things.jsonl"),
        "--out",
        out,
    ]
    arguments += ["--feature", "stars:number:event:missing=mean", "--feature", "kinds:ids:item:encoding=dictionary"]
    assert main(arguments) == 0
    sequences = Sequences.open(out)
    assert sequences.items.tolist() == [0, 1, 0]
    assert sequences.catalogue.tolist() == [0, 1, 2]
    assert sequences.item_features["kinds"].values.tolist() == [0, 1]
    assert sequences.schema.features[0] == Feature(name="stars", kind="number", missing="mean")
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "4 records read = 3 kept + 1 duplicates",
        "2 users, 3 items (1 of them only in the item table), 3 events",
        "2020-01-02",
        "stars",
        "lengths: median 1.5",
        "item table: 2 of 2 records kept, 1 of them not in the log; 1 items without attributes",
    ):
        assert text in shown
    assert main(["verify", out]) == 0
    (Path(out) / "items.npy").write_bytes(b"x" * (Path(out) / "items.npy").stat().st_size)
    with pytest.raises(DataError, match=r"items.npy is no readable .npy file"):
        main(["verify", out])


@pytest.mark.parametrize("extra", [[], ["--items-delimiter", ","]])
def test_command_reads_side_tables_like_the_log(tmp_path: Path, extra: list[str]) -> None:
    (tmp_path / "log.csv").write_bytes("user\titem\ttime\n1\té\t3\n".encode("latin-1"))
    delimiter = "," if extra else "\t"
    (tmp_path / "items.csv").write_bytes(f"id{delimiter}price\né{delimiter}5\n".encode("latin-1"))
    (tmp_path / "users.jsonl").write_text('{"who": 1, "town": "Köln"}\n')
    out = tmp_path / "out"
    arguments = ["ingest", str(tmp_path / "log.csv"), "--delimiter", "\\t", "--encoding", "latin-1", "--out", str(out)]
    arguments += ["--item-encoding", "dictionary", "--items-table", str(tmp_path / "items.csv"), "--items-key", "id"]
    arguments += ["--users-table", str(tmp_path / "users.jsonl"), "--users-key", "who", *extra]
    arguments += ["--feature", "price:number:item", "--feature", "town:id:user:encoding=dictionary"]
    assert main(arguments) == 0
    sequences = Sequences.open(out)
    assert sequences.item_features["price"].values.tolist() == [5]
    texts = sequences.vocabulary("town").table
    assert texts["text"].to_list() == ["Köln"]


def test_description_keeps_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").write_text("1|5\n1|x\n")
    out = tmp_path / "[bold]"
    columns = ["--columns", "user,item", "--time", "none", "--delimiter", "|", "--max-quarantine-share", "0.5"]
    assert main(["ingest", str(tmp_path / "log.txt"), *columns, "--out", str(out)]) == 0
    shown = "".join(capsys.readouterr().out.split())  # long paths wrap
    assert f"{out}digest" in shown
    assert str(out / "quarantine.jsonl") in shown


def test_command_without_header_and_time(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("1|5\n1|4\n")
    assert (
        main(
            [
                "ingest",
                str(tmp_path / "log.txt"),
                "--columns",
                "user,item",
                "--time",
                "none",
                "--delimiter",
                "|",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert Sequences.open(tmp_path / "out").items.tolist() == [5, 4]


def test_command_readers(tmp_path: Path, ml_folder: Path) -> None:
    assert main(["movielens", str(ml_folder), "--out", str(tmp_path / "a")]) == 0
    kuairand_log(tmp_path / "log.csv.gz")
    assert (
        main(
            ["kuairand", str(tmp_path / "*.csv.gz"), "--published-filter", "--core", "2", "--out", str(tmp_path / "b")]
        )
        == 0
    )
    assert Sequences.open(tmp_path / "b").meta["counts"]["kept"] == 5
    (tmp_path / "sequences.txt").write_text("1 2 3\n")
    assert main(["amazon", str(tmp_path / "sequences.txt"), "--out", str(tmp_path / "c")]) == 0
    with pytest.raises(DataError, match="exists already"):
        main(["amazon", str(tmp_path / "sequences.txt"), "--out", str(tmp_path / "c")])


@pytest.mark.parametrize("command", ["ingest", "movielens", "kuairand", "amazon", "synthetic", "inspect", "verify"])
def test_help_teaches_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"Example: nestpipe data {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price", "not of the form"),
        ("price:number:item:extra", "not of the form"),
        ("price:float:item", "kind is 'float', but it must be one of id, ids, number, vector"),
        ("price:number:item:colour=red", "unknown option 'colour'"),
        ("place:vector:event:dim=²", "dim is '²', but it must be a whole number"),
        ("place:vector:event:dim=two", "dim is 'two', but it must be a whole number"),
    ],
)
def test_bad_feature_flags(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_feature_flag(text)


def test_feature_flag() -> None:
    assert parse_feature_flag("place:vector:event:dim=3:column=p") == Feature(
        name="place", kind="vector", dim=3, column="p"
    )
