"""Fits the constants of the model to recorded traces.

Work is the median over ranks and batches, without waits; from sequential runs if there are any, because nothing runs concurrently
there. A message is sent when the event of the last rank has ended, and has arrived when a stream that was blocked on it continues;
messages that nothing waited for give no information. Messages leave a worker one after the other, so the time of one counts
from the end of the previous one. Bandwidth and delay are fitted to sizes and times; congestion to runs with different numbers
of workers, and is 0 if there is only one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import truediv
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from nestpipe.errors import DataError
from nestpipe.profiling.overlap import steps_of
from nestpipe.profiling.trace_file import KINDS, RankTrace, Span, stage_of
from nestpipe.simulate.constants import Constants

_ROUNDS = 5  # fixed-point iterations: start times follow from bandwidth and delay, and these from start times
_MERGED_KINDS = {"arrive": "compute"}  # with a chunk of shared rows
_REAL_WAIT_NS = 20_000  # shorter waits are the cost of the call


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One run: its ranks, and the batches that all of them recorded completely."""

    traces: Sequence[RankTrace]
    batches: frozenset[int]
    num_micro_batches: int

    @property
    def world_size(self) -> int:
        return self.traces[0].world_size

    @property
    def is_sequential(self) -> bool:
        """Whether nothing ran concurrently."""
        return all(span.stream == "compute" for trace in self.traces for span in trace.spans)

    def spans(self) -> Iterator[tuple[int, Span]]:
        """Spans of complete batches, with their rank."""
        for trace in self.traces:
            yield from ((trace.rank, span) for span in trace.spans if span.batch in self.batches)


@dataclass(frozen=True, slots=True)
class _LinkFit:
    """A link: seconds = delay + bytes x per_byte."""

    delay_s: float
    per_byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """CPU times of a rank that no trace contains, measured separately."""

    background_s: float  # of all other threads in a sequential step
    idle_share: float  # of a core, in a rank without work
    peer_s: float  # of a stream, per additional peer of a message


def calibrate(
    traces: Sequence[RankTrace],
    *,
    device_s: float = 0.0,
    probes: Probes | None = None,
    source: str = "recorded traces",
) -> Constants:
    """The constants of the recorded runs; raises DataError if the traces do not determine them.

    `device_s` of a batch's compute takes no core. With `probes`, the CPU time of background threads beyond their idle time is
    the cost of moving bytes. Without them both are 0, and the cost of a peer is the whole cost of opening a receive, which is an
    upper bound.
    """
    runs = _runs(traces)
    fewest = min(run.world_size for run in runs)
    if fewest < 2:
        raise DataError(
            "a trace of one rank contains no messages. Record with --pipeline.advanced.trace-steps N on two or more ranks."
        )
    small = [run for run in runs if run.world_size == fewest]
    quiet = [run for run in small if run.is_sequential] or small
    work = {kind: mean(_work_s(run, kind) for run in quiet) for kind in KINDS}
    compute_s = [seconds for run in quiet for seconds in _sums(run, "compute").values()]
    if work["compute"] < device_s:
        raise DataError(
            f"compute took {1e3 * work['compute']:.1f} ms of a batch, less than the device time of {1e3 * device_s:.1f} ms."
        )
    added_s = _micro_batch_s(quiet, device_s)
    work["compute"] -= added_s * mean(run.num_micro_batches for run in quiet)
    num_rows, row_bytes, key_bytes, dense_bytes = (mean(column) for column in zip(*map(_sizes, small), strict=True))
    # An upper bound: post also determines what is sent.
    per_message = mean(_work_s(run, "post") / (2 * run.num_micro_batches) / (run.world_size - 1) for run in quiet)
    if probes:
        per_message = min(per_message, probes.peer_s)
    links = [(run.world_size, link) for run in runs if (link := _fit_link(run))]
    own = [link for size, link in links if size == fewest]
    if not own:
        raise DataError("larger messages took no longer than small ones; the traces do not determine the bandwidth.")
    num_bytes = 2 * (num_rows * row_bytes + dense_bytes) + num_rows * key_bytes
    sent = num_bytes * (fewest - 1) / fewest
    moving_s = _moving_s(probes, quiet) if probes else 0.0
    return Constants(
        source=source,
        base_workers=fewest,
        work_s=_without_launches({**work, "compute": work["compute"] - device_s}, per_message * (fewest - 1), quiet),
        device_s=device_s,
        micro_batch_s=added_s,
        num_rows=num_rows,
        row_bytes=row_bytes,
        key_bytes=key_bytes,
        dense_bytes=dense_bytes,
        first_use=mean(_first_use(run) for run in small),
        bytes_per_s=1 / mean(link.per_byte_s for link in own),
        delay_s=mean(link.delay_s for link in own),
        peer_s=per_message,
        wire_cpu_s=moving_s / sent if sent else 0.0,
        idle_share=probes.idle_share if probes else 0.0,
        congestion=_congestion(links),
        jitter=_jitter(compute_s),
    )


