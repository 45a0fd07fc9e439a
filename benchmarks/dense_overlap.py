"""How much of the dense gradient exchange is hidden behind the last backward? Two ranks on a link, layers emulated.

A model of equal layers is trained by the nested schedule. A layer has real weights, gradients, messages and updates, but sleeps
instead of computing, so that neither the load of the machine nor the number of cores decides. Arms alternate in blocks:

    during    dense gradients are summed by bucket while earlier layers are in backward, as `nestpipe train` does
    after     the same exchange, but no bucket is ready before the backward has ended

Both arms are recorded. Exposed: from the end of the last compute to the end of `dense sum`, on the slower rank; in arm `after`
that is the whole exchange (reduce-scatter, update of the own piece, all-gather), and a short run without layers sets the time of
the backward from it. Hidden: 1 - exposed during / exposed after.
Both arms and the sequential step must end bitwise identical, or nothing is recorded.

Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measure
import netlab
import torch
from torch import Tensor, nn

from nestpipe.distributed.process_group import World
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.contract import Output
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState
from nestpipe.profiling.recorder import Recorder
from nestpipe.rng import Rng
from nestpipe.training.process import exact_arithmetic, keep_freed_memory

WIDTH, LAYERS, SAMPLES = 362, 8, 8  # a layer has 0.5 MB, and is a bucket
AT_LEAST = 0.60
RATES = Rates(dense=1e-3, rows=1e-3)


class Sleep(torch.autograd.Function):
    """Takes the time of a layer's forward and backward, without a core."""

    @staticmethod
    def forward(context: Any, values: Tensor, backward_s: float) -> Tensor:
        context.backward_s = backward_s
        time.sleep(backward_s / 2)
        return values.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(context.backward_s)
        return grad, None


class Layers(nn.Module):
    tables = (TableSpec(name="item", dim=WIDTH),)
    coupling = "none"

    def __init__(self, backward_s: float):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._backward_s = backward_s / LAYERS

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        return {"items": Lookup(table="item", ids=batch.items.values)}

    def weight(self, batch: Batch) -> float:
        return float(batch.num_samples)

    def forward(self, rows: dict[str, Rows], batch: Batch, rng: Rng) -> Output:
        hidden = rows["items"].gather()
        for layer in self.layers:
            hidden = torch.tanh(layer(Sleep.apply(hidden, self._backward_s)))
        return Output(hidden.square().sum())


@contextmanager
def _ready_at_the_end(dense: DenseParams, on_ready: Callable[[int], None]) -> Iterator[None]:
    yield
    for number in range(len(dense.buckets)):
        on_ready(number)


def _ways() -> dict[str, Callable[[], AbstractContextManager[object]]]:
    return {"during": nullcontext, "after": lambda: patch.object(DenseParams, "last_backward", _ready_at_the_end)}


def batches(rank: int) -> Iterator[Batch]:
    for number in count():
        ids = torch.arange(SAMPLES) + SAMPLES * rank
        items = Jagged.from_rows([[int(one)] for one in ids + number])
        yield Batch(cursor=Cursor(0, number), sample_ids=ids, items=items)


def rank_program(settings: dict[str, Any]) -> None:
    """Run by each rank; prints its measurements."""
    keep_freed_memory()
    with exact_arithmetic(1):
        world = World.from_environment()
        channels, micro_batches = Channels.of(world), settings["micro_batches"]

        def new_state(backward_s: float) -> TrainState:
            pipeline = PipelineConfig(mode="sequential", micro_batches=micro_batches)
            return build_state(Layers(backward_s), pipeline=pipeline, channels=channels)

        def block(name: str, state: TrainState) -> tuple[float, float]:
            """Seconds per step, and exposed seconds on the slower rank."""
            recorder = Recorder(world.rank, world.size, capacity=10_000)
            observe = recorder.observer(state.num_steps, channels=state.channels)
            runner = Runner(state, Schedule.of("nested", micro_batches), observe=observe)
            data = islice(batches(world.rank), state.num_steps, None)
            start = time.perf_counter()
            with _ways()[name]():
                runner.run(BatchFeed(batches=data, rates=lambda number: RATES, num_batches=settings["steps"]))
            seconds, own = (time.perf_counter() - start) / settings["steps"], exposed_s(recorder, micro_batches)
            return seconds, max(one for (one,) in channels.control.all_gather_floats([own]))

        alone = new_state(0.0)
        backward_s = statistics.median(block("after", alone)[1] for _ in range(3)) / settings["ratio"]
        states = {name: new_state(backward_s) for name in _ways()}
        exposed: dict[str, list[float]] = {name: [] for name in states}

        def timed(name: str) -> float:
            seconds, own = block(name, states[name])
            exposed[name].append(own)
            return seconds

        arms = {name: partial(timed, name) for name in states}
        times = measure.alternate(arms, num_blocks=settings["blocks"])
        plain = new_state(0.0)
        for batch in islice(batches(world.rank), states["during"].num_steps):
            step(plain, batch, RATES)
        digests = {digest(state) for state in (*states.values(), plain)}
        found = {"times": times, "exposed": {name: own[-settings["blocks"] :] for name, own in exposed.items()}}
        print(json.dumps(found | {"backward_s": backward_s, "bitwise_equal": len(digests) == 1}))
        world.close()


