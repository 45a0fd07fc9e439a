"""The training loop: epochs, logging, validation, checkpoints, and every way to stop.

A run is a function of its configuration and data. What the clock decides is only when to stop, never what is computed:
a run that was killed and resumed ends with the bits of one that was left alone. (Settings that choose themselves are decided by
the clock too; they are written down, and repeated from there: pacing.py.)

On several ranks all of them run this loop in step. Rank 0 alone writes metrics, talks to the terminal and looks at the
clock; whatever could make a rank stop is agreed on after every step, or with the ids of a batch where batches overlap.
Checkpoints are written beside it (saver.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from nestpipe.autotune.controller import Controller
from nestpipe.autotune.group_choice import GROUPS, grouped
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.async_writer import CheckpointSaver
from nestpipe.checkpoint.origin import InitFrom
from nestpipe.checkpoint.remote_copy import Mirror
from nestpipe.checkpoint.state import checkpoint_files
from nestpipe.checkpoint.warm_start import WarmStartReport
from nestpipe.config import Config
from nestpipe.data.loader import Loader
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import World
from nestpipe.eval.predictor import make_predictor
from nestpipe.jagged import Batch, Cursor
from nestpipe.models.build_model import inputs_of
from nestpipe.models.config import EncDecConfig, FuXiConfig, HSTUConfig, RankingConfig
from nestpipe.models.contract import Selecting
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed
from nestpipe.pipeline.semi_async import step_to_barrier
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import BatchWork, Clip, Rates, TrainState
from nestpipe.profiling.torch_profiler import profiled
from nestpipe.training.environment import environment
from nestpipe.training.mfu import Utilisation
from nestpipe.training.open_run import agree, check_shared, open_run
from nestpipe.training.process import exact_arithmetic, keep_freed_memory, lock_run, peak_memory_bytes, stop_signals
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state, new_state, warm_state
from nestpipe.training.trackers import JsonlTracker, Progress, TensorBoardTracker, Tracker, Trackers

INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Best:
    """The best validation so far."""

    step: int
    value: float


@dataclass(slots=True)
class LoopProgress:
    """What the loop remembers over interruptions; saved with every checkpoint."""

    seconds: float = 0.0
    best: Best | None = None
    num_stale: int = 0  # validations since the best one


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run and why it stopped."""

    run: Run
    stopped: str


def train(
    config: Config,
    folder: str | Path,
    *,
    resume: bool = False,
    init_from: InitFrom | None = None,
    profile: bool = False,
    quiet: bool = False,
) -> Run:
    """Trains a run to its end and returns it; with `resume` goes on from the latest checkpoint, if there is one.

    A new run starts from the weights of another with `init_from` (see warm_start.py).
    """
    return train_to_end(config, folder, resume=resume, init_from=init_from, profile=profile, quiet=quiet).run


def train_to_end(
    config: Config,
    folder: str | Path,
    *,
    resume: bool = False,
    init_from: InitFrom | None = None,
    profile: bool = False,
    quiet: bool = False,
    world: World | None = None,
    recipe: str | None = None,
) -> Outcome:
    """`train` on one of the ranks of a world, by default torchrun's, with the reason why it stopped.

    The name of the recipe is kept with the run, for its readers.
    """
    config.validate()
    keep_freed_memory()
    config = replace(config, data=replace(config.data, path=str(Path(config.data.path).resolve())))
    if isinstance(config.model, EncDecConfig):
        config = replace(config, model=replace(config.model, ids=str(Path(config.model.ids).resolve())))
    with contextlib.closing(world or World.from_environment(stacks=Path(folder))) as open_world:
        channels = Channels.of(open_world)
        run = open_run(config, Path(folder), resume, init_from, channels)
        agree(run, channels.control)
        with (
            exact_arithmetic(run.config.train.num_threads),
            _Loop(run, channels, quiet=quiet or open_world.rank > 0, recipe=recipe) as loop,
        ):
            return Outcome(run, loop.run_to_end(profile=profile))


