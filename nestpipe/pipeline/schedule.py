"""Schedules: when and on which stream each stage runs. Pure data, printed, checked and drawn without running anything.

Three things decide when an event runs:

    needs(event)       dependencies, here and, for messages, on every rank (dependencies.py). They alone decide correctness.
    program(stream)    the order in which a stream, one thread, takes its events.
    yields_to(event)   events that go first although this one does not depend on them: cores and link are for what other
                       ranks wait for.

Programs and yields only restrict the order further. They change speed, never results.

A mode places stages on streams, with a depth (how many batches ahead rows are retrieved) and an
inner order:

    mode           depth   streams next to compute          hidden behind compute
    serial         0       -                                nothing: the plain order on one stream
    dual-buffer    d       read, keys, fetch, dense         reading, id exchange and retrieval of the next d batches
    frozen-window  0       read, rows, table, dense         row and gradient messages between micro-batches of one batch
    nested         d       read, keys, fetch, rows, dense   both (with stale rows, groups or shared chunks also `table`)

Stream `dense` sums the dense gradients by bucket while earlier layers of the last micro-batch are
in backward (dense_params.py). Here `dense sum` needs that whole compute; the runner lets it start
as soon as its first bucket is ready, and it waits for each of the others.

`chunks` divides the first rows, the last gradients and the update of a batch
(embedding/chunked_exchange.py). The plain stages handle the first chunk; `chunk rows`, `chunk
grads`, `chunk collect`, `chunk merge` and `chunk update` handle the others, counted from 0.

    2 .. 8    by bucket: while one chunk of the last gradients is in flight, the previous one is updated and its rows are
              sent to the next batch
    shared    only rows that neighbouring batches share make them wait for each other: other rows of the next batch are
              sent, and other gradients are applied on stream `table`, while a batch computes. `arrive` marks the arrival
              of the shared rows

With `groups` (embedding/replica_groups.py) replicas exchange their sums after each micro-batch, or
chunk of the last one, on stream `groups`: collect → merge → update.

Programs depend on the mode, the number of micro-batches and the depth, never on sizes. So every
rank runs the same program; a batch without samples and a micro-batch without ids have the same
events as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal, cast

from nestpipe.embedding.config import Chunking
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.dependencies import (
    CHUNK_KINDS,
    MESSAGES,
    MICRO_BATCH_KINDS,
    READ_AHEAD,
    Event,
    Kind,
    dependencies,
    shifted,
)

__all__ = [
    "CHUNK_KINDS",
    "MAIN",
    "MESSAGES",
    "MICRO_BATCH_KINDS",
    "MODES",
    "Event",
    "Kind",
    "Mode",
    "Schedule",
    "schedule_for",
]

Mode = Literal["serial", "dual-buffer", "frozen-window", "nested"]
MODES: tuple[Mode, ...] = ("serial", "dual-buffer", "frozen-window", "nested")

MAIN = "compute"  # the stream of the calling thread

_STREAM_OF: dict[Kind, str] = {
    "read": "read", "keys": "keys", "retrieve": "fetch", "write": "fetch", "post": "rows", "rows": "rows", "grads": "rows",
    "collect": "table", "merge": "groups", "flag": "table", "update": "table", "dense sum": "dense", "norm": "dense",
    "chunk rows": "rows", "chunk grads": "rows", "chunk collect": "table", "chunk merge": "groups", "chunk update": "table",
}  # fmt: skip
# Stages between the last gradients of a batch and the first rows of the next.
_CRITICAL: frozenset[Kind] = frozenset(("flag", "collect", "update"))
_CRITICAL_CHUNKS: frozenset[Kind] = frozenset(("chunk collect", "chunk update"))
_OUTER = ("read", "keys", "fetch")
_STREAMS: dict[Mode, tuple[str, ...]] = {  # next to the main stream, which runs everything else
    "serial": (),
    "dual-buffer": (*_OUTER, "dense"),
    "frozen-window": ("read", "rows", "table", "dense"),
    "nested": (*_OUTER, "rows", "table", "dense"),
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """The events of a run in one mode."""

    mode: Mode
    num_micro_batches: int
    depth: int = 1  # batches whose rows are prefetched; 0 in modes without look-ahead
    clip_rows: bool = False  # every update needs the norm of all row gradients
    stale: bool = False  # rows of a batch are sent before the previous update, always; not the sequential result
    groups: bool = False  # replicas exchange their sums before the update
    chunks: Chunking = 1  # of the last gradients, the update and the next first rows

    def __post_init__(self) -> None:
        if self.stale and self.mode != "nested":
            raise ValueError(f"mode '{self.mode}' has no stale rows; only nested has")
        if self.num_chunks > 1 and (self.mode != "nested" or self.clip_rows or self.stale):
            raise ValueError("only nested has chunks, and only if no norm of rows is needed and no rows are stale")
        if self.looks_ahead != (self.depth > 0):
            raise ValueError(f"mode '{self.mode}' {'needs' if self.looks_ahead else 'has no'} depth, got {self.depth}")
        if not 1 <= self.num_micro_batches <= 256:
            raise ValueError(f"{self.num_micro_batches} micro-batches; there must be 1 to 256")

    @staticmethod
    def of(
        mode: Mode,
        num_micro_batches: int,
        *,
        depth: int = 1,
        clip_rows: bool = False,
        stale: bool = False,
        groups: bool = False,
        chunks: Chunking = 1,
    ) -> Schedule:
        """A schedule; `depth` is ignored in modes without look-ahead."""
        depth = depth if "keys" in _STREAMS[mode] else 0
        return Schedule(mode, num_micro_batches, depth, clip_rows, stale, groups, chunks)

    @property
    def looks_ahead(self) -> bool:
        return "keys" in _STREAMS[self.mode]

    @property
    def num_chunks(self) -> int:
        return 2 if self.chunks == "shared" else self.chunks

    @property
    def num_events(self) -> int:
        """Events of one batch."""
        return sum(map(len, self._all_needs.values()))

    @property
    def max_events(self) -> int:
        """Events of one batch on the busiest stream."""
        kinds = {kind: len(micro_batches) for kind, micro_batches in self._all_needs.items()}
        on_stream = [sum(n for kind, n in kinds.items() if self.stream_of(kind) == stream) for stream in self.streams]
        return max(on_stream)

    @property
    def streams(self) -> tuple[str, ...]:
        """The main stream and those with their own thread."""
        uses_table = self.chunks == "shared" or not self._rows_updates
        own = [stream for stream in _STREAMS[self.mode] if stream != "table" or uses_table]
        return (MAIN, *own, *(["groups"] if self.groups and "rows" in own else []))

    def stream_of(self, kind: Kind) -> str:
        stream = _STREAM_OF.get(kind, MAIN)
        if self._rows_updates and (kind in _CRITICAL or (kind in _CRITICAL_CHUNKS and self.chunks != "shared")):
            stream = "rows"
        elif self.groups and kind in ("collect", "chunk collect"):  # an update does not wait for the next chunk
            stream = "groups"
        return stream if stream in self.streams else MAIN

    @property
    def _rows_updates(self) -> bool:
        """Whether stream `rows` also collects and updates: all ranks wait meanwhile, and a thread switch would add to it."""
        return self.mode == "nested" and not self.stale and not self.groups

    def needs(self, event: Event) -> list[Event]:
        """The events that must be done before; messages on every rank."""
        return shifted(self._all_needs[event.kind][event.micro_batch], event.batch)

    def yields_to(self, event: Event) -> list[Event]:
        """Events that go first although this one does not depend on them.

        After an update all ranks wait for the first rows of the next batch. Look-ahead work starts when these are sent, so
        that it does not take their cores; if only shared rows are waited for, when they have arrived, so that it does not
        take their link.
        """
        if event.kind == "rows" and event.micro_batch == 0:  # the critical message yields to nothing
            return []
        return shifted(self._all_yields.get(event.kind, []), event.batch)

    def waits_for(self, event: Event) -> list[Event]:
        """What its stream waits for before the event: dependencies and yields."""
        return self.needs(event) + self.yields_to(event)

    @property
    def _all_needs(self) -> dict[Kind, list[list[Event]]]:
        return dependencies(self)

    @property
    def _all_yields(self) -> dict[Kind, list[Event]]:
        if not self.looks_ahead:
            return {}
        last, here, read = self.num_micro_batches - 1, -self.depth - 1, -self.depth - 1 - READ_AHEAD
        if self.chunks != "shared":  # a core is free while the last gradients are in flight
            return {
                "read": [self._last_chunk("grads", read, last)],
                "keys": [self._last_chunk("rows", here), Event("read", 1)],
                "write": [self._last_chunk("rows", 1)],
            }
        return {
            "read": [Event("compute", read + 1)],
            "keys": [Event("arrive", here)],
            "write": [Event("arrive", 1)],
            "rows": [Event("arrive", 0)],
            "chunk grads": [Event("arrive", 1)],
            "dense step": [Event("update", 0)],
        }

    def _last_chunk(self, kind: Literal["rows", "grads"], t: int, micro_batch: int = 0) -> Event:
        """The last of the messages with the first rows, or with the last gradients, of batch t."""
        more: Kind = "chunk rows" if kind == "rows" else "chunk grads"
        return Event(more, t, self.num_chunks - 2) if self.num_chunks > 1 else Event(kind, t, micro_batch)

    def program(self, stream: str, num_batches: Callable[[], int | None]) -> Iterator[Event]:
        """The events of a stream in order; endless until the number of batches is known."""
        own = [
            [event for event in self._window(t) if self.stream_of(event.kind) == stream] for t in (-2, -1, 0)
        ]  # they differ during pipeline warm-up
        for t in count(-(self.depth + 1 + READ_AHEAD)):
            window = min(max(t, -2), 0)
            for event in shifted(own[window + 2], t - window):
                total = num_batches()
                if total is None or event.batch < total:
                    yield event
            total = num_batches()
            if total is not None and t >= total:  # the last window contains the write of the last batch
                return

    def events(self, num_batches: int) -> dict[str, list[Event]]:
        """The programs of all streams for a known number of batches."""
        return {stream: list(self.program(stream, lambda: num_batches)) for stream in self.streams}

    def describe(self, num_batches: int) -> str:
        """The programs of all streams, one line each."""
        programs = self.events(num_batches)
        width = max(map(len, programs))
        return "\n".join(f"{stream:<{width}}  {' · '.join(map(str, program))}" for stream, program in programs.items())

    def _window(self, t: int) -> Iterator[Event]:
        """All events while batch t computes; each stream takes its own, in this order."""
        if not self.looks_ahead:
            reads = t + READ_AHEAD if "read" in self.streams else t
            yield from (Event("read", reads), Event("keys", t), Event("retrieve", t))
            yield from self._inner(t, post=t)
            yield Event("write", t)
            return
        yield from (Event("read", t + self.depth + 1 + READ_AHEAD), Event("keys", t + self.depth + 1))
        yield from (Event("write", t - 1), Event("retrieve", t + self.depth))
        yield from self._inner(t, post=t + 1)

    def _inner(self, t: int, *, post: int) -> Iterator[Event]:
        """Batch t from its first rows to its update. `post`: the batch whose receives are posted meanwhile."""
        last = self.num_micro_batches - 1
        if self.stream_of("rows") == MAIN:  # one micro-batch after the other
            yield Event("post", t)
            for i in range(self.num_micro_batches):
                yield from (Event("rows", t, i), Event("compute", t, i), Event("grads", t, i))
                yield from self._collected(t, i)
            yield Event("flag", t)
        elif self.stale:  # rows of the next batch and gradients of this one are in flight while a micro-batch computes
            yield Event("post", post)
            for i in range(self.num_micro_batches):
                yield Event("rows", post, i)
                if i > 0:
                    yield from (Event("grads", t, i - 1), *self._collected(t, i - 1))
                yield Event("compute", t, i)
            yield from (Event("grads", t, last), Event("flag", t), *self._collected(t, last))
        else:
            yield from self._overlapped(t, post)
        yield Event("dense sum", t)
        if self.clip_rows:
            yield Event("norm", t)
        yield from (Event("dense step", t), Event("update", t))

    def _overlapped(self, t: int, post: int) -> Iterator[Event]:
        """Rows of the next micro-batch and gradients of the previous one are in flight while a micro-batch computes."""
        last = self.num_micro_batches - 1
        later = 2 if self._rows_updates else 1  # a stream that also sends must not wait for what it has just sent
        shared, more = self.chunks == "shared", range(self.num_chunks - 1)
        if t in (post, -1):
            yield from self._posted(post)
        yield Event("rows", t, 0)
        for n in () if shared else more:
            yield from (*self._chunk_updated(t - 1, n), Event("chunk rows", t, n))
        for i in range(self.num_micro_batches):
            if i < last:
                yield Event("rows", t, i + 1)
            if i == 0 and shared:
                yield from (Event("arrive", t), Event("chunk grads", t - 1), *self._chunk_updated(t - 1, 0))
            if i > 0:
                yield Event("grads", t, i - 1)
            if i >= later:
                yield from self._collected(t, i - later)
            if i == last and post > t >= 0 and shared:  # unshared rows are sent early
                yield from self._posted(post)
            yield Event("compute", t, i)
        yield Event("grads", t, last)
        if not shared:
            yield from (Event("chunk grads", t, n) for n in more)
            if post > t >= 0:  # a core is free while the last gradients are in flight
                yield from self._posted(post)
        yield Event("flag", t)
        for i in range(max(self.num_micro_batches - later, 0), self.num_micro_batches):
            yield from self._collected(t, i)

    def _collected(self, t: int, micro_batch: int) -> Iterator[Event]:
        """Collects the gradients of a micro-batch and, with groups, those of the replicas."""
        yield Event("collect", t, micro_batch)
        if self.groups:
            yield Event("merge", t, micro_batch)

    def _chunk_updated(self, t: int, n: int) -> Iterator[Event]:
        """Collects the gradients of a further chunk and updates its rows."""
        yield Event("chunk collect", t, n)
        if self.groups:
            yield Event("chunk merge", t, n)
        yield Event("chunk update", t, n)

    def _posted(self, t: int) -> Iterator[Event]:
        """Posts the receives of a batch, and sends the rows that need no update."""
        yield Event("post", t)
        if self.chunks == "shared":
            yield Event("chunk rows", t)


def schedule_for(config: PipelineConfig, number: int, *, clip_rows: bool) -> Schedule:
    """The schedule from a batch to the next barrier. Stale rows are sent one batch earlier, so depth is one more."""
    open_or_sequential: dict[str, Mode] = {"auto": "serial", "sequential": "serial"}
    mode = open_or_sequential.get(config.mode) or cast(Mode, config.mode)
    stale = config.is_stale(number)
    # A norm over all rows needs all gradients before any update, so no chunk may be updated before others.
    is_divisible = not clip_rows and not stale
    return Schedule.of(
        mode,
        config.micro_batches or 1,
        depth=config.advanced.depth + stale,
        clip_rows=clip_rows,
        stale=stale,
        groups=config.groups > 1,
        chunks=config.advanced.chunks if is_divisible else 1,
    )
