"""Made-up traces: the real schedules, executed by a clock that only counts, with durations from a seeded generator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nestpipe.pipeline.schedule import Schedule
from nestpipe.profiling.trace_file import RankTrace, RecordedWait, Span

MS = 1_000_000
START_NS = 10**12
NUM_KEYS = 1_000  # of each batch and rank
TIMES_MS = {"read": 3.0, "keys": 1.5, "post": 0.05, "collect": 0.1, "flag": 0.05, "dense sum": 2.0, "norm": 0.2}
TIMES_MS |= {"rows": 0.2, "grads": 0.2, "dense step": 0.7, "update": 0.8, "write": 1.0}
WAITS = {"compute": ("rows", "rows"), "collect": ("grads", "grads"), "flag": ("flag", "grads")}  # kind -> wait, sender
BYTES = {"keys": 8_000, "dense sum": 50_000}


def made_up(
    mode="nested",
    *,
    rank=0,
    num_steps=6,
    num_micro_batches=4,
    compute_ms=10.0,
    read_ms=TIMES_MS["read"],
    retrieve_ms=4.0,
    message_ms=2.0,
    seed=0,
    run="made-up",
):
    """The trace of one rank of a run in this mode; messages take `message_ms` from their launch."""
    schedule, random = Schedule.of(mode, num_micro_batches), np.random.default_rng(seed + 1000 * rank)
    times = {**TIMES_MS, "read": read_ms, "compute": compute_ms / num_micro_batches, "retrieve": retrieve_ms}
    shares = [
        NUM_KEYS // num_micro_batches + (micro_batch < NUM_KEYS % num_micro_batches)
        for micro_batch in range(num_micro_batches)
    ]
    programs = {stream: iter(events) for stream, events in schedule.events(num_steps).items()}
    waiting = {stream: next(program, None) for stream, program in programs.items()}
    free, done, spans = dict.fromkeys(programs, START_NS), {}, []

    def befores(event):
        return [one for one in schedule.waits_for(event) if one.batch < num_steps]

    while any(waiting.values()):
        stream, event = next(
            (stream, event) for stream, event in waiting.items() if event and all(one in done for one in befores(event))
        )
        kind, batch, micro_batch = event
        ready = free[stream]
        begin = max([ready, *(done[one] for one in befores(event))]) + int(random.integers(2_000, 9_000))
        waits, work = (), begin
        if kind in WAITS:
            name, sender = WAITS[kind]
            sent = done[sender, batch, num_micro_batches - 1 if kind == "flag" else micro_batch]
            work = max(begin + 900, sent + int(message_ms * MS))
            waits = (RecordedWait(name, begin + 100, work),)
        end = work + int(times[kind] * MS * random.uniform(0.9, 1.1))
        num_rows = NUM_KEYS if kind == "keys" else shares[micro_batch] if kind in {"rows", "grads"} else 0
        num_bytes = BYTES.get(kind, num_rows * 128)
        spans.append(Span(stream, kind, batch, micro_batch, ready, begin, end, num_bytes, num_rows, waits))
        free[stream] = done[event] = end
        waiting[stream] = next(programs[stream], None)
    return RankTrace(run, rank, 1, tuple(spans), {})


def ranks(world_size, mode="nested", **settings):
    """The traces of several ranks."""
    return [replace(made_up(mode, rank=rank, **settings), world_size=world_size) for rank in range(world_size)]


def trace_of(*spans, num_dropped=()):
    """These spans as the trace of one rank."""
    return RankTrace("made-up", 0, 1, spans, dict(num_dropped))


def compute(batch, begin, end, *, kind="compute", micro_batch=0, ready=0, waits=()):
    """A span on the compute stream."""
    return Span("compute", kind, batch, micro_batch, min(begin, ready), begin, end, waits=waits)
