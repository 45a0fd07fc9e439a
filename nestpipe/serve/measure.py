"""What things take on this machine: the trigger's constants, measured on the model itself when an instance starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from nestpipe.serve.histories import Histories
from nestpipe.serve.prefix import Served, copy_prefix
from nestpipe.serve.trigger import Costs, Floats, Kind, terms


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    kind: Kind
    length: int
    candidates: int
    ms: float


def measure(served: Served, histories: Histories, *, chunk: int, num_candidates: int = 256, repeats: int = 3) -> Costs:
    """Times histories and candidates of several sizes, the shortest of some repeats each; prefills chunk by chunk, as they run."""
    longest = served.max_len
    catalogue = histories.sequences.catalogue.tolist()
    samples, copy_ms_per_byte = [], 0.0
    for length in sorted({max(longest // 16, 2), max(longest // 4, 2), max(longest // 2, 2), max(longest, 2)}):
        events = histories.sample(length)
        asked = served.ask(events, int(events.times[-1] // 1000) if events.times is not None else 0)
        kept = served.fill_all(asked, chunk=chunk)
        samples.append(Sample("pre", length, 0, _shortest(lambda: served.fill_all(asked, chunk=chunk), repeats)))  # noqa: B023
        for count in {max(num_candidates // 16, 1), max(num_candidates // 4, 1), num_candidates}:
            items = [catalogue[place % len(catalogue)] for place in range(count)]
            wanted = served.candidates(items, histories.sequences)
            full_ms = _shortest(lambda: served.scores([asked], [wanted]), repeats)  # noqa: B023
            hit_ms = _shortest(lambda: served.scores([asked], [wanted], [kept]), repeats)  # noqa: B023
            samples += [Sample("full", length, count, full_ms), Sample("hit", length, count, hit_ms)]
        copy_ms_per_byte = _shortest(lambda: copy_prefix(kept), repeats) / max(kept.num_bytes, 1)  # noqa: B023
    return fit(samples, copy_ms_per_byte=copy_ms_per_byte)


def fit(samples: Iterable[Sample], *, copy_ms_per_byte: float = 0.0) -> Costs:
    """The costs that explain measurements best."""
    found, constants = list(samples), dict[Kind, Floats]()
    for kind in get_args(Kind):
        own = [one for one in found if one.kind == kind]
        matrix = np.array([terms(kind, one.length, one.candidates) for one in own])
        constants[kind] = _least_error(matrix, np.array([one.ms for one in own]))
    return Costs(constants, copy_ms_per_byte=copy_ms_per_byte)


def _shortest(act: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def _least_error(matrix: Floats, ms: Floats) -> Floats:
    """Constants of the least relative error; none is negative, because more work never takes less time."""
    used, found = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while used:
        solved = np.linalg.lstsq(matrix[:, used] / ms[:, None], np.ones(len(ms)), rcond=None)[0]
        if solved.min() >= 0:
            found[used] = solved
            break
        used.pop(int(solved.argmin()))
    return found
