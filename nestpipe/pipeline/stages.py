"""The stages of a batch: plain functions of (state, work) or (state, work, micro_batch).

    read ─ keys ─ retrieve ─ post ─┬─ rows ─ compute ─ grads ─ collect ─ merge ─┬─ flag ─┬─ dense sum ─ norm ─ dense step
                                   └──────────── for each micro-batch ──────────┘        └─ update ─ write

`sequential.py` calls them one after the other. A schedule (schedule.py) says which must wait for which, and a runner
(runner.py) runs them on streams. A stage does not know where it runs or what runs concurrently.

- `merge` is for replica groups (embedding/replica_groups.py) and does nothing without them.
- With chunks, `rows` of the first micro-batch, `grads`, `collect` and `merge` of the last one, and `update` handle the first
  chunk, and `chunk …` the others. `arrive` waits for the rows of the first micro-batch, if a chunk holds shared rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from nestpipe.distributed.process_group import Channel, Handle
from nestpipe.embedding.config import Chunking
from nestpipe.embedding.routing import Plan, route
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.stale_rows import StaleRows
from nestpipe.embedding.window import Window, larger
from nestpipe.errors import ConfigError, TrainError
from nestpipe.jagged import Batch
from nestpipe.models.contract import Model, Output, Selecting
from nestpipe.ops.device_memory import download, upload
from nestpipe.ops.precision import check_sum, mixed_precision
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseBucket, DenseParams
from nestpipe.pipeline.micro_batch import cut_batch
from nestpipe.rng import Rng

_MAX_LOGS = 30  # capacity of the message with a batch's flags and logs
_FLAGS = 2
_STALE, _HELD = "rows without the last update", "rows of the batch"  # sent with the logs


@dataclass(frozen=True, slots=True)
class Clip:
    """Gradient clipping to a norm, 0 for never: of the dense gradients, or of dense and row gradients together."""

    norm: float = 0.0
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates and clipping of one step, captured with its batch."""

    dense: float
    rows: float
    clip: Clip = Clip()


