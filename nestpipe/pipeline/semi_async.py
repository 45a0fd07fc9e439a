"""One training step with rows one update old, start to end: sequential.py with two lines moved.

Rows of a batch leave before the update of the batch before and always miss it, and nothing else; dense weights are never old.
In a pipeline that is worth a wait: rows and gradients of neighbouring batches travel at any time (docs/concepts/pipeline.md). This is
what such a pipeline is compared with, bit by bit.

    before = None
    for number, batch in enumerate(batches):
        before = step(state, batch, rates(number), before)
    finish(state, before)
"""

from __future__ import annotations

from nestpipe.jagged import Batch
from nestpipe.pipeline.stages import (
    BatchWork,
    Rates,
    TrainState,
    collect,
    compute,
    dense_step,
    dense_sum,
    flag,
    grads,
    keys,
    merge,
    norm,
    post,
    read,
    retrieve,
    rows,
    update,
    write,
)


def step(state: TrainState, batch: Batch, rates: Rates, before: BatchWork | None) -> BatchWork:
    """Trains on one rank's share of a batch, all but the update of its rows, which the next step does, or `finish`."""
    work = read(state, batch, rates, state.num_steps)  # 1 parts; which rows each needs, who owns them
    keys(state, work)  # 2 ids out, global weight agreed
    retrieve(state, work)  # 3 who has a row is decided, rows are taken
    post(state, work)
    for micro_batch in range(state.micro_batching.micro_batches):
        rows(state, work, micro_batch)  # 4 all rows leave as they are
    if before is not None:
        finish(state, before)  # 5 then the rows of the batch before change
    for micro_batch in range(state.micro_batching.micro_batches):
        compute(state, work, micro_batch)  # 6 dense forward and backward, row gradients
        grads(state, work, micro_batch)  # 7 gradients of last use go home
        collect(state, work, micro_batch)  # 8 and are added there, in rank order
        merge(state, work, micro_batch)
    flag(state, work)  # 9 nothing is updated if any rank saw a non-finite value
    dense_sum(state, work)  # 10 dense gradients agree on every rank
    norm(state, work)
    dense_step(state, work)
    return work


def finish(state: TrainState, work: BatchWork, *, at_barrier: bool = False) -> None:
    """One step per touched row of a batch. At a barrier the rows as they were are kept for the batch after it."""
    if at_barrier:
        work.window.keep_previous()
    update(state, work)
    write(state, work)


def step_to_barrier(state: TrainState, batch: Batch, rates: Rates) -> dict[str, float]:
    """One step with a barrier after it: the batch reads what the one before left for it, and leaves its own."""
    work = step(state, batch, rates, None)
    finish(state, work, at_barrier=True)
    return work.means
