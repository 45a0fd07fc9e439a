"""When a run saves, validates and stops, and its learning rates: pure functions of the step and the cursor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nestpipe.config import Config
from nestpipe.data.loader import Loader
from nestpipe.jagged import Cursor
from nestpipe.pipeline.stages import Clip, Rates


@dataclass(slots=True)
class Best:
    """The best validation so far."""

    step: int
    value: float


@dataclass(slots=True)
class LoopProgress:
    """State of the loop that survives interruptions; saved with every checkpoint."""

    seconds: float = 0.0
    best: Best | None = None
    num_stale: int = 0  # validations since the best one

    @staticmethod
    def resumed(saved: Mapping[str, Any], validated: list[str]) -> LoopProgress:
        """Of a checkpoint. A best value of another kind of validation (see `validation_of`) is forgotten: values differ."""
        if not saved["best"] or saved.get("validated", validated) != validated:
            return LoopProgress(seconds=saved["seconds"])
        return LoopProgress(seconds=saved["seconds"], best=Best(**saved["best"]), num_stale=saved["num_stale"])


def validation_of(config: Config) -> list[str]:
    """The settings that decide the value of a validation."""
    return [config.train.metric, config.eval.seen, str(config.eval.max_users)]


class RunLimits:
    """The limits of a configuration, in steps of its loader."""

    def __init__(self, config: Config, loader: Loader):
        self._config, self._train, self._loader = config, config.train, loader
        self._decay_steps = self._train.decay_steps or self._train.decay_epochs * loader.num_batches(0)

    def num_steps(self) -> int | None:
        """The number of steps if it is known; with a token budget, epochs differ in length."""
        by_epochs = 0 if self._config.data.batch_tokens else self._train.epochs * self._loader.num_batches(0)
        return min((steps for steps in (self._train.steps, by_epochs) if steps), default=None)

    def rates(self, number: int) -> Rates:
        """Learning rates of a batch, by its number from the start of training."""
        warmup = self._train.warmup_steps
        factor = min(1.0, (number + 1) / warmup) if warmup else 1.0
        if decay := self._decay_steps:
            factor *= max(0.01, 1.0 - (number + 1) / decay)
        clip = Clip(self._train.clip_norm, rows=self._train.clip == "all")
        return Rates(dense=self._config.dense.lr * factor, rows=self._config.embedding.lr * factor, clip=clip)

    def saves_after(self, num_steps: int) -> bool:
        return num_steps % self._train.save_steps == 0

    def logs_after(self, num_steps: int) -> bool:
        return num_steps % self._train.log_steps == 0

    def validates_after(self, epoch: int) -> bool:
        return self._config.data.validation and (epoch + 1) % self._train.eval_epochs == 0

    def steps_to_barrier(self, num_steps: int, cursor: Cursor, others: Iterable[int]) -> int:
        """How many batches may overlap from now on: up to a save, a validation, the end, or one of `others`."""
        most = min([self._train.save_steps - num_steps % self._train.save_steps, *others])
        if self._train.steps:
            most = min(most, self._train.steps - num_steps)
        epoch, to_end = cursor.epoch, self._loader.num_batches(cursor.epoch) - cursor.number
        while to_end < most and not (self.validates_after(epoch) or epoch + 1 == self._train.epochs):
            epoch += 1
            to_end += self._loader.num_batches(epoch)
        return min(most, to_end)

    def is_out_of_time(self, seconds: float) -> bool:
        return bool(self._train.minutes) and seconds >= self._train.minutes * 60

    def reason_to_stop(
        self, num_steps: int, cursor: Cursor, progress: LoopProgress, *, out_of_time: bool
    ) -> str | None:
        """The first limit that is reached; None if the run continues."""
        limits, best = self._train, progress.best
        if limits.steps and num_steps >= limits.steps:
            return f"{limits.steps:,} steps done"
        if limits.epochs and cursor.epoch >= limits.epochs:
            return f"{limits.epochs:,} epochs done"
        if out_of_time:
            return f"{limits.minutes:g} minutes done"
        if limits.patience and best and progress.num_stale >= limits.patience:
            value = f"{best.value:.4f} (step {best.step:,})"
            return f"{limits.metric} did not rise above {value} in {limits.patience} validations"
        return None
