"""The arms of auto.py on one rank: fixed modes, and what auto chooses, in alternating blocks on one state."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean

import torch
import train_arms
from train_arms import RATES, OurArm, Settings

from nestpipe.autotune.auto_pipeline import AutoChoice, WorkloadCounts
from nestpipe.autotune.overlap_profile import StepProfile, choose_overlap
from nestpipe.distributed.process_group import World
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig, PipelineConfig
from nestpipe.profiling.recorder import Recorder
from nestpipe.training.process import exact_arithmetic, keep_freed_memory

_CHECKED_STEPS = 6  # of the comparison with sequential, bitwise


class Arms:
    """All arms share one state: of two tables the one created first was 3 % faster."""

    def __init__(self, channels: Channels, dense: str, samples: int, num_hosts: int):
        self.channels, self._plain = channels, Settings(samples=samples, dense=dense, micro_batches=1)
        world = channels.control.world
        everyones = [train_arms.batches(self._plain, rank) for rank in range(world.size)]
        self._data = everyones[world.rank]
        self._ids = torch.cat([one.items.values for own in everyones for one in own]).unique()
        counts = WorkloadCounts(num_ranks=world.size, num_hosts=num_hosts, num_tokens=self._data[0].num_tokens)
        self.chosen = AutoChoice.of(counts)
        self._state = self._new_state(self._plain)
        if num_hosts > 1:  # as a run of 200 steps or more
            own = self.chosen
            config = PipelineConfig().changed(
                mode="nested", micro_batches=own.micro_batches, ramp=own.ramp, chunks=own.chunks
            )
            profile = StepProfile(
                self._new_state(self._plain), channels.control, lambda: nullcontext(iter(self._data)), RATES
            )
            self.chosen = choose_overlap(profile, config, own, channels.control)

    def arm(self, mode: str, state: train_arms.TrainState | None = None, **settings: object) -> OurArm:
        """One way to run the step."""
        own = replace(self._plain, **settings)  # type: ignore[arg-type]
        return OurArm(mode, own, state or self._state, self._data, Recorder.off())

    def auto(self) -> OurArm:
        own = self.chosen
        return self.arm(own.mode, micro_batches=own.micro_batches, ramp=own.ramp, depth=own.depth, chunks=own.chunks)

    def seconds(self, arm: OurArm, num_steps: int) -> tuple[float, float]:
        """Seconds of a step on the slowest rank, and CPU seconds of a step, mean over ranks."""
        own, control = arm.settings, self.channels.control
        self._state.micro_batching = MicroBatchConfig(micro_batches=own.micro_batches, ramp=own.ramp)
        control.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        arm.run(num_steps)
        own_s = [time.perf_counter() - start, time.process_time() - cpu]
        passed, used = zip(*control.all_gather_floats(own_s, name="seconds"), strict=True)
        return max(passed) / num_steps, fmean(used) / num_steps

    def equals_sequential(self) -> bool:
        """Whether auto, from a new state, is bitwise identical to sequential with its micro-batches."""
        auto = self.auto()
        both = [replace(auto, name=mode, state=self._new_state(auto.settings)) for mode in (auto.name, "sequential")]
        for arm in both:
            arm.run(_CHECKED_STEPS)
        return train_arms.same_bits(both, self.channels.control)

    def _new_state(self, settings: Settings) -> train_arms.TrainState:
        state = train_arms.our_state(settings, self.channels)
        train_arms.create_rows(state, self._ids)
        return state


def rank_program(
    fixed: dict[str, dict[str, object]], *, dense: str, samples: int, num_hosts: int, rounds: int, steps: int
) -> None:
    """Run by each rank; rank 0 prints the seconds per step by arm and round, and what auto chose."""
    keep_freed_memory()
    world = World.from_environment()
    with exact_arithmetic(1):
        torch.use_deterministic_algorithms(True)
        arms = Arms(Channels.of(world), dense, samples, num_hosts)
        runs = {name: arms.arm(**settings) for name, settings in fixed.items()} | {"auto": arms.auto()}  # type: ignore[arg-type]
        found: dict[str, list[float]] = {name: [] for name in runs}
        cpu: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):  # each begins with another arm; the first warms up
            turn = number % len(runs)
            for name in [*runs][turn:] + [*runs][:turn]:
                passed, used = arms.seconds(runs[name], steps)
                if number:
                    found[name].append(passed)
                    cpu[name].append(used)
        is_equal = arms.equals_sequential()
    if world.rank == 0:
        facts = {"chosen": arms.chosen.to_json(), "bitwise_equal": is_equal}
        print(json.dumps({"times": found, "cpu": cpu, **facts}))
    arms.channels.control.barrier()
    world.close()
