"""Constants from recorded traces: what each kind of event worked, what it sent, how long messages took.

Work is a median over ranks and batches, without the waits inside; from runs in which nothing ran beside it, if there are such
(mode sequential). A message is sent when the last rank's event has ended, and has arrived when a lane that was
waiting for it goes on; messages that nobody had to wait for say nothing. They leave a worker one after the other, so the
time of one is counted from the end of the one before. From their sizes and times follow bandwidth and delay; from runs with
different numbers of workers also congestion, which one number of workers cannot show and which is then 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from nestpipe.errors import DataError
from nestpipe.profiling.overlap import steps_of
from nestpipe.profiling.trace_file import KINDS, RankTrace, Span, stage_of
from nestpipe.simulate.constants import Constants, dense_trips

_ROUNDS = 5  # of guessing when a message began from bandwidth and delay, and these from the messages
_OTHER_NAMES = {"arrive": "compute"}  # a schedule that is split has more stages
_REAL_WAIT_NS = 20_000  # shorter ones are the price of asking


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One run: its ranks, and the batches that all of them recorded whole."""

    traces: Sequence[RankTrace]
    batches: frozenset[int]
    num_micro_batches: int

    @property
    def world_size(self) -> int:
        return self.traces[0].world_size

    @property
    def is_plain(self) -> bool:
        """Nothing ran beside anything."""
        return all(span.stream == "compute" for trace in self.traces for span in trace.spans)

    def spans(self) -> Iterator[tuple[int, Span]]:
        """Of whole batches, with the rank."""
        for trace in self.traces:
            yield from ((trace.rank, span) for span in trace.spans if span.batch in self.batches)


@dataclass(frozen=True, slots=True)
class _LinkFit:
    """A network: seconds = delay + bytes x per_byte."""

    delay_s: float
    per_byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What no trace tells, measured on the same ranks: where the CPU time of a rank goes."""

    beside_s: float  # in a sequential step, of all threads but that of its one lane
    idle_share: float  # of a core, when nothing is to be done
    peer_s: float  # of a lane, for one more peer of a message


def calibrate(
    traces: Sequence[RankTrace],
    *,
    device_s: float = 0.0,
    probes: Probes | None = None,
    source: str = "recorded traces",
) -> Constants:
    """Constants of the runs that these traces are of; raises DataError if they do not tell.

    `device_s` of a batch's compute takes no core (a sleep). With `probes`, what threads beside the lanes use, less what they use
    when nothing is to be done, is the price of moving bytes. Without them both are 0, and a peer costs all of what
    opening a receive took, which is more than one more peer does.
    """
    runs = _runs(traces)
    fewest = min(run.world_size for run in runs)
    if fewest < 2:
        raise DataError(
            "a trace of one rank knows no network: it sent nothing. Record with --pipeline.trace-steps N on two or more ranks."
        )
    small = [run for run in runs if run.world_size == fewest]
    quiet = [run for run in small if run.is_plain] or small
    work = {kind: mean(found) for kind in KINDS if (found := [_work_s(run, kind) for run in quiet])}
    compute_s = [seconds for run in quiet for seconds in _sums(run, "compute").values()]
    if work["compute"] < device_s:
        raise DataError(
            f"compute took {1e3 * work['compute']:.1f} ms of a batch, less than the {1e3 * device_s:.1f} ms said to need no core."
        )
    num_rows, row_bytes, key_bytes, dense_bytes = (mean(column) for column in zip(*map(_sizes, small), strict=True))
    # At most: post also finds what is sent.
    per_message = mean(_work_s(run, "post") / (2 * run.num_micro_batches) / (run.world_size - 1) for run in quiet)
    if probes:
        per_message = min(per_message, probes.peer_s)
    lines = [(run.world_size, line) for run in runs if (line := _line(run))]
    own = [line for size, line in lines if size == fewest]
    if not own:
        raise DataError("messages took no longer when they were larger; the traces do not tell the bandwidth.")
    num_bytes = 2 * (num_rows * row_bytes + dense_bytes) + num_rows * key_bytes
    sent = num_bytes * (fewest - 1) / fewest
    moving_s = _moving_s(probes, quiet) if probes else 0.0
    return Constants(
        source=source,
        base_workers=fewest,
        work_s=_beside_messages({**work, "compute": work["compute"] - device_s}, per_message * (fewest - 1), quiet),
        device_s=device_s,
        num_rows=num_rows,
        row_bytes=row_bytes,
        key_bytes=key_bytes,
        dense_bytes=dense_bytes,
        first_use=mean(_first_use(run) for run in small),
        bytes_per_s=1 / mean(line.per_byte_s for line in own),
        delay_s=mean(line.delay_s for line in own),
        peer_s=per_message,
        wire_cpu_s=moving_s / sent if sent else 0.0,
        idle_share=probes.idle_share if probes else 0.0,
        congestion=_congestion(lines),
        jitter=_jitter(compute_s),
    )


def _runs(traces: Sequence[RankTrace]) -> list[_Recorded]:
    by_run: dict[tuple[str, int], list[RankTrace]] = defaultdict(list)
    for trace in traces:
        by_run[trace.run, trace.world_size].append(trace)
    found = []
    for (name, world_size), own in by_run.items():
        if sorted(trace.rank for trace in own) != list(range(world_size)):
            ranks = ", ".join(str(trace.rank) for trace in own)
            raise DataError(
                f"run '{name}' had {world_size} ranks, but there are traces of rank {ranks}; a message's time needs all of them."
            )
        if any(span.kind == "merge" for trace in own for span in trace.spans):
            raise DataError(
                f"run '{name}' trained in groups, whose messages go to some ranks only; record one without groups."
            )
        if any(span.kind == "chunk rows" for trace in own for span in trace.spans):
            raise DataError(
                f"run '{name}' sent its first rows in slices, of which a trace does not tell when each arrived; record one without slices."
            )
        batches = frozenset.intersection(*(frozenset(step.batch for step in steps_of(trace)) for trace in own))
        if not batches:
            raise DataError(f"run '{name}' has no batch that all ranks recorded whole; record more steps.")
        num_micro_batches = 1 + max(span.micro_batch for trace in own for span in trace.spans)
        found.append(_Recorded(own, batches, num_micro_batches))
    if not found:
        raise DataError("there is no trace to take constants from.")
    return found


def _sums(run: _Recorded, kind: str) -> dict[tuple[int, int], float]:
    """Seconds of work by rank and batch, all parts and both halves together."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    for rank, span in run.spans():
        if _OTHER_NAMES.get(span.kind, stage_of(span.kind)) == kind:
            waited = sum(wait.end_ns - max(wait.begin_ns, span.begin_ns) for wait in span.waits)
            found[rank, span.batch] += (span.end_ns - span.begin_ns - waited) / 1e9
    return found


