"""Where the time of a step went: pure functions of the spans that `trace.py` keeps.

A rank's step t is what its compute lane did from the end of batch t-1 to the end of batch t, so steps follow each other
without a gap. Each nanosecond of it has one cause, and the four add up to the step exactly:

    busy            the lane computed, or brought rows that had arrived to their places
    lookup          it waited because reading, key routing or retrieval of batch t was not done
    communication   it waited for rows, gradients, flags or dense sums on their way
    bubble          all the rest: table work in the way, lanes handing over, what nobody recorded

A wait that was marked inside an event has the cause of its messages. Time before the lane came to an event is a bubble: a
checkpoint or a validation between two runs of the pipeline. From then on, the next event of
batch t is what it waits for, and only spans of the same rank, of batches up to t, that ended before the event began can
be the reason. An instant belongs to the first of these that is true:

    1  lookup          read, keys or retrieve runs, or the lane of rows waits for those of batch t+1 before it goes on with t
    2  communication   post, rows, grads, merge, flag, dense sum or norm runs, or a lane waits for such messages
    3  bubble          table work runs: collect, update, write
    4  lookup          read, keys or retrieve is not finished
    5  communication   post, rows, grads, merge, flag, dense sum or norm is not finished
    6  bubble

Ranks of a synchronous step wait for the slowest of them, and what they wait with is a message. `waited_for_others_ns` says how
much of the communication that was: after this rank had computed the batch, and before the last one had.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from nestpipe.errors import DataError
from nestpipe.trace import KINDS, RankTrace, Span, stage_of

Cause = Literal["busy", "lookup", "communication", "bubble"]
CAUSES: tuple[Cause, ...] = ("busy", "lookup", "communication", "bubble")
CAUSE_OF_KIND: dict[str, Cause] = {
    **dict.fromkeys(("arrive", "compute", "dense step"), "busy"),
    **dict.fromkeys(("read", "keys", "retrieve"), "lookup"),
    **dict.fromkeys(("post", "rows", "grads", "merge", "flag", "dense sum", "norm"), "communication"),
    **dict.fromkeys(("cold rows", "cold grads", "next rows", "next grads"), "communication"),
    **dict.fromkeys(("collect", "update", "write"), "bubble"),
    **dict.fromkeys(("cold collect", "cold update", "next collect", "next update"), "bubble"),
}
CAUSE_OF_WAIT: dict[str, Cause] = {
    "keys": "lookup",
    **dict.fromkeys(("rows", "grads", "flag", "dense"), "communication"),
}


class Piece(NamedTuple):
    """Time of the compute lane with one cause."""

    begin_ns: int
    end_ns: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank."""

    rank: int
    batch: int
    pieces: tuple[Piece, ...]  # side by side, from the begin of the step to its end
    seen_ns: dict[Cause, int]  # how long lookup and communication of the batch were seen to take, hidden or not
    num_bytes: dict[str, int]  # sent, by kind of event
    num_rows: dict[str, int]  # rows and grads sent, keys asked for
    computed_ns: int = 0  # when the last part was computed

    @property
    def begin_ns(self) -> int:
        return self.pieces[0].begin_ns

    @property
    def end_ns(self) -> int:
        return self.pieces[-1].end_ns

    @property
    def total_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def time_ns(self, cause: Cause) -> int:
        return sum(piece.end_ns - piece.begin_ns for piece in self.pieces if piece.cause == cause)


def waited_for_others_ns(step: Step, until_ns: int) -> int:
    """Of the communication of a step: what passed while another rank still computed the batch, which the last did until then."""
    own = (piece for piece in step.pieces if piece.cause == "communication")
    return sum(max(min(piece.end_ns, until_ns) - max(piece.begin_ns, step.computed_ns), 0) for piece in own)


def steps_of(trace: RankTrace) -> list[Step]:
    """The steps of a rank that were recorded whole; the first batch only tells where the second begins."""
    groups = [(batch, list(spans)) for batch, spans in groupby(trace.lane("compute"), key=lambda span: span.batch)]
    for (before, _), (batch, _) in pairwise(groups):
        if batch <= before:
            raise DataError(
                f"rank {trace.rank} computed batch {batch} after batch {before}; a step is what the compute lane does "
                "for one batch, so this trace cannot be divided into steps. Record again."
            )
    others = _Others(span for span in trace.spans if span.lane != "compute")
    by_batch: dict[int, list[Span]] = {}
    for span in trace.spans:
        by_batch.setdefault(span.batch, []).append(span)
    first = _first_whole(trace)
    found = []
    for (_, before), (batch, spans) in pairwise(groups):
        if batch >= first and spans[-1].end_ns > before[-1].end_ns:
            pieces = _merged(_divide(before[-1].end_ns, spans, others))
            found.append(_step(trace.rank, batch, pieces, by_batch[batch]))
    return found


def _first_whole(trace: RankTrace) -> int:
    """The first batch of which nothing is missing, because each lane runs each kind of event in batch order.

    Where spans were dropped, the batch of the first one left may have lost others. Recording may have begun when the
    lookup of a batch was already done.
    """
    firsts: dict[tuple[str, str], int] = {}
    for span in trace.spans:
        if span.lane in trace.num_dropped:
            firsts.setdefault((span.lane, span.kind), span.batch + 1)
        elif CAUSE_OF_KIND[span.kind] == "lookup":
            firsts.setdefault((span.lane, span.kind), span.batch)
    return max(firsts.values(), default=0)