def exposed_s(recorder: Recorder, micro_batches: int) -> float:
    """Median over batches of the time from the end of the last compute to the end of the dense sum."""
    spans = recorder.snapshot().spans
    computed = {
        span.batch: span.end_ns for span in spans if (span.kind, span.micro_batch) == ("compute", micro_batches - 1)
    }
    return (
        statistics.median(max(span.end_ns - computed[span.batch], 0) for span in spans if span.kind == "dense sum")
        / 1e9
    )


def digest(state: TrainState) -> str:
    found = hashlib.sha256()
    for values in state.dense.export().values():
        found.update(values.numpy().tobytes())
    return found.hexdigest()


def measured(micro_batches: int, ratio: float, options: argparse.Namespace) -> dict[str, Any]:
    settings = {"micro_batches": micro_batches, "ratio": ratio, "steps": options.steps, "blocks": measure.MIN_BLOCKS}
    with netlab.Lab(2, rate=options.rate) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", json.dumps(settings)]
        found: dict[str, Any] = json.loads(lab.run(command, timeout_s=1800)[0].splitlines()[-1])
    during, after, backward_s = found["exposed"]["during"], found["exposed"]["after"], found["backward_s"]
    hidden = measure.Spread.of([1 - one / other for one, other in zip(during, after, strict=True)])
    exchange, step_ratio = measure.Spread.of(after), measure.ratio(found["times"]["during"], found["times"]["after"])
    return {
        "backward_ms": round(1e3 * backward_s, 1),
        "exchange_ms": round(1e3 * exchange.median, 1),
        "exchange_over_backward": round(exchange.median / backward_s, 3),
        "exposed_ms": round(1e3 * measure.Spread.of(during).median, 1),
        "hidden": round(hidden.median, 3),
        "hidden_range": hidden.range,
        "verdict": measure.verdict(hidden, at_least=AT_LEAST),
        "step_during_over_after": round(step_ratio.median, 3),
        "step_range": step_ratio.range,
        "bitwise_equal": found["bitwise_equal"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one micro-batch, one ratio, few steps; half a minute")
    parser.add_argument("--rate", default="200mbit", help="of each rank's link, per direction")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 1.0], help="exchange over the last backward")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--no-record", action="store_true", help="do not append to results/dense_overlap.jsonl")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank_program(json.loads(options.as_rank))
        return
    if options.quick:
        options.ratios, options.micro_batches, options.steps = options.ratios[:1], [1], 2
    netlab.end_on_sigterm()
    everything, rows = {}, []
    for micro_batches in options.micro_batches:
        for ratio in options.ratios:
            figures = measured(micro_batches, ratio, options)
            if not figures["bitwise_equal"]:
                raise SystemExit(f"the arms differ at {micro_batches} micro-batches; this run is not recorded.")
            name = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}, exchange {ratio:g}x of the backward"
            everything[name] = figures
            low, high = figures["hidden_range"]
            rows.append([
                name,
                f"{figures['exchange_ms']:.0f} ms ({figures['exchange_over_backward']:.2f}x)",
                f"{figures['exposed_ms']:.0f} ms",
                f"{figures['hidden']:.0%} ({low:.0%}-{high:.0%}), {figures['verdict']}",
                f"{figures['step_during_over_after']:.2f}x",
            ])  # fmt: skip
    print(f"2 ranks, {options.rate} each, {LAYERS} emulated layers; limit: at least {AT_LEAST:.0%} hidden")
    print(measure.table(["", "exchange (over backward)", "exposed", "hidden (10-90 %)", "step"], rows))
    if not options.no_record:
        keys = ("rate", "ratios", "micro_batches", "steps", "quick")
        settings = {
            **{key: getattr(options, key) for key in keys},
            "dense": "emulated",
            "layers": LAYERS,
            "width": WIDTH,
        }
        measure.append("dense_overlap", measure.record(seed=0, figures=everything, settings=settings))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
