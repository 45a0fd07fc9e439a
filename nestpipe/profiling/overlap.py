"""Attributes every nanosecond of a step to one cause. Pure functions of recorded spans.

Step t of a rank is the time of its compute stream from the end of batch t-1 to the end of batch t, so steps have no gaps
between them. Four causes add up to the step exactly:

    busy            the stream computed, or copied received rows into place
    lookup          it was idle because reading, key routing or retrieval of batch t had not ended
    communication   it was idle because rows, gradients, flags or dense sums were in flight
    bubble          the rest: table work on the critical path, hand-over between streams, time that nothing recorded

A wait inside an event has the cause of its messages. Time before the stream reached an event (`ready_ns`) is a bubble: a
checkpoint or a validation between two runs of the pipeline. For idle time after that, the candidates are spans of the same
rank, of batches up to t, that ended before the event began. The first rule that holds at an instant decides:

    1  lookup          read, keys or retrieve is running, or the rows stream is blocked on those of batch t+1
    2  communication   post, rows, grads, merge, flag, dense sum or norm is running, or a stream waits for such messages
    3  bubble          table work is running: collect, update, write
    4  lookup          read, keys or retrieve has not ended
    5  communication   post, rows, grads, merge, flag, dense sum or norm has not ended
    6  bubble
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from nestpipe.errors import DataError
from nestpipe.profiling.trace_file import KINDS, RankTrace, Span, stage_of

Cause = Literal["busy", "lookup", "communication", "bubble"]
CAUSES: tuple[Cause, ...] = ("busy", "lookup", "communication", "bubble")
CAUSE_OF_KIND: dict[str, Cause] = {
    **dict.fromkeys(("arrive", "compute", "dense step"), "busy"),
    **dict.fromkeys(("read", "keys", "retrieve"), "lookup"),
    **dict.fromkeys(("post", "rows", "grads", "merge", "flag", "dense sum", "norm"), "communication"),
    **dict.fromkeys(("chunk rows", "chunk grads", "chunk merge"), "communication"),
    **dict.fromkeys(("collect", "update", "write", "chunk collect", "chunk update"), "bubble"),
}
CAUSE_OF_WAIT: dict[str, Cause] = {
    "keys": "lookup",
    **dict.fromkeys(("rows", "grads", "flag", "dense"), "communication"),
}


class TimeSegment(NamedTuple):
    """An interval of the compute stream with one cause."""

    begin_ns: int
    end_ns: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of one rank."""

    rank: int
    batch: int
    segments: tuple[TimeSegment, ...]  # contiguous, from the begin of the step to its end
    seen_ns: dict[Cause, int]  # recorded duration of lookup and communication of the batch, hidden or exposed
    num_bytes: dict[str, int]  # sent, by kind of event
    num_rows: dict[str, int]  # rows and grads sent, keys requested
    computed_ns: int = 0  # end of the last micro-batch's compute

    @property
    def begin_ns(self) -> int:
        return self.segments[0].begin_ns

    @property
    def end_ns(self) -> int:
        return self.segments[-1].end_ns

    @property
    def total_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def time_ns(self, cause: Cause) -> int:
        return sum(one.end_ns - one.begin_ns for one in self.segments if one.cause == cause)


def steps_of(trace: RankTrace) -> list[StepTimes]:
    """The completely recorded steps of a rank; the first batch only marks where the second begins."""
    groups = [(batch, list(spans)) for batch, spans in groupby(trace.stream("compute"), key=lambda span: span.batch)]
    for (before, _), (batch, _) in pairwise(groups):
        if batch <= before:
            raise DataError(
                f"rank {trace.rank} computed batch {batch} after batch {before}; steps are divided by batch in ascending order, "
                "so this trace has none. Record again."
            )
    others = _OtherStreams(span for span in trace.spans if span.stream != "compute")
    by_batch: dict[int, list[Span]] = {}
    for span in trace.spans:
        by_batch.setdefault(span.batch, []).append(span)
    first = _first_complete_batch(trace)
    steps = []
    for (_, before), (batch, spans) in pairwise(groups):
        if batch >= first and spans[-1].end_ns > before[-1].end_ns:
            segments = _merged(_divide(before[-1].end_ns, spans, others))
            steps.append(_step(trace.rank, batch, segments, by_batch[batch]))
    return steps


