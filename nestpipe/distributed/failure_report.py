"""Notes that ranks leave in the store when they give up, so that all name the rank that is really lost.

A rank that waits for a lost one elsewhere is late here, and whoever waits for it here would blame it. So every rank says in
which exchange it missed whom; what a blamed rank itself missed *in another exchange* counts too. Two ranks that miss each
other in one exchange say nothing new. Several threads of a rank may each leave a note: they add up, none is overwritten.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

GRACE_S = 1.0  # a note is written a moment after the connection closes


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a rank gave up and whom it blames."""

    exchange: str  # in which it missed them until the deadline; "" if it did not wait so long
    reason: str
    ranks: tuple[int, ...]
    by: int  # the rank that gave up; others pass its note on


def publish(store: Store, rank: int, note: FailureReport) -> None:
    """Adds a note of this rank; a courtesy: without the store the others still see the closed connection."""
    with contextlib.suppress(RuntimeError):
        line = json.dumps([note.exchange, note.reason, note.ranks, note.by]) + "\n"
        store.append(_key(rank), line)  # type: ignore[attr-defined]  # in every store, but not in torch's stubs


def collect(
    store: Store, ranks: Iterable[int], *, elsewhere: str | None = None, within_s: float = GRACE_S
) -> list[FailureReport]:
    """Notes of these ranks, waiting until each has left one; with `elsewhere`, one of another exchange than that."""
    end = time.monotonic() + within_s
    while True:
        found = {rank: [note for note in _read(store, rank) if note.exchange != elsewhere] for rank in ranks}
        if all(found.values()) or time.monotonic() > end:
            return [note for notes in found.values() for note in notes]
        time.sleep(0.02)


def root_causes(store: Store, notes: Iterable[FailureReport]) -> tuple[int, ...]:
    """Everyone these notes blame, and whom those missed in other exchanges, and so on, as far as it is written by now."""
    blamed: set[int] = set()
    seen: set[FailureReport] = set()
    to_read = list(notes)
    while to_read:
        note = to_read.pop()
        if note in seen:
            continue
        seen.add(note)
        blamed.update(note.ranks)
        to_read += [more for rank in note.ranks for more in _read(store, rank) if more.exchange != note.exchange]
    return tuple(sorted(blamed))


def _key(rank: int) -> str:
    return f"gave-up/{rank}"


def _read(store: Store, rank: int) -> list[FailureReport]:
    with contextlib.suppress(RuntimeError):  # likewise
        if store.check([_key(rank)]):
            lines = [json.loads(line) for line in store.get(_key(rank)).decode().splitlines()]
            return [FailureReport(exchange, reason, tuple(ranks), by) for exchange, reason, ranks, by in lines]
    return []
