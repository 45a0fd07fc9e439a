"""Item texts and features that name items are keyed by the ids of the log, whatever these are."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from nestpipe.cli import main
from nestpipe.data.item_texts import read_item_texts
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError

ITEMS = {"int64": ["5", "4", "9"], "hash": ["lamp", "soap", "ü"], "dictionary": ["lamp", "soap", "ü"]}


@pytest.mark.parametrize("encoding", list(ITEMS))
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_texts_are_found_by_the_ids_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], encoding: str, suffix: str
) -> None:
    first, second, third = ITEMS[encoding]
    (tmp_path / "log.csv").write_text(f"user,what,time\n1,{first},100\n1,{second},101\n2, {third} ,9\n")
    unknown, broken = ("777", "seven") if encoding == "int64" else ("rug", "")
    keys = [second, first, unknown, first, broken]
    texts = pl.DataFrame({"what": keys, "title": ["Soap", "Lamp", "Rug", "Lamp again", "?"], "stock": [1, 2, 3, 4, 5]})
    getattr(texts, f"write_{suffix}")(tmp_path / f"items.{suffix}")
    flags = ["--texts", str(tmp_path / f"items.{suffix}"), "--item", "what", "--item-encoding", encoding]
    assert main(["data", "ingest", str(tmp_path / "log.csv"), *flags, "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "item texts: 2 of 5 records kept, 1 of items that are not in the log; 1 items without text" in said
    assert "left out of the item texts: 1 x item appears again in the table" in said
    assert "left out of the item texts: 1 x item is " in said
    sequences = Sequences.open(tmp_path / "out")
    sequences.verify()
    number = sequences.vocabulary("item").number_of
    assert read_item_texts(sequences) == {number(second): "Soap", number(first): "Lamp"}
    assert read_item_texts(sequences, "stock") == {number(second): "1", number(first): "2"}
    with pytest.raises(DataError, match="has no column 'name'; it has"):
        read_item_texts(sequences, "name")


def test_a_file_of_texts_names_items_and_titles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("user,what,time\n1,5,100\n")
    command = ["data", "ingest", str(tmp_path / "log.csv"), "--item", "what", "--out", str(tmp_path / "out"), "--texts"]
    for header, wanted in (
        ("item_id,name", "no column 'title'"),
        ("sku,title", "none of the columns what, item_id, item"),
    ):
        (tmp_path / "items.csv").write_text(f"{header}\n5,Lamp\n")
        assert main([*command, str(tmp_path / "items.csv")]) == 2
        assert wanted in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("encoding", list(ITEMS))
def test_a_feature_may_name_items(tmp_path: Path, encoding: str) -> None:
    first, second, third = ITEMS[encoding]
    unknown = "777" if encoding == "int64" else "rug"
    rows = [(1, first, 1, "", ""), (1, second, 2, first, f"{first}|{unknown}|{third}"), (1, third, 3, unknown, unknown)]
    log = pl.DataFrame(rows, schema=["user", "item", "time", "trigger", "shown"], orient="row")
    log.write_csv(tmp_path / "log.csv")
    features = ["--feature", "trigger:id:event:encoding=item", "--feature", "shown:ids:event:encoding=item"]
    command = ["data", "ingest", str(tmp_path / "log.csv"), "--item-encoding", encoding, *features]
    bad = ["--feature", "number:number:event:encoding=item", "--out", str(tmp_path / "out")]
    assert main([*command, *bad]) == 2
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    sequences = Sequences.open(tmp_path / "out")
    sequences.verify()
    one, _, three = sequences.items.tolist()
    trigger, shown = sequences.event_features["trigger"], sequences.event_features["shown"]
    assert (trigger.values.tolist(), trigger.offsets.tolist()) == ([one], [0, 0, 1, 1])
    assert (shown.values.tolist(), shown.offsets.tolist()) == ([one, three], [0, 0, 2, 2])
    assert sequences.meta["notes"] == [
        "feature 'trigger': 1 values name items that are in no event; they are missing",
        "feature 'shown': 2 values name items that are in no event; they are missing",
    ]
    assert sequences.vocabulary("trigger").own_ids([one]) == sequences.vocabulary("item").own_ids([one])
    assert not (tmp_path / "out" / "texts.trigger.parquet").exists()
