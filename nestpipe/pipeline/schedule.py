"""When stages run: pure data, to be printed, checked and drawn without running anything.

An `Event` is one stage of one batch (and part) on one rank. Three things decide when it runs:

`needs(event)`      what must be done before, here and, for messages, on every rank. These are the true dependencies: any
                    order that respects them has the bits of the sequential step (docs/concepts/exactness.md).
`program(lane)`     the order in which a lane, one thread, takes its events.
`lets_pass(event)`  what goes first though the event does not need it: cores are for what other ranks wait for.

The last two lose freedom, never correctness.

A mode is a placement of stages on lanes, a depth (how many batches ahead rows are retrieved) and an inner order:

    mode           depth   lanes beside compute             what is hidden behind compute
    serial         0       -                                nothing: the plain order on one lane
    dual-buffer    d       read, keys, fetch                reading, key routing and retrieval of the next d batches
    frozen-window  0       read, rows, table                row and gradient messages of the parts of one batch
    nested         d       read, keys, fetch, rows, dense   both (stale or in groups it has a lane `table` too)

`split` sends the first rows and the last gradients of a batch in two messages each (embedding/chunked_exchange.py): only what
neighbouring batches share, the hot half, makes them wait for each other. The cold rows of the next batch leave and the cold
gradients of the last one are applied (on a lane of their own, table) while a batch computes. `arrive` says when hot rows are there.

`slices` cuts the same messages, and the update between them, by the buckets of each owner: while one slice of the last gradients
travels the one before is updated, and its rows are on their way to the next batch before the last slice has come. The first is
in the plain stages; `chunk rows`, `chunk grads`, `chunk collect` and `chunk update` have the others, counted from 0.

`groups` of ranks (embedding/replica_groups.py) exchange their sums after each part: collect → merge → update, on a lane of its own where
gradients have one.

Programs depend on mode, number of parts and depth, never on sizes, so every rank runs the same; a batch without samples and
a part without ids are events like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Literal, NamedTuple

from nestpipe.pipeline.config import PipelineConfig

Kind = Literal[
    "read", "keys", "retrieve", "post", "rows", "compute", "grads", "collect", "merge",
    "flag", "dense sum", "norm", "dense step", "update", "write",
    "arrive", "unshared rows", "unshared grads", "unshared collect", "unshared update",
    "chunk rows", "chunk grads", "chunk collect", "chunk update",
]  # fmt: skip
Mode = Literal["serial", "dual-buffer", "frozen-window", "nested"]
MODES: tuple[Mode, ...] = ("serial", "dual-buffer", "frozen-window", "nested")

# Stages that exchange messages: done means that every rank's share has been launched.
MESSAGES: frozenset[Kind] = frozenset(
    (
        "keys",
        "rows",
        "unshared rows",
        "chunk rows",
        "grads",
        "unshared grads",
        "chunk grads",
        "merge",
        "dense sum",
        "norm",
    )
)
CHUNK_KINDS: tuple[Kind, ...] = ("chunk rows", "chunk grads", "chunk collect", "chunk update")
MICRO_BATCH_KINDS: frozenset[Kind] = frozenset(("rows", "compute", "grads", "collect", "merge", *CHUNK_KINDS))
MAIN = "compute"  # the lane of the calling thread

_ALONE: dict[Kind, str] = {
    "read": "read", "keys": "keys", "retrieve": "fetch", "write": "fetch", "post": "rows", "rows": "rows", "grads": "rows",
    "collect": "table", "merge": "groups", "flag": "table", "update": "table", "dense sum": "dense", "norm": "dense",
    "unshared rows": "rows", "unshared grads": "rows", "unshared collect": "table", "unshared update": "table",
    **dict.fromkeys(CHUNK_KINDS, "rows"),
}  # fmt: skip
# Between the last gradients of a batch and the first rows of the next.
_BETWEEN: frozenset[Kind] = frozenset(("flag", "collect", "update"))
_OUTER = ("read", "keys", "fetch")
_STREAMS: dict[Mode, tuple[str, ...]] = {  # lanes of their own; everything else is on the main lane
    "serial": (),
    "dual-buffer": _OUTER,
    "frozen-window": ("read", "rows", "table"),
    "nested": (*_OUTER, "rows", "table", "dense"),
}
_READ_AHEAD = 2  # batches read beyond those whose ids are out


class Event(NamedTuple):
    """One stage of one batch, and of one part (or further slice) where it has several."""

    kind: Kind
    batch: int
    micro_batch: int = 0

    def __str__(self) -> str:
        micro_batch = f".{self.micro_batch}" if self.kind in MICRO_BATCH_KINDS else ""
        return f"{self.kind}({self.batch}{micro_batch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The events of a run in one mode."""

    mode: Mode
    num_micro_batches: int
    depth: int = 1  # batches whose rows are retrieved ahead; 0 in modes that do not look ahead
    clip_rows: bool = False  # the norm of row gradients is needed before any update
    stale: bool = (
        False  # rows of a batch leave before the update of the batch before, always: not exact, not sequential's bits
    )
    split: bool = False  # rows of the first part and gradients of the last in a hot and a cold message
    groups: bool = False  # of ranks: replicas exchange their sums before the update
    num_chunks: int = 1  # in which the last gradients, the update and the next first rows come

    def __post_init__(self) -> None:
        if self.stale and self.mode != "nested":
            raise ValueError(f"mode '{self.mode}' has no stale rows; only nested has")
        if self.split and (self.mode != "nested" or self.clip_rows or self.stale):
            raise ValueError("only nested can be split, and only if no norm of rows is needed and no rows are stale")
        if self.split and self.groups:
            raise ValueError("groups of ranks exchange whole sums; a split schedule has them in halves")
        if self.num_chunks > 1 and (self.mode != "nested" or self.clip_rows or self.stale or self.split or self.groups):
            raise ValueError("only nested has slices, and only without a norm of rows, stale rows, split and groups")
        if self.looks_ahead != (self.depth > 0):
            raise ValueError(f"mode '{self.mode}' {'needs' if self.looks_ahead else 'has no'} depth, got {self.depth}")
        if not 1 <= self.num_micro_batches <= 256:
            raise ValueError(f"{self.num_micro_batches} parts; there must be 1 to 256")

    @staticmethod
    def of(
        mode: Mode,
        num_micro_batches: int,
        *,
        depth: int = 1,
        clip_rows: bool = False,
        stale: bool = False,
        split: bool = False,
        groups: bool = False,
        num_chunks: int = 1,
    ) -> Schedule:
        """A schedule; the depth counts only where the mode looks ahead."""
        depth = depth if "keys" in _STREAMS[mode] else 0
        return Schedule(mode, num_micro_batches, depth, clip_rows, stale, split, groups, num_chunks)

    @property
    def looks_ahead(self) -> bool:
        return "keys" in _STREAMS[self.mode]

    @property
    def num_events(self) -> int:
        """Events of one batch."""
        return sum(map(len, self._all_needs.values()))

    @property
    def max_events(self) -> int:
        """Events of one batch on the lane that has most."""
        kinds = {kind: len(micro_batches) for kind, micro_batches in self._all_needs.items()}
        on_stream = [sum(n for kind, n in kinds.items() if self.stream_of(kind) == stream) for stream in self.streams]
        return max(on_stream)

    @property
    def streams(self) -> tuple[str, ...]:
        """The main lane and those that are threads of their own."""
        own = [stream for stream in _STREAMS[self.mode] if stream != "table" or self.split or not self._in_a_row]
        return (MAIN, *own, *(["groups"] if self.groups and "rows" in own else []))

    def stream_of(self, kind: Kind) -> str:
        stream = "rows" if self._in_a_row and kind in _BETWEEN else _ALONE.get(kind, MAIN)
        return stream if stream in self.streams else MAIN

    @property
    def _in_a_row(self) -> bool:
        """Whether the lane of rows also collects and updates: while it does all ranks wait, and handing over takes time."""
        return self.mode == "nested" and not self.stale and not self.groups

    def needs(self, event: Event) -> list[Event]:
        """What must be done before; of message stages, on every rank."""
        return _moved(self._all_needs[event.kind][event.micro_batch], event.batch)

    def yields_to(self, event: Event) -> list[Event]:
        """What goes first though the event does not need it.

        When a batch is updated, all ranks wait for the first rows of the next one. What looks further ahead starts when they
        have left, and not on their cores; if only hot rows are waited for, when they have arrived, and not on their line.
        """
        if event.kind == "rows" and event.micro_batch == 0:  # they wait for nobody
            return []
        return _moved(self._all_yields.get(event.kind, []), event.batch)

    def waits_for(self, event: Event) -> list[Event]:
        """What its lane waits for before the event: what it needs, and what it lets pass."""
        return self.needs(event) + self.yields_to(event)

    @property
    def _all_needs(self) -> dict[Kind, list[list[Event]]]:
        return _needs(self)

    @property
    def _all_yields(self) -> dict[Kind, list[Event]]:
        if not self.looks_ahead:
            return {}
        last, here, read = self.num_micro_batches - 1, -self.depth - 1, -self.depth - 1 - _READ_AHEAD
        if not self.split:  # while the last gradients travel a core is free
            return {
                "read": [
                    Event("chunk grads", read, self.num_chunks - 2)
                    if self.num_chunks > 1
                    else Event("grads", read, last)
                ],
                "keys": [self._first_rows(here), Event("read", 1)],
                "write": [self._first_rows(1)],
            }
        return {
            "read": [Event("compute", read + 1)],
            "keys": [Event("arrive", here)],
            "write": [Event("arrive", 1)],
            "rows": [Event("arrive", 0)],
            "unshared grads": [Event("arrive", 1)],
            "dense sum": [Event("grads", 0, last)],
            "dense step": [Event("update", 0)],
        }

    def _first_rows(self, t: int) -> Event:
        """The last of those that batch t begins with."""
        return Event("chunk rows", t, self.num_chunks - 2) if self.num_chunks > 1 else Event("rows", t)

    def program(self, stream: str, num_batches: Callable[[], int | None]) -> Iterator[Event]:
        """The events of a lane in the order in which it takes them, without end until the number of batches is known."""
        own = [
            [event for event in self._window(t) if self.stream_of(event.kind) == stream] for t in (-2, -1, 0)
        ]  # they differ while the pipeline fills
        for t in count(-(self.depth + 1 + _READ_AHEAD)):
            usual = min(max(t, -2), 0)
            for event in _moved(own[usual + 2], t - usual):
                total = num_batches()
                if total is None or event.batch < total:
                    yield event
            total = num_batches()
            if total is not None and t >= total:  # the last window holds what is written after the last batch
                return

    def events(self, num_batches: int) -> dict[str, list[Event]]:
        """The programs of all lanes for a known number of batches."""
        return {stream: list(self.program(stream, lambda: num_batches)) for stream in self.streams}

    def describe(self, num_batches: int) -> str:
        """The programs of all lanes, one line for each."""
        programs = self.events(num_batches)
        width = max(map(len, programs))
        return "\n".join(f"{stream:<{width}}  {' · '.join(map(str, program))}" for stream, program in programs.items())

    def _window(self, t: int) -> Iterator[Event]:
        """All events while batch t computes, in an order of which each lane takes its own."""
        if not self.looks_ahead:
            reads = t + _READ_AHEAD if "read" in self.streams else t
            yield from (Event("read", reads), Event("keys", t), Event("retrieve", t))
            yield from self._inner(t, post=t)
            yield Event("write", t)
            return
        yield from (Event("read", t + self.depth + 1 + _READ_AHEAD), Event("keys", t + self.depth + 1))
        yield from (Event("write", t - 1), Event("retrieve", t + self.depth))
        yield from self._inner(t, post=t + 1)

    def _inner(self, t: int, *, post: int) -> Iterator[Event]:
        """Batch t from its first rows to its update. Receives are opened before the first rows (of this batch or the next)."""
        last = self.num_micro_batches - 1
        if self.stream_of("rows") == MAIN:  # plain: one part after the other
            yield Event("post", t)
            for i in range(self.num_micro_batches):
                yield from (Event("rows", t, i), Event("compute", t, i), Event("grads", t, i))
                yield from self._collected(t, i)
            yield Event("flag", t)
        elif self.stale:  # rows of the next batch and gradients of this one travel while a part computes
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
        """Rows of the next part and gradients of the last one travel while a part computes."""
        last = self.num_micro_batches - 1
        later = 2 if self._in_a_row else 1  # a lane that also sends does not wait for what it has just sent
        if t in (post, -1):
            yield from self._posted(post)
        yield Event("rows", t, 0)
        for n in range(self.num_chunks - 1):
            yield from (Event("chunk collect", t - 1, n), Event("chunk update", t - 1, n), Event("chunk rows", t, n))
        for i in range(self.num_micro_batches):
            if i < last:
                yield Event("rows", t, i + 1)
            if i == 0 and self.split:
                yield Event("arrive", t)
                yield from (
                    Event("unshared grads", t - 1),
                    Event("unshared collect", t - 1),
                    Event("unshared update", t - 1),
                )
            if i > 0:
                yield Event("grads", t, i - 1)
            if i >= later:
                yield from self._collected(t, i - later)
            if i == last and post > t >= 0 and self.split:  # cold rows leave early
                yield from self._posted(post)
            yield Event("compute", t, i)
        yield Event("grads", t, last)
        for n in range(self.num_chunks - 1):
            yield Event("chunk grads", t, n)
        if post > t >= 0 and not self.split:  # while the last gradients travel a core is free
            yield from self._posted(post)
        yield Event("flag", t)
        for i in range(max(self.num_micro_batches - later, 0), self.num_micro_batches):
            yield from self._collected(t, i)

    def _collected(self, t: int, micro_batch: int) -> Iterator[Event]:
        """Owners have the gradients of a part, their own and with groups those of their replicas."""
        yield Event("collect", t, micro_batch)
        if self.groups:
            yield Event("merge", t, micro_batch)

    def _posted(self, t: int) -> Iterator[Event]:
        """Receives of a batch are opened, and what needs no update leaves."""
        yield Event("post", t)
        if self.split:
            yield Event("unshared rows", t)


