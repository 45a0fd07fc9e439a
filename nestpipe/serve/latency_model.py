"""Latency models: cost constants measured on the model when an instance starts, and the choice of a generation path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from nestpipe.ops.device_memory import wait_here
from nestpipe.serve.generation_model import GenerativeModel, Steering
from nestpipe.serve.kv_cache import EntryState
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.prefill_policy import Floats, Kind, RankingCosts, terms
from nestpipe.serve.prefix_moves import prefix_moves
from nestpipe.serve.prefix_store import PrefixStore
from nestpipe.serve.user_history import UserHistories


@dataclass(frozen=True, slots=True)
class LatencySample:
    """One measurement."""

    kind: Kind
    length: int
    candidates: int
    ms: float


def measure_costs(
    served: ServedModel,
    histories: UserHistories,
    *,
    chunk: int,
    store: PrefixStore | None = None,
    num_candidates: int = 256,
    repeats: int = 3,
) -> RankingCosts:
    """Measures histories and candidates of several sizes, the fastest of `repeats` each; prefills run chunk by chunk."""
    longest = served.max_len
    catalogue = histories.sequences.catalogue.tolist()
    samples, copy_ms_per_byte, moves = [], 0.0, prefix_moves(served.ranker.device)
    for length in sorted({max(longest // 16, 2), max(longest // 4, 2), max(longest // 2, 2), max(longest, 2)}):
        events = histories.sample(length)
        inputs = served.prepare(events, int(events.times[-1] // 1000) if events.times is not None else 0)
        kept = served.fill_all(inputs, chunk=chunk)
        prefill_ms = _shortest(lambda: served.fill_all(inputs, chunk=chunk), repeats)  # noqa: B023
        samples.append(LatencySample("pre", length, 0, prefill_ms))
        if store is not None and store.write(kept, since=store.num_forgets):
            read_ms = _shortest(lambda: store.read(kept.key, kept.digest), repeats)  # noqa: B023
            samples.append(LatencySample("read", length, 0, read_ms))
            store.forget(kept.key.user)
        for count in {max(num_candidates // 16, 1), max(num_candidates // 4, 1), num_candidates}:
            items = [catalogue[place % len(catalogue)] for place in range(count)]
            wanted = served.candidates(items, histories.sequences)
            full_ms = _shortest(lambda: served.scores([inputs], [wanted]), repeats)  # noqa: B023
            hit_ms = _shortest(lambda: served.scores([inputs], [wanted], [kept]), repeats)  # noqa: B023
            samples += [LatencySample("full", length, count, full_ms), LatencySample("hit", length, count, hit_ms)]
        on_host = moves.demoted(kept)
        copy_ms = _shortest(lambda: wait_here(*moves.promoted(on_host).keys), repeats)  # noqa: B023
        copy_ms_per_byte = copy_ms / max(kept.num_bytes, 1)
    return fit(samples, copy_ms_per_byte=copy_ms_per_byte)


def fit(samples: Iterable[LatencySample], *, copy_ms_per_byte: float = 0.0) -> RankingCosts:
    """Fits the costs to measurements."""
    measured, constants = list(samples), dict[Kind, Floats]()
    for kind in get_args(Kind):
        if not (own := [one for one in measured if one.kind == kind]):
            continue  # there is no store
        matrix = np.array([terms(kind, one.length, one.candidates) for one in own])
        constants[kind] = _least_error(matrix, np.array([one.ms for one in own]))
    return RankingCosts(constants, copy_ms_per_byte=copy_ms_per_byte)


def _shortest(act: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def _least_error(matrix: Floats, ms: Floats) -> Floats:
    """Non-negative least squares of the relative error: more work never takes less time."""
    used, constants = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while used:
        solved = np.linalg.lstsq(matrix[:, used] / ms[:, None], np.ones(len(ms)), rcond=None)[0]
        if solved.min() >= 0:
            constants[used] = solved
            break
        used.pop(int(solved.argmin()))
    return constants


_NARROW = 4  # a narrow search has this many times fewer beams
_REPEATS = 3
MemoryPath = Literal["hit_device", "hit_host", "full", "shorter", "narrow"]
DEGRADED = frozenset({"shorter", "narrow"})


@dataclass(slots=True, kw_only=True)
class GenerationCosts:
    """Costs of encoding and decoding in milliseconds, corrected while running."""

    encode_ms: float
    encode_event_ms: float
    decode_ms: float
    decode_beam_ms: float
    slowness: float = 1.0  # recent latency over the measured one

    def encode(self, num_events: int) -> float:
        return self.slowness * (self.encode_ms + self.encode_event_ms * num_events)

    def decode(self, width: int) -> float:
        return self.slowness * (self.decode_ms + self.decode_beam_ms * width)

    def observe(self, took_ms: float, expected_ms: float) -> None:
        """Rises at once and falls slowly: a late answer is worse than a narrow one."""
        if expected_ms > 0:
            seen = self.slowness * took_ms / expected_ms
            self.slowness = min(max(0.95 * self.slowness + 0.05 * seen, min(seen, 2 * self.slowness), 0.25), 100.0)

    def relax(self) -> None:
        """After a refusal: without new measurements the estimate must decay, or every request would be refused for ever."""
        self.slowness = max(0.98 * self.slowness, 0.25)


class GenerationPath(NamedTuple):
    """A path, its estimated cost, and the events and beams that it uses."""

    path: MemoryPath
    cost_ms: float
    num_events: int
    width: int

    @property
    def is_degraded(self) -> bool:
        return self.path in DEGRADED


def choose(
    estimates: GenerationCosts,
    *,
    state: EntryState | None,
    slack_ms: float,
    num_events: int,
    beam: int,
    k: int,
    block: int,
) -> GenerationPath | None:
    """The first path that fits into the slack; None if nothing does."""
    decode, narrow = estimates.decode(beam), narrow_width(beam, k)
    hit: MemoryPath | None = None
    if state in {EntryState.READY, EntryState.PINNED}:
        hit = "hit_device"
    elif state == EntryState.HOST:
        hit = "hit_host"
    paths = [GenerationPath(hit, decode, num_events, beam)] if hit else []
    paths.append(GenerationPath("full", estimates.encode(num_events) + decode, num_events, beam))
    shorter = range(num_events - block, 0, -block)
    paths += [GenerationPath("shorter", estimates.encode(kept) + decode, kept, beam) for kept in shorter]
    kept = num_events if hit else min(block, num_events)
    cost = estimates.decode(narrow) + (0.0 if hit else estimates.encode(kept))
    paths.append(GenerationPath("narrow", cost, kept, narrow))
    return next((one for one in paths if one.cost_ms <= slack_ms), None)


def narrow_width(beam: int, k: int) -> int:
    return min(max(k, beam // _NARROW), beam)


def measure_generation(served: GenerativeModel, histories: UserHistories) -> GenerationCosts:
    """Measures encoding (long, short) and decoding (wide, narrow)."""
    beam = served.model.config.beam
    whole = served.prepare(histories.sample(served.max_len))
    half = served.shorter(whole, max(served.max_len // 2, 1))
    memory = served.encode(whole)

    def search(width: int) -> None:
        served.generate([whole], [memory], [Steering()], width=width, k=[1])

    narrow = narrow_width(beam, 1)
    wide_ms, narrow_ms = _best_ms(lambda: search(beam)), _best_ms(lambda: search(narrow))
    whole_ms, half_ms = _best_ms(lambda: served.encode(whole)), _best_ms(lambda: served.encode(half))
    per_beam = max(wide_ms - narrow_ms, 0.0) / max(beam - narrow, 1)
    per_event = max(whole_ms - half_ms, 0.0) / max(whole.num_events - half.num_events, 1)
    return GenerationCosts(
        encode_ms=max(whole_ms - per_event * whole.num_events, 0.0),
        encode_event_ms=per_event,
        decode_ms=max(wide_ms - per_beam * beam, 0.0),
        decode_beam_ms=per_beam,
    )


def _best_ms(work: Callable[[], object]) -> float:
    """The fastest of some runs, after one warm-up run."""
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return min(times[1:])
