"""Log of events since ingestion: an append-only file of checksummed records, shared by the instances of a run.

    file      NPEV  length  crc32  {"events": [...]}    NPEV  length  crc32  ...

A record holds the events of one request, so they are stored together or not at all. The next writer truncates a torn record at
the end (its process or machine died). Damage before the end is an error, because the events after it would be lost. A lock file
serialises writers; readers see complete records only.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestpipe.atomic_files import flush
from nestpipe.errors import DataError

Event = Mapping[str, Any]
_MAGIC = b"NPEV"
_HEAD = struct.Struct("<4sII")  # magic, length of the payload, its checksum


class EventLog:
    """A reader with its position in the file, which may also write."""

    def __init__(self, path: Path, *, lock: Path | None = None):
        """`lock` is the lock file of another log, if writers hold one lock for both."""
        self.path, self.lock = path, lock or path.with_name(path.name + ".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        self._hold(os.open(path, os.O_RDONLY))
        self._end = 0  # of the records that were read

    def has_news(self) -> bool:
        """Whether `news` may return something, for one call of the system."""
        info = self.path.stat()
        return info.st_size != self._end or info.st_ino != self._inode

    @contextmanager
    def news(self) -> Iterator[tuple[bool, list[Event]]]:
        """Whether the file was replaced, and the events since the last call, or all events of a replaced file.

        They count as read only if the body succeeds; otherwise the next call returns them again.
        """
        is_other = self.path.stat().st_ino != self._inode
        file, begin = (os.open(self.path, os.O_RDONLY), 0) if is_other else (self._file, self._end)
        try:
            size = os.fstat(file).st_size - begin
            records, length = _complete_records(_read(file, size, begin), self.path, begin)
            yield is_other, [event for record in records for event in record]
        except BaseException:
            if is_other:
                os.close(file)
            raise
        if is_other:
            self._close()
            self._hold(file)
        self._end = begin + length

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the writer lock."""
        with self.lock.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def append(self, events: list[Event]) -> None:
        """Appends one record and flushes it to disk. Call it inside `writing`, after `news`."""
        record = _record(events)
        with self.path.open("r+b") as file:
            file.truncate(self._end)  # a torn record
            file.seek(self._end)
            file.write(record)
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, keep: Callable[[Event], bool]) -> int:
        """Replaces the file by one with the events to keep; returns how many are gone. Raises DataError."""
        with self.writing():
            records, _ = _complete_records(self.path.read_bytes(), self.path)
            kept = [[event for event in record if keep(event)] for record in records]
            draft = self.path.with_name(f".{self.path.name}.tmp")
            # Not one record: damage anywhere in it would look like a torn end.
            draft.write_bytes(b"".join(_record(record) for record in kept if record))
            flush(draft)
            draft.replace(self.path)
            flush(self.path.parent)
            return sum(map(len, records)) - sum(map(len, kept))

    def _hold(self, file: int) -> None:
        """Keeps the file open, so that its inode is not reused."""
        self._file, self._inode = file, os.fstat(file).st_ino
        self._close = weakref.finalize(self, os.close, file)


def is_event_log(path: Path) -> bool:
    """Whether a file is an event log, by its first bytes; an empty one is if it has the name."""
    with path.open("rb") as file:
        first = file.read(len(_MAGIC))
    return first == _MAGIC or (not first and path.suffix == ".log")


def _record(events: list[Event]) -> bytes:
    payload = json.dumps({"events": events}, allow_nan=False, separators=(",", ":")).encode()
    return _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def _read(file: int, size: int, begin: int) -> bytes:
    """Reads `size` bytes; one call returns at most 2 GiB on Linux."""
    chunks: list[bytes] = []
    while size > 0 and (chunk := os.pread(file, size, begin)):
        chunks.append(chunk)
        size, begin = size - len(chunk), begin + len(chunk)
    return b"".join(chunks)


def _complete_records(data: bytes, path: Path, begin: int = 0) -> tuple[list[list[Event]], int]:
    """The events of each complete record, and how many bytes these take; raises DataError for damage."""
    records: list[list[Event]] = []
    place = 0
    while (payload := _payload_at(data, place)) is not None:
        records.append(json.loads(payload)["events"])
        place += _HEAD.size + len(payload)
    if place < len(data) and (later := _next_record(data, place + 1)) is not None:
        raise DataError(
            f"{path} is damaged at byte {begin + place:,}: a record there does not fit its checksum, but whole "
            f"records follow from byte {begin + later:,} on. Restore the file, or cut the damaged part out."
        )
    return records, place


def _payload_at(data: bytes, place: int) -> bytes | None:
    """The payload of a complete record at this place."""
    if len(data) - place < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(data, place)
    payload = data[place + _HEAD.size : place + _HEAD.size + length]
    is_complete = magic == _MAGIC and len(payload) == length and zlib.crc32(payload) == checksum
    return payload if is_complete else None


def _next_record(data: bytes, place: int) -> int | None:
    """The place of the next complete record."""
    while (place := data.find(_MAGIC, place)) >= 0:
        if _payload_at(data, place) is not None:
            return place
        place += 1
    return None
