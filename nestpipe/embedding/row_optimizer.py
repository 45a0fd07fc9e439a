"""Row optimizers: the new value of a row is a function of its old value, its gradient and the learning rate alone.

Other rows in the same call make no difference, bitwise, so a row may be updated on any rank, in any
order and in any batch. Therefore updates use only elementwise operations that are exactly rounded,
one after the other, and per-row sums in a fixed order; the native version does the same operations.
That excludes pow and exp, fused operations (addcmul, addcdiv, add with alpha: torch contracts
product and sum where the processor can), and torch's fp32 square root, which is one unit off in one
of six cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_adam import Adam, LazyAdam, State, caught_up
from nestpipe.embedding.row_kernels import OptimizerCall, RowKernels, row_kernels
from nestpipe.embedding.row_ops import ArrivedGrads, check_slots, exact_sqrt, gather_rows, scatter_rows, triton_for
from nestpipe.ops.device_memory import address, upload


class RowOptimizer(Protocol):
    """Updates gathered rows [n, D] and their state [n, ...] in place."""

    @property
    def config(self) -> OptimizerConfig: ...

    def new_state(self, num_rows: int, dim: int) -> State:
        """Initial state."""
        ...

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float, batch: int = 0) -> None:
        """One update of each row by a batch, also with a zero gradient."""
        ...


class Sgd:
    def __init__(self, config: OptimizerConfig):
        self.config = config

    def new_state(self, num_rows: int, dim: int) -> State:
        return {}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float, batch: int = 0) -> None:
        _decay(rows, self.config, lr)
        rows.sub_(grads * lr)


class AdaGrad:
    """Accumulates the square of the full gradient sum, per weight."""

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def new_state(self, num_rows: int, dim: int) -> State:
        return {"sum": torch.zeros(num_rows, dim)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float, batch: int = 0) -> None:
        _decay(rows, self.config, lr)
        state["sum"].add_(grads * grads)
        rows.sub_((grads * lr).div_(exact_sqrt(state["sum"]).add_(self.config.eps)))


class RowwiseAdaGrad:
    """AdaGrad with one accumulator per row: the mean square of its gradient."""

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def new_state(self, num_rows: int, dim: int) -> State:
        return {"sum": torch.zeros(num_rows, 1)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float, batch: int = 0) -> None:
        _decay(rows, self.config, lr)
        state["sum"].add_(fold(grads * grads).div_(grads.shape[1]))
        rows.sub_((grads * lr).div_(exact_sqrt(state["sum"]).add_(self.config.eps)))


def fold(values: Tensor) -> Tensor:
    """Row sums [n, 1] of [n, D] in place, by a fixed tree: the upper half is added to the lower until one is left."""
    while values.shape[1] > 1:
        half = -(-values.shape[1] // 2)
        values[:, : values.shape[1] - half].add_(values[:, half:])
        values = values[:, :half]
    return values


def _decay(rows: Tensor, config: OptimizerConfig, lr: float) -> None:
    if config.weight_decay:
        rows.mul_(1 - lr * config.weight_decay)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], RowOptimizer]] = {
    "sgd": Sgd,
    "adagrad": AdaGrad,
    "rowwise_adagrad": RowwiseAdaGrad,
    "adam": Adam,
    "lazy_adam": LazyAdam,
}


def update_slots(
    optimizer: RowOptimizer,
    rows: Tensor,
    state: State,
    slots: Tensor,
    grads: Tensor | ArrivedGrads,
    lr: float,
    *,
    batch: int = 0,
    native: bool | None = None,
    num_threads: int = 1,
) -> None:
    """One update of the rows [S, D] and state [S, ...] at distinct slots [n] by gradients [n, D] of a batch.

    Slots of -1 are skipped. The number of threads does not change the result.
    """
    segments = [grads] if isinstance(grads, Tensor) else grads.segments
    if isinstance(grads, Tensor) and grads.shape != (len(slots), *rows.shape[1:]):
        raise ValueError(f"gradients {list(grads.shape)} for {len(slots):,} slots do not fit rows {list(rows.shape)}")
    if (on_device := _triton_for(native, [rows, *state.values(), *segments], [rows, *segments])) is not None:
        on_device.update(optimizer, rows, state, slots, grads, lr, batch)
        return
    kernels = _kernels_for(native, [rows, *state.values()], [rows, *segments])
    if kernels is None:
        total = grads.total() if isinstance(grads, ArrivedGrads) else grads
        _update_copies(optimizer, rows, state, slots, total, lr, batch)
        return
    slots = slots.contiguous()
    call = _call(rows, slots, num_threads)
    call.lr, call.keep = lr, 1 - lr * optimizer.config.weight_decay
    if isinstance(grads, Tensor):
        grads = grads.contiguous()
        call.grads = address(grads)
    else:
        pointers = grads.pointers()
        call.starts, call.rows = address(grads.starts), address(pointers)
    match optimizer:
        case Sgd():
            done = kernels.sgd(call)
        case AdaGrad():
            done = kernels.adagrad(call, state["sum"], optimizer.config.eps)
        case RowwiseAdaGrad():
            done = kernels.rowwise_adagrad(call, state["sum"], optimizer.config.eps)
        case LazyAdam():
            done = kernels.lazy_adam(call, optimizer, state)
        case Adam():
            optimizer.steps(rows.dtype).record(batch, lr)
            done = kernels.adam(call, optimizer.missed(batch, rows.dtype), state)
        case _:
            raise TypeError(f"no native update for {type(optimizer).__name__}")
    check_slots(done, slots, len(rows))


def gather_slots(
    optimizer: RowOptimizer,
    rows: Tensor,
    state: State,
    slots: Tensor,
    out: Tensor | None = None,
    *,
    batch: int,
    native: bool | None = None,
) -> Tensor:
    """A copy of the weights [n, D] at slots, as a batch reads them; in `out` if given. Slots may repeat."""
    if not isinstance(optimizer, Adam):
        return gather_rows(rows, slots, out, native=native)
    out = rows.new_empty(len(slots), *rows.shape[1:]) if out is None else out
    if out.shape != (len(slots), *rows.shape[1:]):
        raise ValueError(f"{len(slots):,} rows of {list(rows.shape)} do not fit into a buffer {list(out.shape)}")
    if not len(slots):
        return out
    missed, columns = optimizer.missed(batch, rows.dtype), [rows, out, *state.values()]
    if (on_device := _triton_for(native, columns, [rows, out])) is not None:
        on_device.adam_gather(missed, rows, state, slots, out)
        return out
    kernels = _kernels_for(native, columns, [rows])
    if kernels is None:
        slots = upload(slots, rows.device)
        own = {name: gather_rows(column, slots) for name, column in state.items()}
        return out.copy_(caught_up(missed, gather_rows(rows, slots), own))
    slots = slots.contiguous()
    check_slots(kernels.adam_gather(_call(rows, slots, 1), missed, state, out), slots, len(rows))
    return out


def _kernels_for(native: bool | None, columns: Sequence[Tensor], numbers: Sequence[Tensor]) -> RowKernels | None:
    """The native functions if they are enabled, built, and support these columns."""
    fits = all(column.device.type == "cpu" and column.is_contiguous() for column in columns)
    fits = fits and all(one.dtype == torch.float32 for one in numbers)
    return row_kernels() if fits and (native is None or native) else None


def _triton_for(native: bool | None, columns: Sequence[Tensor], numbers: Sequence[Tensor]) -> ModuleType | None:
    """triton_updates.py if its kernels are enabled, run on the columns' device, and support these columns."""
    if triton_for(native, *columns) is None or not all(one.dtype == torch.float32 for one in numbers):
        return None
    from nestpipe.embedding import triton_updates

    return triton_updates


def _call(rows: Tensor, slots: Tensor, num_threads: int) -> OptimizerCall:
    return OptimizerCall(
        weights=address(rows),
        num_slots=len(rows),
        dim=rows.shape[1],
        slots=address(slots),
        n=len(slots),
        num_threads=num_threads,
    )


def _update_copies(
    optimizer: RowOptimizer, rows: Tensor, state: State, slots: Tensor, grads: Tensor, lr: float, batch: int
) -> None:
    known = (slots != -1).nonzero().flatten()
    slots = upload(slots.index_select(0, known), rows.device)
    grads = grads.index_select(0, upload(known, rows.device))
    own, own_state = gather_rows(rows, slots), {name: gather_rows(column, slots) for name, column in state.items()}
    optimizer.update(own, own_state, grads, lr, batch)
    scatter_rows(rows, slots, own)
    for name, column in state.items():
        scatter_rows(column, slots, own_state[name])
