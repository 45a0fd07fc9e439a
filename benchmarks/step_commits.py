"""Is a training step on the CPU as cheap as at an earlier commit? CPU time and Python calls per step, both in alternation.

    python benchmarks/step_commits.py --before COMMIT

Both commits train in processes of their own, on the same batches, one thread, sequential and nested; a block of one follows a
block of the other. A process keeps its memory layout, so every start begins a new pair of processes: its ratio is the median of
its blocks' ratios, and a figure is the median of the starts with their 10-90 % range. CPU time of the whole process counts, so a
busy machine matters little; Python calls per sequential step are exact. The workload is small on purpose: what the engine adds to
the arithmetic must show.
The workloads are those of commit_steps.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import measure

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS, MODES = ("retrieval", "rows"), ("sequential", "nested")  # of commit_steps.py
_LIMIT = 1.05


class _Commit:
    """The process of a commit."""

    def __init__(self, tree: Path):
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "benchmarks" / "commit_steps.py")]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree
        )

    def __enter__(self) -> _Commit:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, workload: str, mode: str, num_steps: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([workload, mode, num_steps]) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit, "nestpipe"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def ratios_of_start(trees: Mapping[str, Path], num_blocks: int, num_steps: int) -> dict[str, float]:
    """The ratio now / before of each cell, measured by a new pair of processes that end with it."""
    with contextlib.ExitStack() as ended:
        commits = {name: ended.enter_context(_Commit(tree)) for name, tree in trees.items()}
        found = {}
        for workload in WORKLOADS:
            for mode in MODES:
                arms = {
                    name: (lambda own=own, w=workload, m=mode: own.ask(w, m, num_steps))
                    for name, own in commits.items()
                }
                times = measure.alternate(arms, num_blocks=num_blocks)
                found[f"{workload}/{mode}"] = measure.ratio(times["now"], times["before"]).median
            calls = {name: own.ask(workload, "calls", 1) for name, own in commits.items()}
            found[f"{workload}/calls"] = calls["now"] / calls["before"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--before", default="fb7e6b9", help="the earlier commit [the last one before training on devices]"
    )
    parser.add_argument("--starts", type=int, default=measure.MIN_BLOCKS, help="pairs of processes")
    parser.add_argument("--blocks", type=int, default=measure.MIN_BLOCKS, help="of a cell in a start")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/step_commits.jsonl")
    options = parser.parse_args()
    starts = []
    with checked_out(options.before) as tree:
        pair = [("before", tree), ("now", ROOT)]
        for number in range(options.starts):  # either commit begins every other one
            starts.append(ratios_of_start(dict(pair[:: 1 - 2 * (number % 2)]), options.blocks, options.steps))
            print(f"start {number + 1}: { ({cell: round(one, 3) for cell, one in starts[-1].items()}) }", flush=True)
    found = {cell: measure.Spread.of([one[cell] for one in starts]) for cell in starts[0]}
    figures: dict[str, object] = {cell: round(one.median, 4) for cell, one in found.items()}
    timed = {cell: one for cell, one in found.items() if not cell.endswith("/calls")}
    for cell, one in timed.items():
        figures |= {f"{cell}_range": one.range, f"{cell}_at_most_{_LIMIT}": measure.verdict(one, at_most=_LIMIT)}
    print(
        measure.table(
            [f"now / {options.before}", "of starts (10-90 %)"], [[cell, str(one)] for cell, one in found.items()]
        )
    )
    worst = max(one.median for one in timed.values())
    print(f"worst median {worst:.3f}; the limit is {_LIMIT}")
    if not options.no_record:
        settings = {
            "before": options.before, "starts": options.starts, "blocks": options.blocks, "steps": options.steps
        }  # fmt: skip
        measure.append("step_commits", measure.record(seed=0, figures=figures, settings=settings))
    sys.exit(int(worst > _LIMIT))


if __name__ == "__main__":
    main()
