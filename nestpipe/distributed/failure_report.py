"""Failure reports in the store, so that every rank names the rank that failed first.

    rank 0 ──waits in A──▶ rank 1 ──waits in B──▶ rank 2 (dead)       0 would blame 1; the reports lead to 2

A rank that waits for a failed one is late for others, who would blame it. So each report says in
which exchange a rank waited for whom, and `root_causes` follows the chain. Two ranks that miss each
other in one exchange add nothing: only reports about *another* exchange are followed. The threads
of a rank append to one key; no report overwrites another.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from nestpipe.distributed.clock import Clock

GRACE_S = 1.0  # a report is written shortly after the connection closes
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a rank aborted and which ranks it blames."""

    exchange: str  # that reached its deadline; "" if the rank aborted for another reason
    reason: str
    ranks: tuple[int, ...]
    by: int  # the rank that aborted; others forward its report


def publish(store: Store, rank: int, report: FailureReport) -> None:
    """Appends a report of this rank. Best effort: without the store the peers still see the closed connection."""
    with contextlib.suppress(RuntimeError):
        line = json.dumps([report.exchange, report.reason, report.ranks, report.by]) + "\n"
        store.append(_key(rank), line)  # type: ignore[attr-defined]  # in every store, but not in torch's stubs


def collect(
    store: Store,
    ranks: Iterable[int],
    *,
    not_about: str | None = None,
    within_s: float = GRACE_S,
    clock: Clock = time,
) -> list[FailureReport]:
    """Reports of these ranks, except those about exchange `not_about`. Waits up to `within_s` for one of each rank."""
    ranks, end = tuple(ranks), clock.monotonic() + within_s
    while True:
        reports = {rank: [one for one in _read(store, rank) if one.exchange != not_about] for rank in ranks}
        if all(reports.values()) or clock.monotonic() > end:
            return [report for own in reports.values() for report in own]
        clock.sleep(_POLL_S)


def root_causes(store: Store, reports: Iterable[FailureReport]) -> tuple[int, ...]:
    """The ranks that these reports blame, those that they blame in other exchanges, and so on; ascending."""
    blamed: set[int] = set()
    visited: set[FailureReport] = set()
    stack = list(reports)
    while stack:
        report = stack.pop()
        if report in visited:
            continue
        visited.add(report)
        blamed.update(report.ranks)
        stack += [one for rank in report.ranks for one in _read(store, rank) if one.exchange != report.exchange]
    return tuple(sorted(blamed))


def _key(rank: int) -> str:
    return f"failures/{rank}"


def _read(store: Store, rank: int) -> list[FailureReport]:
    with contextlib.suppress(RuntimeError):  # best effort, like `publish`
        if store.check([_key(rank)]):
            lines = [json.loads(line) for line in store.get(_key(rank)).decode().splitlines()]
            return [FailureReport(exchange, reason, tuple(ranks), by) for exchange, reason, ranks, by in lines]
    return []
