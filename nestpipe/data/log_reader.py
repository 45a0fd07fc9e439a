"""Reads logs and tables: `LogSource` names the files, `read_raw` yields their records in untyped chunks.

A chunk has a frame of the wanted columns (text from CSV and JSONL, typed from Parquet) and the broken records that have
no columns. Each row carries its record number within its file, from 1, without the header. A problem of a whole file is
an error; a problem of a record never is.
"""

from __future__ import annotations

import csv
import difflib
import glob
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from nestpipe.data.config import Format
from nestpipe.data.record_splitter import STRAY_QUOTE, UNIT, Records, read_blocks, split_records
from nestpipe.errors import DataError

RECORD = "#record"
JSON_MARK = (
    "\uffff"  # prefix of a JSON list, object or boolean in a text column; a Unicode noncharacter, so no text has it
)
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
_DELIMITERS = (",", "\t", ";", "|", "::", " ")


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


def read_raw(
    source: LogSource | pl.DataFrame, columns: Sequence[str], *, keys: Sequence[str] = ()
) -> Iterator[RawChunk]:
    """The wanted columns of every record, in order; a frame counts as one file. Raises DataError for a bad file.

    `keys` are wanted columns that nearly every record has: a JSONL file whose first chunk lacks one is refused early.
    """
    if isinstance(source, pl.DataFrame):
        require_columns("the frame", source.columns, columns)
        yield RawChunk("frame", _numbered(source.select(columns).lazy()).collect())
        return
    for path in expand(source):
        for chunk in _read_file(path, source, columns, keys):
            if source.transform is None:
                yield chunk
                continue
            frame = source.transform(chunk.frame)
            require_columns(str(path), frame.columns, columns)
            yield RawChunk(chunk.file, frame.select(RECORD, *columns), chunk.broken)


def _numbered(frame: pl.LazyFrame) -> pl.LazyFrame:
    return frame.with_row_index(RECORD, 1).with_columns(pl.col(RECORD).cast(pl.Int64))


def expand(source: LogSource) -> list[Path]:
    """The files of a source, each once; raises DataError if a path or glob matches none."""
    if not source.paths:
        raise DataError("no log was given, so there is nothing to read. Name at least one file or glob.")
    found: dict[Path, Path] = {}
    for pattern in source.paths:
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
    return next(iter(_read_file(path, source, (), ()))).frame.columns[1:]


def propose_delimiter(source: LogSource) -> str:
    """The delimiter that the first line of a CSV file shows; empty if it is the one that is taken anyway."""
    path = expand(source)[0]
    if source.delimiter or _format_of(path, source) != "csv" or not path.stat().st_size:
        return source.delimiter
    first = next(iter(read_blocks(path, encoding=source.encoding, block_bytes=source.block_bytes)))
    line = first.partition(b"\n")[0].decode(errors="replace")
    usual = "\t" if ".tsv" in path.name.lower() else ","
    better = max((one for one in _DELIMITERS if one != " "), key=line.count)
    return better if usual not in line and better in line else ""


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


def _read_file(path: Path, source: LogSource, columns: Sequence[str], keys: Sequence[str]) -> Iterator[RawChunk]:
    file_format = _format_of(path, source)
    if not path.stat().st_size:
        raise DataError(
            f"{path} is empty (0 bytes), which looks like an unfinished export. Remove it from the paths, or export it again."
        )
    wanted = () if source.transform else columns
    if file_format == "parquet":
        return _read_parquet(path, source, wanted)
    blocks = read_blocks(path, encoding=source.encoding, block_bytes=source.block_bytes)
    if file_format == "csv":
        return _read_csv(path, blocks, source, wanted)
    lines = split_records(blocks, delimiter=UNIT, quoted=False)
    return (
        _read_jsonl(path, lines, wanted, keys if wanted else ()) if file_format == "jsonl" else _read_lines(path, lines)
    )


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


