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

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Table

from nestpipe.errors import DataError
from nestpipe.profiling.recorder import KINDS, RankTrace, Span, stage_of

Cause = Literal["busy", "lookup", "communication", "bubble"]
CAUSES: tuple[Cause, ...] = ("busy", "lookup", "communication", "bubble")
CAUSE_OF_KIND: dict[str, Cause] = {
    **dict.fromkeys(("arrive", "compute", "dense step"), "busy"),
    **dict.fromkeys(("read", "keys", "retrieve"), "lookup"),
    **dict.fromkeys(("post", "rows", "grads", "merge", "flag", "dense sum", "norm"), "communication"),
    **dict.fromkeys(("unshared rows", "unshared grads", "chunk rows", "chunk grads"), "communication"),
    **dict.fromkeys(("collect", "update", "write"), "bubble"),
    **dict.fromkeys(("unshared collect", "unshared update", "chunk collect", "chunk update"), "bubble"),
}
CAUSE_OF_WAIT: dict[str, Cause] = {
    "keys": "lookup",
    **dict.fromkeys(("rows", "grads", "flag", "dense"), "communication"),
}


class TimePiece(NamedTuple):
    """Time of the compute lane with one cause."""

    begin_ns: int
    end_ns: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of one rank."""

    rank: int
    batch: int
    pieces: tuple[TimePiece, ...]  # side by side, from the begin of the step to its end
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


def waited_for_others_ns(step: StepTimes, until_ns: int) -> int:
    """Of the communication of a step: what passed while another rank still computed the batch, which the last did until then."""
    own = (piece for piece in step.pieces if piece.cause == "communication")
    return sum(max(min(piece.end_ns, until_ns) - max(piece.begin_ns, step.computed_ns), 0) for piece in own)


def steps_of(trace: RankTrace) -> list[StepTimes]:
    """The steps of a rank that were recorded whole; the first batch only tells where the second begins."""
    groups = [(batch, list(spans)) for batch, spans in groupby(trace.stream("compute"), key=lambda span: span.batch)]
    for (before, _), (batch, _) in pairwise(groups):
        if batch <= before:
            raise DataError(
                f"rank {trace.rank} computed batch {batch} after batch {before}; a step is what the compute lane does "
                "for one batch, so this trace cannot be divided into steps. Record again."
            )
    others = _Others(span for span in trace.spans if span.stream != "compute")
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
        if span.stream in trace.num_dropped:
            firsts.setdefault((span.stream, span.kind), span.batch + 1)
        elif CAUSE_OF_KIND[span.kind] == "lookup":
            firsts.setdefault((span.stream, span.kind), span.batch)
    return max(firsts.values(), default=0)


def _step(rank: int, batch: int, pieces: tuple[TimePiece, ...], spans: list[Span]) -> StepTimes:
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
    return StepTimes(rank, batch, pieces, seen, sent, rows, computed_ns)


def _divide(begin_ns: int, spans: Iterable[Span], others: _Others) -> Iterator[TimePiece]:
    """The causes of all time from `begin_ns` to the end of the last span of the compute lane."""
    place = begin_ns
    for span in spans:
        marks = [(wait.begin_ns, wait.end_ns, CAUSE_OF_WAIT[wait.name]) for wait in span.waits]
        for first, last, cause in (*marks, (span.end_ns, span.end_ns, None)):
            idle_end = min(max(place, span.begin_ns), first)
            came = min(max(place, span.ready_ns), idle_end)  # before that the lane was elsewhere: a save, a validation
            yield TimePiece(place, came, "bubble")
            if came < idle_end:
                yield from others.reasons(came, idle_end, span)
            yield TimePiece(idle_end, first, CAUSE_OF_KIND[span.kind])
            if cause is not None:
                yield TimePiece(first, last, cause)
            place = last


def _merged(pieces: Iterable[TimePiece]) -> tuple[TimePiece, ...]:
    """The same pieces without empty ones, neighbours of one cause as one."""
    found: list[TimePiece] = []
    for piece in pieces:
        if piece.begin_ns == piece.end_ns:
            continue
        if found and found[-1].cause == piece.cause:
            piece = TimePiece(found.pop().begin_ns, piece.end_ns, piece.cause)  # noqa: PLW2901
        found.append(piece)
    return tuple(found)


class _Others:
    """What the other lanes of a rank did, found by when it ended."""

    def __init__(self, spans: Iterable[Span]):
        self._spans = sorted(spans, key=lambda span: span.end_ns)
        self._ends = [span.end_ns for span in self._spans]

    def reasons(self, begin_ns: int, end_ns: int, awaited: Span) -> Iterator[TimePiece]:
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
            yield TimePiece(first, last, "lookup" if late else _reason(first, spans))


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


NAMES: dict[Cause, str] = {
    "busy": "busy",
    "lookup": "exposed lookup",
    "communication": "exposed communication",
    "bubble": "bubbles",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its 10-90 % range."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        median, low, high = np.percentile(list(values), [50, 10, 90]).tolist()
        return Spread(median, low, high)

    def cells(self) -> tuple[str, str]:
        return f"{self.median:.2f}", f"{self.low:.2f} - {self.high:.2f}"


@dataclass(frozen=True, slots=True)
class StepDivision:
    """How the steps of one rank, or of the slowest rank of each step, divide."""

    step_ms: Spread
    ms: dict[Cause, Spread]
    share: dict[Cause, float]  # of the time of all steps; they add up to 1

    @staticmethod
    def of(steps: Sequence[StepTimes]) -> StepDivision:
        total = sum(step.total_ns for step in steps)
        times: dict[Cause, list[int]] = {cause: [step.time_ns(cause) for step in steps] for cause in CAUSES}
        return StepDivision(
            Spread.of(step.total_ns / 1e6 for step in steps),
            {cause: Spread.of(ns / 1e6 for ns in values) for cause, values in times.items()},
            {cause: sum(values) / total for cause, values in times.items()},
        )


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """What the traces of all ranks say about a range of steps."""

    first_batch: int
    last_batch: int
    num_steps: int
    ranks: dict[int, StepDivision]
    waited_for_others: dict[int, float]  # by rank, of its time: communication while another rank still computed
    slowest: StepDivision  # of each step the rank that took longest
    busy_share: float  # of the slowest rank
    exposed_lookup: float  # time that compute waited for it / its total time
    exposed_communication: float
    rows_sent_ratio: dict[str, float]  # "rows" out and "grads" home, over unique keys per rank and window
    num_bytes: dict[str, Spread]  # sent by all ranks in a step, by kind of event
    num_dropped: int  # spans that the recorders had no room for

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Group:
        """Tables for `rich.print`, of less than 80 columns."""
        slowest = Table(
            title=f"{self.num_steps} steps, batches {self.first_batch} to {self.last_batch}", pad_edge=False
        )
        ranks = Table(pad_edge=False)
        for table, heads in (
            (slowest, ("slowest rank of each step", "median ms", "10-90 %", "of the time")),
            (ranks, ("rank", "median ms", *CAUSES, "slower rank")),
        ):
            for number, head in enumerate(heads):
                table.add_column(head, justify="right" if number else "left", no_wrap=True)
        slowest.add_row("step", *self.slowest.step_ms.cells(), "100.0 %", end_section=True)
        for cause, name in NAMES.items():
            slowest.add_row(name, *self.slowest.ms[cause].cells(), f"{100 * self.slowest.share[cause]:.1f} %")
        for rank, one in self.ranks.items():
            shares = (f"{100 * one.share[cause]:.1f} %" for cause in CAUSES)
            ranks.add_row(
                str(rank), f"{one.step_ms.median:.2f}", *shares, f"{100 * self.waited_for_others[rank]:.1f} %"
            )
        lines = [
            f"exposed: lookup {100 * self.exposed_lookup:.1f} %, communication {100 * self.exposed_communication:.1f} % of their time",
            "rows sent / unique keys: "
            + (", ".join(f"{kind} {ratio:.3f}" for kind, ratio in self.rows_sent_ratio.items()) or "not counted"),
            "bytes per step, all ranks: "
            + (", ".join(f"{kind} {one.median:,.0f}" for kind, one in self.num_bytes.items()) or "none"),
        ]
        if self.num_dropped:
            lines.append(f"{self.num_dropped:,} older spans had no room and were dropped; their steps are left out")
        return Group(slowest, ranks, *lines)


def choose(traces: Sequence[RankTrace], first: int | None = None, last: int | None = None) -> list[list[StepTimes]]:
    """Per rank the steps of batches first .. last (last excluded) that all ranks recorded whole; raises DataError."""
    found = [{step.batch: step for step in steps_of(trace)} for trace in traces]
    whole = sorted(set.intersection(*(set(steps) for steps in found)))
    chosen = [batch for batch in whole if (first is None or batch >= first) and (last is None or batch < last)]
    if not chosen:
        asked = ":".join("" if bound is None else str(bound) for bound in (first, last))
        raise DataError(
            f"no step of batches {asked} was recorded whole by all ranks; there are {len(whole)}, "
            f"from {whole[0]} to {whole[-1]}."
            if whole
            else "no step was recorded whole by all ranks: that takes two batches, the first of which tells where the second "
            "begins, and room for their spans. Record more steps with --pipeline.trace-steps N."
        )
    return [[steps[batch] for batch in chosen] for steps in found]


def report(
    traces: Sequence[RankTrace], steps: Sequence[Sequence[StepTimes]], *, sequential: Sequence[Sequence[StepTimes]] = ()
) -> OverlapReport:
    """Sums up the steps of all ranks.

    Exposed is the waiting of the slowest rank over the total time of what it waited for. Totals are those of a
    `sequential` run, in which nothing is hidden, or else what was seen: a message on its way while nobody waits for it is
    not seen, so then the shares are upper bounds.
    """
    slowest = [max(same, key=lambda step: step.total_ns) for same in zip(*steps, strict=True)]
    totals: dict[Cause, float] = {}
    for cause in ("lookup", "communication"):
        if sequential:
            exposed = [max(same, key=lambda step: step.total_ns) for same in zip(*sequential, strict=True)]
            totals[cause] = sum(step.time_ns(cause) for step in exposed) / len(exposed) * len(slowest)
        else:
            totals[cause] = sum(step.seen_ns[cause] for step in slowest)
    division = StepDivision.of(slowest)
    return OverlapReport(
        first_batch=slowest[0].batch,
        last_batch=slowest[-1].batch,
        num_steps=len(slowest),
        ranks={own[0].rank: StepDivision.of(own) for own in steps},
        waited_for_others=_waited_for_others(steps),
        slowest=division,
        busy_share=division.share["busy"],
        exposed_lookup=_exposed(slowest, "lookup", totals),
        exposed_communication=_exposed(slowest, "communication", totals),
        rows_sent_ratio=_rows_sent_ratio(steps),
        num_bytes=_bytes(steps),
        num_dropped=sum(sum(trace.num_dropped.values()) for trace in traces),
    )


def _exposed(steps: Sequence[StepTimes], cause: Cause, totals: dict[Cause, float]) -> float:
    return sum(step.time_ns(cause) for step in steps) / totals[cause] if totals[cause] else 0.0


def _waited_for_others(steps: Sequence[Sequence[StepTimes]]) -> dict[int, float]:
    untils = [max(step.computed_ns for step in same) for same in zip(*steps, strict=True)]
    return {
        own[0].rank: sum(map(waited_for_others_ns, own, untils)) / sum(step.total_ns for step in own) for own in steps
    }


def _rows_sent_ratio(steps: Sequence[Sequence[StepTimes]]) -> dict[str, float]:
    num_rows = {
        kind: sum(step.num_rows.get(kind, 0) for own in steps for step in own) for kind in ("keys", "rows", "grads")
    }
    return {kind: num_rows[kind] / num_rows["keys"] for kind in ("rows", "grads") if num_rows["keys"]}


def _bytes(steps: Sequence[Sequence[StepTimes]]) -> dict[str, Spread]:
    per_step = [
        [sum(step.num_bytes.get(kind, 0) for step in same) for kind in KINDS] for same in zip(*steps, strict=True)
    ]
    columns = zip(*per_step, strict=True)
    return {kind: Spread.of(numbers) for kind, numbers in zip(KINDS, columns, strict=True) if any(numbers)}
