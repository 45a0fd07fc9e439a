"""One training step, start to end. Read this first: every faster way to run a step must be bitwise identical to it."""

from __future__ import annotations

from nestpipe.jagged import Batch
from nestpipe.pipeline.stages import (
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


def step(state: TrainState, batch: Batch, rates: Rates) -> dict[str, float]:
    """Trains on one rank's share of a batch; returns the loss and the model's logs, averaged over the global weight."""
    work = read(state, batch, rates, state.num_steps)  # 1 micro-batches; which rows each needs, which rank owns them
    keys(state, work)  # 2 all-to-all of ids, global weight agreed
    retrieve(state, work)  # 3 ids are admitted, rows are taken
    post(state, work)
    for micro_batch in range(state.micro_batching.micro_batches):
        rows(state, work, micro_batch)  # 4 rows of first use are sent
        compute(state, work, micro_batch)  # 5 dense forward and backward, row gradients
        grads(state, work, micro_batch)  # 6 gradients of last use are sent to their owners
        collect(state, work, micro_batch)  # 7 and received there, to be added in rank order,
        merge(state, work, micro_batch)  # then in group order, with replica groups
    flag(state, work)  # 8 no parameter is updated if any rank saw a non-finite value
    dense_sum(state, work)  # 9 each rank sums its pieces of the dense gradients,
    norm(state, work)
    dense_step(state, work)  # 10 updates these, and gathers the others; one step per touched row
    update(state, work)
    write(state, work)
    return work.means
