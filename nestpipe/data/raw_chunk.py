"""Untyped chunks of a log, as the readers of CSV, JSONL and Parquet yield them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from nestpipe.errors import DataError

RECORD = "#record"
JSON_MARK = (
    "\uffff"  # prefix of a JSON list, object or boolean in a text column; a Unicode noncharacter, so no text has it
)


# Columns that may be read as numbers where all values of a chunk are plain ones.
NumberKinds = Mapping[str, type[pl.Int64 | pl.Float64]]


class BrokenRecord(NamedTuple):
    """A record that cannot be split into columns."""

    record: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class RawChunk:
    """Records of one file: a frame of columns and `#record`, and the broken ones."""

    file: str
    frame: pl.DataFrame
    broken: tuple[BrokenRecord, ...] = ()
    as_text: Callable[[], pl.DataFrame] | None = None
    """Reads the frame again with every column as text, if some were read as numbers at once."""


def numbered(frame: pl.LazyFrame, first: int = 1) -> pl.LazyFrame:
    """The frame with its record numbers in front."""
    return frame.with_row_index(RECORD, first).with_columns(pl.col(RECORD).cast(pl.Int64))


def plain_numbers(frame: pl.DataFrame, kinds: NumberKinds) -> dict[str, pl.Series]:
    """The columns whose values are all numbers, present and finite, as numbers."""
    found = {}
    for name, kind in kinds.items():
        if name in frame.columns:
            values = frame[name].cast(kind, strict=False)
            if not values.null_count() and values.is_finite().all():
                found[name] = values
    return found


def require_columns(where: str, present: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises DataError that names the missing columns, the nearest present ones, and all that are there."""
    if RECORD in wanted:
        raise DataError(f"{where}: the column name '{RECORD}' is reserved for record numbers. Rename the column.")
    hints = []
    for name in wanted:
        if name not in present:
            near = difflib.get_close_matches(name.lower(), [other.lower() for other in present], 1, 0.5)
            match = next((other for other in present if near and other.lower() == near[0]), None)
            hints.append(f"no column '{name}'" + (f" (did you mean '{match}'?)" if match else ""))
    if hints:
        shown = ", ".join(name for name in present if name != RECORD)
        raise DataError(f"{where} has {'; '.join(hints)}. Its columns are: {shown}. Map the columns in the schema.")


def shown(value: Any) -> Any:
    """A raw value as it is in the file."""
    if isinstance(value, str) and value.startswith(JSON_MARK):
        try:
            value = json.loads(value.removeprefix(JSON_MARK))
        except ValueError:  # the text itself begins with the prefix
            return value
        return [shown(one) for one in value] if isinstance(value, list) else value
    return value
