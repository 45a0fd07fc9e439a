"""What makes files outlive a power cut."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nestpipe.errors import DataError


def flush(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no such numbers; they are written as these strings


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, with nan and inf as numbers again; a half-written last line is left out.

    Raises DataError, with the line number, if any other line is broken.
    """
    records = _records(path)
    for record in records:
        record.update({name: float(value) for name, value in record.items() if value in _NOT_FINITE})
    return records


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, or a crash, finds the old or the new content and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line break was not finished
    return [_record(path, number, line) for number, line in enumerate(lines, start=1)]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number} is not JSON ({error}): {line[:80]!r}. Remove the line.") from error
    if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
        raise DataError(f"{path}, line {number} is not a JSON object: {line[:80]!r}. Remove the line.")
    return record