def _first_complete_batch(trace: RankTrace) -> int:
    """The first batch with all its spans; each stream runs each kind of event in batch order.

    Where spans were dropped, the batch of the first remaining one may be incomplete. Recording may have begun after the
    lookup of a batch.
    """
    firsts: dict[tuple[str, str], int] = {}
    for span in trace.spans:
        if span.stream in trace.num_dropped:
            firsts.setdefault((span.stream, span.kind), span.batch + 1)
        elif CAUSE_OF_KIND[span.kind] == "lookup":
            firsts.setdefault((span.stream, span.kind), span.batch)
    return max(firsts.values(), default=0)


def _step(rank: int, batch: int, segments: tuple[TimeSegment, ...], spans: list[Span]) -> StepTimes:
    seen: dict[Cause, int] = {}
    for cause in ("lookup", "communication"):
        intervals = [(one.begin_ns, one.end_ns) for one in segments if one.cause == cause]
        intervals += [(span.begin_ns, span.end_ns) for span in spans if CAUSE_OF_KIND[span.kind] == cause]
        waits = (wait for span in spans for wait in span.waits if CAUSE_OF_WAIT[wait.name] == cause)
        intervals += [(wait.begin_ns, wait.end_ns) for wait in waits]
        seen[cause] = _length_of_union(intervals)
    num_bytes, num_rows = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for span in spans:
        num_bytes[span.kind] += span.num_bytes
        num_rows[stage_of(span.kind)] += span.num_rows  # all chunks of a message together
    sent = {kind: number for kind, number in num_bytes.items() if number}
    rows = {kind: number for kind, number in num_rows.items() if number}
    computed_ns = max((span.end_ns for span in spans if span.kind == "compute"), default=0)
    return StepTimes(rank, batch, segments, seen, sent, rows, computed_ns)


def _divide(begin_ns: int, spans: Iterable[Span], others: _OtherStreams) -> Iterator[TimeSegment]:
    """The causes of the time from `begin_ns` to the end of the compute stream's last span."""
    now = begin_ns
    for span in spans:
        waits = [(wait.begin_ns, wait.end_ns, CAUSE_OF_WAIT[wait.name]) for wait in span.waits]
        for first, last, cause in (*waits, (span.end_ns, span.end_ns, None)):
            idle_end = min(max(now, span.begin_ns), first)
            reached = min(max(now, span.ready_ns), idle_end)  # before that: a save or a validation
            yield TimeSegment(now, reached, "bubble")
            if reached < idle_end:
                yield from others.idle_causes(reached, idle_end, span)
            yield TimeSegment(idle_end, first, CAUSE_OF_KIND[span.kind])
            if cause is not None:
                yield TimeSegment(first, last, cause)
            now = last


def _merged(segments: Iterable[TimeSegment]) -> tuple[TimeSegment, ...]:
    """Drops empty segments and joins neighbours of one cause."""
    merged: list[TimeSegment] = []
    for begin, end, cause in segments:
        if begin == end:
            continue
        joins = merged and merged[-1].cause == cause
        merged.append(TimeSegment(merged.pop().begin_ns if joins else begin, end, cause))
    return tuple(merged)


class _OtherStreams:
    """Spans of the other streams of a rank, sorted by their end."""

    def __init__(self, spans: Iterable[Span]):
        self._spans = sorted(spans, key=lambda span: span.end_ns)
        self._ends = [span.end_ns for span in self._spans]

    def idle_causes(self, begin_ns: int, end_ns: int, awaited: Span) -> Iterator[TimeSegment]:
        """Why the compute stream was idle before an event."""
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
            blocked = any(  # the rows stream waits for ids or rows of batch t+1
                post.ready_ns <= first < span.end_ns <= post.begin_ns for post in posts for span in ahead
            )
            yield TimeSegment(first, last, "lookup" if blocked else _idle_cause(first, spans))


def _idle_cause(instant: int, spans: Sequence[Span]) -> Cause:
    """Rules 1 to 6 of the module docstring."""
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
