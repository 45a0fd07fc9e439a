"""Encodings of id columns as int64.

    int64        the number itself; every value is legal
    hash         a stable 64-bit hash of the text
    dictionary   the rank of the text among all distinct texts, from 0; independent of the order of the log

Dictionary ranks are known only at the end of the log, so texts are hashed first (provisional ids) and the hashes are
replaced at the end (final ids).

A feature that names items shares the item's encoder. An encoder that starts from the vocabulary of an earlier ingest keeps its numbers and numbers new texts,
sorted, behind them.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from nestpipe.data.schema import Encoding, Schema
from nestpipe.data.vocabulary import TABLE_SCHEMA, Vocabulary
from nestpipe.errors import DataError
from nestpipe.rng import hash_text


class Encoder:
    """The encoding of one id column; it keeps the texts, because own ids come back out."""

    def __init__(self, name: str, *, encoding: Encoding, known: Vocabulary | None = None) -> None:
        self.name = name
        self.encoding = encoding
        self._known = known or Vocabulary(name, encoding)
        self._texts: dict[int, str] = {}  # the texts of this ingest by their hash
        self._ids: dict[int, int] = {}  # the numbers of those that are known from before
        self._numbers: pl.DataFrame | None = None  # made by the first call of `final`, when all texts are known

    def provisional(self, texts: pl.Series) -> pl.Series:
        """Int64 hashes of texts, null for null; raises DataError if two known texts share a hash."""
        distinct = texts.drop_nulls().unique()
        codes = [hash_text(text) for text in distinct.to_list()]
        self._remember(codes, distinct.to_list())
        return texts.replace_strict(distinct, pl.Series(codes, dtype=pl.Int64), default=None, return_dtype=pl.Int64)

    def provisional_lists(self, lists: pl.Series) -> pl.Series:
        """The same for the elements of lists."""
        flat = lists.filter(lists.list.len() > 0).explode()
        distinct = flat.drop_nulls().unique()
        codes = self.provisional(distinct)
        element = pl.element().replace_strict(distinct, codes, default=None, return_dtype=pl.Int64)
        return lists.to_frame("lists").select(pl.col("lists").list.eval(element))["lists"]

    def _remember(self, codes: list[int], texts: list[str]) -> None:
        new = [(code, text) for code, text in zip(codes, texts, strict=True) if self._texts.get(code) != text]
        for code, text in new:
            if self._texts.setdefault(code, text) != text:
                raise self._collision(text, self._texts[code], code)
        if not len(self._known.table):
            return
        if self.encoding == "dictionary":
            numbers, is_known = self._known.numbers_of([text for _, text in new])
            found = zip(new, numbers.tolist(), is_known.tolist(), strict=True)
            self._ids |= {code: number for (code, _), number, known in found if known}
            return
        for (code, text), before in zip(new, self._known.texts_of([code for code, _ in new]), strict=True):
            if before is not None:
                self._ids[code] = code
                if before != text:
                    raise self._collision(text, before, code)

    def _collision(self, text: str, before: str, code: int) -> DataError:
        return DataError(
            f"'{self.name}' values {text!r} and {before!r} have the same 64-bit hash {code}, so they would become one id. Rename one of them."
        )

    def final(self, frame: pl.DataFrame, column: str) -> pl.DataFrame:
        """Replaces provisional by final ids; a no-op unless the encoding is a dictionary."""
        if self.encoding != "dictionary" or column not in frame.columns:
            return frame
        if self._numbers is None:
            ids = self._all_ids()
            self._numbers = pl.DataFrame(
                {"code": list(ids), "id": list(ids.values())}, schema={"code": pl.Int64, "id": pl.Int64}
            )
        element = pl.element() if isinstance(frame.schema[column], pl.List) else pl.col(column)
        mapped = element.replace_strict(self._numbers["code"], self._numbers["id"], default=None, return_dtype=pl.Int64)
        return frame.with_columns(
            pl.col(column).list.eval(mapped) if isinstance(frame.schema[column], pl.List) else mapped
        )

    def _all_ids(self) -> dict[int, int]:
        """The final id of each hash: numbers of the known texts stay, new texts follow in sorted order."""
        if self.encoding == "hash":
            return {code: code for code in self._texts}
        new = sorted(self._texts.keys() - self._ids.keys(), key=self._texts.__getitem__)
        return {**self._ids, **{code: self._known.next_id + place for place, code in enumerate(new)}}

    def vocabulary(self) -> Vocabulary:
        """All texts with their final ids, also those known from before; empty for int64, whose ids are the values."""
        new = {code: number for code, number in self._all_ids().items() if code not in self._ids}
        rows = {"id": list(new.values()), "text": [self._texts[code] for code in new]}
        table = pl.concat([self._known.table, pl.DataFrame(rows, schema=TABLE_SCHEMA)], rechunk=True)
        return Vocabulary(self.name, self.encoding, table, next_id=self._next_id)

    @property
    def _next_id(self) -> int:
        """The number that the next new text would get; 0 where texts are not numbered."""
        num_new = len(self._texts) - len(self._ids)
        return self._known.next_id + num_new if self.encoding == "dictionary" else 0

    def to_json(self) -> dict[str, object]:
        how = {
            "int64": "as is",
            "hash": "BLAKE2b-64 of the UTF-8 text",
            "dictionary": "number of the text: the first ingest's in sorted order from 0, new ones sorted behind them",
        }
        return {"encoding": self.encoding, "rule": how[self.encoding], "next_id": self._next_id}


def make_encoders(schema: Schema, known: Mapping[str, Vocabulary] | None = None) -> Mapping[str, Encoder]:
    """One encoder for user, for item, and each id feature; from the vocabularies of an earlier ingest if given."""
    known = known or {}
    features = [feature for feature in schema.features if feature.kind in {"id", "ids"}]
    encodings = {"user": schema.user_encoding, "item": schema.item_encoding}
    encodings |= {one.name: schema.encoding_of(one) for one in features if one.encoding != "item"}
    found = {name: Encoder(name, encoding=one, known=known.get(name)) for name, one in encodings.items()}
    return found | {one.name: found["item"] for one in features if one.encoding == "item"}
