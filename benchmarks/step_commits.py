"""Is a training step on the CPU as cheap as at an earlier commit? CPU time and Python calls per step, both in alternation.

    python benchmarks/step_commits.py --before COMMIT

Both commits train in processes of their own, on the same batches, one thread, sequential and nested; a block of one follows a
block of the other. CPU time of the whole process counts, so a busy machine matters little; Python calls per sequential step
are exact. The workload is small on purpose: what the engine adds to the arithmetic must show.
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
from collections.abc import Iterator
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--before", default="fb7e6b9", help="the earlier commit [the last one before training on devices]"
    )
    parser.add_argument("--blocks", type=int, default=3 * measure.MIN_BLOCKS)
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/step_commits.jsonl")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    with checked_out(options.before) as tree, contextlib.ExitStack() as ended:
        before, now = _Commit(tree), _Commit(ROOT)
        for one in (before, now):
            ended.callback(one.process.kill)
        rows = []
        for workload in WORKLOADS:
            for mode in MODES:
                arms = {
                    name: (lambda own=own, w=workload, m=mode: own.ask(w, m, options.steps))
                    for name, own in (("before", before), ("now", now))
                }
                times = measure.alternate(arms, num_blocks=options.blocks)
                ratio = measure.ratio(times["now"], times["before"])
                figures |= {f"{workload}/{mode}": round(ratio.median, 4), f"{workload}/{mode}_range": ratio.range}
                rows.append(
                    [
                        workload,
                        mode,
                        *(f"{1e3 * measure.Spread.of(one).median:.2f} ms" for one in times.values()),
                        str(ratio),
                    ]
                )
            calls = [one.ask(workload, "calls", 1) for one in (before, now)]
            figures[f"{workload}/calls"] = round(calls[1] / calls[0], 4)
            rows.append([workload, "calls", *(f"{one:.0f}" for one in calls), f"{calls[1] / calls[0]:.3f}"])
    print(measure.table(["", "", f"at {options.before}", "now", "ratio (10-90 %)"], rows))
    worst = max(value for key, value in figures.items() if isinstance(value, float) and not key.endswith("calls"))
    print(f"worst median {worst:.3f}; the limit is {_LIMIT}")
    if not options.no_record:
        settings = {"before": options.before, "blocks": options.blocks, "steps": options.steps}
        measure.append("step_commits", measure.record(seed=0, figures=figures, settings=settings))
    sys.exit(int(worst > _LIMIT))


if __name__ == "__main__":
    main()
