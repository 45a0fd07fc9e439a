"""Own ids come back as they were in the log, and a dictionary grows without renumbering."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.data.erase_user import forget_user
from nestpipe.data.id_encoding import Encoder
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.vocabulary import TABLE_SCHEMA, Vocabulary
from nestpipe.errors import DataError
from tests.small_runs import files_naming

TEXTS = st.lists(st.text(min_size=1, max_size=4), max_size=12)


def encoded(encoder: Encoder, texts: list[str]) -> list[int]:
    """Final ids of a column of texts."""
    codes = encoder.provisional(pl.Series(texts, dtype=pl.String))
    return encoder.final(codes.to_frame("own"), "own")["own"].to_list()


@given(TEXTS, TEXTS, TEXTS)
def test_a_dictionary_that_grows_twice_keeps_every_number(
    first: list[str], second: list[str], third: list[str]
) -> None:
    vocabulary, numbers = Vocabulary("own", "dictionary"), dict[str, int]()
    for texts in (first, second, third):
        encoder = Encoder("own", encoding="dictionary", known=vocabulary)
        found = dict(zip(texts, encoded(encoder, texts), strict=True))
        assert all(found[text] == numbers[text] for text in found if text in numbers)
        new = sorted(found.keys() - numbers.keys())  # numbered in sorted order behind the others
        assert [found[text] for text in new] == list(range(len(numbers), len(numbers) + len(new)))
        numbers |= found
        vocabulary = encoder.vocabulary()
        assert vocabulary.next_id == len(numbers)
    assert {text: vocabulary.number_of(text) for text in numbers} == numbers
    assert vocabulary.own_ids(list(numbers.values())) == list(numbers)
    assert vocabulary.number_of("longer than any") is None
    asked = [*numbers, "longer than any", ""]
    found, known = vocabulary.numbers_of(asked)
    assert known.tolist() == [True] * len(numbers) + [False, False]
    assert found[known].tolist() == list(numbers.values())


@pytest.mark.parametrize("encoding", ["int64", "hash", "dictionary"])
def test_own_ids_of_a_folder_come_back(tmp_path: Path, encoding: str) -> None:
    own = [7, -3, 2**60, 0] if encoding == "int64" else ["ß", "zoe", "7", "a b"]
    log = pl.DataFrame({"user": own, "item": own[::-1], "time": [1, 2, 3, 4]})
    schema = Schema(user_encoding=encoding, item_encoding=encoding)  # type: ignore[arg-type]
    write_sequences(tmp_path / "out", schema=schema, log=log)
    sequences = Sequences.open(tmp_path / "out")
    users, items = sequences.vocabulary("user"), sequences.vocabulary("item")
    pairs = {
        users.own_ids([user])[0]: items.own_ids(sequences.items[place : place + 1])[0]
        for place, user in enumerate(sequences.users.tolist())
    }
    assert pairs == dict(zip(own, own[::-1], strict=True))
    assert [users.number_of(one) for one in users.own_ids(sequences.users)] == sequences.users.tolist()


def test_a_forgotten_users_name_is_gone_and_their_number_stays_unused(tmp_path: Path) -> None:
    log = pl.DataFrame({"user": ["ann", "bob", "zoe"], "item": ["a", "b", "c"], "time": [1, 2, 3]})
    schema = Schema(user_encoding="dictionary", item_encoding="dictionary")
    sequences = write_sequences(tmp_path / "out", schema=schema, log=log)
    before = sequences.vocabulary("user")
    number = before.number_of("zoe")
    assert files_naming(tmp_path, "zoe")
    assert number == 2
    forget_user(sequences, number, announce=lambda digest: None)
    after = Sequences.open(tmp_path / "out").vocabulary("user")
    assert after.number_of("zoe") is None
    assert [after.number_of(name) for name in ("ann", "bob")] == [0, 1]
    assert after.next_id == 3
    with pytest.raises(DataError, match="no text for 2"):
        after.own_ids([2])
    assert not files_naming(tmp_path, "zoe")
    encoder = Encoder("user", encoding="dictionary", known=after)
    assert encoded(encoder, ["zoe", "ann"]) == [3, 0]


def test_nothing_else_of_a_forgotten_user_stays(tmp_path: Path) -> None:
    """Not a value that only they have, not a user without events, not a rejected record."""
    log = pl.DataFrame(
        {
            "user": ["ann", "bob", "olga"],
            "item": ["a", "b", "c"],
            "time": ["1", "2", "noon"],
            "shop": ["x1", "x2", "x3"],
        }
    )
    people = pl.DataFrame({"user": ["ann", "bob", "dora"], "mail": ["ann@m", "bob@m", "dora@m"]})
    mail = Feature(name="mail", kind="id", scope="user", encoding="hash")
    shop = Feature(name="shop", kind="id", encoding="dictionary")
    schema = Schema(user_encoding="dictionary", item_encoding="dictionary", features=(mail, shop))
    options = BuildOptions(max_quarantine_share=1.0)
    users = SideTable(source=people, key="user")
    write_sequences(tmp_path / "out", schema=schema, log=log, users=users, options=options)

    for name in ("olga", "bob", "dora"):
        assert files_naming(tmp_path, name)
        sequences = Sequences.open(tmp_path / "out")
        number = sequences.vocabulary("user").number_of(name)
        forget_user(sequences, number, announce=lambda digest: None, own=name)
        assert not files_naming(tmp_path, name)
    assert not files_naming(tmp_path, "x2")
    assert not files_naming(tmp_path, "bob@m")
    left = Sequences.open(tmp_path / "out")
    left.verify()
    assert left.vocabulary("user").own_ids(left.users) == ["ann"]
    assert left.vocabulary("shop").number_of("x1") is not None
    assert left.meta["counts"]["users"] == 1


def test_what_is_no_id_is_said() -> None:
    numbers = Vocabulary("user", "int64")
    assert numbers.number_of("42") == 42
    for wrong in ("alice", True, 2**63, str(-(2**63) - 1), "\u0663", "1.0", ""):
        with pytest.raises(DataError, match=r"is not an int64.*--user-encoding dictionary"):
            numbers.number_of(wrong)
    found, known = numbers.numbers_of(["42", "alice", -3, 2**63])
    assert (found.tolist(), known.tolist()) == ([42, 0, -3, 0], [True, False, True, False])
    with pytest.raises(DataError, match="no text for 5; it holds 0 texts"):
        Vocabulary("item", "hash").own_ids(np.array([5]))


def test_a_name_without_ids_is_refused(tmp_path: Path) -> None:
    sequences = write_sequences(
        tmp_path / "out", schema=Schema(), log=pl.DataFrame({"user": [1], "item": [2], "time": [3]})
    )
    with pytest.raises(DataError, match=r"no ids named 'town'; it has \['item', 'user'\]"):
        sequences.vocabulary("town")


def test_texts_that_were_numbered_as_they_came_are_found_without_a_search_for_each(monkeypatch):
    """A service numbers texts in the order of their arrival: then runs of ascending texts are one or two long."""
    texts = [f"{(7919 * number) % 10_007:05}" for number in range(10_007)]
    table = pl.DataFrame({"id": np.arange(10_007), "text": texts}, schema=TABLE_SCHEMA)
    vocabulary = Vocabulary("item", "dictionary", table)
    assert len(vocabulary._blocks) == 1
    numbers, known = vocabulary.numbers_of([*texts[::7], "nobody"])
    assert numbers[:-1].tolist() == list(range(0, 10_007, 7))
    assert known.tolist() == [True] * (len(known) - 1) + [False]
    assert vocabulary.number_of(texts[5003]) == 5003
    monkeypatch.setattr("nestpipe.data.vocabulary._SHORT", 3)
    mixed = Vocabulary(
        "item", "dictionary", pl.DataFrame({"id": range(7), "text": list("acegdbf")}, schema=TABLE_SCHEMA)
    )
    assert [mixed.number_of(one) for one in "aceg"] == [0, 1, 2, 3]
    assert [mixed.number_of(one) for one in "dbfx"] == [4, 5, 6, None]
