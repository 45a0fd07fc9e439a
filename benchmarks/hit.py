"""CPU of a request whose KV prefix is cached, over history lengths: the native hit beside the torch operations.

    before    the request's batch and digest, its candidates, some 25 torch operations around the attention kernel
    after     the same batch with the digest of its hint, its candidates, one native call

Both arms run in one process on one thread, in alternation, in CPU time; scores of both are compared. The yardstick `at sgemm's
rate` is the time of attention's arithmetic at the rate of a large torch.mm of the same run. It is no lower bound: on some processors
torch.mm uses narrower vectors than the kernel.

    python benchmarks/hit.py            # 257 to 4,096 events, 128 candidates; about a minute
    python benchmarks/hit.py --quick    # 4,096 events alone, nothing is recorded
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import measure
import numpy as np
import relay_worlds
import torch
from relay_worlds import SEED

from nestpipe.data.sequences import Sequences
from nestpipe.serve.model import open_served
from nestpipe.serve.prefill import HistoryInputs, ServedModel
from nestpipe.serve.user_history import of_user, stored
from nestpipe.training.run_folder import Run

LENGTHS = (257, 764, 1499, 3352, 4096)
NUM_USERS, NUM_CANDIDATES, PER_BLOCK = 300, 128, 12
AT_MOST, AIM = 0.6, 0.52  # of before, at the longest history


class HitBench:
    """A served model, and requests of one user with a cached prefix."""

    def __init__(self, served: ServedModel, sequences: Sequences):
        self._served, self._sequences = served, sequences
        items = np.array(sequences.catalogue)
        self._items = np.random.default_rng(SEED).choice(items, NUM_CANDIDATES, replace=False).tolist()

    def arms(self, length: int) -> dict[str, Callable[[], float]]:
        """A block of each arm: CPU milliseconds of a request."""
        own = self._sequences
        events = of_user(own, 7, stored(own, np.arange(length) % len(own.items)).in_time_order())
        assert events.times is not None
        query_time = int(events.times[-1] // 1000) + 60
        hint = self._served.prepare(events, query_time)
        prefix = self._served.fill_all(hint, chunk=512)

        def request(earlier: HistoryInputs | None, *, native: bool) -> torch.Tensor:
            inputs = self._served.prepare(events, query_time, earlier=earlier)
            candidates = self._served.candidates(self._items, own)
            logits = self._served.ranker.score([prefix], inputs.suffix, candidates, native=native)
            with torch.no_grad():
                return self._served.ranker.model.tasks.predict(logits)

        difference = float((request(None, native=False) - request(hint, native=True)).abs().max())
        if difference > 1e-5:
            raise SystemExit(f"native and torch scores differ by {difference:.1e} at {length} events; no figures")

        def block(earlier: HistoryInputs | None, *, native: bool) -> float:
            start = time.process_time()
            for _ in range(PER_BLOCK):
                request(earlier, native=native)
            return 1000 * (time.process_time() - start) / PER_BLOCK

        return {"before": lambda: block(None, native=False), "after": lambda: block(hint, native=True)}

    def bound_ms(self, length: int, sgemm: float) -> float:
        """The products of attention alone, at the rate of sgemm."""
        config = self._served.ranker.model.config
        per_pair = 2 * config.num_heads * (config.qk_dim + config.v_dim) * config.num_blocks
        return 1e3 * per_pair * length * NUM_CANDIDATES / sgemm


def sgemm_rate(size: int = 1024, repeats: int = 9) -> float:
    """Floating-point operations per second of a large product on one thread."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        torch.mm(a, b)
        times.append(time.process_time() - start)
    return 2 * size**3 / min(times)


def measured(bench: HitBench, lengths: Sequence[int]) -> dict[str, object]:
    figures: dict[str, object] = {}
    rows, sgemm = [], sgemm_rate()
    for length in lengths:
        found = measure.alternate(bench.arms(length))
        spread, bound = measure.ratio(found["after"], found["before"]), bench.bound_ms(length, sgemm)
        before, after = (float(np.median(found[name])) for name in ("before", "after"))
        figures |= {
            f"before_ms {length}": round(before, 3),
            f"after_ms {length}": round(after, 3),
            f"bound_ms {length}": round(bound, 3),
            f"hit_cpu_vs_before {length}": round(spread.median, 4),
            f"hit_cpu_vs_before_range {length}": spread.range,
        }
        verdict = measure.verdict(spread, at_most=AT_MOST) if length == LENGTHS[-1] else ""
        rows.append([f"{length:,}", f"{before:.2f} ms", f"{after:.2f} ms", str(spread), f"{bound:.2f} ms", verdict])
    figures |= {
        "hit_cpu_vs_before": figures[f"hit_cpu_vs_before {lengths[-1]}"],
        "hit_cpu_vs_before_range": figures[f"hit_cpu_vs_before_range {lengths[-1]}"],
        "sgemm_gflops": round(sgemm / 1e9, 1),
    }
    print(measure.table(["events", "before", "after", "after / before", "at sgemm's rate", f"at most {AT_MOST}"], rows))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "nestpipe-relay", help="for data and runs"
    )
    parser.add_argument("--quick", action="store_true", help="the longest history alone; nothing is recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = relay_worlds.relay_long(options.folder, NUM_USERS)
    with tempfile.TemporaryDirectory() as tables:
        run = Run.open(world.run)
        figures = measured(
            HitBench(open_served(run, folder=Path(tables)), run.sequences), LENGTHS[-1:] if options.quick else LENGTHS
        )
    if not options.quick:
        settings = {"lengths": LENGTHS, "candidates": NUM_CANDIDATES, "per_block": PER_BLOCK, "aim": AIM}
        measure.append("hit", measure.record(seed=SEED, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
