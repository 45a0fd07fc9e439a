"""The training loop: epochs, logging, validation, checkpoints, and every way to stop.

A run is a function of its configuration and data. What the clock decides is only when to stop, never what is computed:
a run that was killed and resumed ends with the bits of one that was left alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from nestpipe import checkpoint
from nestpipe.config import Config
from nestpipe.data.loader import Loader
from nestpipe.errors import ConfigError
from nestpipe.jagged import Batch, Cursor
from nestpipe.metrics import JsonlTracker, TensorBoardTracker, Tracker, Trackers
from nestpipe.pipeline.sequential import Rates, TrainState, step
from nestpipe.progress import Progress
from nestpipe.run import Run, contents_of
from nestpipe.scoring import Scorer

# Limits and reporting may differ when a run goes on; everything else decides its bits.
_FREE_KEYS = ("epochs", "steps", "minutes", "save_steps", "keep_last", "log_steps", "tensorboard")


@dataclass(slots=True)
class Best:
    """The best validation so far."""

    step: int
    value: float


@dataclass(slots=True)
class Memory:
    """What the loop remembers over interruptions; saved with every checkpoint."""

    seconds: float = 0.0
    best: Best | None = None
    num_stale: int = 0  # validations since the best one


def train(
    config: Config, folder: str | Path, *, resume: bool = False, profile: bool = False, quiet: bool = False
) -> Run:
    """Trains a run to its end and returns it; with `resume` goes on from the latest checkpoint, if there is one."""
    config = replace(
        config, train=replace(config.train, num_threads=config.train.num_threads or torch.get_num_threads())
    )
    if resume and (Path(folder) / "config.json").exists():
        run = _reopen(config, Path(folder))
    else:
        run = Run.create(config, folder)
    with _exact_arithmetic(run.config.train.num_threads), _Loop(run, quiet=quiet) as loop:
        loop.run_to_end(profile=profile)
    return run


class _Loop:
    def __init__(self, run: Run, *, quiet: bool):
        self._run, self._config = run, run.config
        self._loader = Loader(run.sequences, run.split, run.config.data, seed=run.config.seed)
        self._memory = Memory()
        self._cursor = Cursor(0, 0)
        self._state = self._restore()
        self._trackers = _trackers(run, self._state.num_steps)
        self._progress = Progress(self._num_steps(), done=self._state.num_steps, quiet=quiet)
        self._since = time.monotonic()

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._trackers.close()

    def run_to_end(self, *, profile: bool) -> None:
        """Steps until a limit is reached or a signal asks to stop; always leaves a checkpoint of the last step."""
        reason = self._reason_to_stop()
        with _stop_signals() as stop, contextlib.closing(self._loader.iterate(self._cursor)) as batches:
            profiler = _Profiler(self._run.folder / "profile") if profile else None
            while reason is None:
                batch = next(batches)
                self._step(batch)
                if profiler:
                    profiler.step()
                reason = "interrupted" if stop.is_set() else self._reason_to_stop()
                if reason is None and self._state.num_steps % self._config.train.save_steps == 0:
                    self._save()
            if profiler:
                profiler.close()
        self._save()
        self._trackers.summary(
            {"stopped": reason, "steps": self._state.num_steps, "epoch": self._cursor.epoch, **asdict(self._memory)}
        )
        self._progress.say(f"stopped at step {self._state.num_steps:,}: {reason}. Run: {self._run.folder}")

    def _step(self, batch: Batch) -> None:
        logs = step(self._state, batch, self._rates())
        self._cursor = self._loader.next_cursor(batch.cursor)
        self._progress.advance(num_tokens=batch.num_tokens, epoch=batch.cursor.epoch, loss=logs.get("loss"))
        if self._state.num_steps % self._config.train.log_steps == 0 and logs:
            rate = {"tokens_per_s": self._progress.tokens_per_s, "epoch": float(batch.cursor.epoch)}
            self._trackers.log(self._state.num_steps, {**logs, **rate})
        ended_epoch = self._cursor.epoch > batch.cursor.epoch
        if ended_epoch and self._config.data.validation and self._cursor.epoch % self._config.train.eval_epochs == 0:
            self._validate()

    def _validate(self) -> None:
        scorer = Scorer(self._state, self._run.sequences, self._run.split, self._config)
        values = scorer.evaluate("validation", progress=False).scalars()
        self._trackers.log(self._state.num_steps, {f"validation/{name}": value for name, value in values.items()})
        value = values[self._config.train.metric]
        self._progress.say(f"step {self._state.num_steps:,}: validation {self._config.train.metric} {value:.4f}")
        if self._memory.best is None or value > self._memory.best.value:
            self._memory.best, self._memory.num_stale = Best(self._state.num_steps, value), 0
            self._save()
        else:
            self._memory.num_stale += 1

    def _reason_to_stop(self) -> str | None:
        limits, memory = self._config.train, self._memory
        if limits.steps and self._state.num_steps >= limits.steps:
            return f"{limits.steps:,} steps done"
        if limits.epochs and self._cursor.epoch >= limits.epochs:
            return f"{limits.epochs:,} epochs done"
        if limits.minutes and memory.seconds + time.monotonic() - self._since >= limits.minutes * 60:
            return f"{limits.minutes:g} minutes done"
        if limits.patience and memory.best and memory.num_stale >= limits.patience:
            return f"{limits.metric} did not rise above {memory.best.value:.4f} (step {memory.best.step:,}) in {limits.patience} validations"
        return None

    def _num_steps(self) -> int | None:
        """The number of steps if it is known: epochs with a token budget, minutes and patience leave it open."""
        limits = self._config.train
        by_epochs = (
            limits.epochs * self._loader.num_batches(0)
            if limits.epochs and not self._config.data.batch_tokens
            else None
        )
        known = [steps for steps in (limits.steps or None, by_epochs) if steps]
        return None if limits.minutes or not known else min(known)

    def _rates(self) -> Rates:
        warmup = self._config.train.warmup_steps
        factor = min(1.0, (self._state.num_steps + 1) / warmup) if warmup else 1.0
        return Rates(dense=self._config.dense.lr * factor, rows=self._config.embedding.lr * factor)

    def _restore(self) -> TrainState:
        if not checkpoint.complete_steps(self._run.checkpoints):
            return self._run.new_state()
        state, manifest = self._run.load_state()
        progress = manifest.progress
        best = Best(**progress["best"]) if progress["best"] else None
        self._memory = Memory(seconds=progress["seconds"], best=best, num_stale=progress["num_stale"])
        self._cursor = manifest.cursor
        return state

    def _save(self) -> None:
        now = time.monotonic()
        self._memory.seconds += now - self._since
        self._since = now
        checkpoint.save(
            self._run.checkpoints, self._state.num_steps, self._cursor, asdict(self._memory), contents_of(self._state)
        )
        best = self._memory.best.step if self._memory.best else None
        checkpoint.prune(self._run.checkpoints, keep_last=self._config.train.keep_last, keep=best)


class _Profiler:
    """Profiles steps 4 to 8 after the start, writes a trace and prints where the time went."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=2, active=5, repeat=1),
        )
        self._profiler.start()

    def step(self) -> None:
        self._profiler.step()

    def close(self) -> None:
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        table = self._profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
        (self._folder / "table.txt").write_text(table)
        print(table)
        if self._profiler.events():
            self._profiler.export_chrome_trace(str(self._folder / "trace.json"))
            print(f"trace for Perfetto or chrome://tracing: {self._folder / 'trace.json'}")


