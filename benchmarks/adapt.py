"""Does autotuning keep up with the best fixed settings? Nested steps on a workload whose sequence lengths change half-way.

First half: 512 samples x 10 Zipf(1.05) ids per rank, second half: x 100, on a table of 1M x 64, a small MLP, two ranks. Arms:
fixed numbers of micro-batches, and an autotuned one that starts with four (nestpipe/autotune/search.py), as a run with
`--pipeline.adapt K` does; K is the length of a block. Blocks of all arms alternate on one state (of two tables the first one
created was 3 % faster), and each round begins with another arm. A fixed arm that is clearly slower after twelve rounds is
dropped.

The figure of a half is the total time of the autotuned arm over that of the best fixed arm, with a 10-90 % range by bootstrap
over rounds. It includes detecting the change, the search, measurements with their barriers, agreement and logging. Aim: at
most 1.02 in each half. Before a half, one block of each fixed arm, not counted, creates the new rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median

import measure
import netlab
import numpy as np

LENGTHS = {"short": 10, "long": 100}
ROUNDS = {"short": 6, "long": 1}  # relative number of rounds, so that both halves take about as long
FIXED = [
    1,
    2,
    4,
]  # more micro-batches cost more than they hide: 8 took 2.6 and 1.3 times as long as the best in earlier records
START = 4
FIRST = 12  # rounds in which most of the search happens
AIM = 1.02


def figures_of(times: dict[str, dict[str, list[float]]]) -> dict[str, object]:
    """For each half: autotuned over best fixed arm, in total (this decides) and as median with its range."""
    figures: dict[str, object] = {}
    for half, arms in times.items():
        means = {name: fmean(own) for name, own in arms.items() if name != "adaptive"}
        best = min((name for name in means if len(arms[name]) == len(arms["adaptive"])), key=means.__getitem__)
        drawn = _drawn_again(arms["adaptive"], arms[best])
        ratio = measure.ratio(arms["adaptive"], arms[best])
        figures[half] = {
            "best_fixed_micro_batches": int(best),
            "adaptive_over_best": round(sum(arms["adaptive"]) / sum(arms[best]), 4),
            "adaptive_over_best_range": drawn.range,
            "adaptive_over_best_first_rounds": round(sum(arms["adaptive"][:FIRST]) / sum(arms[best][:FIRST]), 4),
            "adaptive_over_best_median": round(ratio.median, 4),
            "adaptive_over_best_median_range": ratio.range,
            "worst_fixed_over_best": round(max(means.values()) / means[best], 4),
            "verdict": measure.verdict(drawn, at_most=AIM),
        }
    return figures


def _drawn_again(times: list[float], base: list[float], *, num: int = 1000) -> measure.Spread:
    """Ratio of total times, with its range by bootstrap over rounds."""
    rounds = np.random.default_rng(0).integers(len(times), size=(num, len(times)))
    return measure.Spread.of(list(np.array(times)[rounds].sum(1) / np.array(base)[rounds].sum(1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short blocks, dominated by the search; about 80 seconds")
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument("--blocks", type=int, help="rounds of the long half; the short one has six times as many")
    parser.add_argument("--steps", type=int, help="steps of a block")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/adapt.jsonl")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        from adapt_arms import rank_program  # needs torch

        rank_program(FIXED, START, lengths=LENGTHS, **json.loads(options.as_rank))
        return
    options.blocks = options.blocks or (measure.MIN_BLOCKS if options.quick else 60)
    options.steps = options.steps or (20 if options.quick else 100)
    netlab.end_on_sigterm()
    rounds = {half: options.blocks * times for half, times in ROUNDS.items()}
    arguments = json.dumps({"num_rounds": rounds, "steps": options.steps})
    with netlab.Lab(2, rate=options.rate) as lab:
        outputs = lab.run([sys.executable, str(Path(__file__)), "--as-rank", arguments], timeout_s=3600)
    found = json.loads(outputs[0].splitlines()[-1])
    figures = figures_of(found["times"])
    for half, arms in found["times"].items():
        rows = [
            [
                name,
                f"{1e3 * median(times) / options.steps:.1f} ms",
                f"{1e3 * fmean(times) / options.steps:.1f} ms",
            ]
            for name, times in arms.items()
        ]
        print(
            f"\n{half}: {LENGTHS[half]} ids per sample\n"
            + measure.table(["micro_batches", "step, median", "mean"], rows)
        )
    print("\n" + "\n".join(found["chosen"]), flush=True)
    if not options.no_record:
        settings = {name: getattr(options, name) for name in ("blocks", "steps", "rate", "quick")}
        measure.append("adapt", measure.record(seed=0, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