@dataclass(slots=True, eq=False)
class TrainState:
    """Everything that a step reads and changes."""

    model: Model
    embedding: ShardedTables
    dense: DenseParams
    control: Channel  # for agreements of all ranks
    seed: int
    flags: Channel | None = None  # for flags and logs, if the channel of all ranks for rows is on a device
    micro_batching: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    skip_nonfinite: bool = False  # skip a batch with a non-finite value instead of raising
    precision: torch.dtype = torch.float32  # of matrix products; weights, rows and sums are fp32
    num_steps: int = 0  # steps done

    @property
    def num_ranks(self) -> int:
        return self.embedding.all_ranks.world.size

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All channels that stages use."""
        return *self.embedding.channels, self.dense.channel, *([] if self.flags is None else [self.flags])

    @property
    def device(self) -> torch.device:
        """Where rows and dense weights are used."""
        return self.dense.weights.device

    @property
    def flag_channel(self) -> Channel:
        """The channel of all ranks, on the host, of the thread that sends rows."""
        return self.flags or self.embedding.all_ranks


@dataclass(slots=True, eq=False)
class BatchWork:
    """One batch in flight: what its stages share."""

    number: int  # of the batch, from the start of training
    batch: Batch  # as it was read
    rates: Rates
    rng: Rng
    micro_batches: list[Batch]  # of the samples that the model selected
    plan: Plan
    window: Window
    sums: dict[str, float | Tensor] = field(default_factory=dict)  # this rank's loss and logs; fp64 on a device
    means: dict[str, float] = field(default_factory=dict)  # over all ranks, after `flag`; empty without weight
    previous: Window | None = None  # window of the previous batch, to find shared rows
    next: Window | None = None  # window of the next batch, if it has been read
    largest_dense: float | Tensor = 0.0
    skipped: bool = False  # no parameter is updated
    factor: float = 1.0  # scale of gradients, from clipping
    mark_bucket: Callable[[int], None] | None = None  # set if dense sums overlap with the backward: called when ready
    await_bucket: Callable[[int], None] = lambda bucket: None
    _flags: Handle | None = None
    _flag_buffers: list[Tensor] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"step {self.number + 1}"


def read(
    state: TrainState, batch: Batch, rates: Rates, number: int, chunks: Chunking = 1, stop: bool = False
) -> BatchWork:
    """Divides the batch into micro-batches and routes their lookups: which rows, which owners."""
    check_coupling(state, batch)
    state.embedding.record_rate(number, rates.rows)
    rng = Rng(state.seed, number)
    chosen = state.model.select(batch, rng) if isinstance(state.model, Selecting) else batch
    micro_batches = cut_batch(chosen, state.micro_batching)
    plan = route(
        [state.model.lookups(micro_batch, rng) for micro_batch in micro_batches],
        list(state.embedding.tables),
        state.embedding.owners,
    )
    window = Window(state.embedding, plan, number, state.model.weight(chosen), stop, chunks)
    return BatchWork(number, batch, rates, rng, micro_batches, plan, window)


def check_coupling(state: TrainState, batch: Batch) -> None:
    """Raises ConfigError if the loss couples samples that micro-batches or ranks would separate."""
    coupling, name = state.model.coupling, type(state.model).__name__
    if coupling == "batch" and (state.micro_batching.micro_batches > 1 or state.num_ranks > 1):
        raise ConfigError(
            f"the loss of {name} mixes all samples of a batch (coupling 'batch'), but {state.micro_batching.micro_batches} micro-batches on "
            f"{state.num_ranks} ranks would separate them. Use --pipeline.micro-batches 1 on one rank, or define the loss "
            "inside groups (coupling 'group', --data.group-size)."
        )
    if coupling == "group" and batch.groups is None:
        raise ConfigError(f"the loss of {name} mixes samples of a group, but samples have none; set --data.group-size.")


def keys(state: TrainState, work: BatchWork) -> None:
    """All-to-all of ids; agrees on the global weight and on whether to stop."""
    work.window.exchange_ids(work.previous, work.next, where=work.where)
    work.previous = work.next = None


def retrieve(state: TrainState, work: BatchWork) -> None:
    """Owners admit ids and take their rows."""
    work.window.retrieve()
    stale = [one for one in state.embedding.row_access.values() if isinstance(one, StaleRows)]
    if stale:
        shares = [one.pop_shares(work.number) for one in stale]
        work.sums[_STALE], work.sums[_HELD] = (float(sum(column)) for column in zip(*shares, strict=True))


def post(state: TrainState, work: BatchWork) -> None:
    """Posts the receives of all messages of the window."""
    work.window.post_receives(where=work.where)
    buffers = torch.zeros(state.num_ranks, _FLAGS + _MAX_LOGS, dtype=torch.float64)
    work._flag_buffers = list(buffers.unbind())
    work._flags = state.flag_channel.post("flags", work._flag_buffers, where=work.where)


def rows(state: TrainState, work: BatchWork, micro_batch: int) -> None:
    """Sends rows of first use to their requesters; of the first micro-batch only chunk 0."""
    work.window.launch_rows(micro_batch)


def arrive(state: TrainState, work: BatchWork) -> None:
    """Waits for the rows of the first micro-batch, so that other streams can yield to their arrival."""
    work.window.wait_rows(0)


def compute(state: TrainState, work: BatchWork, micro_batch: int) -> None:
    """Dense forward and backward of one micro-batch; adds its row gradients to those of earlier ones."""
    if micro_batch == 0:
        state.dense.zero_grads()
    local_rows = work.window.local_rows(micro_batch)
    batch, rows_of = work.micro_batches[micro_batch], work.plan.rows(micro_batch, local_rows)
    if (device := state.device).type != "cpu":
        batch, rows_of = batch.moved(partial(upload, device=device)), {k: v.moved(device) for k, v in rows_of.items()}
    with mixed_precision(device, state.precision):
        output = cast(nn.Module, state.model)(rows_of, batch, work.rng)
    check_sum(output.loss_sum, type(state.model).__name__)
    is_last = micro_batch == work.plan.num_micro_batches - 1
    with state.dense.last_backward(work.mark_bucket) if is_last and work.mark_bucket else nullcontext():
        (output.loss_sum / (work.window.weight or 1.0)).backward()
    work.window.add_grads(micro_batch, local_rows)
    _add(work.sums, output)
    if is_last:
        work.largest_dense = larger(0.0, state.dense.grads)


def grads(state: TrainState, work: BatchWork, micro_batch: int) -> None:
    """Sends gradient sums of last use to their owners; after the last micro-batch also flags and logs."""
    work.window.launch_grads(micro_batch)
    if micro_batch == work.plan.num_micro_batches - 1:
        if len(work.sums) > _MAX_LOGS:
            raise TrainError(f"the model logs {len(work.sums) - 1} values; at most {_MAX_LOGS - 1} are supported.")
        values = _flag_values(state, work)
        flags = torch.tensor(values + [0.0] * (_FLAGS + _MAX_LOGS - len(values)), dtype=torch.float64)
        _posted(work).launch([flags] * state.num_ranks)


def collect(state: TrainState, work: BatchWork, micro_batch: int) -> None:
    """Owners wait for the gradients of a micro-batch."""
    work.window.collect(micro_batch)


def merge(state: TrainState, work: BatchWork, micro_batch: int) -> None:
    """Replicas exchange the gradient sums that a micro-batch completes."""
    work.window.merge(micro_batch, where=f"{work.where}, micro-batch {micro_batch}")


def flag(state: TrainState, work: BatchWork) -> None:
    """Agrees on non-finite values and sums the logs. Raises TrainError on every rank unless such batches are skipped."""
    _posted(work).wait_arrived()
    gathered = [values.tolist() for values in work._flag_buffers]
    work.skipped = not work.window.weight
    for rank, (code, seen, *_) in enumerate(gathered):
        if code:
            kinds = ["loss", "dense gradient", *(f"gradient of table '{table}'" for table in state.embedding.tables)]
            work.skipped = True
            if not state.skip_nonfinite:
                what = f"{kinds[int(code) - 1]} is {seen} at {work.where} on rank {rank}"
                raise TrainError(f"{what}; no parameter was updated.")
    if work.window.weight:
        totals = [sum(column) for column in zip(*(one[_FLAGS:] for one in gathered), strict=True)]  # in rank order
        named = dict(zip(work.sums, totals, strict=False))
        num_stale, num_rows = named.pop(_STALE, 0.0), named.pop(_HELD, 0.0)
        work.means = {name: total / work.window.weight for name, total in named.items()}
        if num_rows:
            work.means["collision_rate"] = num_stale / num_rows
    if work.skipped and work.window.weight:
        work.means["skipped"] = 1.0


def dense_sum(state: TrainState, work: BatchWork) -> None:
    """Reduce-scatters the dense gradients, bucket by bucket; during a backward also stages the update of each."""
    clip, is_early = work.rates.clip, work.mark_bucket is not None and not work.rates.clip.norm

    def on_sum(bucket: DenseBucket) -> None:
        if is_early:
            state.dense.advance(bucket, work.rates.dense, staged=True)

    state.dense.reduce(work.await_bucket, on_sum, where=work.where)
    state.dense.wait_gathers()
    if clip.norm and not clip.rows:
        _clip(state, work, 0.0)


def norm(state: TrainState, work: BatchWork) -> None:
    """Norm of dense and row gradients together: rows by id, squares in fp64, owners (of group 0) in rank order."""
    if work.rates.clip.norm and work.rates.clip.rows:
        grads = work.window.owned_grads().values() if state.embedding.group == 0 else ()
        squares = [sums.double().square().sum(1).sum() for sums in grads]
        _clip(state, work, sum(download(torch.stack(squares)).tolist()) if squares else 0.0)


def dense_step(state: TrainState, work: BatchWork) -> None:
    """The dense weights change, unless the batch is skipped; the last stage of a batch on the main stream."""
    is_staged = work.mark_bucket is not None
    if not work.skipped:
        if not is_staged:
            _advance(state, work)
        state.dense.commit(work.rates.dense, staged=is_staged)
    state.num_steps = work.number + 1


def update(state: TrainState, work: BatchWork) -> None:
    """One optimizer step per row of the batch, or of its first chunk."""
    if not work.skipped:
        if work.rates.clip.rows and work.factor < 1.0:
            for sums in work.window.owned_grads().values():
                sums.mul_(work.factor)
        work.window.update(work.rates.rows)


def chunk_rows(state: TrainState, work: BatchWork, number: int) -> None:
    """Sends a further chunk of the rows of the first micro-batch."""
    work.window.launch_rows(0, number + 1)


def chunk_grads(state: TrainState, work: BatchWork, number: int) -> None:
    """Sends a further chunk of the gradients of the last micro-batch."""
    work.window.launch_grads(work.plan.num_micro_batches - 1, number + 1)


def chunk_collect(state: TrainState, work: BatchWork, number: int) -> None:
    """Owners wait for the gradients of `chunk_grads`."""
    work.window.collect(work.plan.num_micro_batches - 1, number + 1)


def chunk_merge(state: TrainState, work: BatchWork, number: int) -> None:
    """Replicas exchange the gradient sums that a further chunk completes."""
    work.window.merge(work.plan.num_micro_batches - 1, number + 1, where=f"{work.where}, chunk {number + 1}")


def chunk_update(state: TrainState, work: BatchWork, number: int) -> None:
    """One optimizer step per row of a further chunk."""
    if not work.skipped:
        work.window.update(work.rates.rows, number + 1)


def write(state: TrainState, work: BatchWork) -> None:
    """Releases the rows: those that no later batch in flight holds are written back."""
    _posted(work).wait()
    work.window.release()


def _add(sums: dict[str, float | Tensor], output: Output) -> None:
    for name, value in {"loss": output.loss_sum, **output.logs}.items():
        own = value.item() if value.device.type == "cpu" else value.detach().double()
        sums[name] = own if name not in sums else sums[name] + own


def _posted(work: BatchWork) -> Handle:
    if work._flags is None:
        raise TrainError(f"flags of {work.where} used before they were posted: the schedule lacks a dependency.")
    return work._flags


def _flag_values(state: TrainState, work: BatchWork) -> list[float]:
    """A code and a value of what is not finite, and the logs. From a device, all with one wait."""
    tables, window = state.embedding.tables, work.window
    values = [work.largest_dense, *(window.largest.get(name, 0.0) for name in tables), *work.sums.values()]
    if on_device := [one for one in values if isinstance(one, Tensor)]:
        copies = iter(download(torch.stack([one.double() for one in on_device])).tolist())
        values = [next(copies) if isinstance(one, Tensor) else one for one in values]
    largest, logs = (cast(list[float], one) for one in (values[: 1 + len(tables)], values[1 + len(tables) :]))
    return [*_not_finite(state, [abs(logs[list(work.sums).index("loss")]), *largest]), *logs]


def _not_finite(state: TrainState, magnitudes: list[float]) -> tuple[float, float]:
    """A code and a value: which of loss, dense and row gradients could overflow a sum over all ranks; 0 for none."""
    limit = torch.finfo(state.dense.grads.dtype).max / state.num_ranks
    for code, largest in enumerate(magnitudes, start=1):
        if not largest <= limit:  # also true of nan
            return code, largest
    return 0, 0.0


def _clip(state: TrainState, work: BatchWork, own_rows: float) -> None:
    """Agrees on the norm of all gradients, in rank order; `own_rows`: squared norm of this rank's row gradients."""
    squares = state.dense.channel.all_gather_floats([state.dense.own_square() + own_rows], name="norm")
    work.factor = min(1.0, work.rates.clip.norm / max(sum(square for (square,) in squares) ** 0.5, 1e-300))
    if work.mark_bucket is not None:
        _advance(state, work)


def _advance(state: TrainState, work: BatchWork) -> None:
    """Each rank updates its pieces of the dense weights, and receives those of the others."""
    for bucket in state.dense.buckets:
        state.dense.advance(bucket, work.rates.dense, work.factor, staged=work.mark_bucket is not None)
    state.dense.wait_gathers()


MicroBatchStage = Callable[[TrainState, BatchWork, int], None]
BatchStage = Callable[[TrainState, BatchWork], None]
MICRO_BATCH_STAGES: dict[str, MicroBatchStage] = {
    "rows": rows,
    "compute": compute,
    "grads": grads,
    "collect": collect,
    "merge": merge,
    "chunk rows": chunk_rows,
    "chunk grads": chunk_grads,
    "chunk collect": chunk_collect,
    "chunk merge": chunk_merge,
    "chunk update": chunk_update,
}
BATCH_STAGES: dict[str, BatchStage] = {
    "keys": keys,
    "retrieve": retrieve,
    "post": post,
    "flag": flag,
    "dense sum": dense_sum,
    "norm": norm,
    "dense step": dense_step,
    "update": update,
    "write": write,
    "arrive": arrive,
}
