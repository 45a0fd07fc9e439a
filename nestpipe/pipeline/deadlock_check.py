"""Deadlock check: proves, for a number of batches and ranks, that a schedule runs to its end. Nothing is run.

Every rank runs the programs of its streams, each in order; an event starts when all it waits for is
done. A stage with messages is one node for all ranks: it is done when every rank has entered. The
schedule is free of deadlock if and only if the graph of all dependencies, all yields and the
program order of all streams has no cycle. (The same order of exchanges on every rank is necessary,
but not sufficient.)

    check(Schedule.of("nested", 8, depth=2), num_batches=6, world_size=4)      # raises ScheduleError, or returns
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from nestpipe.pipeline.schedule import CHUNK_KINDS, MESSAGES, Event, Kind, Schedule

Programs = Mapping[str, Sequence[Event]]  # stream -> events in order
Node = tuple[Event, int]  # an event on a rank; messages are on EVERY_RANK
EVERY_RANK = -1


class ScheduleError(ValueError):
    """A schedule lacks events, has some twice, differs between ranks, or has a deadlock."""


def check(schedule: Schedule, num_batches: int, world_size: int) -> None:
    """Raises ScheduleError unless every event is in one program and no event waits for itself."""
    check_programs(schedule, [schedule.events(num_batches)] * world_size, num_batches)


def check_programs(schedule: Schedule, ranks: Sequence[Programs], num_batches: int) -> None:
    """`check` for given programs of each rank."""
    for rank, programs in enumerate(ranks):
        _check_complete(schedule, programs, num_batches, rank)
        for stream, program in programs.items():
            if list(program) != list(ranks[0][stream]):
                raise ScheduleError(f"stream '{stream}' runs another program on rank {rank} than on rank 0")
    befores: dict[Node, dict[Node, str]] = {}  # node -> the nodes it waits for, and why
    for rank, programs in enumerate(ranks):
        for before, after, why in _waits(schedule, programs, num_batches, rank):
            befores.setdefault(before, {})
            befores.setdefault(after, {}).setdefault(before, why)
    if cycle := find_cycle(befores):
        lines = (f"  {_name(after)} waits for {_name(before)}: {befores[after][before]}" for after, before in cycle)
        raise ScheduleError(
            f"mode '{schedule.mode}' with {schedule.num_micro_batches} micro-batches and depth {schedule.depth} deadlocks on "
            f"{len(ranks)} ranks. These events wait for each other:\n" + "\n".join(lines)
        )


def all_events(schedule: Schedule, num_batches: int) -> list[Event]:
    """Every event of so many batches, in the order of the sequential step."""
    once: tuple[Kind, ...] = ("read", "keys", "retrieve", "post")
    norm: tuple[Kind, ...] = ("norm",) if schedule.clip_rows else ()
    after: tuple[Kind, ...] = ("flag", "dense sum", *norm, "dense step", "update")
    merge: tuple[Kind, ...] = ("merge",) if schedule.groups else ()
    each: tuple[Kind, ...] = ("rows", "compute", "grads", "collect", *merge)
    first: tuple[Kind, ...] = ("rows", "arrive", *each[1:]) if schedule.chunks == "shared" else each
    chunk = [kind for kind in CHUNK_KINDS[1:] if kind != "chunk merge" or schedule.groups]
    micro_batches, more = range(schedule.num_micro_batches), range(schedule.num_chunks - 1)
    return [
        event
        for t in range(num_batches)
        for event in (
            *(Event(kind, t) for kind in once),
            *(Event("chunk rows", t, n) for n in more),
            *(Event(kind, t, micro_batch) for micro_batch in micro_batches for kind in (each if micro_batch else first)),
            *(Event(kind, t) for kind in after),
            *(Event(kind, t, n) for n in more for kind in chunk),
            Event("write", t),
        )
    ]  # fmt: skip


def find_cycle(befores: Mapping[Node, Mapping[Node, str]]) -> list[tuple[Node, Node]]:
    """Pairs (node, one it waits for) around a cycle; empty if there is none."""
    afters: dict[Node, list[Node]] = {node: [] for node in befores}
    for node, waits in befores.items():
        for before in waits:
            afters[before].append(node)
    missing = {node: len(waits) for node, waits in befores.items()}
    ready = [node for node, number in missing.items() if not number]
    while ready:
        node = ready.pop()
        del missing[node]
        for after in afters[node]:
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    if not missing:
        return []
    path = [
        next(iter(missing))
    ]  # each of the rest waits for another of the rest, so following the waits must close a cycle
    while path[-1] not in path[:-1]:
        path.append(next(before for before in befores[path[-1]] if before in missing))
    return list(pairwise(path[path.index(path[-1]) :]))


def _check_complete(schedule: Schedule, programs: Programs, num_batches: int, rank: int) -> None:
    actual = Counter(event for program in programs.values() for event in program)
    expected = Counter(all_events(schedule, num_batches))
    for what, events in (("lack", expected - actual), ("have too often", actual - expected)):
        if events:
            raise ScheduleError(f"the programs of rank {rank} {what} {', '.join(map(str, sorted(events)))}")
    for stream, program in programs.items():
        if foreign := [event for event in program if schedule.stream_of(event.kind) != stream]:
            raise ScheduleError(f"stream '{stream}' of rank {rank} runs {foreign[0]}, which belongs to another stream")


def _waits(schedule: Schedule, programs: Programs, num_batches: int, rank: int) -> Iterator[tuple[Node, Node, str]]:
    """The waits of a rank: (before, after, why)."""
    for stream, program in programs.items():
        for before, after in pairwise(program):
            if before != after:
                yield _node(before, rank), _node(after, rank), f"comes later on stream '{stream}'"
        for event in program:
            for need in schedule.needs(event):
                if need.batch < num_batches:  # events beyond the last batch are not waited for
                    yield _node(need, rank), _node(event, rank), "needs it"
            for first in schedule.yields_to(event):
                if first.batch < num_batches:
                    yield _node(first, rank), _node(event, rank), "yields to it"


def _node(event: Event, rank: int) -> Node:
    return event, EVERY_RANK if event.kind in MESSAGES else rank


def _name(node: Node) -> str:
    event, rank = node
    return f"{event} on {'all ranks' if rank == EVERY_RANK else f'rank {rank}'}"