def _read_csv(path: Path, blocks: Iterator[bytes], source: LogSource, wanted: Sequence[str]) -> Iterator[RawChunk]:
    delimiter = source.delimiter or ("\t" if ".tsv" in path.name.lower() else ",")
    several = len(delimiter.encode()) > 1
    chunks = split_records(
        _unify(blocks, delimiter) if several else blocks, delimiter=UNIT if several else delimiter, quoted=not several
    )
    names, number = list(source.columns), 1
    for index, records in enumerate(chunks):
        if index == 0:
            names, header = _header(path, records, names, delimiter, several)
            require_columns(str(path), names, wanted)
        else:
            header = False
        if header:
            del records.texts[0], records.num_fields[0]
        if records.texts:
            yield _csv_chunk(path, records, names, wanted=wanted or names, delimiter=delimiter, number=number)
        number += len(records.texts)


def _unify(blocks: Iterator[bytes], delimiter: str) -> Iterator[bytes]:
    """Replaces a delimiter of several bytes by one byte, also across block boundaries."""
    long, rest = delimiter.encode(), b""
    for block in blocks:
        data = rest + block
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        yield data[:end].replace(long, UNIT.encode())
    yield rest.replace(long, UNIT.encode())


def _header(path: Path, records: Records, names: list[str], delimiter: str, several: bool) -> tuple[list[str], bool]:
    """The names of the columns and whether the first record is the header."""
    line = records.texts[0].decode()
    better = max(_DELIMITERS, key=line.count)
    is_single = max(records.num_fields) <= 1 or (records.num_fields[0] <= 1 and better in line and better != " ")
    if is_single and len(names) != 1:
        hint = f"{better!r} would give {line.count(better) + 1}" if better in line else "there is no usual delimiter"
        raise DataError(
            f"{path} has a single column with the delimiter {delimiter!r}, so user and item are not separate columns; in its first line {line[:80]!r} {hint}. Pass the delimiter (--delimiter)."
        )
    if names:
        return names, False
    text = records.texts[0].decode()
    found = text.split(UNIT) if several else next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    found = [name.strip() for name in found]
    if len(set(found)) < len(found):
        twice = sorted({name for name in found if found.count(name) > 1})
        raise DataError(
            f"{path} has more than one column named {', '.join(map(repr, twice))}, so it is ambiguous which to read. Rename them."
        )
    return found, True


def _csv_chunk(
    path: Path, records: Records, names: list[str], *, wanted: Sequence[str], delimiter: str, number: int
) -> RawChunk:
    good, numbers, broken = [], [], []
    for place, (text, num_fields) in enumerate(zip(records.texts, records.num_fields, strict=True), number):
        if num_fields == len(names):
            good.append(text)
            numbers.append(place)
        else:
            broken.append(
                BrokenRecord(place, _field_problem(num_fields, len(names)), text.decode().replace(UNIT, delimiter))
            )
    several = len(delimiter.encode()) > 1
    frame = pl.DataFrame(schema=dict.fromkeys(names, pl.String))
    if good:
        frame = pl.read_csv(
            b"\n".join(good) + b"\n",
            has_header=False,
            new_columns=names,
            infer_schema=False,
            separator=UNIT if several else delimiter,
            quote_char=None if several else '"',
        )
    if frame.shape != (len(good), len(names)):
        raise AssertionError(f"{path}: {len(good)} records of {len(names)} fields became a frame of {frame.shape}")
    frame = frame.select(pl.Series(RECORD, numbers, dtype=pl.Int64), *(pl.col(name) for name in wanted))
    return RawChunk(str(path), frame, tuple(broken))


def _field_problem(num_fields: int, expected: int) -> str:
    if num_fields == STRAY_QUOTE:
        return "stray or unclosed quote"
    return f"{'surplus' if num_fields > expected else 'missing'} fields: {num_fields} instead of {expected}"


