"""Records what each stream of a rank executed and when, at the cost of reading a clock.

Recording takes no lock: the spans of a stream are appended only by the thread that runs it. A full stream drops its oldest
spans and counts them. `trace_file.py` stores the spans.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.profiling.trace_file import KINDS, STREAMS, RankTrace, RecordedWait, Span

if TYPE_CHECKING:
    from nestpipe.distributed.process_group import Channel

now = time.monotonic_ns

_KIND_SET = frozenset(KINDS)
_Wait = tuple[str, int, int]  # name, begin, end
_EXCHANGES_OF_ROWS = frozenset(("ids", "rows", "gradients"))
_WAIT_OF_EXCHANGE = {
    **dict.fromkeys(("counts", "ids", "last uses", "shared", "sizes of groups", "ids of groups"), "keys"),
    **{"rows": "rows", "gradients": "grads", "sums": "grads", "flags": "flag", "sum": "dense", "norm": "dense"},
}
_NOTHING = (0, 0)  # bytes and rows
_MAX_BATCHES_AHEAD = 16  # events of a stream may be out of order by fewer batches: more than any pipeline is deep
_NO_WAIT: AbstractContextManager[None] = nullcontext()


class Recorder:
    """Collects the spans of one rank.

        runner.observe = recorder.observer(first, channels=channels)    # every event with its times, and what it sends

    Without a runner: read `ready_ns`, `begin_ns` and `end_ns` with `now` and call `add` in the thread that ran the event.
    `wait` and `count` are called inside the event. If `on` is False, skip the clock.
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
        """Keeps the last `capacity` spans of each stream."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a recorder keeps at least one span per stream")
        self.on = on
        self._facts = RankTrace(run, rank, world_size, (), {}, clock_offset_ns)
        self._tracks = {stream: _Track(capacity) for stream in STREAMS}
        self._event = _Event()

    @staticmethod
    def off() -> Recorder:
        """A recorder that records nothing."""
        return Recorder(capacity=1, on=False)

    def add(
        self, stream: str, kind: str, batch: int, micro_batch: int, ready_ns: int, begin_ns: int, end_ns: int
    ) -> None:
        """Records one event, with the waits and counts of this thread since `ready_ns`."""
        if not self.on:
            return
        if kind not in _KIND_SET:
            raise ValueError(f"unknown kind of event '{kind}'; known: {', '.join(KINDS)}")
        track, (pending, sent) = self._tracks[stream], self._event.own
        waits: tuple[_Wait, ...] = ()
        if pending:
            waits = tuple(pending if pending[0][1] >= ready_ns else [wait for wait in pending if wait[1] >= ready_ns])
            pending.clear()
        track.num_added += 1
        track.spans.append((kind, batch, micro_batch, ready_ns, begin_ns, end_ns, *sent, waits))
        sent[:] = _NOTHING

    def observer(
        self, first: int, start: int = 0, *, channels: Sequence[Channel] = ()
    ) -> Callable[[str, tuple[str, int, int], int, int, int], None] | None:
        """The callback of a runner, called with stream, event and times; its batches count from `first`. None if this is off.

        Batches before `start` are skipped, and `channels` are watched only from there: recording costs about 1 % of a short
        step.
        """
        if not self.on:
            return None
        self._event.own[1][:] = _NOTHING  # sent outside any event
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
            elif begun:  # another stream has begun; this one is at an earlier batch
                pending, sent = self._event.own
                pending.clear()
                sent[:] = _NOTHING

        return observe

    def wait(self, name: str) -> AbstractContextManager[None]:
        """Context manager: the time in which this thread's event is blocked on messages."""
        return _Waiting(self._event.own[0], name) if self.on else _NO_WAIT

    def count(self, num_bytes: int, num_rows: int = 0) -> None:
        """Adds to what this thread's event sends: bytes to other ranks, and rows to all ranks or unique keys requested."""
        if self.on:
            sent = self._event.own[1]
            sent[0] += num_bytes
            sent[1] += num_rows

    def launched(self, name: str, num_bytes: int, num_rows: int) -> None:
        """Counts an exchange (`Channel.watch`)."""
        self.count(num_bytes, num_rows if name.partition("/")[0] in _EXCHANGES_OF_ROWS else 0)

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Context manager: a wait for an exchange (`Channel.watch`)."""
        awaited = _WAIT_OF_EXCHANGE.get(name.partition("/")[0])
        return self.wait(awaited) if awaited else _NO_WAIT

    @property
    def last_batch(self) -> int:
        """The batch of the latest event on the compute stream; -1 if there is none."""
        spans = self._tracks["compute"].spans
        return int(spans[-1][1]) if spans else -1

    def snapshot(self, first: int = 0) -> RankTrace:
        """Everything recorded so far, from batch `first` on; no stream may be running."""
        spans = tuple(
            Span(*(stream, *fields, tuple(RecordedWait(*wait) for wait in waits)))
            for stream, track in self._tracks.items()
            for *fields, waits in track.since(first)
        )
        num_dropped = {
            stream: track.num_added - len(track.spans)
            for stream, track in self._tracks.items()
            if track.num_added > len(track.spans)
        }
        return replace(self._facts, spans=spans, num_dropped=num_dropped)

    def batch_ends(self, first: int = 0) -> list[int]:
        """The time at which the compute stream ended each batch, from `first` on; no stream may be running."""
        return list({batch: end for _, batch, _, _, _, end, *_ in self._tracks["compute"].since(first)}.values())

    def save(self, folder: Path) -> Path:
        """Writes RUN/trace/rank-NNN.jsonl atomically; returns its path."""
        return self.snapshot().save(folder)


class _Track:
    """The last spans of a stream, as plain tuples."""

    __slots__ = ("num_added", "spans")

    def __init__(self, capacity: int):
        self.spans: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self.num_added = 0

    def since(self, first: int) -> list[tuple[Any, ...]]:
        """Spans of batches from `first` on, in order. Reads backwards and stops where no such batch can follow."""
        recent = takewhile(lambda span: span[1] >= first - _MAX_BATCHES_AHEAD, reversed(self.spans))
        return [span for span in recent if span[1] >= first][::-1]


class _Event(threading.local):
    """Waits and counts of the event that a thread is executing."""

    def __init__(self) -> None:
        self.own: tuple[list[_Wait], list[int]] = ([], [0, 0])  # one attribute: thread-local access is slow


class _Waiting:
    __slots__ = ("_begin_ns", "_name", "_waits")

    def __init__(self, waits: list[_Wait], name: str):
        self._waits, self._name, self._begin_ns = waits, name, 0

    def __enter__(self) -> None:
        self._begin_ns = now()

    def __exit__(self, *_: object) -> None:
        self._waits.append((self._name, self._begin_ns, now()))
