"""Made-up traces of a nested pipeline: lanes, edges and waits as the real ones, durations from a seeded generator."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nestpipe.trace import LANES, WHOLE, RankTrace, Span, Wait

MS = 1_000_000


@dataclass
class Machine:
    """One rank: lanes that are busy until some time, events that follow others."""

    seed: int
    start_ns: int = 10**12
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.free = dict.fromkeys(LANES, self.start_ns)
        self.done: dict[tuple[str, int, int], int] = {}

    def end(self, kind, batch, part=WHOLE):
        return self.done.get((kind, batch, part), self.start_ns)

    def run(self, lane, kind, batch, part, *, after, ms, wait=None, num_bytes=0, num_rows=0):
        """An event of about `ms` after the ends in `after`; `wait` is (name, when the messages are there)."""
        ready = self.free[lane]
        begin = max(ready, *after) + int(self.random.integers(2_000, 9_000))
        waits, work = (), begin
        if wait:
            work = max(begin + 900, wait[1])
            waits = (Wait(wait[0], begin + 100, work),)
        end = work + int(ms * MS * self.random.uniform(0.9, 1.1))
        self.spans.append(Span(lane, kind, batch, part, ready, begin, end, num_bytes, num_rows, waits))
        self.free[lane] = self.done[kind, batch, part] = end
        return end


def nested(
    *, rank=0, num_steps=6, num_parts=4, compute_ms=10.0, retrieve_ms=4.0, message_ms=2.0, seed=0, run="made-up"
):
    """The spans of one rank: 1,000 keys a batch, rows of t after the update of t-1, retrieval of t after W(t-2)."""
    machine, last = Machine(seed + 1000 * rank), num_parts - 1
    add, end = machine.run, machine.end
    shares = [1000 // num_parts + (part < 1000 % num_parts) for part in range(num_parts)]

    def rows(kind, t, part, after):
        add("rows", kind, t, part, after=after, ms=0.2, num_bytes=shares[part] * 128, num_rows=shares[part])

    for t in range(num_steps):
        add("read", "read", t, WHOLE, after=[end("dense step", t - 4)], ms=3)
        add(
            "keys",
            "keys",
            t,
            WHOLE,
            after=[end("read", t), end("dense step", t - 3)],
            ms=1.5,
            num_bytes=8_000,
            num_rows=1_000,
        )
        if t > 1:
            add("fetch", "write", t - 2, WHOLE, after=[end("update", t - 2)], ms=1)
        add("fetch", "retrieve", t, WHOLE, after=[end("keys", t)], ms=retrieve_ms)
        for part in range(num_parts):  # F1 · C1 F2 B1 · C2 F3 B2 · ...
            for early in {0, 1} & set(range(num_parts)) if part == 0 else {part + 1} & set(range(num_parts)):
                rows("rows", t, early, [end("retrieve", t), end("update", t - 1)])
            arrival = end("rows", t, part) + int(message_ms * MS)
            add(
                "compute",
                "compute",
                t,
                part,
                after=[end("rows", t, part)],
                ms=compute_ms / num_parts,
                wait=("rows", arrival),
            )
            rows("grads", t, part, [end("compute", t, part)])
        arrival = end("grads", t, last) + int(message_ms * MS)
        add("rows", "flag", t, WHOLE, after=[end("grads", t, last)], ms=0.1, num_bytes=16)
        add("dense", "dense sum", t, WHOLE, after=[end("compute", t, last)], ms=2, num_bytes=50_000)
        add("table", "sum", t, WHOLE, after=[end("grads", t, last)], ms=0.5, wait=("grads", arrival))
        add("table", "update", t, WHOLE, after=[end("sum", t), end("flag", t)], ms=0.8)
        add("compute", "dense step", t, WHOLE, after=[end("dense sum", t), end("flag", t)], ms=0.7)
    return RankTrace(run, rank, 1, tuple(machine.spans), {})


def ranks(world_size, **settings):
    """The traces of several ranks."""
    made = [nested(rank=rank, **settings) for rank in range(world_size)]
    return [RankTrace(one.run, one.rank, world_size, one.spans, {}) for one in made]


def trace_of(*spans, num_dropped=()):
    """These spans as the trace of one rank."""
    return RankTrace("made-up", 0, 1, spans, dict(num_dropped))


def compute(batch, begin, end, *, kind="compute", part=0, ready=None, waits=()):
    """A span on the compute lane."""
    return Span("compute", kind, batch, part, begin if ready is None else ready, begin, end, waits=waits)
