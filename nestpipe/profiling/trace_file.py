"""The trace of a run: one span per executed event, in one file per rank.

    RUN/trace/rank-000.jsonl      a header, then one span per line

    ready_ns          begin_ns                        end_ns
       |  predecessors   |  work   [ wait for rows ]  work  |

Times are CLOCK_MONOTONIC, which all processes of a machine share. The clocks of two machines differ by an offset: the header
holds an estimate (0 if there is none), and `load` adds it, so that all ranks are on one clock.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nestpipe.atomic_files import replace_file
from nestpipe.errors import DataError

STREAMS = ("read", "keys", "fetch", "rows", "compute", "table", "groups", "dense")
KINDS = (
    *("read", "keys", "retrieve", "post", "rows", "compute", "grads", "collect", "merge"),
    *("flag", "dense sum", "norm", "dense step", "update", "write"),
    *("arrive", "chunk rows", "chunk grads", "chunk collect", "chunk merge", "chunk update"),
)
# One event per micro-batch, or per chunk after the first; the other kinds have one event per batch.
MICRO_BATCH_KINDS = frozenset(("rows", "compute", "grads", "collect", "merge", *KINDS[-5:]))
WAITS = ("keys", "rows", "grads", "flag", "dense")  # messages that an event may wait for

_FORMAT, _VERSION = "nestpipe trace", 2
_KIND_SET = frozenset(KINDS)


@dataclass(frozen=True, slots=True)
class RecordedWait:
    """Time inside an event in which its stream was blocked on messages."""

    name: str  # one of WAITS
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """One executed event; `micro_batch` is 0 for kinds that have one event per batch."""

    stream: str
    kind: str
    batch: int
    micro_batch: int
    ready_ns: int  # the stream reached the event
    begin_ns: int  # its predecessors had ended
    end_ns: int  # read before its successors are notified
    num_bytes: int = 0  # sent to other ranks
    num_rows: int = 0  # rows or gradients sent to all ranks, this one included; for "keys" the unique keys requested
    waits: tuple[RecordedWait, ...] = ()  # in order, not overlapping


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The spans of one rank; those of a stream in execution order."""

    run: str  # an identifier that only the ranks of this run share
    rank: int
    world_size: int
    spans: tuple[Span, ...]
    num_dropped: dict[str, int]  # by stream; absent means none
    clock_offset_ns: int = 0  # added to convert to the clock of rank 0

    def stream(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.stream == name]

    def save(self, folder: Path) -> Path:
        """Writes the rank's file; rank 0 also deletes files of ranks beyond the world size."""
        path = _path(folder, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            [
                *(span.stream, span.kind, span.batch, span.micro_batch, span.ready_ns, span.begin_ns, span.end_ns),
                *(span.num_bytes, span.num_rows, [[wait.name, wait.begin_ns, wait.end_ns] for wait in span.waits]),
            ]
            for span in self.spans
        ]
        body = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "run": self.run,
            "rank": self.rank,
            "world_size": self.world_size,
            "clock_offset_ns": self.clock_offset_ns,
            "num_dropped": self.num_dropped,
            "digest": _digest(body),
        }
        replace_file(path, json.dumps(header).encode() + b"\n" + body)
        if self.rank == 0:
            for number, leftover in _files(folder).items():
                if number >= self.world_size:
                    leftover.unlink()
        return path


def load(folder: Path) -> tuple[RankTrace, ...]:
    """Reads the traces of all ranks, on one clock. Raises DataError if one is missing, damaged or from another run."""
    files = _files(folder)
    if not files:
        raise DataError(
            f"{folder} has no trace: there is no {_path(folder, 0)}. "
            "Train with --pipeline.advanced.trace-steps N, which records the last N steps."
            if folder.is_dir()
            else f"there is no folder {folder}; give the folder of a run."
        )
    traces = [_read(path, rank) for rank, path in files.items()]
    first = traces[0]
    for trace in traces[1:]:
        if (trace.run, trace.world_size) != (first.run, first.world_size):
            raise DataError(
                f"{folder / 'trace'} mixes two runs: rank {first.rank} belongs to run '{first.run}' on {first.world_size} ranks, "
                f"rank {trace.rank} to run '{trace.run}' on {trace.world_size}. Times of different runs cannot "
                "be compared: delete the folder and record again."
            )
    if missing := sorted(set(range(first.world_size)) - files.keys()):
        raise DataError(
            f"{_path(folder, missing[0])} is missing; the run had {first.world_size} ranks. The step is as slow as its "
            "slowest rank, so the report needs all of them: copy the file here, or record again."
        )
    return tuple(traces)