def _work_s(run: _Recorded, kind: str) -> float:
    return median(found) if (found := list(_sums(run, kind).values())) else 0.0


def _moving_s(probes: Probes, runs: Sequence[_Recorded]) -> float:
    """CPU time of a sequential step in which threads beside the lane move bytes."""
    step_s = median(step.total_ns for run in runs for trace in run.traces for step in steps_of(trace)) / 1e9
    return max(probes.beside_s - probes.idle_share * step_s, 0.0)


def _beside_messages(work: dict[str, float], launch_s: float, runs: Sequence[_Recorded]) -> dict[str, float]:
    """Work without what launching messages takes, which grows with the number of peers (costs.py)."""
    micro_batches = mean(run.num_micro_batches for run in runs)
    num_messages = {
        "rows": micro_batches,
        "grads": micro_batches,
        "keys": 4,
        "dense sum": 2 * dense_trips(runs[0].world_size),
        "post": 2 * micro_batches,
    }
    return {
        kind: max(seconds - num_messages.get(kind, 0) * launch_s, 0.0)
        for kind, seconds in work.items()
        if kind == stage_of(kind)
    }


def _sizes(run: _Recorded) -> tuple[float, float, float, float]:
    """Rows of a rank and batch, bytes of a row, of a key and of the dense gradients."""
    rows, num_bytes = defaultdict[str, int](int), defaultdict[str, int](int)
    for _, span in run.spans():
        rows[stage_of(span.kind)] += span.num_rows
        num_bytes[stage_of(span.kind)] += span.num_bytes
    batches, crossing = len(run.batches) * run.world_size, (run.world_size - 1) / run.world_size
    if not rows["keys"] or not rows["rows"]:
        raise DataError("the traces count no rows: nothing was looked up, or the lanes were not watched.")
    return (
        rows["keys"] / batches,
        num_bytes["rows"] / rows["rows"] / crossing,
        num_bytes["keys"] / rows["keys"] / crossing,
        num_bytes["dense sum"] / 2 / batches / crossing,
    )


