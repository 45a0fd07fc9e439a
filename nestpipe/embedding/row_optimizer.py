"""Row optimizers: the new value of a row is a function of its old value, its gradient and the learning rate alone.

Other rows in the same call make no difference, bitwise, so a row may be updated on any rank, in any
order and in any batch. Therefore updates use only elementwise operations that are exactly rounded,
one after the other, and per-row sums in a fixed order; the native version does the same operations.
That excludes pow and exp, fused operations (addcmul, addcdiv, add with alpha: torch contracts
product and sum where the processor can), and torch's fp32 square root, which is one unit off in one
of six cases.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_ops import ArrivedGrads, check_slots, gather_rows, scatter_rows
from nestpipe.ops.native_library import Native, library

State = dict[str, Tensor]
_SQRT_CHUNK = 1 << 15  # values; stays in the cache


class RowOptimizer(Protocol):
    """Updates gathered rows [n, D] and their state [n, ...] in place."""

    config: OptimizerConfig

    def new_state(self, num_rows: int, dim: int) -> State:
        """Initial state."""
        ...

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        """One update of each row, also with a zero gradient."""
        ...


class Sgd:
    def __init__(self, config: OptimizerConfig):
        self.config = config

    def new_state(self, num_rows: int, dim: int) -> State:
        return {}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        _decay(rows, self.config, lr)
        rows.sub_(grads * lr)


class AdaGrad:
    """Accumulates the square of the full gradient sum, per weight."""

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def new_state(self, num_rows: int, dim: int) -> State:
        return {"sum": torch.zeros(num_rows, dim)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        _decay(rows, self.config, lr)
        state["sum"].add_(grads * grads)
        rows.sub_((grads * lr).div_(exact_sqrt(state["sum"]).add_(self.config.eps)))


class RowwiseAdaGrad:
    """AdaGrad with one accumulator per row: the mean square of its gradient."""

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def new_state(self, num_rows: int, dim: int) -> State:
        return {"sum": torch.zeros(num_rows, 1)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        _decay(rows, self.config, lr)
        state["sum"].add_(fold(grads * grads).div_(grads.shape[1]))
        rows.sub_((grads * lr).div_(exact_sqrt(state["sum"]).add_(self.config.eps)))


class Adam:
    """Lazy Adam: each row counts its own steps."""

    def __init__(self, config: OptimizerConfig):
        self.config = config
        self._corrections: dict[torch.dtype, Tensor] = {}

    def new_state(self, num_rows: int, dim: int) -> State:
        zeros = torch.zeros(num_rows, dim)
        return {"mean": zeros, "square": zeros.clone(), "step": torch.zeros(num_rows, 1, dtype=torch.int32)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        config = self.config
        _decay(rows, config, lr)
        state["step"].add_(1)
        step = state["step"].flatten()
        corrections = self.corrections(int(step.max()) + 1 if len(step) else 1, rows.dtype).index_select(0, step)
        state["mean"].mul_(config.beta1).add_(grads * (1 - config.beta1))
        state["square"].mul_(config.beta2).add_((grads * grads).mul_(1 - config.beta2))
        denominator = exact_sqrt(state["square"] / corrections[:, 1:]).add_(config.eps)
        rows.sub_((state["mean"] / corrections[:, :1]).mul_(lr).div_(denominator))

    def corrections(self, num_steps: int, dtype: torch.dtype) -> Tensor:
        """1 - beta ** step [>= num_steps, 2] as a table: a vectorised pow rounds the tail of a tensor differently."""
        table = self._corrections.get(dtype)
        if table is None or len(table) < num_steps:
            betas = (self.config.beta1, self.config.beta2)
            table = torch.tensor([[1 - beta**k for beta in betas] for k in range(2 * num_steps)], dtype=torch.float64)
            table = self._corrections[dtype] = table.to(dtype)
        return table


def exact_sqrt(values: Tensor) -> Tensor:
    """The square root, exactly rounded for fp32: the fp64 root is close enough to round correctly."""
    roots = torch.empty_like(values, memory_format=torch.contiguous_format)
    for out, chunk in zip(roots.view(-1).split(_SQRT_CHUNK), values.reshape(-1).split(_SQRT_CHUNK), strict=True):
        out.copy_(chunk.double().sqrt_())
    return roots


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
}


def update_slots(
    optimizer: RowOptimizer,
    rows: Tensor,
    state: State,
    slots: Tensor,
    grads: Tensor | ArrivedGrads,
    lr: float,
    *,
    native: bool | None = None,
    num_threads: int = 1,
) -> None:
    """One update of the rows [S, D] and state [S, ...] at distinct slots [n] by gradients [n, D].

    Slots of -1 are skipped. The number of threads does not change the result.
    """
    segments = [grads] if isinstance(grads, Tensor) else grads.segments
    columns = [rows, *state.values()]
    fits = rows.device.type == "cpu" and all(column.is_contiguous() for column in columns)
    fits = fits and rows.dtype == torch.float32 and all(one.dtype == torch.float32 for one in segments)
    functions = _functions() if fits and (native is None or native) else None
    if functions is None and isinstance(grads, ArrivedGrads):
        grads = grads.total()
    if isinstance(grads, Tensor) and grads.shape != (len(slots), *rows.shape[1:]):
        raise ValueError(f"gradients {list(grads.shape)} for {len(slots):,} slots do not fit rows {list(rows.shape)}")
    if functions is None:
        assert isinstance(grads, Tensor)
        _update_copies(optimizer, rows, state, slots, grads, lr)
        return
    slots = slots.contiguous()
    call = _OptimizerCall(
        weights=rows.data_ptr(),
        num_slots=len(rows),
        dim=rows.shape[1],
        slots=slots.data_ptr(),
        n=len(slots),
        lr=lr,
        keep=1 - lr * optimizer.config.weight_decay,
        num_threads=num_threads,
    )
    if isinstance(grads, Tensor):
        grads = grads.contiguous()
        call.grads = grads.data_ptr()
    else:
        pointers = grads.pointers()
        call.starts, call.rows = grads.starts.data_ptr(), pointers.data_ptr()
    check_slots(functions.update(optimizer, state, call), slots, len(rows))


def _update_copies(
    optimizer: RowOptimizer, rows: Tensor, state: State, slots: Tensor, grads: Tensor, lr: float
) -> None:
    known = (slots != -1).nonzero().flatten()
    slots, grads = slots.index_select(0, known), grads.index_select(0, known)
    own, own_state = gather_rows(rows, slots), {name: gather_rows(column, slots) for name, column in state.items()}
    optimizer.update(own, own_state, grads, lr)
    scatter_rows(rows, slots, own)
    for name, column in state.items():
        scatter_rows(column, slots, own_state[name])


class _OptimizerCall(Structure):
    """nestpipe_rows of rows.cpp."""

    _fields_ = (
        ("weights", c_void_p),
        ("num_slots", c_int64),
        ("dim", c_int64),
        ("slots", c_void_p),
        ("n", c_int64),
        ("grads", c_void_p),
        ("lr", c_float),
        ("keep", c_float),
        ("num_threads", c_int64),
        ("starts", c_void_p),
        ("rows", c_void_p),
    )


class _Adam(Structure):
    """nestpipe_adam of rows.cpp."""

    _fields_ = (
        ("mean", c_void_p),
        ("square", c_void_p),
        ("step", c_void_p),
        ("corrections", c_void_p),
        ("num_corrections", c_int64),
        ("beta1", c_float),
        ("rest1", c_float),
        ("beta2", c_float),
        ("rest2", c_float),
        ("eps", c_float),
    )


class _OptimizerFunctions:
    """The functions of rows.cpp for updates. All return the number of slots, or the place of the first invalid one."""

    def __init__(self, native: Native):
        call = POINTER(_OptimizerCall)
        self._sgd = native.function("nestpipe_rows_sgd", c_int64, call)
        self._adagrad = native.function("nestpipe_rows_adagrad", c_int64, call, c_void_p, c_float)
        self._rowwise = native.function("nestpipe_rows_rowwise_adagrad", c_int64, call, c_void_p, c_float)
        self._adam = native.function("nestpipe_rows_adam", c_int64, call, POINTER(_Adam))

    def update(self, optimizer: RowOptimizer, state: State, call: _OptimizerCall) -> int:
        match optimizer:
            case Sgd():
                return int(self._sgd(byref(call)))
            case AdaGrad():
                return int(self._adagrad(byref(call), state["sum"].data_ptr(), optimizer.config.eps))
            case RowwiseAdaGrad():
                return int(self._rowwise(byref(call), state["sum"].data_ptr(), optimizer.config.eps))
            case Adam():
                return self._update_adam(optimizer, state, call)
        raise TypeError(f"no native update for {type(optimizer).__name__}")

    def _update_adam(self, optimizer: Adam, state: State, call: _OptimizerCall) -> int:
        config = optimizer.config
        needed = 1
        while True:
            corrections = optimizer.corrections(needed, torch.float32)
            adam = _Adam(
                mean=state["mean"].data_ptr(),
                square=state["square"].data_ptr(),
                step=state["step"].data_ptr(),
                corrections=corrections.data_ptr(),
                num_corrections=len(corrections),
                beta1=config.beta1,
                rest1=1 - config.beta1,
                beta2=config.beta2,
                rest2=1 - config.beta2,
                eps=config.eps,
            )
            done = int(self._adam(byref(call), byref(adam)))
            if done >= 0:
                return done
            needed = -done


@cache
def _functions() -> _OptimizerFunctions | None:
    native = library()
    return _OptimizerFunctions(native) if native else None
