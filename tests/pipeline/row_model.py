"""A symbolic model of what a schedule does to rows: a value is the history that produced it, so two values are equal only if
the same operations were applied in the same order.

Only stages that touch rows or dense weights are modelled; `projected` gives the order that a schedule's dependencies imply
between them once all other stages are removed. Eviction is part of the model: a table with fewer slots than keys gives the slot
of one row to another, and a late write or update must not hit that.

    retrieve    slots are assigned, rows are read from them             rows      values are sent to requesters
    compute     a gradient from the values and the dense weights        update    values change
    dense step  the dense weights change                                write     values are written back

With two chunks, rows and update are about every second key, or about the keys shared with the previous or next batch, and the
chunk stages about the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from typing import Any, NamedTuple

from nestpipe.embedding.config import Chunking
from nestpipe.pipeline.schedule import Event, Kind, Schedule
from tests.pipeline.orders import Edge, ancestors, needs_without

KINDS: tuple[Kind, ...] = ("retrieve", "rows", "compute", "dense step", "update", "write")
CHUNK_KINDS: tuple[Kind, ...] = (
    *("retrieve", "rows", "chunk rows", "compute", "dense step", "update", "chunk update", "write"),
)
Pattern = tuple[tuple[int, ...], ...]  # the keys of each batch


class State(NamedTuple):
    """The complete state; tuples, so that states can be compared and hashed."""

    slots: tuple[tuple[int, int], ...]  # (key, value) of each slot; key -1 for an empty one
    used: tuple[int, ...]  # the batch that used each key last
    buffer: tuple[tuple[int, int], ...]  # (value, number of batches that hold it) of each key; no batch: not there
    refs: tuple[tuple[int, ...] | None, ...]  # of each batch: the slots of its keys, -1 for none
    reads: tuple[tuple[int, ...], ...]  # of each batch: the values sent, 0 for none yet
    grads: tuple[int, ...]  # of each batch; 0 for none yet
    dense: int
    dense_grad: int


FAILED = State((), (), (), (), (), (), -1, -1)  # a stage found nothing to work on


@dataclass(slots=True, eq=False)
class RowModel:
    """Batches with these keys, on a table with so many slots, through a buffer or in place."""

    pattern: Pattern
    num_keys: int
    num_slots: int
    protect_steps: int
    buffered: bool
    chunks: Chunking = 1
    _names: dict[Any, int] = field(default_factory=dict)  # history -> value

    @property
    def start(self) -> State:
        size = len(self.pattern)
        none: tuple[None, ...] = (None,) * size
        reads = tuple((0,) * len(keys) for keys in self.pattern)
        return State(
            ((-1, 0),) * self.num_slots,
            (-1,) * self.num_keys,
            ((0, 0),) * self.num_keys,
            none,
            reads,
            (0,) * size,
            0,
            0,
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return CHUNK_KINDS if self.chunks != 1 else KINDS

    def sequential(self) -> State:
        """The state after all batches, one after the other."""
        state = self.start
        for t in range(len(self.pattern)):
            for kind in self.kinds:
                state = self.apply(state, Event(kind, t))
        return state

    def _chunk(self, t: int, other: int, number: int) -> set[int]:
        """Keys of a batch in a chunk: every second one, or those that another batch holds too."""
        if self.chunks == "shared":
            others = self.pattern[other] if 0 <= other < len(self.pattern) else ()
            return {key for key in self.pattern[t] if (key not in others) == bool(number)}
        return {key for key in self.pattern[t] if key % self.chunks == number}

    def apply(self, state: State, event: Event) -> State:
        """The state after an event, or FAILED."""
        needs_refs = event.kind not in ("retrieve", "compute", "dense step")
        if state is FAILED or (needs_refs and state.refs[event.batch] is None):
            return FAILED
        handler = getattr(self, "_" + event.kind.replace(" ", "_"))
        after: State = handler(state, event.batch)
        return after

    def _retrieve(self, state: State, t: int) -> State:
        slots, used, buffer, refs = list(state.slots), list(state.used), list(state.buffer), []
        if any(batch is not None for batch in state.refs[t + 1 :]):
            return FAILED  # batches are counted in order
        for key in self.pattern[t]:
            used[key] = t
        for key in self.pattern[t]:
            place = next((slot for slot, (owner, _) in enumerate(slots) if owner == key), -1)
            if place < 0 and (place := self._free_slot(slots, used, t)) >= 0:
                slots[place] = (key, self._value("new", key))
            refs.append(place)
            value, holders = buffer[key]
            if not holders:
                value = slots[place][1] if place >= 0 else self._value("new", key)
            buffer[key] = (value, holders + 1)
        return state._replace(
            slots=tuple(slots), used=tuple(used), buffer=tuple(buffer), refs=_with(state.refs, t, tuple(refs))
        )

    def _free_slot(self, slots: list[tuple[int, int]], used: list[int], t: int) -> int:
        """An empty slot, or that of the row which was not used for the longest time, unless it is protected."""
        ages = [(used[key] if key >= 0 else -2, key, place) for place, (key, _) in enumerate(slots)]
        age, key, place = min(ages)
        return place if key < 0 or age < t - self.protect_steps else -1

    def _rows(self, state: State, t: int) -> State:
        return self._send(state, t, self._chunk(t, t - 1, 0))

    def _chunk_rows(self, state: State, t: int) -> State:
        return self._send(state, t, self._chunk(t, t - 1, 1))

    def _send(self, state: State, t: int, keys: set[int]) -> State:
        values = tuple(
            self._now(state, key, slot) if key in keys else before
            for key, slot, before in zip(self.pattern[t], _refs(state, t), state.reads[t], strict=True)
        )
        return state._replace(reads=_with(state.reads, t, values))

    def _now(self, state: State, key: int, slot: int) -> int:
        if self.buffered:
            return state.buffer[key][0]
        return state.slots[slot][1] if slot >= 0 else self._value("new", key)

    def _compute(self, state: State, t: int) -> State:
        if 0 in state.reads[t]:
            return FAILED
        grad = self._value("gradient", t, state.reads[t], state.dense)
        return state._replace(grads=_with(state.grads, t, grad), dense_grad=grad)

    def _dense_step(self, state: State, t: int) -> State:
        return state._replace(dense=self._value("dense", state.dense, state.dense_grad))

    def _update(self, state: State, t: int) -> State:
        return self._change(state, t, self._chunk(t, t + 1, 0))

    def _chunk_update(self, state: State, t: int) -> State:
        return self._change(state, t, self._chunk(t, t + 1, 1))

    def _change(self, state: State, t: int, keys: set[int]) -> State:
        slots, buffer = list(state.slots), list(state.buffer)
        for key, slot in zip(self.pattern[t], _refs(state, t), strict=True):
            if slot >= 0 and key in keys:
                new = self._value("updated", self._now(state, key, slot), state.grads[t], key)
                if self.buffered:
                    buffer[key] = (new, buffer[key][1])
                else:
                    slots[slot] = (slots[slot][0], new)
        return state._replace(slots=tuple(slots), buffer=tuple(buffer))

    def _write(self, state: State, t: int) -> State:
        slots, buffer = list(state.slots), list(state.buffer)
        for key, slot in zip(self.pattern[t], _refs(state, t), strict=True):
            value, holders = buffer[key]
            buffer[key] = (value, holders - 1) if holders > 1 else (0, 0)
            if holders == 1 and slot >= 0 and self.buffered:
                slots[slot] = (slots[slot][0], value)
        return state._replace(slots=tuple(slots), buffer=tuple(buffer))

    def _value(self, *history: Any) -> int:
        return self._names.setdefault(history, len(self._names) + 1)


def _refs(state: State, t: int) -> tuple[int, ...]:
    found = state.refs[t]
    assert found is not None
    return found


def _with(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def projected(schedule: Schedule, num_batches: int, dropped: Edge | None = None) -> list[tuple[Event, Event]]:
    """The order that the needs leave between the events of the model, without one kind of edge."""
    before, kinds = ancestors(needs_without(schedule, num_batches, dropped)), kinds_of(schedule)
    events = events_of(num_batches, kinds)
    return [(one, event) for event in events for one in before[event] if one.kind in kinds]


def kinds_of(schedule: Schedule) -> tuple[Kind, ...]:
    return CHUNK_KINDS if schedule.chunks != 1 else KINDS


def events_of(num_batches: int, kinds: tuple[Kind, ...] = KINDS) -> list[Event]:
    return [Event(kind, t) for t in range(num_batches) for kind in kinds]


def patterns(num_batches: int, num_keys: int) -> Iterator[Pattern]:
    """Every way in which batches can hold keys, up to the names of the keys."""
    columns = list(product((False, True), repeat=num_batches))  # of one key: in which batches it is
    for chosen in combinations_with_replacement(columns, num_keys):
        yield pattern_of(chosen)


def pattern_of(chosen: Sequence[Iterable[bool]]) -> Pattern:
    return tuple(tuple(key for key, there in enumerate(row) if there) for row in zip(*chosen, strict=True))
