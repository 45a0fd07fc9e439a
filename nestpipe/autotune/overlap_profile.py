"""A short profile of a run: a few steps on a state that is thrown away, and the cost model of `nestpipe simulate` fitted to them.

    measure()   steps of one setting on all ranks: seconds per step, and the traces that the constants are fitted to
    predict()   seconds per step of every mode, relative to what was measured, so that what the model leaves out cancels

Mode, depth and chunks decide no bits, so a clock may choose them (choose_overlap). The division of a batch does decide bits; it is
only recommended (`nestpipe tune pipeline`). Rank 0 decides, because ranks measure different times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from nestpipe.autotune.auto_pipeline import AutoChoice
from nestpipe.distributed.process_group import Channel
from nestpipe.embedding.config import Chunking
from nestpipe.errors import DataError
from nestpipe.jagged import Batch
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import schedule_for
from nestpipe.pipeline.stages import Clip, Rates, TrainState
from nestpipe.profiling.overlap import steps_of
from nestpipe.profiling.recorder import Recorder, now
from nestpipe.profiling.trace_file import RankTrace, load
from nestpipe.simulate.advice import MODES, PipelineSetting, step_s
from nestpipe.simulate.calibrate import calibrate
from nestpipe.simulate.costs import Cluster
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import new_state

NUM_STEPS = 8
_WARM_UP = 2  # steps of pipeline warm-up
_MARGIN = 0.05  # relative gain for which another setting than that of the counts is taken: times are not more accurate
_EXPOSED_LOOKUP = 0.01  # share of a step; above it, rows are prefetched earlier
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Batches = Callable[[], AbstractContextManager[Iterator[Batch]]]


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """Steps of one setting; equal on every rank."""

    config: PipelineConfig
    step_s: float  # of the slowest rank
    exposed_lookup: float  # share of a step
    traces: tuple[RankTrace, ...]

    @property
    def setting(self) -> PipelineSetting:
        return PipelineSetting(self.config.mode, self.config.micro_batches)


class StepProfile:
    """Measures settings on a new state of a run."""

    def __init__(self, state: TrainState, control: Channel, batches_of: Batches, rates: Rates):
        self._state, self._control, self._batches_of, self._rates = state, control, batches_of, rates
        self._offset_ns = _clock_offset_ns(control)

    @staticmethod
    def of(run: Run, channels: Channels, batches_of: Batches) -> StepProfile:
        config = run.config
        clip = Clip(config.train.clip_norm, rows=config.train.clip == "all" and config.train.clip_norm > 0)
        rates = Rates(dense=config.dense.lr, rows=config.embedding.lr, clip=clip)
        return StepProfile(new_state(run, channels), channels.control, batches_of, rates)

    def measure(self, config: PipelineConfig) -> ProfiledSteps:
        """A few steps of one setting. Collective."""
        state, world, first = self._state, self._control.world, self._state.num_steps
        clip = self._rates.clip
        schedule = schedule_for(config, config.advanced.sync_steps, clip_rows=clip is not None and clip.rows)
        capacity = (NUM_STEPS + 8) * schedule.max_events
        recorder = Recorder(
            world.rank, world.size, capacity=capacity, run=f"profile {first}", clock_offset_ns=self._offset_ns
        )
        state.micro_batching, watched = config.micro_batching, state.channels
        before = [channel.watch for channel in watched]
        runner = Runner(state, schedule, observe=recorder.observer(first, channels=watched))
        try:
            with self._batches_of() as batches:
                runner.run(BatchFeed(batches=batches, rates=lambda _: self._rates, num_batches=NUM_STEPS))
        finally:
            for channel, watch in zip(watched, before, strict=True):
                channel.watch = watch
        own_s = median(after - begun for begun, after in pairwise(recorder.batch_ends(first)[_WARM_UP:])) / 1e9
        traces = _of_all_ranks(recorder.snapshot(first + _WARM_UP), self._control)
        steps = [step for trace in traces for step in steps_of(trace)]
        lookup = sum(step.time_ns("lookup") for step in steps) / max(sum(step.total_ns for step in steps), 1)
        slowest = max(row[0] for row in self._control.all_gather_floats([own_s], name="seconds of a step"))
        return ProfiledSteps(config, slowest, lookup, traces)


def predict(
    measured: Sequence[ProfiledSteps], numbers: Iterable[int], *, cores: int | None
) -> dict[PipelineSetting, float]:
    """Seconds per step of every mode with these numbers of micro-batches; nothing if the traces do not determine the constants."""
    plain = [one for one in measured if one.config.mode == "nested" and one.config.advanced.chunks == 1]
    try:
        constants = calibrate([trace for one in plain for trace in one.traces])
    except DataError:
        return {}
    cluster = Cluster(workers=len(plain[0].traces), cores=cores)
    scale = median(one.step_s / step_s(one.setting, constants, cluster) for one in plain)
    settings = [PipelineSetting(mode, number) for mode in MODES for number in numbers]
    return {setting: scale * step_s(setting, constants, cluster) for setting in settings}


def choose_overlap(profile: StepProfile, config: PipelineConfig, counted: AutoChoice, control: Channel) -> AutoChoice:
    """The choice from counts, with mode, depth and chunks as measured. Collective; `config` has the counted choice."""
    counts: tuple[Chunking, ...] = (1, config.advanced.chunks, "shared")
    measured = [profile.measure(config.changed(chunks=one)) for one in dict.fromkeys(counts)]
    times = predict(measured, [config.micro_batches], cores=None)
    if not times:
        measured.append(profile.measure(config.changed(mode="sequential", chunks=1)))
    found: dict[tuple[str, Chunking], float] = {
        (one.config.mode, one.config.advanced.chunks): one.step_s for one in measured
    }
    found |= {(one.mode, 1): seconds for one, seconds in times.items() if one.mode != "nested"}
    best = min(found, key=lambda one: found[one])
    if found[best] > (1 - _MARGIN) * found["nested", config.advanced.chunks]:
        best = ("nested", config.advanced.chunks)
    depth = counted.depth + (measured[0].exposed_lookup > _EXPOSED_LOOKUP and best[0] in ("dual-buffer", "nested"))
    gain = f"{found['sequential', 1] / found[best]:.2f}x of sequential expected"
    chosen: dict[str, Any] = {"mode": best[0], "chunks": best[1], "depth": depth, "gain": gain}
    agreed = control.broadcast_bytes(json.dumps(chosen).encode(), 0, name="measured settings")
    return replace(counted, **json.loads(agreed))


def _of_all_ranks(own: RankTrace, control: Channel) -> tuple[RankTrace, ...]:
    """The traces of all ranks on the clock of rank 0. Collective."""
    with TemporaryDirectory() as folder:
        files = control.all_gather_bytes(own.save(Path(folder)).read_bytes(), name="traces")
        for rank, content in enumerate(files):
            Path(folder, "trace", f"rank-{rank:03d}.jsonl").write_bytes(content)
        return load(Path(folder))


def _clock_offset_ns(control: Channel) -> int:
    """What to add to this rank's clock for that of rank 0, to within the latency of a message. Collective."""
    boot = _BOOT_ID.read_bytes() if _BOOT_ID.exists() else b"?"
    boots, offsets = control.all_gather_bytes(boot, name="boot ids"), []
    for _ in range(5):
        control.barrier()
        clocks = [row[0] for row in control.all_gather_ints([now()], name="clocks")]
        offsets.append(clocks[0] - clocks[control.world.rank])
    return 0 if boots[0] == boot else int(median(offsets))
