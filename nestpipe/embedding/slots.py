"""Row optimizers in place: columns of weights and state, updated at the slots of a batch without copying rows.

The definition is `RowOptimizer.update` (optim.py) on the gathered rows; that is what runs where there is no native
version and for 64-bit weights. The native one does the same exactly rounded operations in the same order, so both have
the same bits.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from nestpipe.embedding.optim import AdaGrad, Adam, RowOptimizer, RowwiseAdaGrad, Sgd, State
from nestpipe.embedding.rows import Arrived, check_slots, gather_rows, scatter_rows
from nestpipe.native import Native, library


def update_slots(
    optimizer: RowOptimizer,
    rows: Tensor,
    state: State,
    slots: Tensor,
    grads: Tensor | Arrived,
    lr: float,
    *,
    native: bool | None = None,
    num_threads: int = 1,
) -> None:
    """One update of the rows [S, D] and state [S, ...] at distinct slots [n] by gradients [n, D], which may still have to be added.

    A slot of -1 is left out, as often as it is there. Threads share the rows, which changes no bits.
    """
    given = [grads] if isinstance(grads, Tensor) else grads.segments
    columns = [rows, *state.values()]
    fits = rows.device.type == "cpu" and all(column.is_contiguous() for column in columns)
    fits = fits and rows.dtype == torch.float32 and all(one.dtype == torch.float32 for one in given)
    functions = _functions() if fits and (native is None or native) else None
    if functions is None and isinstance(grads, Arrived):
        grads = grads.total()
    if isinstance(grads, Tensor) and grads.shape != (len(slots), *rows.shape[1:]):
        raise ValueError(f"gradients {list(grads.shape)} for {len(slots):,} slots do not fit rows {list(rows.shape)}")
    if functions is None:
        assert isinstance(grads, Tensor)
        _update_copies(optimizer, rows, state, slots, grads, lr)
        return
    slots = slots.contiguous()
    call = _Call(
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


class _Call(Structure):
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


class _Functions:
    """What rows.cpp offers for updates. All return the number of places, or that of the first wrong slot."""

    def __init__(self, native: Native):
        call = POINTER(_Call)
        self._sgd = native.function("nestpipe_rows_sgd", c_int64, call)
        self._adagrad = native.function("nestpipe_rows_adagrad", c_int64, call, c_void_p, c_float)
        self._rowwise = native.function("nestpipe_rows_rowwise_adagrad", c_int64, call, c_void_p, c_float)
        self._adam = native.function("nestpipe_rows_adam", c_int64, call, POINTER(_Adam))

    def update(self, optimizer: RowOptimizer, state: State, call: _Call) -> int:
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

    def _update_adam(self, optimizer: Adam, state: State, call: _Call) -> int:
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
def _functions() -> _Functions | None:
    found = library()
    return _Functions(found) if found else None
