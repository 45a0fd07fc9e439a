"""Splits text files, plain or compressed, into records.

    bytes -> decompress -> decode -> UTF-8 bytes -> records

A record is a line; a quoted CSV field may contain line breaks. Polars would drop surplus fields, fill in missing ones and
fail on a stray quote. Each of these must reach the quarantine with its text, so records are split here.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import polars as pl

from nestpipe.errors import DataError

UNIT = "\x1f"  # ASCII unit separator, replaces delimiters of several characters, which Polars cannot read
STRAY_QUOTE = -1

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
MAX_OPEN = 1 << 20  # a longer quoted record is treated as an unclosed quote


@dataclass(slots=True)
class Records:
    """Whole records and the number of fields of each; `STRAY_QUOTE` if the quotes do not pair up."""

    texts: list[bytes] = field(default_factory=list)
    num_fields: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CleanRecords:
    """Whole records of a regular block, each of all columns, with \\n as line end."""

    body: bytes
    num_records: int


# Takes a block; returns its records and the bytes they take, or None if the block is not regular.
CleanCut = Callable[[bytes], tuple[CleanRecords, int] | None]


def read_blocks(path: Path, *, encoding: str, block_bytes: int) -> Iterator[bytes]:
    """The file as UTF-8 in blocks with arbitrary boundaries; raises DataError if it is damaged or undecodable."""
    decoder = codecs.getincrementaldecoder(_codec(encoding))()
    num_bytes = 0
    try:
        for block in _decompressed(path, encoding=encoding, block_bytes=block_bytes):
            yield decoder.decode(block).encode()
            num_bytes += len(block)
        yield decoder.decode(b"", final=True).encode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{path} is not {encoding} text: byte 0x{byte:02x} near position {num_bytes + error.start:,} cannot be decoded, "
            "so no id in it can be trusted. Pass the encoding of the file (--encoding), for example latin-1."
        ) from None


def _codec(encoding: str) -> str:
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise DataError(
            f"unknown encoding {encoding!r}, so the log cannot be decoded. Common encodings are utf-8, latin-1, cp1252 and utf-16."
        ) from None
    # utf-8-sig drops the byte order mark of spreadsheets, which would become part of the first column name.
    return "utf-8-sig" if name == "utf-8" else name


def _decompressed(path: Path, *, encoding: str, block_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        magic = file.read(4)
    try:
        if magic == _ZSTD:
            yield from _zstd_blocks(path, encoding=encoding)
            return
        with gzip.open(path, "rb") if magic.startswith(_GZIP) else path.open("rb") as stream:
            while block := stream.read(block_bytes):
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from None
    except (pl.exceptions.PolarsError, OSError) as error:
        if magic != _ZSTD:
            raise
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is truncated or damaged ({error}): its last records are missing, and a shorter log would look like a "
        "complete one. Copy or download the file again."
    )


def _zstd_blocks(path: Path, *, encoding: str) -> Iterator[bytes]:
    if _codec(encoding) != "utf-8-sig":
        raise DataError(
            f"{path} is compressed with zstd, which is decoded as UTF-8 only, not as {encoding}. Compress it with gzip instead."
        )
    for frame in pl.scan_lines(path, glob=False).collect_batches(chunk_size=1 << 18):
        yield "".join(f"{line}\n" for line in frame["line"].to_list()).encode()


def split_records(blocks: Iterator[bytes], *, delimiter: str, quoted: bool) -> Iterator[Records]:
    """Splits blocks into whole records without line ends; blank lines are not records."""
    for records in split_blocks(blocks, delimiter=delimiter, quoted=quoted, clean=None):
        if isinstance(records, Records):
            yield records


def split_blocks(
    blocks: Iterator[bytes], *, delimiter: str, quoted: bool, clean: CleanCut | None
) -> Iterator[Records | CleanRecords]:
    """The same, but `clean` may take a regular block as a whole; it must find the same records in it."""
    separator = delimiter.encode()
    rest = b""
    for block in blocks:
        data = rest + block
        whole = None if clean is None else clean(data)
        if whole is not None:
            regular, used = whole
            yield regular
        else:
            records, used = _cut(data, separator=separator, quoted=quoted, final=False)
            if records.texts:
                yield records
        rest = data[used:]
    if rest:
        data = rest + b"\n"
        whole = None if clean is None else clean(data)
        if whole is not None and whole[1] == len(data):
            yield whole[0]
            return
        records, _ = _cut(data, separator=separator, quoted=quoted, final=True)
        if records.texts:
            yield records


def _cut(data: bytes, *, separator: bytes, quoted: bool, final: bool) -> tuple[Records, int]:
    """The whole records of the data, and the number of bytes they take."""
    if quoted and b'"' in data:
        return _cut_quoted(data, separator=separator, final=final)
    used = data.rfind(b"\n") + 1
    texts = [line.removesuffix(b"\r") for line in data[:used].split(b"\n")]
    texts = [text for text in texts if text]
    return Records(texts, [text.count(separator) + 1 for text in texts]), used


def _cut_quoted(data: bytes, *, separator: bytes, final: bool) -> tuple[Records, int]:
    match = _record_pattern(separator).match
    count = _field_pattern(separator).findall
    records = Records()
    place = 0
    while place < len(data):
        found = match(data, place)
        if found is not None and len(found[1]) < MAX_OPEN:
            text = found[1].removesuffix(b"\r")
            num_fields = len(count(text)) if b'"' in text else text.count(separator) + 1
            place = found.end()
        else:
            end = data.find(b"\n", place)
            if end < 0 or not (final or found or len(data) - place >= MAX_OPEN):
                break  # the quote may close, or the line may end, in the next block
            text, num_fields, place = data[place:end].removesuffix(b"\r"), STRAY_QUOTE, end + 1
        if text:
            records.texts.append(text)
            records.num_fields.append(num_fields)
    return records, place


def first_record(data: bytes, *, separator: bytes, quoted: bool) -> tuple[bytes, int] | None:
    """The text of the first record and the bytes it takes; None if it is blank, broken or incomplete."""
    if not quoted:
        end = data.find(b"\n")
        text = data[: max(end, 0)]
    else:
        found = _record_pattern(separator).match(data)
        if found is None or len(found[1]) >= MAX_OPEN:
            return None
        end, text = found.end() - 1, found[1]
    text = text.removesuffix(b"\r")
    return (text, end + 1) if text else None


@lru_cache
def _record_pattern(separator: bytes) -> re.Pattern[bytes]:
    """Matches one legal record and its line end; possessive, so that a stray quote costs one pass over its field."""
    quoted, plain = _field(separator)
    one = rb"(?:" + quoted + rb"|" + plain + rb")"
    return re.compile(rb"(" + one + rb"(?:" + re.escape(separator) + one + rb")*+)\r?\n")


@lru_cache
def _field_pattern(separator: bytes) -> re.Pattern[bytes]:
    """Matches once per field of a legal record."""
    quoted, plain = _field(separator)
    return re.compile(rb"(?:^|" + re.escape(separator) + rb")(?:" + quoted + rb"|" + plain + rb")")


def _field(separator: bytes) -> tuple[bytes, bytes]:
    return rb'"(?:[^"]++|"")*+"', rb'[^"\n' + re.escape(separator) + rb"]*+"