def _moved(events: list[Event], batches: int) -> list[Event]:
    """The same so many batches later; what would be before the first batch is not there."""
    return [Event(kind, batch + batches, micro_batch) for kind, batch, micro_batch in events if batch + batches >= 0]


@cache
def _needs(schedule: Schedule) -> dict[Kind, list[list[Event]]]:
    """For each stage and part: what it needs, with batches relative to its own."""
    depth, stale, clip_rows, groups = schedule.depth, schedule.stale, schedule.clip_rows, schedule.groups
    last, micro_batches = schedule.num_micro_batches - 1, range(schedule.num_micro_batches)
    all_rows = [Event("rows", 0, i) for i in micro_batches]
    missing = [Event("update", -1), *(Event("rows", 1, i) for i in micro_batches)] if stale else []
    after_norm = [Event("norm", 0)] if clip_rows else []
    summed = Event("merge" if groups else "collect", 0, last)
    once: dict[Kind, list[Event]] = {
        # Two bounds on what is ahead, and the order of the data.
        "read": [Event("read", -1), Event("dense step", -depth - 2 - _READ_AHEAD)],
        "keys": [Event("read", 0), Event("dense step", -depth - 2)],
        # R: rows that nobody holds come from tables to which all batches before those in flight have written theirs.
        "retrieve": [Event("keys", 0), Event("write", -depth - 1), Event("retrieve", -1)],
        "post": [Event("retrieve", 0)],
        "flag": [Event("grads", 0, last)],
        "dense sum": [Event("compute", 0, last)],
        **({"norm": [Event("dense sum", 0), summed]} if clip_rows else {}),
        "dense step": [Event("dense sum", 0), Event("flag", 0), *after_norm],
        # U: all gradients are in, all ranks' flags are known, and the rows as they were have left.
        "update": [summed, Event("flag", 0), *all_rows, *after_norm, *missing],
        # W
        "write": [Event("update", 0), Event("write", -1)],
    }
    each: dict[Kind, list[list[Event]]] = {
        # F: a row leaves when it was retrieved (before post) and the batch before has updated it.
        "rows": [[Event("post", 0), Event("update", -2 if stale else -1)] for _ in micro_batches],
        # C: with all rows that have been sent so far, after the part before or with the dense weights of the batch before.
        "compute": [
            [Event("compute", 0, i - 1) if i else Event("dense step", -1), *all_rows[: i + 1]] for i in micro_batches
        ],
        # B
        "grads": [[Event("compute", 0, i), Event("post", 0)] for i in micro_batches],
        # The sums at the owner, in part order.
        "collect": [[Event("grads", 0, i), *([Event("collect", 0, i - 1)] if i else [])] for i in micro_batches],
    }
    if groups:
        # X: replicas have what this one's group adds up to, in part order.
        each["merge"] = [[Event("collect", 0, i), *([Event("merge", 0, i - 1)] if i else [])] for i in micro_batches]
    if schedule.split:
        _split(once, each, depth, last)
    if schedule.num_chunks > 1:
        _slice(once, each, schedule.num_chunks - 1, last)
    return {**{kind: [needs] for kind, needs in once.items()}, **each}


