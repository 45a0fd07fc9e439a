"""Reads logs and tables: `LogSource` names the files, `read_raw` yields their records in untyped chunks.

A chunk has a frame of the wanted columns (text from CSV and JSONL, typed from Parquet) and the broken records that have
no columns. Each row carries its record number within its file, from 1, without the header. A problem of a whole file is
an error; a problem of a record never is.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from nestpipe.data.config import Format
from nestpipe.data.csv_reader import DELIMITERS, CsvReader
from nestpipe.data.jsonl_reader import read_jsonl
from nestpipe.data.raw_chunk import RECORD, NumberKinds, RawChunk, numbered, require_columns
from nestpipe.data.record_splitter import UNIT, Records, read_blocks, split_records
from nestpipe.data.remote_files import fetch_files, is_url, name_of
from nestpipe.errors import DataError

NO_NUMBERS: NumberKinds = {}
LINE = "line"  # the one column of format 'lines'

_SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".dat": "csv",
    ".txt": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """Files of one format, read in the given order; the files of a glob in the order of their names."""

    paths: tuple[str, ...]
    format: Format = "auto"
    """Detected by suffix, before .gz or .zst."""
    delimiter: str = ""
    """CSV: by default tab for .tsv, otherwise comma. With several characters, quotes have no special meaning."""
    columns: tuple[str, ...] = ()
    """CSV: column names of a file without header."""
    encoding: str = "utf-8"
    transform: Callable[[pl.DataFrame], pl.DataFrame] | None = None
    """Maps each raw frame to one with the wanted columns; keeps the column `#record`."""
    block_bytes: int = 8 << 20
    chunk_rows: int = 500_000
    split_all: bool = False
    """Split every record in Python, also those of regular blocks: slow, the reference of the fast readers."""


def read_raw(
    source: LogSource | pl.DataFrame,
    columns: Sequence[str],
    *,
    keys: Sequence[str] = (),
    numbers: NumberKinds = NO_NUMBERS,
) -> Iterator[RawChunk]:
    """The wanted columns of every record, in order; a frame counts as one file. Raises DataError for a bad file.

    `keys` are wanted columns that nearly every record has: a JSONL file whose first chunk lacks one is refused early.
    `numbers` are columns that may come as numbers from CSV and JSONL, where all their values in a chunk are plain numbers; such a
    chunk can be read again as text.
    """
    if isinstance(source, pl.DataFrame):
        require_columns("the frame", source.columns, columns)
        yield RawChunk("frame", numbered(source.select(columns).lazy()).collect())
        return
    for path in expand(source):
        for chunk in _read_file(path, source, columns, keys, numbers):
            if source.transform is None:
                yield chunk
                continue
            frame = source.transform(chunk.frame)
            require_columns(name_of(path), frame.columns, columns)
            yield RawChunk(chunk.file, frame.select(RECORD, *columns), chunk.broken)


def expand(source: LogSource) -> list[Path]:
    """The files of a source, each once, URLs as local copies; raises DataError if a path, URL or glob matches none."""
    if not source.paths:
        raise DataError("no log was given, so there is nothing to read. Name at least one file or glob.")
    found: dict[Path, Path] = {}
    for pattern in source.paths:
        if is_url(pattern):
            copies = fetch_files(pattern)
            if not copies:
                raise DataError(
                    f"no file matches {pattern!r} in the store, so there is nothing to read. Check the address."
                )
            found |= {copy: copy for copy in copies}
            continue
        path = Path(pattern)
        # pathlib's own glob takes no absolute patterns
        matches = [path] if path.is_file() else [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207
        files = [match for match in matches if match.is_file()]
        if not files:
            raise DataError(
                f"no file matches {pattern!r} (relative to {Path.cwd()}), so there is nothing to read. Check the path, and quote a glob so that the shell does not expand it."
            )
        for file in files:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def columns_of(source: LogSource) -> list[str]:
    """The columns of the first file, for readers whose columns are optional."""
    path = expand(source)[0]
    if _format_of(path, source) == "parquet":
        return _parquet_columns(path)
    return next(iter(_read_file(path, source, (), (), {}))).frame.columns[1:]


def propose_delimiter(source: LogSource) -> str:
    """The delimiter that the first line of a CSV file shows; empty if it is the one that is taken anyway."""
    path = expand(source)[0]
    if source.delimiter or _format_of(path, source) != "csv" or not path.stat().st_size:
        return source.delimiter
    first = next(iter(read_blocks(path, encoding=source.encoding, block_bytes=source.block_bytes)))
    line = first.partition(b"\n")[0].decode(errors="replace")
    usual = "\t" if ".tsv" in path.name.lower() else ","
    better = max((one for one in DELIMITERS if one != " "), key=line.count)
    return better if usual not in line and better in line else ""


def _read_file(
    path: Path, source: LogSource, columns: Sequence[str], keys: Sequence[str], numbers: NumberKinds
) -> Iterator[RawChunk]:
    file_format = _format_of(path, source)
    if not path.stat().st_size:
        raise DataError(
            f"{path} is empty (0 bytes), which looks like an unfinished export. Remove it from the paths, or export it again."
        )
    wanted = () if source.transform else columns
    if file_format == "parquet":
        return _read_parquet(path, source, wanted)
    blocks = read_blocks(path, encoding=source.encoding, block_bytes=source.block_bytes)
    if file_format == "lines":
        return _read_lines(path, split_records(blocks, delimiter=UNIT, quoted=False))
    if not wanted:
        keys, numbers = (), {}
    if file_format == "jsonl":
        return read_jsonl(path, blocks, wanted=wanted, keys=keys, numbers=numbers, split_all=source.split_all)
    delimiter = source.delimiter or ("\t" if ".tsv" in path.name.lower() else ",")
    reader = CsvReader(path, delimiter=delimiter, columns=source.columns, wanted=wanted)
    return reader.chunks(blocks, numbers=numbers, split_all=source.split_all)


def _format_of(path: Path, source: LogSource) -> Format:
    if source.format != "auto":
        return source.format
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in {".gz", ".zst"}]
    if suffixes and suffixes[-1] in _SUFFIXES:
        return _SUFFIXES[suffixes[-1]]
    known = ", ".join(_SUFFIXES)
    raise DataError(
        f"{path} has no known suffix, so its format is unknown; known are {known}, each also with .gz or .zst. Pass the format (--format)."
    )


def _read_lines(path: Path, chunks: Iterator[Records]) -> Iterator[RawChunk]:
    number = 1
    for records in chunks:
        numbers = range(number, number + len(records.texts))
        texts = [text.decode() for text in records.texts]
        yield RawChunk(
            name_of(path), pl.DataFrame({RECORD: numbers, LINE: texts}, schema={RECORD: pl.Int64, LINE: pl.String})
        )
        number += len(texts)


def _parquet_columns(path: Path) -> list[str]:
    try:
        return list(pl.read_parquet_schema(path))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            f"{path} is not a complete Parquet file ({error}), so none of its records can be read. Copy or export it again."
        ) from None


def _read_parquet(path: Path, source: LogSource, wanted: Sequence[str]) -> Iterator[RawChunk]:
    present = _parquet_columns(path)
    require_columns(name_of(path), present, wanted)
    scan = numbered(pl.scan_parquet(path, glob=False).select(wanted or present))
    try:
        for frame in scan.collect_batches(chunk_size=source.chunk_rows, maintain_order=True):
            yield RawChunk(name_of(path), frame)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            f"{path} cannot be read to its end ({error}); a shorter log would look complete. Copy or export it again."
        ) from None
