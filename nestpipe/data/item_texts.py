"""Texts of items: a table keyed by the ids of the log, kept in the sequence folder as text.parquet for semantic ids and prompts.

A record of an item that the catalogue does not have is counted and left out: shops have titles of what nobody bought yet.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.column_types import parse_key
from nestpipe.data.log_reader import LogSource, columns_of, read_raw
from nestpipe.data.raw_chunk import RECORD
from nestpipe.data.sequences import Sequences
from nestpipe.data.vocabulary import Vocabulary
from nestpipe.errors import DataError

ITEM_TEXTS = "text.parquet"
_TITLE = "title"
_KEYS = ("item_id", "item")


def text_key(source: LogSource, item: str) -> str:
    """The column of item ids of a file of texts: the log's item column, else item_id; raises DataError without one."""
    present, wanted = columns_of(source), tuple(dict.fromkeys((item, *_KEYS)))
    found = [name for name in wanted if name in present]
    if not found or _TITLE not in present:
        lacking = f"none of the columns {', '.join(wanted)} for item ids" if not found else f"no column '{_TITLE}'"
        raise DataError(
            f"{source.paths[0]} has {lacking}; its columns are {present}. A file of item texts has item ids as in the log and a title."
        )
    return found[0]


def raw_texts(source: LogSource | pl.DataFrame, key: str) -> tuple[pl.DataFrame, int]:
    """All columns of a table of texts as they are, and the number of its broken records."""
    columns = source.columns if isinstance(source, pl.DataFrame) else columns_of(source)
    chunks = list(read_raw(source, columns, keys=[key]))
    return pl.concat([chunk.frame.drop(RECORD) for chunk in chunks]), sum(len(chunk.broken) for chunk in chunks)


def write_item_texts(
    folder: Path, read: tuple[pl.DataFrame, int], key: str, vocabulary: Vocabulary, catalogue: NDArray[np.int64]
) -> dict[str, Any]:
    """Writes the texts of the catalogue's items under their numbers, the first of each; returns counts of what was read."""
    frame, num_broken = read
    typed = parse_key(frame[key], "item", vocabulary.encoding)
    own = typed.columns["item"]
    is_id = own.is_not_null().to_numpy()
    numbers, known = vocabulary.numbers_of(own.drop_nulls().to_list())
    known &= np.isin(numbers, catalogue)
    rows = np.flatnonzero(is_id)[known]
    ids = pl.Series("item", numbers[known], dtype=pl.Int64)
    is_first = ids.is_first_distinct()
    table = frame[rows].select(ids, *(pl.col(name) for name in frame.columns if name not in {key, "item"}))
    table = table.filter(is_first)
    table.write_parquet(folder / ITEM_TEXTS)
    reasons = Counter({reason: int(mask.sum()) for mask, reason in typed.problems})
    reasons.update({"the record is broken": num_broken, "item appears again in the table": int((~is_first).sum())})
    return {
        "read": frame.height + num_broken,
        "kept": table.height,
        "not_in_log": int((~known).sum()),
        "without_attributes": len(catalogue) - table.height,
        "reasons": {reason: count for reason, count in reasons.items() if count},
    }


def read_item_texts(sequences: Sequences, column: str = _TITLE) -> dict[int, str] | None:
    """The text of each item that has one; None if the folder has no texts. Raises DataError for another column."""
    path = sequences.path / ITEM_TEXTS
    if not path.is_file():
        return None
    table = pl.read_parquet(path)
    if column not in table.columns:
        raise DataError(f"{path} has no column '{column}'; it has {table.columns}.")
    texts = table.select("item", pl.col(column).cast(pl.String)).drop_nulls()
    return dict(zip(texts["item"].to_list(), texts[column].to_list(), strict=True))
