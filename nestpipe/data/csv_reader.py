"""Reads CSV: regular blocks by Polars at once, all others record by record.

    block -> regular?  yes -> Polars, number columns as numbers         (clean_blocks)
                       no  -> records -> good ones by Polars as text    (record_splitter)
                                      -> broken ones with their text and the reason

A chunk whose numbers were read at once has lost their text, which the quarantine needs, so it can be read again as text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import polars as pl

from nestpipe.data.clean_blocks import cut_clean
from nestpipe.data.raw_chunk import (
    RECORD,
    BrokenRecord,
    NumberKinds,
    RawChunk,
    numbered,
    plain_numbers,
    require_columns,
)
from nestpipe.data.record_splitter import STRAY_QUOTE, UNIT, CleanRecords, Records, first_record, split_blocks
from nestpipe.data.remote_files import name_of
from nestpipe.errors import DataError

DELIMITERS = (",", "\t", ";", "|", "::", " ")
_SAMPLE_ROWS = 1000


class CsvReader:
    """Reads one CSV file."""

    def __init__(self, path: Path, *, delimiter: str, columns: Sequence[str], wanted: Sequence[str]) -> None:
        several = len(delimiter.encode()) > 1
        self._path, self._delimiter, self._columns, self._wanted = path, delimiter, list(columns), wanted
        self._separator, self._quoted = UNIT if several else delimiter, not several
        self._names: list[str] | None = None  # known after the first records
        self._kinds: NumberKinds | None = None  # chosen by the first regular block

    def chunks(self, blocks: Iterator[bytes], *, numbers: NumberKinds, split_all: bool) -> Iterator[RawChunk]:
        """The records of the file in order; `numbers` are columns that may be read as numbers where all fields are plain."""
        number = 1
        for records in split_blocks(
            blocks if self._quoted else _unify(blocks, self._delimiter),
            delimiter=self._separator,
            quoted=self._quoted,
            clean=None if split_all else self._cut_clean,
        ):
            if isinstance(records, CleanRecords):
                yield self._clean_chunk(records, numbers, number=number)
                number += records.num_records
                continue
            if self._names is None:
                self._read_header(records)
                if not self._columns:
                    del records.texts[0], records.num_fields[0]
            if records.texts:
                yield self._split_chunk(records, number=number)
            number += len(records.texts)

    def _cut_clean(self, data: bytes) -> tuple[CleanRecords, int] | None:
        """The records of a regular block; the first block may begin with a header."""
        separator, start, names = self._separator.encode(), 0, self._names or self._columns
        if not names:
            header = first_record(data, separator=separator, quoted=self._quoted)
            if header is None:
                return None
            text, start = header
            names = self._split_header(text)
        found = cut_clean(data[start:], separator=separator, num_columns=len(names), quoted=self._quoted)
        if found is None:
            return None
        if self._names is None:
            self._set_names(names)
        return found[0], start + found[1]

    def _read_header(self, records: Records) -> None:
        """Sets the names of the columns from the first records; raises DataError if the delimiter must be wrong."""
        line = records.texts[0].decode()
        better = max(DELIMITERS, key=line.count)
        is_single = max(records.num_fields) <= 1 or (records.num_fields[0] <= 1 and better in line and better != " ")
        if is_single and len(self._columns) != 1:
            hint = (
                f"{better!r} would give {line.count(better) + 1}" if better in line else "there is no usual delimiter"
            )
            raise DataError(
                f"{name_of(self._path)} has a single column with the delimiter {self._delimiter!r}, so user and item are not separate columns; in its first line {line[:80]!r} {hint}. Pass the delimiter (--delimiter)."
            )
        self._set_names(self._columns or self._split_header(records.texts[0]))

    def _split_header(self, text: bytes) -> list[str]:
        line = text.decode()
        reader = csv.reader(io.StringIO(line, newline=""), delimiter=self._delimiter) if self._quoted else None
        return [name.strip() for name in (line.split(UNIT) if reader is None else next(reader))]

    def _set_names(self, names: list[str]) -> None:
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise DataError(
                f"{name_of(self._path)} has more than one column named {', '.join(map(repr, twice))}, so it is ambiguous which to read. Rename them."
            )
        require_columns(name_of(self._path), names, self._wanted)
        self._names = names

    def _clean_chunk(self, records: CleanRecords, numbers: NumberKinds, *, number: int) -> RawChunk:
        as_text = partial(self._parse, records.body, records.num_records, {}, number=number)
        if self._kinds is None:
            sample = self._scan(records.body, {}, num_rows=_SAMPLE_ROWS).select(self._wanted or self._names).collect()
            self._kinds = {name: numbers[name] for name in plain_numbers(sample, numbers)}
        if not self._kinds:
            return RawChunk(name_of(self._path), as_text())
        try:
            frame = self._parse(records.body, records.num_records, self._kinds, number=number)
            is_plain = len(plain_numbers(frame, self._kinds)) == len(self._kinds)
        except pl.exceptions.ComputeError:
            is_plain = False
        if is_plain:
            return RawChunk(name_of(self._path), frame, as_text=as_text)
        text = as_text()
        plain = plain_numbers(text, self._kinds)
        self._kinds = {name: self._kinds[name] for name in plain} if len(plain) < len(self._kinds) else {}
        return RawChunk(name_of(self._path), text)

    def _split_chunk(self, records: Records, *, number: int) -> RawChunk:
        num_columns = len(self._names or ())
        good, numbers, broken = [], [], []
        for place, (text, num_fields) in enumerate(zip(records.texts, records.num_fields, strict=True), number):
            if num_fields == num_columns:
                good.append(text)
                numbers.append(place)
            else:
                shown = text.decode().replace(UNIT, self._delimiter)
                broken.append(BrokenRecord(place, _field_problem(num_fields, num_columns), shown))
        frame = self._parse(b"".join(text + b"\n" for text in good), len(good), {}, number=0)
        frame = frame.with_columns(pl.Series(RECORD, numbers, dtype=pl.Int64))
        return RawChunk(name_of(self._path), frame, tuple(broken))

    def _parse(self, body: bytes, num_records: int, kinds: NumberKinds, *, number: int) -> pl.DataFrame:
        """A frame of record numbers and the wanted columns, as text unless `kinds` says otherwise."""
        names = self._names or []
        if body:
            frame = numbered(self._scan(body, kinds).select(self._wanted or names), number).collect()
        else:
            frame = pl.DataFrame(schema={RECORD: pl.Int64, **dict.fromkeys(self._wanted or names, pl.String)})
        if frame.height != num_records:
            raise AssertionError(f"{name_of(self._path)}: {num_records} records became a frame of {frame.shape}")
        return frame

    def _scan(self, body: bytes, kinds: NumberKinds, num_rows: int | None = None) -> pl.LazyFrame:
        return pl.scan_csv(
            body,
            has_header=False,
            schema={name: kinds.get(name, pl.String) for name in self._names or ()},
            separator=self._separator,
            quote_char='"' if self._quoted else None,
            n_rows=num_rows,
        )


def _unify(blocks: Iterator[bytes], delimiter: str) -> Iterator[bytes]:
    """Replaces a delimiter of several bytes by one byte, also across block boundaries."""
    long, rest = delimiter.encode(), b""
    for block in blocks:
        data = rest + block
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        yield data[:end].replace(long, UNIT.encode())
    yield rest.replace(long, UNIT.encode())


def _field_problem(num_fields: int, expected: int) -> str:
    if num_fields == STRAY_QUOTE:
        return "stray or unclosed quote"
    return f"{'surplus' if num_fields > expected else 'missing'} fields: {num_fields} instead of {expected}"
