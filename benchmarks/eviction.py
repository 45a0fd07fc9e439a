"""Does a step of a full, bounded table cost more the larger the table is? CPU time of admission and eviction alone.

Tables of 0.5, 1, 2 and 4 million rows, all full, in 4,096 buckets, one process, one thread. A step has 20,000 distinct ids: 18,000
that have a row, drawn uniformly (the worst case for caches), and 2,000 new ones, each of which evicts a row. What remains of
the growth are cache misses. The last arm is the reference in torch, which sorts the table, at 0.5 million rows. Rows themselves
are not written: that does not depend on the size of the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import count

import measure
import torch

from nestpipe.embedding.admission import Admission
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.usage_ledger import Order

SIZES = (500_000, 1_000_000, 2_000_000, 4_000_000)
NUM_IDS, NUM_NEW, NUM_BUCKETS, SEED = 20_000, 2_000, 4_096, 0
FILL = 250_000  # ids per batch while a table is filled
SPREAD = 0x9E3779B97F4A7C1  # an odd factor: ids are spread over 63 bits


class FullTable:
    """The ids of a table at its limit. `step` takes batches of which a tenth is new."""

    def __init__(self, num_rows: int, order: Order, *, native: bool | None = None):
        config = EmbeddingConfig(max_rows=num_rows, evict=order, num_buckets=NUM_BUCKETS)
        self._admission = Admission(config, NUM_BUCKETS, native=native)
        self._generator = torch.Generator().manual_seed(SEED)
        self._steps, self._next_id = count(), 0
        self._ids = torch.empty(num_rows, dtype=torch.int64)  # by slot
        while self._num_slots < num_rows:  # the emptiest bucket is the last to be full
            self._advance(self._new_ids(FILL))

    @property
    def _num_slots(self) -> int:
        return self._admission.rows.index.num_slots

    def step(self) -> float:
        """CPU seconds of one step."""
        slots = torch.randint(0, self._num_slots, (2 * NUM_IDS,), generator=self._generator).unique()
        chosen = slots[torch.randperm(len(slots), generator=self._generator)[: NUM_IDS - NUM_NEW]]
        return self._advance(torch.cat([self._ids[chosen], self._new_ids(NUM_NEW)]), num_new=NUM_NEW)

    def _new_ids(self, num: int) -> torch.Tensor:
        self._next_id += num
        return torch.arange(self._next_id - num, self._next_id) * SPREAD

    def _advance(self, ids: torch.Tensor, *, num_new: int | None = None) -> float:
        ids = ids.sort().values
        start = time.process_time()
        change = self._admission.advance(ids, next(self._steps))
        spent_s = time.process_time() - start
        self._ids[change.admitted_slots] = change.admitted
        if num_new is not None and not num_new == len(change.admitted) == len(change.evicted.ids):
            raise SystemExit(
                f"{len(change.admitted):,} rows admitted and {len(change.evicted.ids):,} evicted, not {num_new:,}"
            )
        return spent_s


def block(table: FullTable, num_steps: int) -> Callable[[], float]:
    return lambda: sum(table.step() for _ in range(num_steps)) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks and steps; about a minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_blocks, num_steps = (9, 4) if options.quick else (25, 16)
    orders: tuple[Order, ...] = ("lru", "lfu")
    arms = {f"{order} {size}": block(FullTable(size, order), num_steps) for order in orders for size in SIZES}
    arms[f"lru {SIZES[0]} torch"] = block(FullTable(SIZES[0], "lru", native=False), 1)
    times = measure.alternate(arms, num_blocks=num_blocks, warm_up=2)
    spreads = {name: measure.Spread.of([1e3 * one for one in found]) for name, found in times.items()}
    rows = []
    for name, found in spreads.items():
        order, size, *more = name.split()
        growth = measure.ratio(times[name], times[f"{order} {SIZES[0]}"])
        rows.append([f"{order}, {int(size) / 1e6:g}M rows{', torch' if more else ''}", str(found), str(growth)])
    print(measure.table(["table", "ms of CPU per step", f"over {SIZES[0] / 1e6:g}M rows"], rows))
    figures: dict[str, object] = {}
    for order in orders:
        largest = f"{order} {SIZES[-1]}"
        growth = measure.ratio(times[largest], times[f"{order} {SIZES[0]}"])
        figures |= {f"{order}_ms": {str(size): round(spreads[f"{order} {size}"].median, 3) for size in SIZES}}
        figures |= {f"{order}_growth": round(growth.median, 3), f"{order}_growth_range": growth.range}
        figures |= {f"{order}_8_ms": measure.verdict(spreads[largest], at_most=8.0)}
        figures |= {f"{order}_growth_2.5": measure.verdict(growth, at_most=2.5)}
    figures["torch_ms"] = round(spreads[f"lru {SIZES[0]} torch"].median, 1)
    settings = {"num_blocks": num_blocks, "num_steps": num_steps, "num_ids": NUM_IDS, "num_new": NUM_NEW}
    settings |= {"num_buckets": NUM_BUCKETS, "threads": 1, "quick": options.quick}
    line = measure.record(seed=SEED, figures=figures, settings=settings)
    measure.append("eviction", line)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