def _runs(traces: Sequence[RankTrace]) -> list[_Recorded]:
    by_run: dict[tuple[str, int], list[RankTrace]] = defaultdict(list)
    for trace in traces:
        by_run[trace.run, trace.world_size].append(trace)
    runs = []
    for (name, world_size), own in by_run.items():
        if sorted(trace.rank for trace in own) != list(range(world_size)):
            ranks = ", ".join(str(trace.rank) for trace in own)
            raise DataError(
                f"run '{name}' had {world_size} ranks, but there are traces of rank {ranks}; message times need all ranks."
            )
        if any(span.kind == "merge" for trace in own for span in trace.spans):
            raise DataError(
                f"run '{name}' trained in groups, whose messages go to some ranks only; record a run without groups."
            )
        kinds = {span.kind for trace in own for span in trace.spans}
        if "chunk rows" in kinds and "arrive" not in kinds:
            raise DataError(
                f"run '{name}' sent its first rows in chunks of buckets, whose arrival times are not recorded; record a run without chunks."
            )
        batches = frozenset.intersection(*(frozenset(step.batch for step in steps_of(trace)) for trace in own))
        if not batches:
            raise DataError(f"run '{name}' has no batch that all ranks recorded completely; record more steps.")
        num_micro_batches = 1 + max(span.micro_batch for trace in own for span in trace.spans)
        runs.append(_Recorded(own, batches, num_micro_batches))
    if not runs:
        raise DataError("there is no trace to fit constants to.")
    return runs


def _sums(run: _Recorded, kind: str) -> dict[tuple[int, int], float]:
    """Seconds of work by rank and batch, all micro-batches and chunks together."""
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for rank, span in run.spans():
        if _MERGED_KINDS.get(span.kind, stage_of(span.kind)) == kind:
            waited = sum(wait.end_ns - max(wait.begin_ns, span.begin_ns) for wait in span.waits)
            sums[rank, span.batch] += (span.end_ns - span.begin_ns - waited) / 1e9
    return sums


def _work_s(run: _Recorded, kind: str) -> float:
    return median(sums) if (sums := _sums(run, kind).values()) else 0.0


def _micro_batch_s(runs: Sequence[_Recorded], device_s: float) -> float:
    """What each micro-batch adds to the compute of a batch; 0 if all runs have the same number."""
    numbers, seconds = [run.num_micro_batches for run in runs], [_work_s(run, "compute") - device_s for run in runs]
    if len(set(numbers)) == 1:
        return 0.0
    slope = float(np.polyfit(numbers, seconds, 1)[0])
    return float(max(min(slope, *map(truediv, seconds, numbers)), 0.0))


