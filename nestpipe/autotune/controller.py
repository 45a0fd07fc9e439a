"""The settings of every step: configured, tuned at the start, taken from another run, or adapted while training.

    RUN/settings.jsonl      {"step": 0, "micro_batches": 4, "ramp": 1.0, "depth": 1, "buffer_rows": 0, "why": "..."}

Invariants:

- A line holds from its step on. It is written before that step, and every checkpoint contains a
  copy of all lines.
- A decision is never made twice: a resumed run takes the existing lines, also those beyond its
  checkpoint, so it repeats the same micro-batches. Any mode that follows them (`--pipeline.follow
  RUN`) is bitwise identical. Measurements only extend the lines.
- Settings change at barriers, when no batch is in flight. All ranks decide alike from the
  measurements of all.

While nothing changes barriers become rarer; a rank whose batch sizes change requests the next one
(backoff.py).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nestpipe.atomic_files import read_jsonl, replace_file
from nestpipe.autotune.backoff import MEASURE_STEPS, MeasurementTimer
from nestpipe.autotune.measure import Batches, observe, of_all_ranks, profile, size_of
from nestpipe.autotune.search import MAX_DEPTH, MAX_MICRO_BATCHES, PipelineChoice, TuningDecision, choose
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.embedding.prefetch_buffer import PrefetchBuffer
from nestpipe.embedding.stale_rows import StaleRows
from nestpipe.errors import ConfigError
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import Runner
from nestpipe.pipeline.schedule import schedule_for
from nestpipe.pipeline.stages import BatchWork, TrainState
from nestpipe.profiling.recorder import Recorder
from nestpipe.training.run_folder import Run

FILE = "settings.jsonl"


@dataclass(frozen=True, slots=True)
class AppliedSetting:
    """The setting from one step on, and its reason."""

    first: int
    choice: PipelineChoice
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"step": self.first, **asdict(self.choice), "why": self.why}

    @staticmethod
    def from_json(content: dict[str, Any]) -> AppliedSetting:
        fields = {key: value for key, value in content.items() if key not in ("step", "why")}
        return AppliedSetting(content["step"], PipelineChoice(**fields), content["why"])


class Controller:
    """Applies settings to the training state and its runner, and chooses new ones."""

    def __init__(self, run: Run, state: TrainState, channels: Channels):
        self._run, self._state, self._channels = run, state, channels
        self._settings = run.config.pipeline
        self._history: list[AppliedSetting] = []
        self._timer = (
            MeasurementTimer(period=self._settings.adapt, number=state.num_steps) if self._settings.adapt else None
        )
        clip = run.config.train
        self._clip_rows = clip.clip == "all" and clip.clip_norm > 0
        self.recorder, self.runner = self._new_runner()

    @property
    def history(self) -> list[dict[str, Any]]:
        """The settings of all steps, for a checkpoint; empty if the configuration fixes them."""
        return [one.to_json() for one in self._history]

    def start(self, saved: Sequence[dict[str, Any]], batches_of: Batches) -> str:
        """Chooses the first settings; returns a message, "" for none. Collective.

        `saved`: the history in the checkpoint from which the run resumes. `batches_of()` opens batches for a profile.
        """
        control, settings = self._channels.control, self._settings
        known = all_ranks_or_none(control, "settings read", lambda: self._read(saved) if self._leads else [])
        history = json.loads(control.broadcast_bytes(json.dumps(known).encode(), 0, name="settings"))
        self._history = [AppliedSetting.from_json(one) for one in history]
        if self._history:
            self._write()
            return ""
        if settings.tune:
            measured = profile(self._run, self._channels, batches_of, clip_rows=self._clip_rows)
            chosen = choose(measured, max_micro_batches=self._max_micro_batches, max_depth=self._max_depth)
            if self._timer and not settings.sync_steps:
                self._timer = MeasurementTimer(period=settings.adapt, number=self._state.num_steps, known=measured)
            return self._decide(chosen)
        if settings.adapt:
            start = PipelineChoice(micro_batches=settings.micro_batches, ramp=settings.ramp, depth=settings.depth)
            return self._decide(TuningDecision(start, "as configured"))
        return ""

    def begin(self) -> None:
        """Applies the settings of the next step. Called at every barrier."""
        number, settings = self._state.num_steps, self._settings
        if choice := self._choice(number):
            settings = replace(settings, micro_batches=choice.micro_batches, ramp=choice.ramp, depth=choice.depth)
            for access in self._state.embedding.row_access.values():
                inner = access.inner if isinstance(access, StaleRows) else access
                if isinstance(inner, PrefetchBuffer):
                    inner.reserve(choice.buffer_rows)
        self._state.micro_batching = settings
        if self.runner is not None:
            self.runner.schedule = schedule_for(settings, number, clip_rows=self._clip_rows)
            first = self._timer.due - MEASURE_STEPS if self._timer and not settings.trace_steps else 0
            self.runner.observe = self.recorder.observer(number, first, channels=self._state.channels)

    def steps_to_change(self) -> int | None:
        """Steps until the settings may change, which needs a barrier; None for never."""
        number = self._state.num_steps
        steps = [one.first - number for one in self._history if one.first > number]
        if self._timer:
            steps.append(self._timer.due - number)
        if switch := self._settings.steps_to_switch(number):
            steps.append(switch)
        return min(steps, default=None)

    def record(self, work: BatchWork) -> None:
        """Records the batch size of a finished step."""
        if self._timer:
            self._timer.record(size_of(work))

    def requests_measurement(self) -> bool:
        """Whether this rank requests a barrier because its batch sizes have changed."""
        return self._timer is not None and self._timer.is_requested

    def end(self, *, early: bool) -> str:
        """At a barrier: measures and chooses if that is due and not decided already; returns a message, "" for none.

        `early`: a rank requested the barrier.
        """
        number, stale, timer = self._state.num_steps, self._settings.is_stale, self._timer
        if timer is None or self.runner is None:
            return ""
        if switched := stale(number) != stale(number - 1):
            timer.forget()  # times of exact steps say nothing about stale ones
        if early or switched:
            timer.restart(number)
        if number < timer.due:
            return ""
        if any(one.first >= number for one in self._history):
            timer.postpone(number)
            return ""
        now = self._choice(number - 1)
        first = max([timer.since, *(one.first for one in self._history)])
        choice = now or PipelineChoice(micro_batches=self._state.micro_batching.micro_batches)
        measured = observe(self.recorder, choice, first, self._num_samples, timer.size)
        if (measured := of_all_ranks(self._channels.control, measured)) is None:
            timer.postpone(number)  # too few steps since the settings changed
            return ""
        chosen = timer.decide(number, measured, max_micro_batches=self._max_micro_batches, max_depth=self._max_depth)
        return "" if now and chosen.choice.is_within(now) else self._decide(chosen)

    def save_trace(self) -> None:
        if self._settings.trace_steps:
            self.recorder.save(self._run.folder)

    @property
    def _leads(self) -> bool:
        return self._channels.control.world.rank == 0

    @property
    def _num_samples(self) -> int:
        return self._run.config.data.batch_size // self._channels.control.world.size

    @property
    def _max_micro_batches(self) -> int:
        """1 for a loss over the whole batch."""
        return 1 if self._state.model.coupling == "batch" else MAX_MICRO_BATCHES

    @property
    def _max_depth(self) -> int:
        """The depth for which rows are protected from eviction."""
        limits = self._run.config.embedding
        return limits.protect_steps - 1 - self._settings.staleness if limits.max_rows else MAX_DEPTH

    def _choice(self, number: int) -> PipelineChoice | None:
        choices = [one.choice for one in self._history if one.first <= number]
        return choices[-1] if choices else None

    def _decide(self, chosen: TuningDecision) -> str:
        setting = AppliedSetting(self._state.num_steps, chosen.choice, chosen.why)
        self._history.append(setting)
        self._write()
        return f"step {setting.first:,}: {setting.choice}. {setting.why}"

    def _read(self, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """On rank 0: the lines of this run, of its checkpoint, or of the run that it follows."""
        own, other = self._run.folder / FILE, self._settings.follow
        if own.exists() or saved:
            return read_jsonl(own) if own.exists() else list(saved)
        if not other:
            return []
        path = Path(other) / FILE
        if not path.exists():
            raise ConfigError(
                f"{path} does not exist: {other} neither tuned nor adapted its settings; leave follow out."
            )
        first, lines = self._state.num_steps, read_jsonl(path)
        # Steps of this run before it began to follow are its own.
        before = [line | {"step": first} for line in lines if line["step"] <= first]
        return before[-1:] + [line for line in lines if line["step"] > first]

    def _write(self) -> None:
        lines = "".join(json.dumps(one) + "\n" for one in self.history).encode()
        action = (lambda: replace_file(self._run.folder / FILE, lines)) if self._leads else (lambda: None)
        all_ranks_or_none(self._channels.control, "settings written", action)

    def _new_runner(self) -> tuple[Recorder, Runner | None]:
        """The recorder and the runner; no runner for the sequential loops."""
        settings, state = self._settings, self._state
        if settings.mode == "sequential" and not settings.trace_steps:
            return Recorder.off(), None
        schedule = schedule_for(settings, state.num_steps, clip_rows=self._clip_rows)
        recorded = max(settings.trace_steps, MEASURE_STEPS if settings.adapt else 0)
        if not recorded:
            return Recorder.off(), Runner(state, schedule)
        largest = settings
        if (
            settings.adapt or settings.tune or settings.follow or (self._run.folder / FILE).exists()
        ):  # micro-batches may change
            largest = replace(settings, micro_batches=max(settings.micro_batches, MAX_MICRO_BATCHES), depth=MAX_DEPTH)
        most = schedule_for(largest, state.num_steps, clip_rows=self._clip_rows).max_events
        name, world = uuid.uuid4().hex.encode(), state.control.world
        recorder = Recorder(
            world.rank,
            world.size,
            capacity=(recorded + schedule.depth + 3) * most,
            run=state.control.broadcast_bytes(name, 0, name="trace").decode(),
        )
        return recorder, Runner(state, schedule)
