"""Events since the log was ingested: an append-only file of checksummed records, shared by the instances of a run.

    file      NPEV  length  crc32  {"events": [...]}    NPEV  length  crc32  ...

A record is what one request brought, so it is there whole or not at all. A record that was cut off while being written
(the process or the machine died) is taken away by the next writer; damage before the end is an error, because events
behind it would be lost. Writers take turns by a lock beside the file; readers see whole records as they come.
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
    """One reader's place in the file, and the right to write."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        self._hold(os.open(path, os.O_RDONLY))
        self._end = 0  # how far this reader has come

    @contextmanager
    def news(self) -> Iterator[tuple[bool, list[Event]]]:
        """Events that came since the last time. True if the file is another: then these are all there are.

        They count as read only if the body succeeds; else the next call has them again.
        """
        is_other = os.fstat(self._file).st_ino != self.path.stat().st_ino
        file, begin = (os.open(self.path, os.O_RDONLY), 0) if is_other else (self._file, self._end)
        try:
            size = os.fstat(file).st_size - begin
            records, length = _whole_records(_read(file, size, begin), self.path, begin)
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
        """Nobody else writes meanwhile."""
        with self.path.with_name(self.path.name + ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def append(self, events: list[Event]) -> None:
        """One record, on the disk when this returns; `news` has it too. Only while `writing`, after `news`."""
        record = _record(events)
        with self.path.open("r+b") as file:
            file.truncate(self._end)  # what stands behind was cut off while being written
            file.seek(self._end)
            file.write(record)
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, keep: Callable[[Event], bool]) -> int:
        """Another file with the events to keep takes the place of this one; says how many are gone. Raises DataError."""
        with self.writing():
            records, _ = _whole_records(self.path.read_bytes(), self.path)
            kept = [[event for event in record if keep(event)] for record in records]
            draft = self.path.with_name(f".{self.path.name}.tmp")
            # As many records as before: in one, damage anywhere would look like an end that was cut off.
            draft.write_bytes(b"".join(_record(record) for record in kept if record))
            flush(draft)
            draft.replace(self.path)
            flush(self.path.parent)
            return sum(map(len, records)) - sum(map(len, kept))

    def _hold(self, file: int) -> None:
        """It stays open, so that no other file can get its number."""
        self._file = file
        self._close = weakref.finalize(self, os.close, file)


def _record(events: list[Event]) -> bytes:
    payload = json.dumps({"events": events}, allow_nan=False, separators=(",", ":")).encode()
    return _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def _read(file: int, size: int, begin: int) -> bytes:
    """So many bytes from a place on, however many one call gives: Linux ends at 2 GiB."""
    pieces: list[bytes] = []
    while size > 0 and (piece := os.pread(file, size, begin)):
        pieces.append(piece)
        size, begin = size - len(piece), begin + len(piece)
    return b"".join(pieces)


def _whole_records(data: bytes, path: Path, begin: int = 0) -> tuple[list[list[Event]], int]:
    """The events of each whole record from a byte of the file on, and how many bytes those take; raises DataError for damage."""
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
    """What a whole record at this place holds."""
    if len(data) - place < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(data, place)
    payload = data[place + _HEAD.size : place + _HEAD.size + length]
    whole = magic == _MAGIC and len(payload) == length and zlib.crc32(payload) == checksum
    return payload if whole else None


def _next_record(data: bytes, place: int) -> int | None:
    """Where the next whole record begins."""
    while (place := data.find(_MAGIC, place)) >= 0:
        if _payload_at(data, place) is not None:
            return place
        place += 1
    return None
