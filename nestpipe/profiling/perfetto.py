"""Traces for ui.perfetto.dev and chrome://tracing: a rank is a process, a stream a thread, an arrow a message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from nestpipe.profiling.overlap import CAUSES, StepTimes
from nestpipe.profiling.trace_file import MICRO_BATCH_KINDS, STREAMS, RankTrace, Span

LETTERS = {
    "read": "read",
    "keys": "K",
    "retrieve": "R",
    "post": "post",
    "rows": "F",
    "compute": "C",
    "grads": "B",
    "collect": "S",
    "merge": "X",
    "flag": "flag",
    "dense sum": "D",
    "norm": "norm",
    "dense step": "step",
    "update": "U",
    "write": "W",
    "arrive": "A",
    "chunk rows": "Fn",
    "chunk grads": "Bn",
    "chunk collect": "Sn",
    "chunk merge": "Xn",
    "chunk update": "Un",
}
_SENDERS = {"keys": "keys", "rows": "rows", "grads": "grads", "dense": "dense sum"}  # wait -> kind of the sending event
_STEPS = len(STREAMS)  # the thread below the streams


def title(span: Span, num_micro_batches: int) -> str:
    """Event, micro-batch or chunk, and batch: 'C 2/8 (t=14)'."""
    micro_batch = f" {span.micro_batch + 1}/{num_micro_batches}" if span.kind in MICRO_BATCH_KINDS else ""
    if span.kind.startswith("chunk "):
        micro_batch = f" chunk {span.micro_batch + 2}"
    return f"{LETTERS[span.kind]}{micro_batch} (t={span.batch})"


def num_micro_batches_of(traces: Sequence[RankTrace]) -> int:
    """Micro-batches per batch, as the compute streams executed them."""
    return 1 + max((span.micro_batch for trace in traces for span in trace.spans if span.kind == "compute"), default=0)


def to_perfetto(traces: Sequence[RankTrace], steps: Sequence[Sequence[StepTimes]]) -> str:
    """The spans of all ranks and the causes of the chosen steps, as JSON in Chrome's trace event format."""
    start = min((span.ready_ns for trace in traces for span in trace.spans), default=0)
    num_micro_batches = num_micro_batches_of(traces)
    events: list[dict[str, Any]] = []
    for trace in traces:
        events += _names(trace.rank)
        for span in trace.spans:
            events += _span_events(trace.rank, span, title(span, num_micro_batches), start)
    for own in steps:
        for step in own:
            arguments = {f"{cause}_ms": step.time_ns(cause) / 1e6 for cause in CAUSES}
            place = {"pid": step.rank, "tid": _STEPS, **_time(step.begin_ns, step.end_ns, start)}
            events.append({"ph": "X", "name": f"step {step.batch}", "cat": "step", **place, "args": arguments})
    events += _arrows(traces, start)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for number, stream in enumerate((*STREAMS, "steps")):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": stream}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}


def _span_events(rank: int, span: Span, name: str, start: int) -> Iterator[dict[str, Any]]:
    place = {"pid": rank, "tid": STREAMS.index(span.stream)}
    counts = {"batch": span.batch, "micro_batch": span.micro_batch, "bytes": span.num_bytes, "rows": span.num_rows}
    if span.begin_ns > span.ready_ns:
        idle = _time(span.ready_ns, span.begin_ns, start)
        yield {"ph": "X", "name": f"before {name}", "cat": "idle", **place, **idle, "args": {}}
    busy = _time(span.begin_ns, span.end_ns, start)
    yield {"ph": "X", "name": name, "cat": span.kind, **place, **busy, "args": counts}
    for wait in span.waits:
        time = _time(wait.begin_ns, wait.end_ns, start)
        yield {"ph": "X", "name": f"wait for {wait.name}", "cat": "wait", **place, **time, "args": {}}


def _arrows(traces: Sequence[RankTrace], start: int) -> Iterator[dict[str, Any]]:
    """Arrows from the last sender of a message to the wait for it."""
    sent: dict[tuple[str, int, int], list[tuple[int, Span]]] = {}
    for trace in traces:
        for span in trace.spans:
            sent.setdefault((span.kind, span.batch, span.micro_batch), []).append((trace.rank, span))
    number = 0
    for trace in traces:
        for span in trace.spans:
            for wait in span.waits:
                kind = _SENDERS.get(wait.name, "")
                if span.kind.endswith(" collect"):  # of a chunk
                    kind = f"{span.kind.removesuffix('collect')}{kind}"
                senders = sent.get((kind, span.batch, span.micro_batch), ())
                before = [(rank, one) for rank, one in senders if one is not span and one.begin_ns <= wait.end_ns]
                if before:
                    rank, last = max(before, key=lambda pair: pair[1].begin_ns)
                    number += 1
                    common = {"name": wait.name, "cat": "message", "id": number}
                    yield {"ph": "s", **common, "pid": rank, **_point(last.stream, last.begin_ns, start)}
                    end = {"pid": trace.rank, **_point(span.stream, wait.begin_ns, start)}
                    yield {"ph": "f", "bp": "e", **common, **end}


def _time(begin_ns: int, end_ns: int, start: int) -> dict[str, float]:
    return {"ts": (begin_ns - start) / 1e3, "dur": (end_ns - begin_ns) / 1e3}  # microseconds


def _point(stream: str, at_ns: int, start: int) -> dict[str, float]:
    return {"tid": STREAMS.index(stream), "ts": (at_ns - start) / 1e3}