def _reopen(config: Config, folder: Path) -> Run:
    """The run in a folder, with the free settings of `config`; raises ConfigError if anything else differs."""
    saved = Run.open(folder)
    free = {name: getattr(config.train, name) for name in _FREE_KEYS}
    wanted = replace(saved.config, train=replace(saved.config.train, **free))
    if wanted != config:
        before, after = _flat(saved.config), _flat(config)
        changed = [
            f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
            for key in before | after
            if before.get(key) != after.get(key)
        ]
        changed = [line for line in changed if line.split(":")[0] not in {f"train.{name}" for name in _FREE_KEYS}]
        raise ConfigError(
            f"{folder} was started with another configuration; going on would mix two runs:\n"
            + "\n".join(f"  - {line}" for line in changed)
            + f"\nOnly these may change: {', '.join('train.' + name for name in _FREE_KEYS)}."
        )
    return Run(folder, wanted)


def _flat(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}" if isinstance(values, dict) else section: value
        for section, values in asdict(config).items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def _trackers(run: Run, num_steps: int) -> Tracker:
    """New files for a new run; an interrupted one continues after its last saved step."""
    trackers: list[Tracker] = [JsonlTracker.resume(run.folder / "metrics.jsonl", num_steps)]
    if run.config.train.tensorboard:
        trackers.append(TensorBoardTracker(run.folder / "tensorboard", resume_step=num_steps or None))
    return Trackers(trackers)


@contextlib.contextmanager
def _exact_arithmetic(num_threads: int) -> Iterator[None]:
    """Deterministic algorithms and a fixed number of threads, as they were before afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    debugging: Any = torch.utils.deterministic
    fill = debugging.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    debugging.fill_uninitialized_memory = False  # costs a pass over every new tensor
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        debugging.fill_uninitialized_memory = fill
        torch.set_num_threads(before[1])


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event set by the first Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals only reach the main thread
        return

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