def _split(once: dict[Kind, list[Event]], each: dict[Kind, list[list[Event]]], depth: int, last: int) -> None:
    """What is needed when the first rows and the last gradients are cut in two; plain stages have the hot half."""
    # Rows that the batch before does not hold were last updated, cold, by an earlier one; before those in flight all is home.
    updated = [Event("unshared update", -back) for back in range(2, depth + 1)]
    once["keys"] += [Event("keys", -1)]  # what is hot is told by the ids of neighbours
    once["post"] += [Event("keys", 1)]
    once["unshared rows"] = [Event("post", 0), *updated]
    each["rows"] = [[*needs, *(updated[:1] if micro_batch else [])] for micro_batch, needs in enumerate(each["rows"])]
    each["compute"][0] += [Event("unshared rows", 0), Event("arrive", 0)]
    once["arrive"] = [Event("rows", 0), Event("unshared rows", 0)]
    once["unshared grads"] = [Event("compute", 0, last), Event("post", 0)]
    once["unshared collect"] = [Event("unshared grads", 0), Event("collect", 0, last)]
    once["unshared update"] = [Event("unshared collect", 0), Event("flag", 0)]
    once["write"] += [Event("unshared update", 0)]


def _slice(once: dict[Kind, list[Event]], each: dict[Kind, list[list[Event]]], num: int, last: int) -> None:
    """What is needed when the last gradients, the update and the first rows come in slices; plain stages have the first."""
    more = range(num)
    updated = [Event("chunk update", -1, n) for n in more]
    each["rows"] = [[*needs, *(updated if micro_batch else [])] for micro_batch, needs in enumerate(each["rows"])]
    each["chunk rows"] = [[Event("post", 0), updated[n]] for n in more]
    each["compute"][0] += [Event("chunk rows", 0, n) for n in more]
    each["chunk grads"] = [[Event("compute", 0, last), Event("post", 0)] for _ in more]
    before = [Event("collect", 0, last - 1)] if last else []  # the sums of earlier parts are in
    each["chunk collect"] = [[Event("chunk grads", 0, n), *before] for n in more]
    each["chunk update"] = [[Event("chunk collect", 0, n), Event("flag", 0)] for n in more]
    once["write"] += [Event("chunk update", 0, n) for n in more]


def schedule_for(config: PipelineConfig, number: int, *, clip_rows: bool) -> Schedule:
    """When stages run, from a batch on to the next barrier. Stale rows leave a batch earlier, so they are taken earlier."""
    mode: Mode = "serial" if config.mode == "sequential" else config.mode
    stale = config.is_stale(number)
    # A norm over all rows needs all gradients: then none may be late.
    may_be_late = not clip_rows and not stale
    return Schedule.of(
        mode,
        config.micro_batches,
        depth=config.depth + stale,
        clip_rows=clip_rows,
        stale=stale,
        split=config.split and may_be_late,
        groups=config.groups > 1,
        num_chunks=config.chunks if may_be_late else 1,
    )
