"""What every lane of every rank did, and when: recorded at the cost of a clock, kept in the run's folder.

    RUN/trace/rank-000.jsonl      a header, then one span per line

A span is one event that a lane executed:

    ready_ns          begin_ns                        end_ns
       |  predecessors   |  work   [ wait for rows ]  work  |

`overlap.py` divides steps, `perfetto.py` and `timeline.py` draw. Times are those of CLOCK_MONOTONIC, which all ranks of a
machine share. Between machines it differs by an offset, which the header keeps (0 unless somebody estimated it) and
which loading adds, so that all ranks stand on one clock as well as the estimate is.

Recording takes no lock: a lane's spans are appended by the one thread that runs it. A full lane drops its oldest spans
and counts them.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nestpipe.atomic_files import replace_file
from nestpipe.errors import DataError

if TYPE_CHECKING:
    from nestpipe.distributed.process_group import Channel

STREAMS = ("read", "keys", "fetch", "rows", "compute", "table", "groups", "dense")
KINDS = (
    *("read", "keys", "retrieve", "post", "rows", "compute", "grads", "collect", "merge"),
    *("flag", "dense sum", "norm", "dense step", "update", "write"),
    *("arrive", "unshared rows", "unshared grads", "unshared collect", "unshared update"),
    *("chunk rows", "chunk grads", "chunk collect", "chunk update"),
)
# One for each part, or for each slice but the first; the others are of a whole batch.
MICRO_BATCH_KINDS = frozenset(("rows", "compute", "grads", "collect", "merge", *KINDS[-4:]))
WAITS = ("keys", "rows", "grads", "flag", "dense")  # the messages that somebody may wait for inside an event

now = time.monotonic_ns

_FORMAT, _VERSION = "nestpipe trace", 2
_KIND_SET = frozenset(KINDS)
_Marks = tuple[str, int, int]  # a wait's name, begin and end
_EXCHANGES_OF_ROWS = frozenset(("ids", "rows", "gradients"))
_WAIT_OF_EXCHANGE = {
    **dict.fromkeys(("counts", "ids", "last uses", "shared", "sizes of groups", "ids of groups"), "keys"),
    **{"rows": "rows", "gradients": "grads", "sums": "grads", "flags": "flag", "sum": "dense", "norm": "dense"},
}
_NOTHING = (0, 0)  # bytes and rows
_MOST_AHEAD = 16  # batches by which events of a lane may be out of order: more than any pipeline is deep
_NO_WAIT: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class RecordedWait:
    """Time inside an event in which its lane only waited for messages."""

    name: str  # one of WAITS
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """One event on a lane: of which batch and part (from 0, and 0 where a kind has no parts), when, and what it sent."""

    stream: str
    kind: str
    batch: int
    micro_batch: int
    ready_ns: int  # the lane came to the event
    begin_ns: int  # its predecessors were done
    end_ns: int  # it was done; taken before its successors are told
    num_bytes: int = 0  # sent to other ranks
    num_rows: int = 0  # rows or gradients sent to all ranks, this one included; for "keys" the unique keys asked for
    waits: tuple[RecordedWait, ...] = ()  # in order, apart from each other


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank recorded; the spans of a lane in the order in which it executed them."""

    run: str  # a word that the ranks of this run share, and no other run
    rank: int
    world_size: int
    spans: tuple[Span, ...]
    num_dropped: dict[str, int]  # by lane; absent means none
    clock_offset_ns: int = 0  # what to add for the clock of rank 0

    def stream(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.stream == name]

    def save(self, folder: Path) -> Path:
        """Writes the rank's file in the folder of a run; rank 0 removes those of ranks that are no more."""
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


