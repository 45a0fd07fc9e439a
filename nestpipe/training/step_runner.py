"""The runner of a run whose stages overlap, with its recorder; a sequential run has neither."""

from __future__ import annotations

import uuid

from nestpipe.pipeline.runner import Runner
from nestpipe.pipeline.schedule import schedule_for
from nestpipe.pipeline.stages import TrainState
from nestpipe.profiling.recorder import Recorder
from nestpipe.training.run_folder import Run


class StepRunner:
    """Runs steps up to the next barrier, and records the last ones if that is configured."""

    def __init__(self, run: Run, state: TrainState):
        """Collective."""
        self._state, self._run, self._settings, train = state, run, run.config.pipeline, run.config.train
        self._clip_rows = train.clip == "all" and train.clip_norm > 0
        schedule = schedule_for(self._settings, state.num_steps, clip_rows=self._clip_rows)
        self.runner, self._recorder = Runner(state, schedule), Recorder.off()
        if steps := self._settings.advanced.trace_steps:
            world, name = state.control.world, uuid.uuid4().hex.encode()
            self._recorder = Recorder(
                world.rank,
                world.size,
                capacity=(steps + schedule.depth + 3) * schedule.max_events,
                run=state.control.broadcast_bytes(name, 0, name="trace").decode(),
            )

    @staticmethod
    def of(run: Run, state: TrainState) -> StepRunner | None:
        """None for sequential steps that are not recorded."""
        settings = run.config.pipeline
        return StepRunner(run, state) if settings.mode != "sequential" or settings.advanced.trace_steps else None

    def begin(self) -> Runner:
        """The runner for the steps to the next barrier, with their schedule."""
        number = self._state.num_steps
        self.runner.schedule = schedule_for(self._settings, number, clip_rows=self._clip_rows)
        self.runner.observe = self._recorder.observer(number, channels=self._state.channels)
        return self.runner

    def save_trace(self) -> None:
        if self._settings.advanced.trace_steps:
            self._recorder.save(self._run.folder)
