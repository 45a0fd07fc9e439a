"""The arms of adapt.py on one rank: blocks of steps with fixed micro-batches, and autotuned blocks."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import measure
import train_arms
from train_arms import RATES, Settings

from nestpipe.atomic_files import replace_file
from nestpipe.autotune.backoff import MEASURE_STEPS, MeasurementTimer
from nestpipe.autotune.measure import observe, of_all_ranks, size_of
from nestpipe.autotune.search import PipelineChoice
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import World
from nestpipe.jagged import Batch
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.stages import BatchWork
from nestpipe.profiling.recorder import Recorder
from nestpipe.training.process import exact_arithmetic, keep_freed_memory

# After so many rounds a fixed arm that nearly always takes so much longer than the best one is not run any more.
TELLING, SLOWER = 12, 1.05


class Arms:
    """All arms share one state. The adaptive one does what nestpipe/autotune/controller.py does, on batches in memory."""

    def __init__(self, channels: Channels, fixed: list[int], start: int, period: int, folder: Path):
        self.fixed = [str(micro_batches) for micro_batches in fixed]
        self.chosen: list[str] = []
        self._channels, self._settings, self._period, self._folder = channels, Settings(samples=512), period, folder
        self._state = train_arms.our_state(self._settings, channels)
        self._choices = {str(micro_batches): PipelineChoice(micro_batches=micro_batches) for micro_batches in fixed} | {
            "adaptive": PipelineChoice(micro_batches=start)
        }
        self._recorder = Recorder(capacity=1 << 15)
        # Steps of the adaptive arm: its periods end in the middle of blocks, so that the cost of a measurement's barrier is included.
        self._done = period // 2
        self._timer = MeasurementTimer(period=period, number=self._done)

    def batches(self, length: int) -> list[Batch]:
        return train_arms.batches(self._settings, self._channels.control.world.rank, length=length)

    def block(self, name: str, data: list[Batch]) -> float:
        """Seconds of a period of one arm on the slowest rank, autotuning included."""
        self._channels.control.barrier()
        start = time.perf_counter()
        if name == "adaptive":
            self._adaptive(data)
        else:
            self._stretch(name, data, self._period)
        own = round((time.perf_counter() - start) * 1e9)
        return max(row[0] for row in self._channels.control.all_gather_ints([own])) / 1e9

    def _stretch(self, name: str, data: list[Batch], num_steps: int) -> int:
        """Returns the number of steps done: fewer if a rank of the adaptive arm requested a measurement."""
        state, choice, adaptive, observer = self._state, self._choices[name], name == "adaptive", None
        first = state.num_steps
        state.micro_batching = MicroBatchConfig(micro_batches=choice.micro_batches, ramp=choice.ramp)
        for stream in state.channels:
            stream.watch = None
        if adaptive:
            start = first + self._timer.due - self._done - MEASURE_STEPS
            observer = self._recorder.observer(first, start, channels=state.channels)
        runner = Runner(state, Schedule.of("nested", choice.micro_batches, depth=choice.depth), observe=observer)
        stream = (data[number % len(data)] for number in count(first))
        feed = BatchFeed(batches=stream, rates=lambda _: RATES, num_batches=num_steps)
        if adaptive:
            feed = replace(feed, stop_requested=self._asks_to_look, on_step=self._on_step)
        return runner.run(feed)

    def _asks_to_look(self) -> bool:
        return self._timer.is_requested

    def _on_step(self, work: BatchWork) -> None:
        self._timer.record(size_of(work))

    def _adaptive(self, data: list[Batch]) -> None:
        end = self._done + self._period
        while self._done < end:
            first, num_steps = self._state.num_steps, min(self._timer.due, end) - self._done
            num_done = self._stretch("adaptive", data, num_steps)
            self._done += num_done
            if num_done < num_steps:
                self._timer.restart(self._done)
            elif self._done == self._timer.due:
                self._choose(first)

    def _choose(self, first: int) -> None:
        now, stream = self._choices["adaptive"], self._channels.control
        seen = of_all_ranks(stream, observe(self._recorder, now, first, self._settings.samples, self._timer.size))
        if seen is None:
            self._timer.restart(self._done)  # another arm ran in the middle of a trial
            return
        decision = self._timer.decide(self._done, seen)
        if not decision.choice.is_within(now):
            self._choices["adaptive"] = decision.choice
            self.chosen.append(f"step {self._done - self._period // 2}: {decision.why}")
            write = partial(replace_file, self._folder / "settings.jsonl", json.dumps(self.chosen).encode())
            all_ranks_or_none(stream, "settings written", write if stream.world.rank == 0 else lambda: None)


def seconds_of(arms: Arms, data: list[Batch], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of every block, by arm; each round begins with another arm."""
    for name in arms.fixed:
        arms.block(name, data)  # creates the new rows
    names = [*arms.fixed, "adaptive"]
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(arms.block(name, data))
        if number + 1 == TELLING:
            best = min((found[name] for name in arms.fixed), key=median)
            slow = {name for name in arms.fixed if measure.ratio(found[name], best).low > SLOWER}
            names = [name for name in names if name not in slow]
    return found


def rank_program(
    fixed: list[int], start: int, *, lengths: dict[str, int], num_rounds: dict[str, int], steps: int
) -> None:
    """Run by each rank; rank 0 prints the seconds of every block by half and arm, and the chosen settings."""
    keep_freed_memory()
    world = World.from_environment()
    channels = Channels.of(world)
    with exact_arithmetic(1), TemporaryDirectory() as folder:
        arms = Arms(channels, fixed, start, steps, Path(folder))
        found = {half: seconds_of(arms, arms.batches(length), num_rounds[half]) for half, length in lengths.items()}
    if world.rank == 0:
        print(json.dumps({"times": found, "chosen": arms.chosen}))
    channels.control.barrier()
    world.close()
