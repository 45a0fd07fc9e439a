"""The training loop: steps, logging, validation, checkpoints, stopping.

A run is a function of its configuration and data. The clock decides only when to stop, never what is computed: a run that is
killed and resumed is bitwise identical to an undisturbed one. (Replica groups may depend on measured times; they are recorded, and
a resumed run repeats them: autotune/run_settings.py.)

All ranks run this loop in lockstep. Only rank 0 writes metrics, prints and reads the clock. Ranks agree on whether to stop after
every step, or, where batches overlap, with the ids of a batch. Checkpoints are written by a background thread
(checkpoint/async_writer.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from nestpipe.autotune.run_settings import Unsettled, settle
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.async_writer import CheckpointSaver
from nestpipe.checkpoint.manifest import Link
from nestpipe.checkpoint.origin import InitFrom
from nestpipe.checkpoint.state import StateSource
from nestpipe.checkpoint.warm_start import WarmStartReport
from nestpipe.config import Config
from nestpipe.data.loader import closing_batches
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import fewer_buckets
from nestpipe.embedding.device_budget import DeviceBuffers
from nestpipe.eval.predictor import make_predictor
from nestpipe.generative.config import AlignedConfig
from nestpipe.jagged import Batch, Cursor
from nestpipe.models.config import FuXiConfig, HSTUConfig, RankingConfig
from nestpipe.models.content_retrieval import ContentRetrieval
from nestpipe.models.contract import Selecting
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed
from nestpipe.pipeline.semi_async import step_to_barrier
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import BatchWork, TrainState
from nestpipe.profiling.torch_profiler import profiled
from nestpipe.training.device import check_precision, exact_device, resolve_device
from nestpipe.training.distributed_eval import ChannelRanks
from nestpipe.training.environment import environment
from nestpipe.training.mfu import Utilisation
from nestpipe.training.open_run import agree, check_shared, open_run, share_run, with_absolute_paths, with_log_sizes
from nestpipe.training.process import exact_arithmetic, keep_freed_memory, lock_run, peak_memory_bytes, stop_signals
from nestpipe.training.rollouts import training_loader
from nestpipe.training.run_folder import Run
from nestpipe.training.run_limits import Best, LoopProgress, RunLimits, validation_of
from nestpipe.training.run_state import load_state, new_state, warm_state
from nestpipe.training.start_line import EarlierStart, cpu_model, gather_hosts, start_line
from nestpipe.training.step_runner import StepRunner
from nestpipe.training.trackers import Progress, Trackers, open_trackers

INTERRUPTED = "interrupted"


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
    """Trains a run to its end and returns it; with `resume`, continues from the latest checkpoint if there is one.

    `init_from` initialises a new run with the weights of another (checkpoint/warm_start.py).
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
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """`train` on one rank of a world, by default torchrun's; also returns why the run stopped.

    `recipe` is recorded with the run; `clock` returns seconds.
    """
    config.validate()
    config = Config.from_json(config.to_json())  # as a resumed run reads it: 1 in a float field is 1.0
    keep_freed_memory()
    config = with_log_sizes(with_absolute_paths(config))
    device = world.device if world else resolve_device(config.train.device)
    check_precision(config.train.precision, device, config.model)
    with (
        exact_device(device),
        contextlib.closing(world or World.from_environment(device=device, stacks=Path(folder))) as open_world,
    ):
        channels = Channels.of(open_world)
        run = open_run(config, Path(folder), resume, init_from, channels)
        agree(run, channels.control)
        with (
            exact_arithmetic(run.config.train.num_threads),
            _Loop(run, channels, quiet=quiet or open_world.rank > 0, recipe=recipe, clock=clock) as loop,
        ):
            return Outcome(run, loop.run_to_end(profile=profile))