def _first_use(run: _Recorded) -> float:
    """The exponent with which the share of rows that have been used grows with the share of parts."""
    counts = np.zeros(run.num_micro_batches)
    for _, span in run.spans():
        if stage_of(span.kind) == "rows":
            counts[span.micro_batch] += span.num_rows
    if run.num_micro_batches == 1:
        return 1.0
    seen = np.cumsum(counts)[:-1] / counts.sum()
    places = np.log(np.arange(1, run.num_micro_batches) / run.num_micro_batches)
    return float(np.clip((places * np.log(seen)).sum() / (places * places).sum(), 0.0, 1.0))


def _line(run: _Recorded) -> _LinkFit | None:
    """Bandwidth and delay of a run, from its messages of rows and gradients; None if large ones took no longer than small ones.

    That happens where most messages were hidden: few were waited for.
    """
    messages = sorted(_messages(run), key=lambda message: message.sent_s)
    line, delay_s = _LinkFit(0.0, 0.0), _delay_s(run)
    for _ in range(_ROUNDS):
        found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        free = 0.0
        for one in messages:
            begin = max(one.sent_s, free, one.opened_s + line.delay_s)
            free = begin + one.num_bytes * line.per_byte_s
            if one.arrived_s is not None and one.arrived_s > begin:
                found[one.kind, one.micro_batch].append((one.num_bytes, one.arrived_s - begin))
        if not found:
            raise DataError(
                "no rank ever waited for rows or gradients, so the traces do not tell how long messages take."
            )
        line = _straight([tuple(map(median, zip(*own, strict=True))) for own in found.values()], delay_s)
    return line if line.per_byte_s else None


class _Sent(NamedTuple):
    """A message: when the last rank sent it, and when a lane that waited for it went on, if one did."""

    sent_s: float
    opened_s: float
    arrived_s: float | None
    num_bytes: float
    kind: str
    micro_batch: int


def _messages(run: _Recorded) -> Iterator[_Sent]:
    """Rows and gradients; and keys and dense sums, which only keep the wire busy."""
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
            if kind == "rows" and micro_batch == 0:  # if they are split
                waiting["arrive", batch, 0] = "rows"
            if kind == "grads" and micro_batch == run.num_micro_batches - 1:
                waiting["flag", batch, 0] = "flag"  # travels with the last gradients; some lanes wait for it first
            ends = [end for event, name in waiting.items() for end in _waited(spans.get(event, []), name)]
            yield _Sent(sent_s, opened_s, median(ends) / 1e9 if ends else None, num_bytes, kind, micro_batch)
        elif kind in ("keys", "dense sum") and all(span.waits for span in own):
            again_s = max(span.waits[0].end_ns for span in own) / 1e9
            first = 0.0 if kind == "keys" else num_bytes / dense_trips(run.world_size)  # how many keys, and then which
            yield _Sent(max(span.begin_ns for span in own) / 1e9, 0.0, None, first, kind, 0)
            yield _Sent(again_s, again_s, None, num_bytes - first, kind, 1)


def _waited(spans: Sequence[Span], name: str) -> list[int]:
    """When waits of this name ended, where there was something to wait for."""
    waits = (wait for span in spans for wait in span.waits if wait.name == name)
    return [wait.end_ns for wait in waits if wait.end_ns - wait.begin_ns > _REAL_WAIT_NS]


def _delay_s(run: _Recorded) -> float:
    """Of the first answer in a key exchange, a few bytes: word of open receives and then the message, two delays."""
    first: dict[int, list[int]] = defaultdict(list)
    for _, span in run.spans():
        if span.kind == "keys" and span.waits:
            first[span.batch].append(span.waits[0].end_ns - span.waits[0].begin_ns)
    shortest = [min(own) for own in first.values()]  # who comes last waits for nobody
    return min(shortest) / 2e9 if shortest else 0.0


def _straight(points: Sequence[tuple[float, ...]], delay_s: float) -> _LinkFit:
    """The line through (bytes, seconds) with the least squares among those that are never negative.

    Messages of one size do not tell delay and bandwidth apart; for them the delay is given.
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


def _congestion(lines: Sequence[tuple[int, _LinkFit]]) -> float:
    """How bytes take longer between more workers, as an exponent; 0 if only one number of workers was seen."""
    sizes = np.log([size for size, _ in lines])
    if np.ptp(sizes) == 0:
        return 0.0
    return max(float(np.polyfit(sizes, np.log([line.per_byte_s for _, line in lines]), 1)[0]), 0.0)


def _jitter(seconds: Sequence[float]) -> float:
    """Half the range of the middle 68 % over the median: the standard deviation where times are normal."""
    low, high = np.quantile(seconds, [0.16, 0.84])
    return float((high - low) / 2 / median(seconds)) if median(seconds) else 0.0
