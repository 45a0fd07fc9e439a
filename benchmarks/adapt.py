"""Do settings that choose themselves keep up with the best fixed ones? Nested steps on a workload whose lengths change half-way.

First half: 512 samples x 10 Zipf(1.05) ids per rank, second half: x 100, on a table of 1M x 64, a small MLP, two ranks. Arms are
fixed numbers of parts and one that starts in the middle and chooses again after every block (nestpipe/pipeline/tune.py), from the
exposed times and row counts of that block. Blocks of all arms alternate. The figure of a half is the adaptive arm's time for all
blocks, those in which it was still searching included, over that of the best fixed arm; aim: at most 1.02 in each half. Only the
first block of a half does not count, for no arm: in it all of them meet new rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import count, islice
from pathlib import Path

import measure
import netlab

LENGTHS = {"short": 10, "long": 100}
FIXED = (1, 2, 4, 8)  # beyond them parts cost more than they hide: 8 took 2.6 and 1.3 times as long as the best
START = 4
AIM = 1.02


def rank_program(options: dict[str, int]) -> None:  # noqa: PLR0915 - one program, told from start to end
    """Run by each rank; rank 0's last line has the seconds of every block by half and arm, and what was chosen."""
    import train_arms
    from train_arms import RATES, Settings

    from nestpipe.comm import World
    from nestpipe.pipeline.parts import PartsConfig
    from nestpipe.pipeline.runner import Feed, Runner
    from nestpipe.pipeline.schedule import Schedule
    from nestpipe.pipeline.tune import Choice, Observed, after_period
    from nestpipe.process import exact_arithmetic, keep_freed_memory
    from nestpipe.profile_steps import observe
    from nestpipe.run import Lanes
    from nestpipe.trace import Recorder

    keep_freed_memory()
    world = World.from_environment()
    lanes, settings = Lanes.of(world), Settings(samples=512)
    choices = {str(parts): Choice(parts=parts) for parts in FIXED} | {"adaptive": Choice(parts=START)}
    states = {name: train_arms.our_state(settings, lanes) for name in choices}
    seen: list[Observed] = []
    found: dict[str, dict[str, list[float]]] = {half: {name: [] for name in choices} for half in LENGTHS}
    chosen: list[str] = []

    def block(name: str, data: list[object]) -> float:
        state, choice = states[name], choices[name]
        state.cut = PartsConfig(parts=choice.parts, ramp=choice.ramp)
        recorder = Recorder(world.rank, world.size, capacity=1 << 15, on=name == "adaptive")
        watched = (state.embedding.keys, state.embedding.rows, state.dense.lane)
        for lane in watched:
            lane.watch = recorder if recorder.on else None
        first = state.num_steps
        runner = Runner(
            state, Schedule.of("nested", choice.parts, depth=choice.depth), observe=recorder.observer(first)
        )
        stream = islice((data[number % len(data)] for number in count()), first, None)
        lanes.control.barrier()
        start = time.perf_counter()
        runner.run(Feed(batches=stream, rates=lambda _: RATES, num_batches=options["steps"]))  # type: ignore[arg-type]
        if recorder.on:  # choosing is part of what it costs
            adapt(observe(recorder, choice, first, settings.samples))
        own = round((time.perf_counter() - start) * 1e9)
        return max(row[0] for row in lanes.control.all_gather_ints([own])) / 1e9

    def adapt(own: Observed | None) -> None:
        gathered = lanes.control.all_gather_bytes(json.dumps(own and own.to_json()).encode())
        now = Observed.of_ranks([Observed.from_json(one) for one in map(json.loads, gathered) if one])
        seen[:], found_out = after_period(seen, now)
        if found_out:
            choices["adaptive"], why = found_out
            chosen.append(why)

    with exact_arithmetic(1):
        for half, length in LENGTHS.items():
            data = train_arms.batches(settings, world.rank, length=length)
            for number in range(options["blocks"] + 1):
                for name in choices:
                    seconds = block(name, data)  # type: ignore[arg-type]
                    if number:  # the first block meets new rows
                        found[half][name].append(seconds)
    if world.rank == 0:
        print(json.dumps({"times": found, "chosen": chosen}))
    lanes.control.barrier()
    world.close()


def figures_of(times: dict[str, dict[str, list[float]]]) -> dict[str, object]:
    """For each half: adaptive over the best fixed arm, all blocks together, which decides; and the median with its range."""
    figures: dict[str, object] = {}
    for half, arms in times.items():
        totals = {name: sum(own) for name, own in arms.items() if name != "adaptive"}
        best = min(totals, key=totals.__getitem__)
        over_best, ratio = sum(arms["adaptive"]) / totals[best], measure.ratio(arms["adaptive"], arms[best])
        figures[half] = {
            "best_fixed_parts": int(best),
            "adaptive_over_best": round(over_best, 4),
            "adaptive_over_best_median": round(ratio.median, 4),
            "adaptive_over_best_median_range": ratio.range,
            "worst_fixed_over_best": round(max(totals.values()) / totals[best], 4),
            "verdict": "met" if over_best <= AIM else "missed",
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short blocks; under 50 seconds on a quiet machine")
    parser.add_argument("--rate", default="1gbit", help="of each host's line")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--steps", type=int, help="steps of a block")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/adapt.jsonl")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank_program(json.loads(options.as_rank))
        return
    options.blocks = options.blocks or (measure.MIN_BLOCKS if options.quick else 50)
    options.steps = options.steps or (8 if options.quick else 50)
    netlab.end_on_sigterm()
    settings = {"blocks": options.blocks, "steps": options.steps}
    with netlab.Lab(2, rate=options.rate) as lab:
        said = lab.run([sys.executable, str(Path(__file__)), "--as-rank", json.dumps(settings)], timeout_s=3600)
    found = json.loads(said[0].splitlines()[-1])
    figures = figures_of(found["times"])
    for half, arms in found["times"].items():
        rows = [
            [
                name,
                f"{1e3 * statistics.median(times) / options.steps:.1f} ms",
                f"{1e3 * sum(times) / len(times) / options.steps:.1f} ms",
            ]
            for name, times in arms.items()
        ]
        print(f"\n{half}: {LENGTHS[half]} ids per sample\n" + measure.table(["parts", "step, median", "mean"], rows))
    print("\n" + "\n".join(found["chosen"]), flush=True)
    if not options.no_record:
        settings |= {"rate": options.rate, "quick": options.quick}
        measure.append("adapt", measure.record(seed=0, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