def _step(rank: int, batch: int, pieces: tuple[Piece, ...], spans: list[Span]) -> Step:
    seen: dict[Cause, int] = {}
    for cause in ("lookup", "communication"):
        intervals = [(piece.begin_ns, piece.end_ns) for piece in pieces if piece.cause == cause]
        intervals += [(span.begin_ns, span.end_ns) for span in spans if CAUSE_OF_KIND[span.kind] == cause]
        waits = (wait for span in spans for wait in span.waits if CAUSE_OF_WAIT[wait.name] == cause)
        intervals += [(wait.begin_ns, wait.end_ns) for wait in waits]
        seen[cause] = _length_of_union(intervals)
    num_bytes, num_rows = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for span in spans:
        num_bytes[span.kind] += span.num_bytes
        num_rows[stage_of(span.kind)] += span.num_rows  # all halves or slices of a message
    sent = {kind: number for kind, number in num_bytes.items() if number}
    rows = {kind: number for kind, number in num_rows.items() if number}
    computed_ns = max((span.end_ns for span in spans if span.kind == "compute"), default=0)
    return Step(rank, batch, pieces, seen, sent, rows, computed_ns)


def _divide(begin_ns: int, spans: Iterable[Span], others: _Others) -> Iterator[Piece]:
    """The causes of all time from `begin_ns` to the end of the last span of the compute lane."""
    place = begin_ns
    for span in spans:
        marks = [(wait.begin_ns, wait.end_ns, CAUSE_OF_WAIT[wait.name]) for wait in span.waits]
        for first, last, cause in (*marks, (span.end_ns, span.end_ns, None)):
            idle_end = min(max(place, span.begin_ns), first)
            came = min(max(place, span.ready_ns), idle_end)  # before that the lane was elsewhere: a save, a validation
            yield Piece(place, came, "bubble")
            if came < idle_end:
                yield from others.reasons(came, idle_end, span)
            yield Piece(idle_end, first, CAUSE_OF_KIND[span.kind])
            if cause is not None:
                yield Piece(first, last, cause)
            place = last


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same pieces without empty ones, neighbours of one cause as one."""
    found: list[Piece] = []
    for piece in pieces:
        if piece.begin_ns == piece.end_ns:
            continue
        if found and found[-1].cause == piece.cause:
            piece = Piece(found.pop().begin_ns, piece.end_ns, piece.cause)  # noqa: PLW2901
        found.append(piece)
    return tuple(found)


class _Others:
    """What the other lanes of a rank did, found by when it ended."""

    def __init__(self, spans: Iterable[Span]):
        self._spans = sorted(spans, key=lambda span: span.end_ns)
        self._ends = [span.end_ns for span in self._spans]

    def reasons(self, begin_ns: int, end_ns: int, awaited: Span) -> Iterator[Piece]:
        """Why the compute lane was idle before an event."""
        ended = self._spans[bisect_right(self._ends, begin_ns) : bisect_right(self._ends, awaited.begin_ns)]
        spans = [span for span in ended if span.batch <= awaited.batch]
        ahead = [span for span in ended if span.batch > awaited.batch and span.kind in ("read", "keys", "retrieve")]
        posts = [span for span in ended if span.batch == awaited.batch + 1 and span.kind == "post"]
        bounds = {begin_ns, end_ns, *(span.end_ns for span in ahead), *(post.ready_ns for post in posts)}
        for span in spans:
            bounds |= {span.begin_ns, span.end_ns, *(wait.begin_ns for wait in span.waits)}
            bounds |= {wait.end_ns for wait in span.waits}
        inside = sorted(bound for bound in bounds if begin_ns <= bound <= end_ns)
        for first, last in pairwise(inside):
            late = any(
                post.ready_ns <= first < span.end_ns <= post.begin_ns for post in posts for span in ahead
            )  # a lane that batch t needs waits for ids or rows of batch t+1
            yield Piece(first, last, "lookup" if late else _reason(first, spans))


def _reason(instant: int, spans: Sequence[Span]) -> Cause:
    """The rules of the module's docstring, in their order."""
    unfinished = [span for span in spans if span.end_ns > instant]
    for candidates in ([span for span in unfinished if span.begin_ns <= instant], unfinished):
        causes = {_cause_at(instant, span) for span in candidates}
        for cause in ("lookup", "communication", "bubble"):
            if cause in causes:
                return cause
    return "bubble"


def _cause_at(instant: int, span: Span) -> Cause:
    waits = (CAUSE_OF_WAIT[wait.name] for wait in span.waits if wait.begin_ns <= instant < wait.end_ns)
    own = CAUSE_OF_KIND[span.kind]
    return own if own == "lookup" else next(waits, own)


def _length_of_union(intervals: list[tuple[int, int]]) -> int:
    total, reached = 0, None
    for begin, end in sorted(intervals):
        if reached is None or begin > reached:
            reached = begin
        total += max(end - reached, 0)
        reached = max(end, reached)
    return total
