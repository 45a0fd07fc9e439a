"""Events and their dependencies: what must be done before a stage of a batch may run. Pure data.

An `Event` is one stage of one batch, and of one micro-batch where the stage has several, on one
rank. The dependencies are the definition of correct: any order of events that respects them is
bitwise identical to the sequential step (docs/concepts/exactness.md). Tests break every edge that
the others do not imply (tests/pipeline/test_mutants.py).

                                    ┌──────── for each micro-batch ────────┐
    read ─ keys ─ retrieve ─ post ─ rows ─ compute ─ grads ─ collect ─ merge ─ flag ─┬─ dense sum ─ norm ─ dense step
                                                                                     └─ update ─ write

`merge` exists with replica groups, `norm` if row gradients are clipped. `chunk …` are the further
messages of a window in chunks (embedding/chunked_exchange.py); the plain stages are then about the
first chunk. `arrive` marks the arrival of the first rows of a window with a chunk of shared rows.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from nestpipe.pipeline.schedule import Schedule

Kind = Literal[
    "read", "keys", "retrieve", "post", "rows", "compute", "grads", "collect", "merge",
    "flag", "dense sum", "norm", "dense step", "update", "write",
    "arrive", "chunk rows", "chunk grads", "chunk collect", "chunk merge", "chunk update",
    "backward",  # inside the last compute: a bucket of dense gradients is complete; in no program, see runner.py
]  # fmt: skip
# Stages that send: done means that the messages of every rank have been launched.
MESSAGES: frozenset[Kind] = frozenset((
    "keys", "rows", "chunk rows", "grads", "chunk grads", "merge", "chunk merge", "dense sum", "norm",
))  # fmt: skip
CHUNK_KINDS: tuple[Kind, ...] = ("chunk rows", "chunk grads", "chunk collect", "chunk merge", "chunk update")
MICRO_BATCH_KINDS: frozenset[Kind] = frozenset(("rows", "compute", "grads", "collect", "merge", *CHUNK_KINDS))
READ_AHEAD = 2  # batches read beyond those whose ids are exchanged


class Event(NamedTuple):
    """One stage of one batch, and of one micro-batch (or further chunk) where it has several."""

    kind: Kind
    batch: int
    micro_batch: int = 0

    def __str__(self) -> str:
        micro_batch = f".{self.micro_batch}" if self.kind in MICRO_BATCH_KINDS else ""
        return f"{self.kind}({self.batch}{micro_batch})"


def shifted(events: list[Event], batches: int) -> list[Event]:
    """The same events so many batches later; those before the first batch are dropped."""
    return [Event(kind, batch + batches, micro_batch) for kind, batch, micro_batch in events if batch + batches >= 0]


@cache
def dependencies(schedule: Schedule) -> dict[Kind, list[list[Event]]]:
    """Per stage and micro-batch: the events that must be done before, with batches relative to its own."""
    depth, stale, clip_rows, groups = schedule.depth, schedule.stale, schedule.clip_rows, schedule.groups
    last, micro_batches = schedule.num_micro_batches - 1, range(schedule.num_micro_batches)
    all_rows = [Event("rows", 0, i) for i in micro_batches]
    before_stale_update = [Event("update", -1), *(Event("rows", 1, i) for i in micro_batches)] if stale else []
    after_norm = [Event("norm", 0)] if clip_rows else []
    summed = Event("merge" if groups else "collect", 0, last)
    once: dict[Kind, list[Event]] = {
        # Order of the data, and two bounds on how far reading and id exchange run ahead.
        "read": [Event("read", -1), Event("dense step", -depth - 2 - READ_AHEAD)],
        "keys": [Event("read", 0), Event("dense step", -depth - 2)],
        # R: a row that no batch in flight holds is read from its table after all earlier batches have written theirs.
        "retrieve": [Event("keys", 0), Event("write", -depth - 1), Event("retrieve", -1)],
        "post": [Event("retrieve", 0)],
        "flag": [Event("grads", 0, last)],
        "dense sum": [Event("compute", 0, last)],
        **({"norm": [Event("dense sum", 0), summed]} if clip_rows else {}),
        "dense step": [Event("dense sum", 0), Event("flag", 0), *after_norm],
        # U: all gradients are collected, all ranks' flags are known, and the old values have been sent.
        "update": [summed, Event("flag", 0), *all_rows, *after_norm, *before_stale_update],
        # W: in the order of batches.
        "write": [Event("update", 0), Event("write", -1)],
    }
    each: dict[Kind, list[list[Event]]] = {
        # F: a row is sent after it was retrieved (before post) and updated by the previous batch.
        "rows": [[Event("post", 0), Event("update", -2 if stale else -1)] for _ in micro_batches],
        # C: after all rows so far are sent, and after the previous micro-batch or the previous batch's dense step.
        "compute": [
            [Event("compute", 0, i - 1) if i else Event("dense step", -1), *all_rows[: i + 1]] for i in micro_batches
        ],
        # B: after the backward.
        "grads": [[Event("compute", 0, i), Event("post", 0)] for i in micro_batches],
        # Sums at the owner, in the order of micro-batches.
        "collect": [[Event("grads", 0, i), *([Event("collect", 0, i - 1)] if i else [])] for i in micro_batches],
    }
    if groups:
        # X: sums of this replica's group, in the order of micro-batches.
        each["merge"] = [[Event("collect", 0, i), *([Event("merge", 0, i - 1)] if i else [])] for i in micro_batches]
    if schedule.num_chunks > 1:
        _add_chunks(once, each, schedule)
    return {**{kind: [needs] for kind, needs in once.items()}, **each}


def _add_chunks(once: dict[Kind, list[Event]], each: dict[Kind, list[list[Event]]], schedule: Schedule) -> None:
    """Dependencies of a window in chunks; the plain stages are about the first one."""
    last, more = schedule.num_micro_batches - 1, range(schedule.num_chunks - 1)
    updated = [[Event("chunk update", -1, n)] for n in more]
    if schedule.chunks == "shared":
        # An unshared row was last updated, as unshared, by a batch in flight two or more back; older updates are written.
        updated = [[Event("chunk update", -back) for back in range(2, schedule.depth + 1)]]
        once["keys"] += [Event("keys", -1)]  # the ids of both batches decide which rows they share
        once["post"] += [Event("keys", 1)]
        once["arrive"] = [Event("rows", 0), Event("chunk rows", 0)]
        each["compute"][0] += [Event("arrive", 0)]
    each["rows"][1:] = [[*needs, *(one for newest in updated for one in newest[:1])] for needs in each["rows"][1:]]
    each["chunk rows"] = [[Event("post", 0), *updated[n]] for n in more]
    each["compute"][0] += [Event("chunk rows", 0, n) for n in more]
    each["chunk grads"] = [[Event("compute", 0, last), Event("post", 0)] for _ in more]
    each["chunk collect"] = [[Event("chunk grads", 0, n)] for n in more]
    if schedule.groups:
        each["chunk merge"] = [[Event("chunk collect", 0, n)] for n in more]
    summed: Kind = "chunk merge" if schedule.groups else "chunk collect"
    earlier = each["merge" if schedule.groups else "collect"][last][1:]  # sums of the micro-batches before the last
    each[summed] = [[*needs, *earlier] for needs in each[summed]]
    each["chunk update"] = [[Event(summed, 0, n), Event("flag", 0)] for n in more]
    once["write"] += [Event("chunk update", 0, n) for n in more]