class _Loop:
    def __init__(self, run: Run, channels: Channels, *, quiet: bool, recipe: str | None, clock: Callable[[], float]):
        """Checks that can reject the configuration or the data run before the folder is written."""
        self._leads = channels.control.world.rank == 0
        asked_data, self._loader = run.config.data, training_loader(run, channels, quiet=quiet)
        hosts, num_steps = gather_hosts(channels.control), RunLimits(run.config, self._loader).num_steps()
        self._settled = settle(Unsettled(run, channels, hosts, self._loader, self._first_batches, num_steps))
        run, channels = self._settled.run, self._settled.channels
        if run.config.data != asked_data:  # balanced
            self._loader = training_loader(run, channels, quiet=True)
        self._run, self._config, self._channels = run, run.config, channels
        self._limits = RunLimits(run.config, self._loader)
        self._memory = LoopProgress()
        self._cursor = Cursor(0, 0)
        self._restored = ""  # name of the checkpoint
        self._warm_start: WarmStartReport | None = None
        self._chain: tuple[Link, ...] = ()
        self._exit = contextlib.ExitStack()
        earlier = EarlierStart.of(run) if self._leads else None
        with contextlib.ExitStack() as undo:
            self._state = self._restore()
            if run.config.train.max_deltas:
                for table in self._state.embedding.tables.values():
                    table.track_changes()
            all_ranks_or_none(
                channels.control,
                "folder taken",
                lambda: self._take_folder(undo, recipe, hosts) if self._leads else None,
            )
            (share_run if self._config.train.checkpoints else check_shared)(run, channels.control)
            if self._warm_start and not quiet and not isinstance(run.config.model, AlignedConfig):
                Console(stderr=True, highlight=False, markup=False).print(self._warm_start)
            self._trackers = (
                open_trackers(run.folder, self._state.num_steps, tensorboard=run.config.train.tensorboard)
                if self._leads
                else Trackers([])
            )
            undo.callback(self._trackers.close)
            train, done = run.config.train, self._state.num_steps
            self._progress = Progress(self._limits.num_steps(), train.minutes * 60, done=done, quiet=quiet)
            undo.callback(self._progress.close)
            self._saver = CheckpointSaver(
                run.checkpoints,
                channels.saves,
                keep_last=train.keep_last,
                background=train.async_save
                and all(one.buffer is None for one in self._state.embedding.tables.values()),
                max_deltas=train.max_deltas,
                chain=self._chain,
            )
            undo.callback(self._close_saver)
            self._exit = undo.pop_all()
        self._steps = StepRunner.of(run, self._state)
        self._buffers = DeviceBuffers(self._state.embedding.tables, self._state.num_steps)
        self._utilisation = Utilisation(run.config.model) if self._leads else None
        self._clock = clock
        self._since = clock()
        if self._leads:
            self._say(start_line(run, earlier, hosts, step=self._state.num_steps, checkpoint=self._restored))
        for text in (self._settled.why, fewer_buckets(run.config.embedding), self._buffers.describe()):
            self._say(text)
        if run.sequences.times is None and isinstance(run.config.model, HSTUConfig | FuXiConfig | RankingConfig):
            self._progress.say(f"{run.sequences.path} is an order-only log: the time biases are off.")

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _close_saver(self) -> None:
        # A save is in flight here only if the run has failed, and that failure is what is reported.
        if lost := self._saver.abort(self._channels.control.deadline_s):
            self._progress.say(f"the checkpoint in flight was not saved: {lost}")

    def _take_folder(self, undo: contextlib.ExitStack, recipe: str | None, hosts: list[str]) -> None:
        undo.enter_context(lock_run(self._run.folder))
        checkpoint_folders.remove_unfinished(self._run.checkpoints)
        facts: dict[str, Any] = {"recipe": recipe, "num_ranks": len(hosts), "hosts": sorted(set(hosts))}
        facts |= {"cpu_model": cpu_model(), "environment": environment(), **self._settled.chosen}
        if isinstance(self._state.model, ContentRetrieval):
            fitted = self._state.model.items.content.statistics
            facts["item_statistics"] = {name: one.to_json() for name, one in fitted.items()}
        self._run.write(statistics=self._loader.statistics, facts=facts)

    def run_to_end(self, *, profile: bool) -> str:
        """Trains until a limit or a stop signal, saves, and returns the reason."""
        reason = self._reason_to_stop(requested=False)
        with (
            stop_signals() as stop,
            contextlib.ExitStack() as reading,
            profiled(self._run.folder / "profile", enabled=profile and self._leads and reason is None) as profile_step,
        ):
            if self._warm_start:
                self._save()  # from here on the run does not need its origin
            early = True
            while reason is None:
                if early:  # batches read ahead of the barrier are read again
                    reading.close()
                    batches = reading.enter_context(closing_batches(self._loader.iterate(self._cursor)))
                early = self._run_to_barrier(batches, stop.is_set, profile_step)
                reason = self._reason_to_stop(requested=stop.is_set())
                if reason is None and self._limits.saves_after(self._state.num_steps):
                    self._save()
            self._save()
            if self._steps:
                self._steps.save_trace()
            self._saver.wait()
            ranks = self._channels.control.all_gather_ints(
                [self._progress.num_tokens, peak_memory_bytes()], name="rank summaries"
            )
            summary = {"steps": self._state.num_steps, "epoch": self._cursor.epoch, **asdict(self._memory)}
            of_ranks = [{"num_tokens": tokens, "memory_bytes": memory} for tokens, memory in ranks]
            self._trackers.summary({"stopped": reason, **summary, "ranks": of_ranks})
        self._progress.say(f"stopped at step {self._state.num_steps:,}: {reason}. Run: {self._run.folder}")
        return reason

    def _run_to_barrier(
        self, batches: Iterator[Batch], stop_requested: Callable[[], bool], profile_step: Callable[[], None]
    ) -> bool:
        """Trains up to the next barrier, where the state is needed: after every batch, or at a save, a validation or the end.

        Returns whether a rank requested to stop earlier.
        """
        start = self._cursor
        self._say(self._buffers.at_barrier(self._state.num_steps))
        if (every := self._refresh_steps) and self._state.num_steps % every == 0:
            cast(Selecting, self._state.model).refresh(self._state.num_steps)
        early = False
        if self._steps is None:
            batch = next(batches)
            run = step_to_barrier if self._config.pipeline.is_stale(self._state.num_steps) else step
            self._after_step(batch, run(self._state, batch, self._limits.rates(self._state.num_steps)))
            profile_step()
        else:

            def on_step(work: BatchWork) -> None:
                self._after_step(work.batch, work.means)
                profile_step()

            num_batches = self._steps_to_barrier()
            num_done = self._steps.begin().run(
                BatchFeed(
                    batches=batches,
                    rates=self._limits.rates,
                    num_batches=num_batches,
                    stop_requested=lambda: (
                        stop_requested() or self._is_out_of_time() or self._saver.failed or self._saver.is_tight
                    ),
                    on_step=on_step,
                )
            )
            early = num_done < num_batches
        if self._cursor.epoch > start.epoch and self._limits.validates_after(self._cursor.epoch - 1):
            self._validate()
        return early

    def _steps_to_barrier(self) -> int:
        """How many batches may overlap from now on."""
        done, every = self._state.num_steps, self._refresh_steps
        others = [self._config.pipeline.steps_to_switch(done), every - done % every if every else 0]
        others.append(self._buffers.steps_to_barrier(done))
        return self._limits.steps_to_barrier(done, self._cursor, [steps for steps in others if steps])

    @property
    def _refresh_steps(self) -> int:
        """Steps between two refreshes of a model that selects events; 0 for other models."""
        return self._state.model.refresh_steps if isinstance(self._state.model, Selecting) else 0

    def _first_batches(self) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """Batches for a measurement before the first step."""
        return closing_batches(self._loader.iterate(Cursor(0, 0)))

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
        if self._limits.logs_after(self._state.num_steps) and logs:
            rates = self._limits.rates(self._state.num_steps - 1)
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
        # Only the means are used, so few bootstrap samples suffice.
        config = replace(self._config, eval=replace(self._config.eval, num_bootstrap=100))
        model, rows = self._state.dense.model_on_host(), self._state.embedding
        scorer = make_predictor(model, rows, self._run.instructed, self._run.split, config)
        report = scorer.evaluate("validation", ranks=ChannelRanks(self._channels.control), progress=False)
        values = report.scalars()
        self._trackers.log(self._state.num_steps, {f"validation/{name}": value for name, value in values.items()})
        value = values[self._config.train.metric]
        self._progress.say(f"step {self._state.num_steps:,}: validation {self._config.train.metric} {value:.4f}")
        if self._memory.best is None or value > self._memory.best.value:
            self._memory.best, self._memory.num_stale = Best(self._state.num_steps, value), 0
            self._save()
        else:
            self._memory.num_stale += 1

    def _reason_to_stop(self, *, requested: bool) -> str | None:
        """Agreed by all ranks: a signal may have reached any of them; the clock is that of rank 0."""
        flags = self._channels.control.all_gather_ints(
            [requested, self._is_out_of_time(), self._saver.failed or self._saver.is_tight], name="stop"
        )
        if any(waits for *_, waits in flags):
            self._saver.wait()  # raises, on every rank, if the save has failed
        if any(signalled for signalled, *_ in flags):
            return INTERRUPTED
        return self._limits.reason_to_stop(
            self._state.num_steps, self._cursor, self._memory, out_of_time=bool(flags[0][1])
        )

    def _is_out_of_time(self) -> bool:
        return self._leads and self._limits.is_out_of_time(self._seconds())

    def _seconds(self) -> float:
        """Training time over all interruptions."""
        return self._memory.seconds + self._clock() - self._since

    def _restore(self) -> TrainState:
        control = self._channels.control
        # Rank 0 looks: on a network file system other ranks may not see the latest yet.
        steps = all_ranks_or_none(
            self._channels.saves,
            "checkpoints listed",
            lambda: checkpoint_folders.complete_steps(self._run.checkpoints) if self._leads else [],
        )
        ((latest,), *_) = control.all_gather_ints([steps[-1] if steps else -1], name="latest checkpoint")
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
        self._memory = LoopProgress.resumed(progress, validation_of(self._config))
        self._cursor = manifest.cursor
        self._restored = checkpoint_folders.checkpoint_folder(self._run.checkpoints, latest).name
        self._chain = manifest.links
        return state

    def _save(self) -> None:
        self._memory.seconds, self._since = self._seconds(), self._clock()
        facts = {
            "settings": self._run.settings,
            "data": self._run.sequences.digest,
            "validated": validation_of(self._config),
        }
        self._saver.save(
            self._state.num_steps,
            self._cursor,
            {**asdict(self._memory), **facts},
            StateSource(self._state),
            keep=self._memory.best.step if self._memory.best else None,
        )
