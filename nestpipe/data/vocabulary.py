"""Own ids: the values of an id column as they are in the log, and the int64 that stands for each of them inside.

    "p7"  --number_of-->  17  --own_ids-->  "p7"

`int64` columns are their own numbers. `hash` columns take a stable hash of the text, `dictionary` columns a number from the table
texts.NAME.parquet of the sequence folder. That table grows without renumbering: the first ingest numbers texts in sorted order,
every extension numbers its new texts, sorted, from `next_id` on. So the table is a sequence of blocks, each sorted by text, and a
text is found by one binary search per block. Texts that a service numbered as they came are sorted here, as one block. A number is never given out twice: `next_id` does not fall when a user is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.schema import Encoding
from nestpipe.errors import DataError
from nestpipe.rng import hash_text

OwnId = int | str
_SHORT = 4096  # texts of a run that costs less to sort than to search on its own
TABLE_SCHEMA = {"id": pl.Int64(), "text": pl.String()}


class Vocabulary:
    """The own ids of one column: 'user', 'item' or a feature."""

    def __init__(self, name: str, encoding: Encoding, table: pl.DataFrame | None = None, *, next_id: int | None = None):
        self.name, self.encoding = name, encoding
        self.table = (pl.DataFrame(schema=TABLE_SCHEMA) if table is None else table).sort("id")
        self._ids: NDArray[np.int64] = self.table["id"].to_numpy()
        used = int(self._ids[-1]) + 1 if encoding == "dictionary" and len(self._ids) else 0
        self.next_id = used if next_id is None else next_id
        self._blocks = _sorted_blocks(self._ids, self.table["text"]) if encoding == "dictionary" else []

    def number_of(self, own: OwnId) -> int | None:
        """The number of an own id; None for a text that the dictionary does not have. Raises DataError for no int64."""
        if self.encoding == "int64":
            return _whole(own, self.name)
        if self.encoding == "hash":
            return hash_text(str(own))
        text = str(own)
        for ids, texts in self._blocks:
            place = int(texts.search_sorted(text))
            if place < len(texts) and texts[place] == text:
                return int(ids[place])
        return None

    def numbers_of(self, own: Sequence[OwnId]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The numbers of many own ids at once, and which of them the vocabulary could have; 0 for others."""
        if self.encoding == "int64":
            if {*map(type, own)} == {int}:  # as requests have them, which are in range
                with suppress(OverflowError):
                    numbers, known = np.array(own, np.int64), np.empty(len(own), np.bool_)
                    known.fill(True)  # a third of the time of np.ones
                    return numbers, known
            known = np.array([_is_int64(one) for one in own], np.bool_)
            return np.array(
                [int(one) if is_int else 0 for one, is_int in zip(own, known, strict=True)], np.int64
            ), known
        if self.encoding == "hash":
            return np.array([hash_text(str(one)) for one in own], np.int64), np.ones(len(own), np.bool_)
        numbers, known = np.zeros(len(own), np.int64), np.zeros(len(own), np.bool_)
        wanted = pl.Series([str(one) for one in own], dtype=pl.String)
        for ids, texts in self._blocks:
            places = np.minimum(wanted_places := texts.search_sorted(wanted).to_numpy(), len(texts) - 1)
            found = (texts.gather(places) == wanted).to_numpy() & (wanted_places < len(texts))
            numbers[found] = ids[places[found]]
            known |= found
        return numbers, known

    def own_ids(self, numbers: NDArray[np.int64] | Sequence[int]) -> list[OwnId]:
        """The own ids of numbers, in their order; raises DataError for a number that has none."""
        wanted = np.asarray(numbers, dtype=np.int64)
        if self.encoding == "int64":
            return list(wanted.tolist())
        places = np.searchsorted(self._ids, wanted)
        inside = np.minimum(places, max(len(self._ids) - 1, 0))
        if len(wanted) and (not len(self._ids) or (self._ids[inside] != wanted).any()):
            unknown = wanted[0] if not len(self._ids) else wanted[self._ids[inside] != wanted][0]
            raise DataError(
                f"the {self.encoding} of '{self.name}' has no text for {unknown}; it holds {len(self._ids):,} texts. "
                "The number belongs to another sequence folder, or to a user who was forgotten."
            )
        return self.table["text"].gather(inside).to_list()

    def texts_of(self, numbers: Sequence[int]) -> list[str | None]:
        """The texts of numbers, in their order; None for a number that has none."""
        wanted = np.asarray(numbers, dtype=np.int64)
        if not len(self._ids):
            return [None] * len(wanted)
        places = np.minimum(np.searchsorted(self._ids, wanted), len(self._ids) - 1)
        texts = self.table["text"].gather(places).to_list()
        return [text if same else None for text, same in zip(texts, self._ids[places] == wanted, strict=True)]


def _is_int64(own: OwnId) -> bool:
    if isinstance(own, str):
        return re.fullmatch(r"[+-]?[0-9]{1,20}", own) is not None and -(2**63) <= int(own) < 2**63
    return not isinstance(own, bool) and -(2**63) <= own < 2**63


def _whole(own: OwnId, name: str) -> int:
    """An own id of an int64 column, which may come as text (from a URL or the command line)."""
    if not _is_int64(own):
        raise DataError(
            f"{name} {str(own)[:80]!r} is not an int64, but the log's {name} column holds int64. Texts need "
            f"--{name}-encoding dictionary (or hash) when the log is ingested."
        )
    return int(own)


def _sorted_blocks(ids: NDArray[np.int64], texts: pl.Series) -> list[tuple[NDArray[np.int64], pl.Series]]:
    """Maximal runs of ascending texts with their ids; all short ones together are sorted into one."""
    if not len(texts):
        return []
    falls = (texts < texts.shift(1)).fill_null(False).to_numpy()
    runs = list(pairwise([0, *np.flatnonzero(falls).tolist(), len(texts)]))
    blocks = [(ids[first:end], texts.slice(first, end - first)) for first, end in runs if end - first >= _SHORT]
    if rest := [np.arange(first, end) for first, end in runs if end - first < _SHORT]:
        rows = np.concatenate(rest)
        order = texts.gather(rows).arg_sort().to_numpy()
        blocks.append((ids[rows[order]], texts.gather(rows[order])))
    return blocks
