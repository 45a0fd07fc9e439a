"""File of one stored KV prefix: segments of consecutive events, with checksums of headers and payloads.

    segment   NPKV  length of header  length of payload  crc32 of payload  crc32 of all before | header, JSON | payload
    payload   keys and values of block 0, of block 1, ...; times

A header has the key of the whole prefix that ends with its segment, so the first segments of a file are a shorter prefix of the
same history. A last segment that is cut off (its process was killed) is ignored; the next append overwrites it. Any other
difference from a checksum is damage.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestpipe.errors import NestPipeError
from nestpipe.models.kv_prefix import InputDigest, KVPrefix, PrefixKey

_MAGIC = b"NPKV"
_HEAD = struct.Struct("<4sIQI")  # magic, bytes of the header and of the payload, checksum of the payload
_CHECK = struct.Struct("<I")  # checksum of the above and of the header
_MAX_HEADER = 1 << 16
Buffer = bytes | memoryview


class DamagedError(NestPipeError):
    """A stored KV prefix does not fit its checksums; it is computed again."""


class RowShapes(NamedTuple):
    """What the rows of a prefix have in common: shapes [H, Q] and [H, V] of the keys and values of a block, and whether it has times."""

    num_blocks: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    has_times: bool

    @classmethod
    def of(cls, prefix: KVPrefix) -> RowShapes:
        keys, values = (tuple(one[0].shape[1:]) for one in (prefix.keys, prefix.values))
        return cls(len(prefix.keys), keys, values, prefix.times is not None)


@dataclass(frozen=True, slots=True)
class Segment:
    """The header of a segment, and where its payload is."""

    key: PrefixKey  # of the prefix that ends with it
    first: int  # its first event
    next_time: int | None
    shapes: RowShapes
    start: int
    num_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


def encode(prefix: KVPrefix, first: int) -> list[Buffer]:
    """The segment of the events from `first` on, as buffers; rows are not copied."""
    payload = [_bytes_of(one[first:]) for one in _rows(prefix)]
    checksum = 0
    for one in payload:
        checksum = zlib.crc32(one, checksum)
    fields = {"key": asdict(prefix.key), "first": first, "next_time": prefix.next_time, "shapes": RowShapes.of(prefix)}
    header = json.dumps(fields, separators=(",", ":")).encode()
    head = _HEAD.pack(_MAGIC, len(header), sum(map(len, payload)), checksum)
    return [head + _CHECK.pack(zlib.crc32(header, zlib.crc32(head))) + header, *payload]


def scan(file: int) -> list[Segment]:
    """The complete segments of a file, without their payloads; raises DamagedError for a damaged header."""
    size, place, segments = os.fstat(file).st_size, 0, list[Segment]()
    while (found := _segment_at(file, place, size)) is not None:
        before = segments[-1].key.length if segments else 0
        if found.first != before or (segments and found.shapes != segments[-1].shapes):
            raise DamagedError("a segment does not follow the one before it")
        segments.append(found)
        place = found.end
    return segments


def load(file: int, segments: Sequence[Segment], digest: InputDigest) -> KVPrefix:
    """The prefix of some first segments of a file; `digest` is that of its inputs. Raises DamagedError."""
    last = segments[-1]
    dtype, length, shapes = getattr(torch, last.key.dtype), last.key.length, last.shapes
    keys = tuple(torch.empty(length, *shapes.keys, dtype=dtype) for _ in range(shapes.num_blocks))
    values = tuple(torch.empty(length, *shapes.values, dtype=dtype) for _ in range(shapes.num_blocks))
    times = torch.empty(length, dtype=torch.int64) if shapes.has_times else None
    prefix = KVPrefix(key=last.key, keys=keys, values=values, times=times, next_time=last.next_time, digest=digest)
    for segment in segments:
        buffers = [_bytes_of(one[segment.first : segment.key.length]) for one in _rows(prefix)]
        if sum(map(len, buffers)) != segment.num_bytes:
            raise DamagedError("a segment has not the bytes of its events")
        _read_all(file, buffers, segment.start)
        checksum = 0
        for one in buffers:
            checksum = zlib.crc32(one, checksum)
        if checksum != segment.checksum:
            raise DamagedError("a payload does not fit its checksum")
    return prefix


def write_all(file: int, buffers: Sequence[Buffer], place: int) -> None:
    """Writes buffers one after the other from a place on; raises OSError."""
    left = [memoryview(one) for one in buffers if len(one)]
    while left:
        num = os.pwritev(file, left, place)
        place += num
        while left and num >= len(left[0]):
            num -= len(left.pop(0))
        if num:
            left[0] = left[0][num:]


def _read_all(file: int, buffers: Sequence[memoryview], place: int) -> None:
    left = [one for one in buffers if len(one)]
    while left:
        num = os.preadv(file, left, place)
        if num == 0:
            raise DamagedError("a payload is cut off")
        place += num
        while left and num >= len(left[0]):
            num -= len(left.pop(0))
        if num:
            left[0] = left[0][num:]


def _segment_at(file: int, place: int, size: int) -> Segment | None:
    """The segment at a place; None at the end of the file and for one that is cut off."""
    head = os.pread(file, _HEAD.size + _CHECK.size, place)
    if len(head) < _HEAD.size + _CHECK.size:
        return None
    magic, header_bytes, payload_bytes, checksum = _HEAD.unpack_from(head)
    (wanted,) = _CHECK.unpack_from(head, _HEAD.size)
    if magic != _MAGIC or header_bytes > _MAX_HEADER:
        raise DamagedError("a segment does not begin as segments do")
    header = os.pread(file, header_bytes, place + len(head))
    if len(header) < header_bytes:
        return None
    if zlib.crc32(header, zlib.crc32(head[: _HEAD.size])) != wanted:
        raise DamagedError("a header does not fit its checksum")
    start = place + len(head) + header_bytes
    if start + payload_bytes > size:
        return None
    try:
        fields: dict[str, Any] = json.loads(header)
        num_blocks, keys, values, has_times = fields["shapes"]
        shapes = RowShapes(num_blocks, tuple(keys), tuple(values), has_times)
        key, first, next_time = PrefixKey(**fields["key"]), fields["first"], fields["next_time"]
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError("a header is of another version") from error
    return Segment(key, first, next_time, shapes, start, payload_bytes, checksum)


def _rows(prefix: KVPrefix) -> Iterator[Tensor]:
    """Everything that a prefix has a row of for each event, in the order of a payload."""
    for keys, values in zip(prefix.keys, prefix.values, strict=True):
        yield from (keys, values)
    if prefix.times is not None:
        yield prefix.times


def _bytes_of(rows: Tensor) -> memoryview:
    """The memory of rows in the host's memory; rows elsewhere are copied."""
    if not rows.numel():
        return memoryview(b"")  # an empty tensor may have strides that cannot be viewed as bytes
    array: Any = rows.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
