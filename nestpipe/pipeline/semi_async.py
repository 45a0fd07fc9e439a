"""One semi-asynchronous training step, start to end: sequential.py with rows that are stale by one step.

The rows of a batch are sent before the update of the previous batch, so they always miss exactly
that update. Dense weights are never stale. A pipeline gains from it because rows and gradients of
neighbouring batches may be in flight at any time (docs/how-to/generative-training.md). This loop is the
reference with which that pipeline must be bitwise identical.

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
    """Trains on one rank's share of a batch, except for the row update: that is left to the next step, or to `finish`."""
    work = read(state, batch, rates, state.num_steps)  # 1 micro-batches; which rows each needs, which rank owns them
    keys(state, work)  # 2 all-to-all of ids, global weight agreed
    retrieve(state, work)  # 3 ids are admitted, rows are taken
    post(state, work)
    for micro_batch in range(state.micro_batching.micro_batches):
        rows(state, work, micro_batch)  # 4 all rows are sent, before
    if before is not None:
        finish(state, before)  # 5 the rows of the previous batch are updated
    for micro_batch in range(state.micro_batching.micro_batches):
        compute(state, work, micro_batch)  # 6 dense forward and backward, row gradients
        grads(state, work, micro_batch)  # 7 gradients of last use are sent to their owners
        collect(state, work, micro_batch)  # 8 and received there, to be added in rank order
        merge(state, work, micro_batch)
    flag(state, work)  # 9 no parameter is updated if any rank saw a non-finite value
    dense_sum(state, work)  # 10 each rank sums its pieces of the dense gradients, and updates them
    norm(state, work)
    dense_step(state, work)
    return work


def finish(state: TrainState, work: BatchWork, *, at_barrier: bool = False) -> None:
    """One step per touched row of a batch. At a barrier the previous values are kept for the next batch."""
    if at_barrier:
        work.window.keep_previous()
    update(state, work)
    write(state, work)


def step_to_barrier(state: TrainState, batch: Batch, rates: Rates) -> dict[str, float]:
    """One step followed by a barrier: reads the values that the previous batch kept, and keeps its own."""
    work = step(state, batch, rates, None)
    finish(state, work, at_barrier=True)
    return work.means
