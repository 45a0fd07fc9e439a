"""Atomic and durable file writes, and JSON-lines files that tolerate a partial last line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nestpipe.errors import DataError


def flush(path: Path) -> None:
    """fsync of a file, or of the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NOT_FINITE = ("nan", "inf", "-inf")  # not in JSON, so written as strings


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, with nan and inf as numbers; a partial last line is skipped.

    Raises DataError with the line number if any other line is damaged.
    """
    records = raw_records(path)
    for record in records:
        record.update({name: float(value) for name, value in record.items() if value in _NOT_FINITE})
    return records


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: a reader, or a crash, sees the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def raw_records(path: Path) -> list[dict[str, Any]]:
    """All records of a JSON-lines file as they were written; a partial last line is skipped. Raises DataError."""
    lines = path.read_bytes().split(b"\n")[:-1]  # after the last line break: a partial line
    return [_record(path, number, line) for number, line in enumerate(lines, start=1)]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number} is not JSON ({error}): {line[:80]!r}. Remove the line.") from error
    if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
        raise DataError(f"{path}, line {number} is not a JSON object: {line[:80]!r}. Remove the line.")
    return record
