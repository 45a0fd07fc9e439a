"""Measurements of steps: of a running training, and a short profile of a few settings on a temporary state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, pairwise
from statistics import fmean, median

from nestpipe.autotune.backoff import BatchSize
from nestpipe.autotune.search import NUMBERS, Measurement, PipelineChoice, choose
from nestpipe.distributed.process_group import Channel
from nestpipe.jagged import Batch
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import schedule_for
from nestpipe.pipeline.stages import BatchWork, Clip, Rates
from nestpipe.profiling.overlap import steps_of
from nestpipe.profiling.recorder import Recorder
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import new_state

PROBES = (2, 8)  # micro-batches: far enough apart to show what one costs
NUM_STEPS = 12
_WARM_UP = 2  # steps of pipeline warm-up
_MIN_STEPS = 3  # for a measurement
_ANALYSED = 5  # steps whose time is broken down, at 0.3 ms each
Batches = Callable[[], AbstractContextManager[Iterator[Batch]]]


def profile(run: Run, channels: Channels, batches_of: Batches, *, clip_rows: bool) -> list[Measurement]:
    """Measures few and many micro-batches, then the setting that these suggest; the fastest is last. Collective."""
    settings = run.config.pipeline
    state, number = new_state(run, channels), settings.sync_steps
    rates = Rates(
        dense=run.config.dense.lr, rows=run.config.embedding.lr, clip=Clip(run.config.train.clip_norm, rows=clip_rows)
    )
    mode = "nested" if settings.mode == "sequential" else settings.mode
    num_samples, measurements = run.config.data.batch_size // channels.control.world.size, list[Measurement]()

    def measure(choice: PipelineChoice) -> Measurement:
        own = replace(settings, mode=mode, micro_batches=choice.micro_batches, ramp=choice.ramp, depth=choice.depth)
        schedule, first = schedule_for(own, number, clip_rows=clip_rows), state.num_steps
        recorder = Recorder(capacity=(NUM_STEPS + 8) * schedule.max_events)
        state.micro_batching = own
        watched = state.channels
        before = [channel.watch for channel in watched]
        runner = Runner(state, schedule, observe=recorder.observer(first, channels=watched))
        sizes: list[BatchSize] = []

        def on_step(work: BatchWork) -> None:
            sizes.append(size_of(work))

        try:
            with batches_of() as batches:
                runner.run(BatchFeed(batches=batches, rates=lambda _: rates, num_batches=NUM_STEPS, on_step=on_step))
        finally:
            for channel, watch in zip(watched, before, strict=True):
                channel.watch = watch
        measured = of_all_ranks(channels.control, observe(recorder, choice, first, num_samples, BatchSize.mean(sizes)))
        assert measured is not None, f"{NUM_STEPS} steps are enough"
        return measured

    for micro_batches in PROBES:
        measurements.append(
            measure(PipelineChoice(micro_batches=min(micro_batches, max(num_samples, 1)), depth=settings.depth))
        )
    suggested = choose(measurements, max_depth=settings.depth).choice
    if suggested.cut not in [one.choice.cut for one in measurements]:
        measurements.append(measure(replace(suggested, depth=settings.depth)))
    return sorted(measurements, key=lambda one: -one.step_s)


def size_of(work: BatchWork) -> BatchSize:
    """The size of a rank's batch."""
    return BatchSize(work.plan.num_rows, work.batch.num_tokens)


def observe(
    recorder: Recorder, choice: PipelineChoice, first: int, num_samples: int, size: BatchSize
) -> Measurement | None:
    """The measurement of one rank from its recorded steps since batch `first`; None if there are too few."""
    recent = max(first, recorder.last_batch + 1 - _ANALYSED - _WARM_UP)
    trace = recorder.snapshot(recent)
    steps = [step for step in steps_of(trace) if step.batch >= recent + _WARM_UP]
    if len(steps) < _MIN_STEPS:
        return None
    batches = {step.batch for step in steps}
    edges = (("rows", 0), ("grads", choice.micro_batches - 1))
    # Rows that neighbouring batches do not share are hidden; where `arrive` marks the others, they are the further chunk.
    is_shared = any(span.kind == "arrive" for span in trace.spans)
    chunks = () if is_shared else ("chunk rows", "chunk grads")
    ends = [
        span.num_rows
        for span in trace.spans
        if span.batch in batches and ((span.kind, span.micro_batch) in edges or span.kind in chunks)
    ]
    done_ns = recorder.batch_ends(first)[_WARM_UP - 1 :]
    return Measurement(
        choice=choice,
        step_s=_middle(after - before for before, after in pairwise(done_ns)) / 1e9,
        busy_s=median(step.time_ns("busy") for step in steps) / 1e9,
        lookup_s=median(step.time_ns("lookup") for step in steps) / 1e9,
        comm_s=median(step.time_ns("communication") for step in steps) / 1e9,
        rows=size.rows,
        tokens=size.tokens,
        edge_rows=sum(ends) / len(steps),
        buffer_rows=max(step.num_rows.get("rows", 0) for step in steps),
        samples=num_samples,
    )


def _middle(times: Iterable[int]) -> float:
    """The interquartile mean: robust against bursts, and less noisy than the median."""
    ordered = sorted(times)
    left_out = len(ordered) // 4
    return fmean(ordered[left_out : len(ordered) - left_out])


def of_all_ranks(channel: Channel, own: Measurement | None) -> Measurement | None:
    """The measurement of all ranks; None if a rank had too few steps. Collective."""
    rows = channel.all_gather_floats(own.numbers if own else [math.nan] * len(NUMBERS), name="observed")
    if own is None or any(map(math.isnan, chain.from_iterable(rows))):
        return None
    return own.of_ranks([dict(zip(NUMBERS, row, strict=True)) for row in rows])