class _Loop:
    def __init__(self, run: Run, channels: Channels, *, quiet: bool, recipe: str | None):
        """Everything that can refuse the configuration or the data does so before the folder is written."""
        self._leads = channels.control.world.rank == 0
        self._loader = Loader(
            run.sequences,
            run.split,
            run.config.data,
            seed=run.config.seed,
            rank=channels.control.world.rank,
            world_size=channels.control.world.size,
            inputs=inputs_of(run.config, run.sequences),
        )
        self._groups = grouped(run, channels, lambda: self._loader.batch(Cursor(0, 0)))
        run, channels = self._groups.run, self._groups.channels
        self._run, self._config, self._channels = run, run.config, channels
        train = run.config.train
        self._decay_steps = train.decay_steps or train.decay_epochs * self._loader.num_batches(0)
        self._memory = LoopProgress()
        self._cursor = Cursor(0, 0)
        self._saved_settings: list[dict[str, Any]] = []
        self._warm_start: WarmStartReport | None = None
        self._exit = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            self._state = self._restore()
            all_ranks_or_none(
                channels.control, "folder taken", lambda: self._take_folder(undo, recipe) if self._leads else None
            )
            check_shared(run.folder, channels.control)
            if self._warm_start and not quiet:
                Console(stderr=True, highlight=False, markup=False).print(self._warm_start)
            self._trackers = _trackers(run, self._state.num_steps) if self._leads else Trackers([])
            undo.callback(self._trackers.close)
            self._progress = Progress(
                self._num_steps(), run.config.train.minutes * 60, done=self._state.num_steps, quiet=quiet
            )
            undo.callback(self._progress.close)
            limits = run.config.train
            self._saver = CheckpointSaver(
                run.checkpoints,
                channels.saves,
                keep_last=limits.keep_last,
                background=limits.async_save and run.config.embedding.tier == "memory",
                mirror=Mirror(limits.mirror) if limits.mirror else None,
            )
            undo.callback(self._close_saver)
            self._exit = undo.pop_all()
        self._controller = Controller(run, self._state, channels)
        self._utilisation = Utilisation(run.config.model) if self._leads else None
        self._since = time.monotonic()
        self._say(self._groups.why)
        if run.sequences.times is None and isinstance(run.config.model, HSTUConfig | FuXiConfig | RankingConfig):
            self._progress.say(f"{run.sequences.path} is an order-only log: the time biases are off.")

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _close_saver(self) -> None:
        # Only a run that has failed finds something here, and that failure is what ends it.
        if lost := self._saver.abort(self._channels.control.deadline_s):
            self._progress.say(f"the checkpoint under way was not saved: {lost}")

    def _take_folder(self, undo: contextlib.ExitStack, recipe: str | None) -> None:
        undo.enter_context(lock_run(self._run.folder))
        checkpoint_folders.remove_unfinished(self._run.checkpoints)
        num_ranks = self._channels.control.world.size
        facts = {"recipe": recipe, "num_ranks": num_ranks, GROUPS: self._groups.chosen, "environment": environment()}
        self._run.write(statistics=self._loader.statistics, facts=facts)
        if self._config.train.mirror:
            Mirror(self._config.train.mirror).push_run(self._run.folder)

    def run_to_end(self, *, profile: bool) -> str:
        """Steps until a limit is reached or a signal asks to stop, saves, and returns the reason."""
        reason = self._reason_to_stop(asked=False)
        with (
            stop_signals() as stop,
            contextlib.ExitStack() as reading,
            profiled(self._run.folder / "profile", enabled=profile and self._leads and reason is None) as profile_step,
        ):
            if self._warm_start:
                self._save()  # from here on the run does not need its origin any more
            if reason is None:
                self._say(self._controller.start(self._saved_settings, self._first_batches))
            early = True
            while reason is None:
                if early:  # what was read beyond the barrier is read again
                    reading.close()
                    batches = reading.enter_context(_closing(self._loader.iterate(self._cursor)))
                early = self._run_to_barrier(batches, stop.is_set, profile_step)
                reason = self._reason_to_stop(asked=stop.is_set())
                if reason is None and self._state.num_steps % self._config.train.save_steps == 0:
                    self._save()
            self._save()
            self._controller.save_trace()
            self._saver.wait()
            ranks = self._channels.control.all_gather_ints(
                [self._progress.num_tokens, peak_memory_bytes()], name="what ranks did"
            )
            summary = {"steps": self._state.num_steps, "epoch": self._cursor.epoch, **asdict(self._memory)}
            did = [{"num_tokens": tokens, "memory_bytes": memory} for tokens, memory in ranks]
            self._trackers.summary({"stopped": reason, **summary, "ranks": did})
        self._progress.say(f"stopped at step {self._state.num_steps:,}: {reason}. Run: {self._run.folder}")
        return reason

    def _run_to_barrier(
        self, batches: Iterator[Batch], asked: Callable[[], bool], profile_step: Callable[[], None]
    ) -> bool:
        """Trains to the next batch after which the state may be needed: every batch, or the next save, validation or end.

        Returns whether a rank asked to stop before.
        """
        start = self._cursor
        if (every := self._refresh_steps) and self._state.num_steps % every == 0:
            cast(Selecting, self._state.model).refresh(self._state.num_steps)
        self._controller.begin()
        early = False
        if self._controller.runner is None:
            batch = next(batches)
            run = step_to_barrier if self._config.pipeline.is_stale(self._state.num_steps) else step
            self._after_step(batch, run(self._state, batch, self._rates(self._state.num_steps)))
            profile_step()
        else:

            def on_step(work: BatchWork) -> None:
                self._after_step(work.batch, work.means)
                self._controller.record(work)
                profile_step()

            num_batches = self._steps_to_barrier()
            num_done = self._controller.runner.run(
                BatchFeed(
                    batches=batches,
                    rates=self._rates,
                    num_batches=num_batches,
                    stop_requested=lambda: (
                        asked() or self._late() or self._saver.failed or self._controller.requests_measurement()
                    ),
                    on_step=on_step,
                )
            )
            early = num_done < num_batches
        self._say(self._controller.end(early=early))
        if self._cursor.epoch > start.epoch and self._validates_after(self._cursor.epoch - 1):
            self._validate()
        return early

    def _steps_to_barrier(self) -> int:
        """How many batches from now on can overlap: up to a save, a validation or a limit, none of which comes earlier."""
        limits, done = self._config.train, self._state.num_steps
        most = limits.save_steps - done % limits.save_steps
        if limits.steps:
            most = min(most, limits.steps - done)
        if change := self._controller.steps_to_change():
            most = min(most, change)
        if every := self._refresh_steps:
            most = min(most, every - done % every)
        epoch, to_end = self._cursor.epoch, self._loader.num_batches(self._cursor.epoch) - self._cursor.number
        while to_end < most and not (self._validates_after(epoch) or epoch + 1 == limits.epochs):
            epoch += 1
            to_end += self._loader.num_batches(epoch)
        return min(most, to_end)

    @property
    def _refresh_steps(self) -> int:
        """Steps between two snapshots that the model chooses events by; 0 if it does not."""
        return self._state.model.refresh_steps if isinstance(self._state.model, Selecting) else 0

    def _validates_after(self, epoch: int) -> bool:
        return self._config.data.validation and (epoch + 1) % self._config.train.eval_epochs == 0

    def _first_batches(self) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """Batches for a profile."""
        return _closing(self._loader.iterate(Cursor(0, 0)))

    def _say(self, text: str) -> None:
        if text:
            self._progress.say(text)

    def _after_step(self, batch: Batch, logs: dict[str, float]) -> None:
        self._cursor = self._loader.next_cursor(batch.cursor)
        self._progress.advance(
            num_tokens=batch.num_tokens, epoch=batch.cursor.epoch, loss=logs.get("loss"), spent_s=self._seconds()
        )
        if self._utilisation is None:
            return
        self._utilisation.add(batch.items.lengths())
        if self._state.num_steps % self._config.train.log_steps == 0 and logs:
            rates = self._rates(self._state.num_steps - 1)
            used = {
                "tokens_per_s": self._progress.tokens_per_s,
                "epoch": float(batch.cursor.epoch),
                "seconds": self._seconds(),
                "memory_bytes": peak_memory_bytes(),
                "lr/dense": rates.dense,
                "lr/rows": rates.rows,
            }
            self._trackers.log(self._state.num_steps, {**logs, **used, **self._utilisation.take()})

    def _validate(self) -> None:
        # Only the means are used here, so the intervals are not worth their usual price.
        config = replace(self._config, eval=replace(self._config.eval, num_bootstrap=100))
        scorer = make_predictor(self._state.model, self._state.embedding, self._run.sequences, self._run.split, config)
        values = scorer.evaluate("validation", progress=False).scalars()
        self._trackers.log(self._state.num_steps, {f"validation/{name}": value for name, value in values.items()})
        value = values[self._config.train.metric]
        self._progress.say(f"step {self._state.num_steps:,}: validation {self._config.train.metric} {value:.4f}")
        if self._memory.best is None or value > self._memory.best.value:
            self._memory.best, self._memory.num_stale = Best(self._state.num_steps, value), 0
            self._save()
        else:
            self._memory.num_stale += 1

    def _reason_to_stop(self, *, asked: bool) -> str | None:
        """The same answer on every rank: a signal may have reached any of them, the clock is that of rank 0."""
        limits, memory = self._config.train, self._memory
        flags = self._channels.control.all_gather_ints([asked, self._late(), self._saver.failed], name="stop")
        if any(failed for *_, failed in flags):
            self._saver.wait()  # raises, on every rank
        if any(signalled for signalled, *_ in flags):
            return INTERRUPTED
        if limits.steps and self._state.num_steps >= limits.steps:
            return f"{limits.steps:,} steps done"
        if limits.epochs and self._cursor.epoch >= limits.epochs:
            return f"{limits.epochs:,} epochs done"
        if flags[0][1]:
            return f"{limits.minutes:g} minutes done"
        if limits.patience and memory.best and memory.num_stale >= limits.patience:
            best = f"{memory.best.value:.4f} (step {memory.best.step:,})"
            return f"{limits.metric} did not rise above {best} in {limits.patience} validations"
        return None

    def _late(self) -> bool:
        """By the clock of this rank; that of rank 0 decides."""
        minutes = self._config.train.minutes
        return self._leads and bool(minutes) and self._seconds() >= minutes * 60

    def _seconds(self) -> float:
        """Training time so far, over all interruptions."""
        return self._memory.seconds + time.monotonic() - self._since

    def _num_steps(self) -> int | None:
        """The number of steps if it is known: with a token budget, epochs differ in length."""
        limits = self._config.train
        by_epochs = 0 if self._config.data.batch_tokens else limits.epochs * self._loader.num_batches(0)
        return min((steps for steps in (limits.steps, by_epochs) if steps), default=None)

    def _rates(self, number: int) -> Rates:
        """Of a batch, by its number from the start of training."""
        warmup = self._config.train.warmup_steps
        factor = min(1.0, (number + 1) / warmup) if warmup else 1.0
        if decay := self._decay_steps:
            factor *= max(0.01, 1.0 - (number + 1) / decay)
        clip = Clip(self._config.train.clip_norm, rows=self._config.train.clip == "all")
        return Rates(dense=self._config.dense.lr * factor, rows=self._config.embedding.lr * factor, clip=clip)

    def _restore(self) -> TrainState:
        control, steps = self._channels.control, checkpoint_folders.complete_steps(self._run.checkpoints)
        seen = control.all_gather_ints([steps[-1] if steps else -1], name="latest checkpoint")
        latest = seen[0][0]  # as rank 0 sees it: on a network file system others may see less
        if latest < 0 and self._run.origin:
            state, self._warm_start = all_ranks_or_none(
                self._channels.saves, "warm state", lambda: warm_state(self._run, self._channels)
            )
            return state
        if latest < 0:
            return all_ranks_or_none(control, "new state", lambda: new_state(self._run, self._channels))
        state, manifest = all_ranks_or_none(
            self._channels.saves, "restored", lambda: load_state(self._run, latest, self._channels)
        )
        progress = manifest.progress
        best = Best(**progress["best"]) if progress["best"] else None
        self._memory = LoopProgress(seconds=progress["seconds"], best=best, num_stale=progress["num_stale"])
        self._cursor = manifest.cursor
        self._saved_settings = progress.get("pace", [])
        return state

    def _save(self) -> None:
        self._memory.seconds, self._since = self._seconds(), time.monotonic()
        facts = {"settings": self._run.settings, "data": self._run.sequences.digest, "pace": self._controller.history}
        self._saver.save(
            self._state.num_steps,
            self._cursor,
            {**asdict(self._memory), **facts},
            checkpoint_files(self._state),
            keep=self._memory.best.step if self._memory.best else None,
        )


@contextlib.contextmanager
def _closing(batches: Generator[Batch]) -> Iterator[Generator[Batch]]:
    try:
        yield batches
    finally:
        with contextlib.suppress(ValueError):  # after a failure a lane may still be reading
            batches.close()


def _trackers(run: Run, num_steps: int) -> Tracker:
    """New files for a new run; an interrupted one continues after its last saved step."""
    trackers: list[Tracker] = [JsonlTracker.resume(run.folder / "metrics.jsonl", num_steps)]
    if run.config.train.tensorboard:
        trackers.append(TensorBoardTracker(run.folder / "tensorboard", resume_step=num_steps or None))
    return Trackers(trackers)
