"""Goodput of the relay over full inference, within a tail-latency budget.

Open-loop load (relay_load.py) on one model instance on core 0; generator and gateway on core 1. *Goodput* is responses per
second, within the budget and not degraded, at the highest rate of a ladder (steps of 1.2) at which 99 % of all requests are.
The budget of the rank stage is a multiple of the latency of full inference, unloaded, measured once before any arm runs.
relay_cells.py says what the cells are. Those that a limit names have at least 1,000 requests per load and five blocks.

    python benchmarks/relay.py --minutes 15                        # the next cells, the important ones first
    python benchmarks/relay.py --cells goodput-2.0-cold10          # these cells
    python benchmarks/relay.py --cells ml1m --ml1m FOLDER          # on a sequence folder of MovieLens-1M
    python benchmarks/relay.py --report                            # figures and picture of what was measured
    python benchmarks/relay.py --quick                             # a small world and short loads; nothing is recorded

Arms alternate within a block. Every block is appended to results/relay_cells.jsonl when it is done, so the same command resumes
after the last of them, also at another commit: figures name the commits. A load ends as soon as it is decided whether it keeps
the budget. Loads in which the generator was late are void and repeated; a block with a load that stays void is repeated for all
arms, and if it stays void again, the run ends. `--minutes` starts no block that would end later, by the time of the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import measure
import netlab
import relay_report
import relay_worlds
from relay_bench import Bench, Running
from relay_cells import CELLS, LADDER_END, MUST, USERS_PER_RUNG, Cell, Cells, rungs
from relay_worlds import SEED, World

QUICK_CELLS = ("goodput-2.0-cold10", "history-2.0-cold10", "overload")
QUICK_SCALE = 0.03


class CellFile:
    """Finished blocks, one line each."""

    def __init__(self, folder: Path):
        self._folder = folder
        path = folder / "relay_cells.jsonl"
        self._lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def blocks(self, cell: str) -> list[dict[str, Any]]:
        return [line["figures"] for line in self._lines if line["settings"]["cell"] == cell]

    def commits(self, cell: str) -> list[str]:
        return sorted({line["commit"] for line in self._lines if line["settings"]["cell"] == cell})

    def add(self, cell: str, figures: dict[str, Any], **settings: object) -> None:
        line = measure.record(seed=SEED, figures=figures, settings={"cell": cell, **settings})
        measure.append("relay_cells", line, folder=self._folder)
        self._lines.append(line)


def world_of(cell: Cell, options: argparse.Namespace) -> tuple[str, World]:
    """The world of a cell and its name; made once per folder."""
    if cell.kind == "ml1m":
        return "relay-ml1m", relay_worlds.relay_ml1m(options.folder, options.ml1m)
    if cell.kind in {"history", "length"}:
        lengths, users, longest = rungs(), USERS_PER_RUNG, LADDER_END
        if options.quick:
            lengths, users, longest = [one // 32 for one in lengths[::3]], 30, LADDER_END // 32
        return "relay-history", relay_worlds.relay_history(
            options.folder, lengths, users_per_rung=users, max_len=longest
        )
    if options.quick:
        return "relay-long", relay_worlds.relay_long(options.folder, 500, times=0.125)
    return "relay-long", relay_worlds.relay_long(options.folder, 20_000)


def run_cell(cell: Cell, file: CellFile, options: argparse.Namespace, until: float) -> bool:
    """Measures the blocks of a cell that are missing; False if the time is up."""
    done = file.blocks(cell.name)
    num_blocks = min(cell.blocks, 2) if options.quick else cell.blocks
    if len(done) >= num_blocks:
        return True
    name, world = world_of(cell, options)

    def unloaded(bench: Bench, full: Running, length: int) -> float:
        """Full inference at a length, measured once for all runs."""
        key = f"unloaded-{name}-{length}"
        if not file.blocks(key):
            file.add(key, {"ms": bench.unloaded_ms(full, length, repeats=9 if options.quick else 31)})
        found = float(file.blocks(key)[0]["ms"])
        print(f"full inference, unloaded, {length:,} events: {found:.1f} ms")
        return found

    print(f"{cell.name}: {len(done)} of {num_blocks} blocks are done", flush=True)
    cells = Cells(world, unloaded, dry=options.dry or options.quick, scale=QUICK_SCALE if options.quick else 1.0)
    with ExitStack() as stack:
        run, took_s = cells.runner(cell, stack, done), 0.0
        for number in range(len(done), num_blocks):
            began = time.monotonic()
            if began + took_s > until:
                return False
            figures = run(number)
            took_s = time.monotonic() - began
            file.add(cell.name, figures | {"seconds": round(took_s, 1)}, workload=name, block=number + 1)
            print(f"  block {number + 1} of {num_blocks}: {took_s:.0f} s", flush=True)
    return time.monotonic() < until


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(tempfile.gettempdir()) / "nestpipe-relay"
    parser.add_argument("--folder", type=Path, default=folder, help="for data and runs")
    parser.add_argument("--cells", nargs="*", choices=list(CELLS), help="default: all, the important ones first")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="starts no block that would end later")
    parser.add_argument("--ml1m", type=Path, help="a sequence folder of MovieLens-1M; without it the cell is left out")
    parser.add_argument("--report", action="store_true", help="figures and picture of the blocks that are done")
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="folder of relay_cells.jsonl")
    parser.add_argument("--quick", action="store_true", help="a small world and short loads, nothing is recorded")
    parser.add_argument("--dry", action="store_true", help="accept void loads, to test the script")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> Sequence[Cell]:
    names = options.cells or (QUICK_CELLS if options.quick else list(CELLS))
    return [CELLS[name] for name in names if CELLS[name].kind != "ml1m" or options.ml1m]


def main() -> None:
    options, began = options_of(), time.monotonic()
    netlab.end_on_sigterm()  # the instances end then too
    if options.quick:
        options.folder /= "quick"
        options.results = Path(tempfile.mkdtemp())
    file = CellFile(options.results)
    if not options.report:
        if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
            os.sched_setaffinity(0, {1})
        with measure.cores_awake():
            for cell in chosen(options):
                if not run_cell(cell, file, options, began + 60 * options.minutes):
                    print("the time is up; the same command resumes here")
                    break
    figures = relay_report.summarise({name: file.blocks(name) for name in CELLS})
    if options.report:
        commits = sorted({commit for name in MUST for commit in file.commits(name)})
        relay_report.record({name: file.blocks(name) for name in CELLS}, commits=commits)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