class Recorder:
    """Takes the spans of one rank.

        runner.observe = recorder.observer(first, channels=state.lanes)    # every event, with its times, and what lanes send

    Without a runner: take `ready_ns`, `begin_ns` and `end_ns` with `now`, and call `add` in the thread that ran the event,
    after `wait` and `count` inside it. Look at `on` first; what is off needs no clock.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        capacity: int,
        run: str = "",
        clock_offset_ns: int = 0,
        on: bool = True,
    ):
        """Keeps the last `capacity` spans of each lane."""
        if capacity < 1:
            raise ValueError(f"a recorder needs room for at least one span per lane, got {capacity}")
        self.on = on
        self._facts = RankTrace(run, rank, world_size, (), {}, clock_offset_ns)
        self._tracks = {stream: _Track(capacity) for stream in STREAMS}
        self._event = _Event()

    @staticmethod
    def off() -> Recorder:
        """A recorder that takes nothing."""
        return Recorder(capacity=1, on=False)

    def add(
        self, stream: str, kind: str, batch: int, micro_batch: int, ready_ns: int, begin_ns: int, end_ns: int
    ) -> None:
        """One event is done; takes along what this thread waited for and counted since `ready_ns`."""
        if not self.on:
            return
        if kind not in _KIND_SET:
            raise ValueError(f"there is no kind of event '{kind}'; there are: {', '.join(KINDS)}")
        track, (marks, sent) = self._tracks[stream], self._event.own
        waits: tuple[_Marks, ...] = ()
        if marks:
            waits = tuple(marks if marks[0][1] >= ready_ns else [mark for mark in marks if mark[1] >= ready_ns])
            marks.clear()
        track.num_added += 1
        track.spans.append((kind, batch, micro_batch, ready_ns, begin_ns, end_ns, *sent, waits))
        sent[:] = _NOTHING

    def observer(
        self, first: int, start: int = 0, *, channels: Sequence[Channel] = ()
    ) -> Callable[[str, tuple[str, int, int], int, int, int], None] | None:
        """What a runner calls with lane, event and times; its batches are counted from `first`. None if this is off.

        Batches before `start` are left out, and `lanes` are watched from then on: recording takes about one hundredth of a
        short step.
        """
        if not self.on:
            return None
        self._event.own[1][:] = _NOTHING  # what this thread sent before is of no event
        begun = first >= start
        for one in channels:
            one.watch = self if begun else None

        def observe(stream: str, event: tuple[str, int, int], ready_ns: int, begin_ns: int, end_ns: int) -> None:
            nonlocal begun
            kind, batch, micro_batch = event
            if first + batch >= start:
                if not begun:
                    begun = True
                    for one in channels:
                        one.watch = self
                self.add(stream, kind, first + batch, micro_batch, ready_ns, begin_ns, end_ns)
            elif begun:  # by another lane, while this one was busy with an earlier batch
                marks, sent = self._event.own
                marks.clear()
                sent[:] = _NOTHING

        return observe

    def wait(self, name: str) -> AbstractContextManager[None]:
        """Marks the time in which this thread waits for messages, inside an event."""
        return _Waiting(self._event.own[0], name) if self.on else _NO_WAIT

    def count(self, num_bytes: int, num_rows: int = 0) -> None:
        """Adds what this thread's event sends: bytes to other ranks, rows to all ranks or unique keys asked for."""
        if self.on:
            sent = self._event.own[1]
            sent[0] += num_bytes
            sent[1] += num_rows

    def launched(self, name: str, num_bytes: int, num_rows: int) -> None:
        """Counts an exchange; as the `watch` of a message lane."""
        self.count(num_bytes, num_rows if name.partition("/")[0] in _EXCHANGES_OF_ROWS else 0)

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Marks a wait for an exchange; as the `watch` of a message lane."""
        awaited = _WAIT_OF_EXCHANGE.get(name.partition("/")[0])
        return self.wait(awaited) if awaited else _NO_WAIT

    @property
    def last_batch(self) -> int:
        """That of the latest event on the compute lane; -1 if there is none."""
        spans = self._tracks["compute"].spans
        return int(spans[-1][1]) if spans else -1

    def snapshot(self, first: int = 0) -> RankTrace:
        """What was recorded so far, of batches from `first` on; no lane may be adding."""
        spans = tuple(
            Span(
                stream,
                kind,
                batch,
                micro_batch,
                ready,
                begin,
                end,
                num_bytes,
                num_rows,
                tuple(RecordedWait(*wait) for wait in waits),
            )
            for stream, track in self._tracks.items()
            for kind, batch, micro_batch, ready, begin, end, num_bytes, num_rows, waits in track.since(first)
        )
        num_dropped = {
            stream: track.num_added - len(track.spans)
            for stream, track in self._tracks.items()
            if track.num_added > len(track.spans)
        }
        return replace(self._facts, spans=spans, num_dropped=num_dropped)

    def batch_ends(self, first: int = 0) -> list[int]:
        """When the compute lane was done with each batch, from `first` on; no lane may be adding."""
        return list({batch: end for _, batch, _, _, _, end, *_ in self._tracks["compute"].since(first)}.values())

    def save(self, folder: Path) -> Path:
        """Writes RUN/trace/rank-NNN.jsonl, whole or not at all; returns its path."""
        return self.snapshot().save(folder)


class _Track:
    """The last spans of a lane, as plain tuples."""

    __slots__ = ("num_added", "spans")

    def __init__(self, capacity: int):
        self.spans: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self.num_added = 0

    def since(self, first: int) -> list[tuple[Any, ...]]:
        """Those of batches from `first` on, in order; looks no further back than it must: a lane is never many batches ahead."""
        late = takewhile(lambda span: span[1] >= first - _MOST_AHEAD, reversed(self.spans))
        return [span for span in late if span[1] >= first][::-1]


class _Event(threading.local):
    """What a thread's present event has waited for and sent."""

    def __init__(self) -> None:
        self.own: tuple[list[_Marks], list[int]] = ([], [0, 0])  # one attribute: each look at a thread's own takes time


