"""Encodings of id columns as int64.

    int64        the number itself; every value is legal
    hash         a stable 64-bit hash of the text
    dictionary   the rank of the text among all distinct texts, from 0; independent of the order of the log

Dictionary ranks are known only at the end of the log, so texts are hashed first (provisional ids) and the hashes are
replaced at the end (final ids).
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from nestpipe.data.schema import Encoding, Schema
from nestpipe.errors import DataError
from nestpipe.rng import hash_text


class Encoder:
    """The encoding of one id column; `keep` stores its texts."""

    def __init__(self, name: str, *, encoding: Encoding, keep: bool) -> None:
        self.name = name
        self.encoding = encoding
        self._keep = keep or encoding == "dictionary"
        self._texts: dict[int, str] = {}
        self._numbers: pl.DataFrame | None = None  # built by the first call of `final`, when all texts are known

    def provisional(self, texts: pl.Series) -> pl.Series:
        """Int64 hashes of texts, null for null; raises DataError if two known texts share a hash."""
        distinct = texts.drop_nulls().unique()
        codes = [hash_text(text) for text in distinct.to_list()]
        if self._keep:
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
        for code, text in zip(codes, texts, strict=True):
            if self._texts.setdefault(code, text) != text:
                raise DataError(
                    f"'{self.name}' values {text!r} and {self._texts[code]!r} have the same 64-bit hash {code}, so they would become one id. Rename one of them."
                )

    def final(self, frame: pl.DataFrame, column: str) -> pl.DataFrame:
        """Replaces provisional by final ids; a no-op unless the encoding is a dictionary."""
        if self.encoding != "dictionary" or column not in frame.columns:
            return frame
        if self._numbers is None:
            codes = sorted(self._texts, key=self._texts.__getitem__)
            self._numbers = pl.DataFrame(
                {"code": codes, "id": range(len(codes))}, schema={"code": pl.Int64, "id": pl.Int64}
            )
        element = pl.element() if isinstance(frame.schema[column], pl.List) else pl.col(column)
        mapped = element.replace_strict(self._numbers["code"], self._numbers["id"], default=None, return_dtype=pl.Int64)
        return frame.with_columns(
            pl.col(column).list.eval(mapped) if isinstance(frame.schema[column], pl.List) else mapped
        )

    def table(self) -> pl.DataFrame | None:
        """The columns id and text of all stored texts, by id; None if texts are not stored."""
        if not self._keep:
            return None
        texts = sorted(self._texts.values())
        ids = list(range(len(texts))) if self.encoding == "dictionary" else [hash_text(text) for text in texts]
        return pl.DataFrame({"id": ids, "text": texts}, schema={"id": pl.Int64, "text": pl.String}).sort("id")

    def to_json(self) -> dict[str, object]:
        how = {
            "int64": "as is",
            "hash": "BLAKE2b-64 of the UTF-8 text",
            "dictionary": "number of the text in sorted order, from 0",
        }
        return {"encoding": self.encoding, "rule": how[self.encoding], "num_texts": len(self._texts)}


def make_encoders(schema: Schema) -> Mapping[str, Encoder]:
    """An encoder for user, item and each id feature; item texts are stored, because recommendations return them."""
    encoders = {
        "user": Encoder("user", encoding=schema.user_encoding, keep=False),
        "item": Encoder("item", encoding=schema.item_encoding, keep=schema.item_encoding != "int64"),
    }
    for feature in schema.features:
        if feature.kind in {"id", "ids"}:
            encoders[feature.name] = Encoder(feature.name, encoding=feature.encoding, keep=False)
    return encoders