def _moving_s(probes: Probes, runs: Sequence[_Recorded]) -> float:
    """CPU time of background threads that move bytes, per sequential step."""
    step_s = median(step.total_ns for run in runs for trace in run.traces for step in steps_of(trace)) / 1e9
    return max(probes.background_s - probes.idle_share * step_s, 0.0)


def _without_launches(work: dict[str, float], launch_s: float, runs: Sequence[_Recorded]) -> dict[str, float]:
    """Work without the launching of messages, which grows with the number of peers (costs.py)."""
    micro_batches = mean(run.num_micro_batches for run in runs)
    num_messages = {
        "rows": micro_batches,
        "grads": micro_batches,
        "keys": 4,
        "dense sum": 4,
        "post": 2 * micro_batches,
    }
    return {
        kind: max(seconds - num_messages.get(kind, 0) * launch_s, 0.0)
        for kind, seconds in work.items()
        if kind == stage_of(kind)
    }


def _sizes(run: _Recorded) -> tuple[float, float, float, float]:
    """Rows per rank and batch; bytes of a row, of a key and of the dense gradients."""
    rows, num_bytes = defaultdict[str, int](int), defaultdict[str, int](int)
    for _, span in run.spans():
        rows[stage_of(span.kind)] += span.num_rows
        num_bytes[stage_of(span.kind)] += span.num_bytes
    batches, crossing = len(run.batches) * run.world_size, (run.world_size - 1) / run.world_size
    if not rows["keys"] or not rows["rows"]:
        raise DataError("the traces count no rows: there were no lookups, or the channels were not watched.")
    return (
        rows["keys"] / batches,
        num_bytes["rows"] / rows["rows"] / crossing,
        num_bytes["keys"] / rows["keys"] / crossing,
        (num_bytes["dense sum"] + num_bytes["dense step"]) / 2 / batches / crossing,  # the latter if sequential
    )


def _first_use(run: _Recorded) -> float:
    """The exponent of the share of used rows as a function of the share of micro-batches."""
    counts = np.zeros(run.num_micro_batches)
    for _, span in run.spans():
        if stage_of(span.kind) == "rows":
            counts[span.micro_batch] += span.num_rows
    if run.num_micro_batches == 1:
        return 1.0
    seen = np.cumsum(counts)[:-1] / counts.sum()
    places = np.log(np.arange(1, run.num_micro_batches) / run.num_micro_batches)
    return float(np.clip((places * np.log(seen)).sum() / (places * places).sum(), 0.0, 1.0))


def _fit_link(run: _Recorded) -> _LinkFit | None:
    """Bandwidth and delay, fitted to messages of rows and gradients; None if larger ones took no longer.

    That happens if most messages were hidden, so that few were waited for.
    """
    messages = sorted(_messages(run), key=lambda message: message.sent_s)
    link, delay_s = _LinkFit(0.0, 0.0), _delay_s(run)
    for _ in range(_ROUNDS):
        times: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        free = 0.0
        for one in messages:
            begin = max(one.sent_s, free, one.opened_s + link.delay_s)
            free = begin + one.num_bytes * link.per_byte_s
            if one.arrived_s is not None and one.arrived_s > begin:
                times[one.kind, one.micro_batch].append((one.num_bytes, one.arrived_s - begin))
        if not times:
            raise DataError(
                "no rank ever waited for rows or gradients, so the traces do not show how long messages take."
            )
        link = _fit_line([tuple(map(median, zip(*own, strict=True))) for own in times.values()], delay_s)
    return link if link.per_byte_s else None


class _Sent(NamedTuple):
    """A message: when the last rank sent it, and when a stream blocked on it continued, if there was one."""

    sent_s: float
    opened_s: float
    arrived_s: float | None
    num_bytes: float
    kind: str
    micro_batch: int


