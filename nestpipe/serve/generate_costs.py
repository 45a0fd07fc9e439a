"""What generation costs here, and which path a request can afford."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nestpipe.serve.cache import State
from nestpipe.serve.generate_model import Generative, Steering
from nestpipe.serve.histories import Histories

_NARROW = 4  # a narrow search has so many times fewer beams
_REPEATS = 3
MemoryPath = Literal["hit_device", "hit_host", "full", "shorter", "narrow"]
DEGRADED = frozenset({"shorter", "narrow"})


@dataclass(slots=True, kw_only=True)
class Estimates:
    """What steps take here, in milliseconds; corrected while running."""

    encode_ms: float
    encode_event_ms: float
    decode_ms: float
    decode_beam_ms: float
    slowness: float = 1.0  # of late, against the above

    def encode(self, num_events: int) -> float:
        return self.slowness * (self.encode_ms + self.encode_event_ms * num_events)

    def decode(self, width: int) -> float:
        return self.slowness * (self.decode_ms + self.decode_beam_ms * width)

    def observe(self, took_ms: float, expected_ms: float) -> None:
        """Goes up at once and down slowly: a late answer is worse than a narrow one."""
        if expected_ms > 0:
            seen = self.slowness * took_ms / expected_ms
            self.slowness = min(max(0.95 * self.slowness + 0.05 * seen, min(seen, 2 * self.slowness), 0.25), 100.0)

    def relax(self) -> None:
        """A request was refused unseen; if all are, nobody would notice that they could be answered again."""
        self.slowness = max(0.98 * self.slowness, 0.25)


class Choice(NamedTuple):
    """A path, what it costs, how many events and beams it uses."""

    path: MemoryPath
    cost_ms: float
    num_events: int
    width: int

    @property
    def is_degraded(self) -> bool:
        return self.path in DEGRADED


def choose(
    estimates: Estimates, *, state: State | None, slack_ms: float, num_events: int, beam: int, k: int, block: int
) -> Choice | None:
    """The first path that fits into the slack; None if nothing does."""
    decode, narrow = estimates.decode(beam), narrow_width(beam, k)
    hit: MemoryPath | None = None
    if state in {State.READY, State.PINNED}:
        hit = "hit_device"
    elif state == State.HOST:
        hit = "hit_host"
    tries = [Choice(hit, decode, num_events, beam)] if hit else []
    tries.append(Choice("full", estimates.encode(num_events) + decode, num_events, beam))
    shorter = range(num_events - block, 0, -block)
    tries += [Choice("shorter", estimates.encode(kept) + decode, kept, beam) for kept in shorter]
    kept = num_events if hit else min(block, num_events)
    cost = estimates.decode(narrow) + (0.0 if hit else estimates.encode(kept))
    tries.append(Choice("narrow", cost, kept, narrow))
    return next((one for one in tries if one.cost_ms <= slack_ms), None)


def narrow_width(beam: int, k: int) -> int:
    return min(max(k, beam // _NARROW), beam)


def measure(served: Generative, histories: Histories) -> Estimates:
    """Encodes and decodes a few times, long and short, wide and narrow."""
    beam = served.model.config.beam
    whole = served.ask(histories.sample(served.max_len))
    half = served.shorter(whole, max(served.max_len // 2, 1))
    memory = served.encode(whole)

    def search(width: int) -> None:
        served.generate([whole], [memory], [Steering()], width=width, k=[1])

    narrow = narrow_width(beam, 1)
    wide_ms, narrow_ms = _best_ms(lambda: search(beam)), _best_ms(lambda: search(narrow))
    whole_ms, half_ms = _best_ms(lambda: served.encode(whole)), _best_ms(lambda: served.encode(half))
    per_beam = max(wide_ms - narrow_ms, 0.0) / max(beam - narrow, 1)
    per_event = max(whole_ms - half_ms, 0.0) / max(whole.num_events - half.num_events, 1)
    return Estimates(
        encode_ms=max(whole_ms - per_event * whole.num_events, 0.0),
        encode_event_ms=per_event,
        decode_ms=max(wide_ms - per_beam * beam, 0.0),
        decode_beam_ms=per_beam,
    )


def _best_ms(work: Callable[[], object]) -> float:
    """The shortest of some times, after a first one that does not count."""
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return min(times[1:])