class _Waiting:
    __slots__ = ("_begin_ns", "_name", "_waits")

    def __init__(self, waits: list[_Marks], name: str):
        self._waits, self._name, self._begin_ns = waits, name, 0

    def __enter__(self) -> None:
        self._begin_ns = now()

    def __exit__(self, *_: object) -> None:
        self._waits.append((self._name, self._begin_ns, now()))


def load(folder: Path) -> tuple[RankTrace, ...]:
    """The traces of all ranks of a run, on one clock; raises DataError if one is missing, damaged or of another run."""
    files = _files(folder)
    if not files:
        raise DataError(
            f"{folder} has no trace: there is no {_path(folder, 0)}. "
            "Train with --pipeline.trace-steps N, which records the last N steps."
            if folder.is_dir()
            else f"there is no folder {folder}; name the folder of a run."
        )
    traces = [_read(path, rank) for rank, path in files.items()]
    first = traces[0]
    for trace in traces[1:]:
        if (trace.run, trace.world_size) != (first.run, first.world_size):
            raise DataError(
                f"{folder / 'trace'} mixes two runs: rank {first.rank} is of run '{first.run}' on {first.world_size} ranks, "
                f"rank {trace.rank} of run '{trace.run}' on {trace.world_size}. Times of different runs say nothing "
                "together: remove the folder and record again."
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
    found = ((re.fullmatch(r"rank-(\d{3,})\.jsonl", path.name), path) for path in (folder / "trace").glob("rank-*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _read(path: Path, rank: int) -> RankTrace:
    """One rank's trace with the offset of its clock applied."""
    first, _, body = path.read_bytes().partition(b"\n")
    header = _json(path, 1, first)
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        _refuse(path, f"line 1 is no header of a trace: {first[:80]!r}")
    if header.get("version") != _VERSION:
        raise DataError(f"{path} is of version {header.get('version')}, this nestpipe reads version {_VERSION}.")
    if header.get("digest") != _digest(body):
        _refuse(path, "its spans are not those that were written (the digest differs)")
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
    raise DataError(f"{path} is damaged: {reason}. Record again; the run itself is not touched by it.")


def _span(line: Sequence[Any], offset: int) -> Span:
    stream, kind, *numbers, waits = line
    batch, micro_batch, ready, begin, end, num_bytes, num_rows = map(int, numbers)
    shifted = tuple(RecordedWait(str(name), int(first) + offset, int(last) + offset) for name, first, last in waits)
    return Span(
        stream,
        kind,
        batch,
        micro_batch,
        ready + offset,
        begin + offset,
        end + offset,
        num_bytes,
        num_rows,
        waits=shifted,
    )


def _problems(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """What no lane can have done, with the number of the span."""
    found, before = [], None
    for number, span in enumerate(spans):
        bounds = [bound for wait in span.waits for bound in (wait.begin_ns, wait.end_ns)]
        if (
            span.stream not in STREAMS
            or span.kind not in _KIND_SET
            or any(wait.name not in WAITS for wait in span.waits)
        ):
            found.append((number, f"has an unknown lane, kind or wait: {span}"))
        elif [span.ready_ns, span.begin_ns, span.end_ns] != sorted((span.ready_ns, span.begin_ns, span.end_ns)):
            found.append((number, f"ends before it begins: {span}"))
        elif [span.ready_ns, *bounds, span.end_ns] != sorted((span.ready_ns, *bounds, span.end_ns)):
            found.append((number, f"waits outside itself, or twice at once: {span}"))
        elif span.stream == "compute":
            if before and span.ready_ns < before.end_ns:
                found.append((number, f"begins while the compute lane is still busy with {before}: {span}"))
            before = span
    return found


def stage_of(kind: str) -> str:
    """The stage of which a kind of event is all, a half or a slice."""
    return kind.removeprefix("unshared ").removeprefix("chunk ")
