"""Trains on a few batches without a run folder: for scripts, tests and `nestpipe check-model`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from nestpipe.jagged import Batch
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Mode, Schedule
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import BatchWork, Rates, TrainState


def train_batches(
    state: TrainState, batches: Iterable[Batch], *, num_batches: int, lr: float = 1e-3, mode: Mode | None = None
) -> list[dict[str, float]]:
    """Trains on the first `num_batches`; returns loss and logs of each. Collective.

    Without a `mode` stages run one after the other (sequential.py); all modes are bitwise identical.
    """
    rates, means = Rates(dense=lr, rows=lr), list[dict[str, float]]()
    if mode is None:
        return [step(state, batch, rates) for batch in islice(batches, num_batches)]

    def record(work: BatchWork) -> None:
        means.append(work.means)

    runner = Runner(state, Schedule.of(mode, state.micro_batching.micro_batches))
    runner.run(BatchFeed(batches=iter(batches), rates=lambda number: rates, num_batches=num_batches, on_step=record))
    return means
