"""What things take on this machine: the trigger's constants, measured on the model itself when an instance starts."""

from __future__ import annotations

import time
from collections.abc import Callable

from nestpipe.serve.histories import Histories
from nestpipe.serve.prefix import Served, copy_prefix
from nestpipe.serve.trigger import Costs, Sample


def measure(served: Served, histories: Histories, *, num_candidates: int = 256, repeats: int = 3) -> Costs:
    """Times histories and candidates of several sizes, the shortest of some repeats each."""
    longest = histories.max_len
    catalogue = histories.sequences.catalogue.tolist()
    samples, copy_ms_per_byte = [], 0.0
    for length in sorted({max(longest // 16, 2), max(longest // 4, 2), max(longest // 2, 2), max(longest, 2)}):
        events = histories.sample(length)
        asked = served.ask(events, int(events.times[-1] // 1000) if events.times is not None else 0)
        kept = served.fill(asked, None, chunk=length)
        samples.append(Sample("pre", length, 0, _shortest(lambda: served.fill(asked, None, chunk=length), repeats)))  # noqa: B023
        for count in {max(num_candidates // 16, 1), max(num_candidates // 4, 1), num_candidates}:
            items = [catalogue[place % len(catalogue)] for place in range(count)]
            wanted = served.candidates(items, histories.sequences)
            full_ms = _shortest(lambda: served.scores([asked], [wanted]), repeats)  # noqa: B023
            hit_ms = _shortest(lambda: served.scores([asked], [wanted], [kept]), repeats)  # noqa: B023
            samples += [Sample("full", length, count, full_ms), Sample("hit", length, count, hit_ms)]
        copy_ms_per_byte = _shortest(lambda: copy_prefix(kept), repeats) / max(kept.num_bytes, 1)  # noqa: B023
    return Costs(samples, copy_ms_per_byte=copy_ms_per_byte)


def _shortest(act: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)
