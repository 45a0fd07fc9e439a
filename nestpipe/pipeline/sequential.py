"""One training step, start to end. Read this first: every faster way to run a step must give exactly these bits."""

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
    """Trains on one rank's share of a batch; returns the loss and the model's logs, averaged over all ranks' weight."""
    work = read(state, batch, rates, state.num_steps)  # 1 parts; which rows each needs, who owns them
    keys(state, work)  # 2 ids out, global weight agreed
    retrieve(state, work)  # 3 who has a row is decided, rows are taken
    post(state, work)
    for micro_batch in range(state.micro_batching.micro_batches):
        rows(state, work, micro_batch)  # 4 rows of first use travel
        compute(state, work, micro_batch)  # 5 dense forward and backward, row gradients
        grads(state, work, micro_batch)  # 6 gradients of last use go home
        collect(state, work, micro_batch)  # 7 and are added there, in rank order,
        merge(state, work, micro_batch)  # then in the order of groups, if there are any
    flag(state, work)  # 8 nothing is updated if any rank saw a non-finite value
    dense_sum(state, work)  # 9 dense gradients agree on every rank
    norm(state, work)
    dense_step(state, work)  # 10 one dense step, and one step per touched row
    update(state, work)
    write(state, work)
    return work.means