def _path(folder: Path, rank: int) -> Path:
    return folder / "trace" / f"rank-{rank:03d}.jsonl"


def _files(folder: Path) -> dict[int, Path]:
    matches = ((re.fullmatch(r"rank-(\d{3,})\.jsonl", path.name), path) for path in (folder / "trace").glob("rank-*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _read(path: Path, rank: int) -> RankTrace:
    """One rank's trace, with its clock offset added."""
    first, _, body = path.read_bytes().partition(b"\n")
    header = _json(path, 1, first)
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        _refuse(path, f"line 1 is not a trace header: {first[:80]!r}")
    if header.get("version") != _VERSION:
        raise DataError(
            f"{path} has trace format version {header.get('version')}; this nestpipe reads version {_VERSION}."
        )
    if header.get("digest") != _digest(body):
        _refuse(path, "its spans do not match the digest in the header")
    try:
        offset = int(header["clock_offset_ns"])
        spans = tuple(_span(line, offset) for line in map(json.loads, body.splitlines()))
        trace = RankTrace(
            str(header["run"]),
            int(header["rank"]),
            int(header["world_size"]),
            spans,
            {str(stream): int(number) for stream, number in header["num_dropped"].items()},
            offset,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _refuse(path, f"{type(error).__name__}: {error}")
    if trace.rank != rank:
        _refuse(path, f"it was written by rank {trace.rank}")
    for number, problem in _problems(trace.spans):
        _refuse(path, f"line {number + 2} {problem}")
    return trace


def _json(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        _refuse(path, f"line {number} is not JSON: {line[:80]!r}")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise DataError(f"{path} is damaged: {reason}. Record again; the run itself is not affected.")


def _span(line: Sequence[Any], offset: int) -> Span:
    stream, kind, *numbers, waits = line
    kind = kind.replace("unshared ", "chunk ")  # as older traces call a chunk of rows that batches do not share
    batch, micro_batch, ready, begin, end, num_bytes, num_rows = map(int, numbers)
    times = (ready + offset, begin + offset, end + offset)
    shifted = tuple(RecordedWait(str(name), int(first) + offset, int(last) + offset) for name, first, last in waits)
    return Span(stream, kind, batch, micro_batch, *times, num_bytes, num_rows, shifted)


def _problems(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """Spans that no stream can have executed: (index, problem)."""
    problems, before = [], None
    for number, span in enumerate(spans):
        bounds = [bound for wait in span.waits for bound in (wait.begin_ns, wait.end_ns)]
        is_known = span.stream in STREAMS and span.kind in _KIND_SET and all(one.name in WAITS for one in span.waits)
        if not is_known:
            problems.append((number, f"has an unknown stream, kind or wait: {span}"))
        elif [span.ready_ns, span.begin_ns, span.end_ns] != sorted((span.ready_ns, span.begin_ns, span.end_ns)):
            problems.append((number, f"ends before it begins: {span}"))
        elif [span.ready_ns, *bounds, span.end_ns] != sorted((span.ready_ns, *bounds, span.end_ns)):
            problems.append((number, f"waits outside itself, or twice at once: {span}"))
        elif span.stream == "compute":
            if before and span.ready_ns < before.end_ns:
                problems.append((number, f"begins before the compute stream has ended {before}: {span}"))
            before = span
    return problems


def stage_of(kind: str) -> str:
    """The stage that a kind of event is all or a chunk of."""
    return kind.removeprefix("chunk ")