def _read_lines(path: Path, chunks: Iterator[Records]) -> Iterator[RawChunk]:
    number = 1
    for records in chunks:
        numbers = range(number, number + len(records.texts))
        texts = [text.decode() for text in records.texts]
        yield RawChunk(
            str(path), pl.DataFrame({RECORD: numbers, LINE: texts}, schema={RECORD: pl.Int64, LINE: pl.String})
        )
        number += len(texts)


def _read_jsonl(
    path: Path, chunks: Iterator[Records], wanted: Sequence[str], keys: Sequence[str]
) -> Iterator[RawChunk]:
    """A record may lack any key; a wanted key that no record of the file has is an error."""
    number, seen = 1, dict[str, None]()
    for records in chunks:
        rows, numbers, broken = [], [], []
        for place, text in enumerate(records.texts, number):
            row = _json_row(text)
            if isinstance(row, dict):
                rows.append(row)
                numbers.append(place)
            else:
                broken.append(BrokenRecord(place, row, text.decode()))
        first, seen = not seen, seen | dict.fromkeys(name for row in rows for name in row)
        if first and rows:
            require_columns(str(path), list(seen), keys)
        columns = {name: _json_column(name, [row.get(name) for row in rows]) for name in wanted or seen}
        frame = pl.DataFrame([pl.Series(RECORD, numbers, dtype=pl.Int64), *columns.values()])
        yield RawChunk(str(path), frame, tuple(broken))
        number += len(records.texts)
    if seen:
        require_columns(str(path), list(seen), wanted)


def _json_row(text: bytes) -> dict[str, Any] | str:
    """The object of a line with its numbers as text, or the reason why there is none."""
    try:
        row = _DECODER.decode(text.decode())
        if not isinstance(row, dict):
            return "not a JSON object"
        # JSON can escape a lone surrogate, which is no character.
        if b"\\u" in text:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "not valid text"
    except (ValueError, RecursionError):
        return "not a JSON object"
    return row


def _number_text(text: str) -> str:
    """A whole JSON number without its .0, so that 12.0 and 12 are the same id."""
    whole, _, fraction = text.partition(".")
    return text if fraction.strip("0") else whole


def _constant_text(name: str) -> str | None:
    """NaN means missing; an infinity is neither an id nor a legal number."""
    return None if name == "NaN" else JSON_MARK + name


# Built once: json.loads would build one per record.
_DECODER = json.JSONDecoder(parse_float=_number_text, parse_int=str, parse_constant=_constant_text)


def _json_column(name: str, values: list[Any]) -> pl.Series:
    return pl.Series(name, [_json_text(value) for value in values], dtype=pl.String)


def _json_text(value: Any) -> str | None:
    """Texts and numbers unchanged; lists, objects and booleans, also inside lists, as JSON with a prefix."""
    if isinstance(value, list):
        return JSON_MARK + json.dumps([_json_scalar(one) for one in value], ensure_ascii=False)
    return _json_scalar(value)


def _json_scalar(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else JSON_MARK + json.dumps(value, ensure_ascii=False)


def shown(value: Any) -> Any:
    """A raw value as it is in the file."""
    if isinstance(value, str) and value.startswith(JSON_MARK):
        try:
            value = json.loads(value.removeprefix(JSON_MARK))
        except ValueError:  # the text itself begins with the prefix
            return value
        return [shown(one) for one in value] if isinstance(value, list) else value
    return value


def _parquet_columns(path: Path) -> list[str]:
    try:
        return list(pl.read_parquet_schema(path))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            f"{path} is not a complete Parquet file ({error}), so none of its records can be read. Copy or export it again."
        ) from None


def _read_parquet(path: Path, source: LogSource, wanted: Sequence[str]) -> Iterator[RawChunk]:
    present = _parquet_columns(path)
    require_columns(str(path), present, wanted)
    scan = _numbered(pl.scan_parquet(path, glob=False).select(wanted or present))
    try:
        for frame in scan.collect_batches(chunk_size=source.chunk_rows, maintain_order=True):
            yield RawChunk(str(path), frame)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            f"{path} cannot be read to its end ({error}); a shorter log would look complete. Copy or export it again."
        ) from None
