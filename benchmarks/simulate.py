"""Does `nestpipe simulate` predict what it has not seen? Constants from 2 ranks; 4, 8 and 16 ranks predicted, then measured.

    constants   traces of 2 ranks at 1 Gbit/s, a sequential and a nested run (simulate_ranks.py), and CPU times of the same two:
                of background threads in a step, of an idle rank, and of one more small message in flight
    predicted   sequential and nested on 4, 8 and 16 ranks, at 1 Gbit/s and at 250 Mbit/s + 5 ms, before any is measured
    measured    the same, in alternating blocks, as in weak_scaling.py

Ranks are real, and their dense part sleeps (--dense-ms) instead of computing, so that 16 fit on a few cores; the model knows
how many cores they share. A network is modelled by its configured rate, burst and delay. With a delay all packets pass one
process, whose rate is measured without training (netlab.py) and limits what all ranks send together. Every row is created
before anything is measured or recorded.

Most of a step is the sleep of the dense part, which no model can get wrong. So the error without the dense part is printed
too; it has no limit, but says more. Needs root, ip and tc, and a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import measure
import netlab
import weak_scaling

from nestpipe.pipeline.schedule import Schedule
from nestpipe.profiling.trace_file import load
from nestpipe.simulate.calibrate import Probes, calibrate
from nestpipe.simulate.constants import Constants
from nestpipe.simulate.costs import Cluster, run_of

MODES = {"sequential": "serial", "nested": "nested"}  # arm -> mode of the schedule
SEEN = ("1gbit", 0.0)
NETWORKS = (SEEN, ("250mbit", 5.0))
RANKS = (4, 8, 16)
MEDIAN_LIMIT, WORST_LIMIT = 0.10, 0.20
PROGRAM = Path(__file__).resolve().with_name("simulate_ranks.py")


@dataclass(frozen=True, slots=True)
class Case:
    """One prediction."""

    ranks: int
    rate: str
    delay_ms: float
    mode: str
    predicted_s: float
    measured: measure.Spread | None = None

    @property
    def network(self) -> str:
        return self.rate + (f"+{self.delay_ms:g}ms" if self.delay_ms else "")

    def error(self, without_s: float = 0.0) -> float:
        """Relative error of the step, or of the step without so many seconds."""
        assert self.measured is not None
        return (self.predicted_s - without_s) / (self.measured.median - without_s) - 1


def ran(num_ranks: int, rate: str, delay_ms: float, options: argparse.Namespace, trace: str = "") -> dict[str, object]:
    """Times by arm and block; with `trace` also probes, and traces of both modes in that folder."""
    settings = weak_scaling.settings_of(options, MODES, num_blocks=options.blocks)
    return weak_scaling.ran(num_ranks, [str(PROGRAM), settings, trace], rate=rate, delay_ms=delay_ms)


def seen(options: argparse.Namespace) -> tuple[Constants, dict[str, object]]:
    """Constants of 2 ranks, and their measured times."""
    rate, delay_ms = SEEN
    with tempfile.TemporaryDirectory() as folder:
        found = ran(2, rate, delay_ms, options, folder)
        traces = [trace for mode in MODES for trace in load(Path(folder) / mode)]
    probes = Probes(**found["probes"])  # type: ignore[arg-type]
    return calibrate(traces, device_s=options.dense_ms / 1e3, probes=probes, source="2 ranks at 1 Gbit/s"), found


def on_network(constants: Constants, rate: str, delay_ms: float, relay_bytes_per_s: float) -> Constants:
    """The same workers on a network with this rate and delay."""
    return replace(
        constants,
        bytes_per_s=netlab.bits_per_s(rate) / 8,
        burst_bytes=netlab.burst_bytes(rate),
        delay_s=constants.delay_s + (delay_ms - SEEN[1]) / 1e3,
        fabric_bytes_per_s=relay_bytes_per_s if delay_ms else float("inf"),
    )


def predicted(constants: Constants, options: argparse.Namespace) -> Iterator[Case]:
    """All cases; a block begins and ends with an empty pipeline, as in the measurement."""
    for rate, delay_ms in options.networks:
        relay = relay_bytes_per_s(delay_ms) if delay_ms else float("inf")
        own = on_network(constants, rate, delay_ms, relay)
        for num_ranks in options.ranks:
            cluster = Cluster(workers=num_ranks, cores=os.cpu_count())
            for arm, mode in MODES.items():
                schedule = Schedule.of(mode, options.micro_batches, depth=options.depth)  # type: ignore[arg-type]
                seconds = seconds_of_block(schedule, own, cluster, num_batches=options.steps)
                yield Case(num_ranks, rate, delay_ms, arm, seconds)


def relay_bytes_per_s(delay_ms: float) -> float:
    """The rate of the process that delays packets, when the link is not the bottleneck."""
    with netlab.Lab(2, rate="10gbit", delay_ms=delay_ms) as lab:
        return netlab.measured(lab)["rate"] / 8


def measured(cases: list[Case], options: argparse.Namespace) -> Iterator[Case]:
    """The same cases with measured times, printed one by one."""
    for rate, delay_ms in options.networks:
        for num_ranks in options.ranks:
            found = ran(num_ranks, rate, delay_ms, options)
            for case in cases:
                if (case.rate, case.delay_ms, case.ranks) == (rate, delay_ms, num_ranks):
                    times: list[float] = found["times"][case.mode]  # type: ignore[index]
                    done = replace(case, measured=measure.Spread.of(times))
                    print(f"{done.network}, {num_ranks} ranks, {case.mode}: {done.error():+.1%}", flush=True)
                    yield done


def report(cases: list[Case], options: argparse.Namespace) -> dict[str, object]:
    """Prints all errors, their median and worst with the limits; returns the figures to record."""
    rows, figures = [], dict[str, object]()
    for case in cases:
        assert case.measured is not None
        rest = case.error(options.dense_ms / 1e3)
        rows.append(
            [
                f"{case.network}, {case.ranks} ranks, {case.mode}",
                f"{1e3 * case.predicted_s:.1f} ms",
                f"{1e3 * case.measured.median:.1f} ms ({1e3 * case.measured.low:.1f}-{1e3 * case.measured.high:.1f})",
                f"{case.error():+.1%}",
                f"{rest:+.1%}",
            ]
        )
        figures[f"{case.network}/{case.ranks}/{case.mode}"] = {
            "model_ms": round(1e3 * case.predicted_s, 1),
            "measured_ms": round(1e3 * case.measured.median, 1),
            "measured_range_ms": [round(1e3 * value, 1) for value in (case.measured.low, case.measured.high)],
            "error": round(case.error(), 4),
            "error_beyond_dense": round(rest, 4),
        }
    print(f"\npredicted vs. measured, dense part emulated ({options.dense_ms} ms), zipf-{options.samples} per rank")
    print(measure.table(["", "predicted", "measured (10-90 %)", "error", "without dense"], rows))
    errors = [abs(case.error()) for case in cases]
    figures["median_error"], figures["worst_error"] = round(statistics.median(errors), 4), round(max(errors), 4)
    for name, value, limit in (
        ("median", statistics.median(errors), MEDIAN_LIMIT),
        ("worst", max(errors), WORST_LIMIT),
    ):
        print(f"{name} error {value:.1%}, limit {limit:.0%}: {'met' if value <= limit else 'missed'}", flush=True)
    return figures


def seconds_of_block(schedule: Schedule, constants: Constants, cluster: Cluster, *, num_batches: int) -> float:
    """Seconds per step of a short run, with warm-up and drain of the pipeline."""
    traces = run_of(schedule, constants, cluster, num_batches=num_batches).traces()
    return max(span.end_ns for trace in traces for span in trace.spans) / 1e9 / num_batches


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="4 ranks, one network, a short dense part; under 50 seconds"
    )
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--dense-ms", type=int, help="duration of the emulated dense part of a batch")
    parser.add_argument("--samples", type=int, help="per rank")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--steps", type=int, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=measure.MIN_BLOCKS)
    parser.add_argument("--no-record", action="store_true", help="do not append to results/simulate.jsonl")
    options = parser.parse_args(arguments)
    options.ranks = sorted(options.ranks or (RANKS[:1] if options.quick else RANKS))
    options.networks = NETWORKS[:1] if options.quick else NETWORKS
    options.dense_ms = options.dense_ms or (150 if options.quick else 1000)
    options.samples = options.samples or (128 if options.quick else 512)
    options.steps = options.steps or (3 if options.quick else 6)
    return options


def main() -> None:
    options = options_of()
    netlab.end_on_sigterm()
    constants, base = seen(options)
    shown = {key: value for key, value in asdict(constants).items() if key != "source"}
    print(f"constants of {constants.source}: {json.dumps(shown)}")
    for arm, mode in MODES.items():  # the fitted cases, for comparison only
        schedule = Schedule.of(mode, options.micro_batches, depth=options.depth)  # type: ignore[arg-type]
        cluster = Cluster(workers=2, cores=os.cpu_count())
        own = on_network(constants, *SEEN, float("inf"))
        again = seconds_of_block(schedule, own, cluster, num_batches=options.steps)
        took = measure.Spread.of(base["times"][arm]).median  # type: ignore[index]
        print(f"2 ranks, {arm}: model {1e3 * again:.1f} ms, measured {1e3 * took:.1f} ms (fitted)", flush=True)
    cases = list(measured(list(predicted(constants, options)), options))
    figures = report(cases, options)
    if not options.no_record:
        keys = ("ranks", "networks", "dense_ms", "samples", "micro_batches", "depth", "steps", "blocks", "quick")
        settings = {**{key: getattr(options, key) for key in keys}, "dense": "emulated"}
        measure.append("simulate", measure.record(seed=0, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