def _messages(run: _Recorded) -> Iterator[_Sent]:
    """Rows and gradients; also keys and dense sums, which only occupy the link."""
    spans: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
    for _, span in run.spans():
        spans[span.kind, span.batch, span.micro_batch].append(span)
    for (kind, batch, micro_batch), own in spans.items():
        sent_s, num_bytes = max(span.end_ns for span in own) / 1e9, mean(span.num_bytes for span in own)
        if kind in ("rows", "grads"):
            opened_s = max((span.end_ns for span in spans.get(("post", batch, 0), [])), default=0) / 1e9
            waiting = (
                {("compute", batch, micro_batch): "rows"}
                if kind == "rows"
                else {("collect", batch, micro_batch): "grads"}
            )
            if kind == "rows" and micro_batch == 0:  # with a chunk of shared rows
                waiting["arrive", batch, 0] = "rows"
            if kind == "grads" and micro_batch == run.num_micro_batches - 1:
                waiting["flag", batch, 0] = "flag"  # sent with the last gradients; some streams wait for it first
            ends = [end for event, name in waiting.items() for end in _waited(spans.get(event, []), name)]
            yield _Sent(sent_s, opened_s, median(ends) / 1e9 if ends else None, num_bytes, kind, micro_batch)
        elif kind in ("keys", "dense sum") and all(span.waits for span in own):
            again_s = max(span.waits[0].end_ns for span in own) / 1e9
            first = 0.0 if kind == "keys" else num_bytes / 2  # the counts, then the ids
            yield _Sent(max(span.begin_ns for span in own) / 1e9, 0.0, None, first, kind, 0)
            yield _Sent(again_s, again_s, None, num_bytes - first, kind, 1)


def _waited(spans: Sequence[Span], name: str) -> list[int]:
    """The ends of waits of this name, without those that were too short to be real."""
    waits = (wait for span in spans for wait in span.waits if wait.name == name)
    return [wait.end_ns for wait in waits if wait.end_ns - wait.begin_ns > _REAL_WAIT_NS]


def _delay_s(run: _Recorded) -> float:
    """Half the first wait of a key exchange, of a few bytes: the notice of open receives, then the message."""
    first: dict[int, list[int]] = defaultdict(list)
    for _, span in run.spans():
        if span.kind == "keys" and span.waits:
            first[span.batch].append(span.waits[0].end_ns - span.waits[0].begin_ns)
    shortest = [min(own) for own in first.values()]  # the last rank waits for no other
    return min(shortest) / 2e9 if shortest else 0.0


def _fit_line(points: Sequence[tuple[float, ...]], delay_s: float) -> _LinkFit:
    """Least-squares line through (bytes, seconds) with non-negative slope and intercept.

    Messages of one size do not determine both; the delay is then given.
    """
    sizes, seconds = np.array(points).T
    if np.ptp(sizes) > 0.2 * sizes.max():
        per_byte, delay = np.polyfit(sizes, seconds, 1)
        if per_byte >= 0 and delay >= 0:
            return _LinkFit(float(delay), float(per_byte))
        if per_byte < 0:
            return _LinkFit(float(seconds.mean()), 0.0)
        delay_s = 0.0
    delay_s = min(delay_s, float(seconds.min()))
    return _LinkFit(delay_s, float((sizes * (seconds - delay_s)).sum() / (sizes * sizes).sum()))


def _congestion(links: Sequence[tuple[int, _LinkFit]]) -> float:
    """Growth of transfer time with the number of workers, as an exponent; 0 for a single number of workers."""
    sizes = np.log([size for size, _ in links])
    if np.ptp(sizes) == 0:
        return 0.0
    return max(float(np.polyfit(sizes, np.log([link.per_byte_s for _, link in links]), 1)[0]), 0.0)


def _jitter(seconds: Sequence[float]) -> float:
    """Half the range of the middle 68 % over the median: the standard deviation where times are normal."""
    low, high = np.quantile(seconds, [0.16, 0.84])
    return float((high - low) / 2 / median(seconds)) if median(seconds) else 0.0
