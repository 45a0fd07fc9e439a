"""The native functions that update rows, as ctypes: structures and signatures of rows.cpp and adam.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache, lru_cache

import torch
from torch import Tensor

from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_adam import SEEN, LazyAdam
from nestpipe.embedding.skipped_steps import MissedSteps
from nestpipe.ops.device_memory import address
from nestpipe.ops.native_library import Native, library


class OptimizerCall(Structure):
    """nestpipe_rows of rows.h."""

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


class _AdamCall(Structure):
    """nestpipe_adam of adam.cpp."""

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


class _MissedCall(Structure):
    """nestpipe_missed of adam.cpp."""

    _fields_ = (
        ("step", c_int64),
        ("settled", c_void_p),
        ("num_settled", c_int64),
        ("recent", c_void_p),
        ("late", c_void_p),
        ("decays", c_int64),
        ("rates", c_void_p),
        ("keeps", c_void_p),
        ("powers", c_void_p),
        ("horizon", c_int64),
        ("first_series", c_int64),
        ("short_square", c_float),
    )


class RowKernels:
    """The native updates. All return the number of slots, or the place of the first invalid one."""

    def __init__(self, native: Native):
        call, adam, missed = POINTER(OptimizerCall), POINTER(_AdamCall), POINTER(_MissedCall)
        self._sgd = native.function("nestpipe_rows_sgd", c_int64, call)
        self._adagrad = native.function("nestpipe_rows_adagrad", c_int64, call, c_void_p, c_float)
        self._rowwise = native.function("nestpipe_rows_rowwise_adagrad", c_int64, call, c_void_p, c_float)
        self._lazy_adam = native.function("nestpipe_rows_lazy_adam", c_int64, call, adam)
        self._adam = native.function("nestpipe_rows_adam", c_int64, call, adam, missed)
        self._gather = native.function("nestpipe_rows_adam_gather", c_int64, call, adam, missed, c_void_p)

    def sgd(self, call: OptimizerCall) -> int:
        return int(self._sgd(byref(call)))

    def adagrad(self, call: OptimizerCall, sums: Tensor, eps: float) -> int:
        return int(self._adagrad(byref(call), address(sums), eps))

    def rowwise_adagrad(self, call: OptimizerCall, sums: Tensor, eps: float) -> int:
        return int(self._rowwise(byref(call), address(sums), eps))

    def lazy_adam(self, call: OptimizerCall, optimizer: LazyAdam, state: Mapping[str, Tensor]) -> int:
        needed = 1
        while True:
            corrections = optimizer.corrections(needed, torch.float32)
            adam = _adam_call(optimizer.config, state, state["step"], corrections)
            done = int(self._lazy_adam(byref(call), byref(adam)))
            if done >= 0:
                return done
            needed = -done

    def adam(self, call: OptimizerCall, missed: MissedSteps, state: Mapping[str, Tensor]) -> int:
        adam, steps = _adam_call(missed.config, state, state[SEEN], missed.corrections), _missed_call(missed)
        return int(self._adam(byref(call), byref(adam), byref(steps)))

    def adam_gather(self, call: OptimizerCall, missed: MissedSteps, state: Mapping[str, Tensor], out: Tensor) -> int:
        """Weights as of `missed.step` into `out`."""
        adam, steps = _adam_call(missed.config, state, state[SEEN], missed.corrections), _missed_call(missed)
        return int(self._gather(byref(call), byref(adam), byref(steps), address(out)))


def _adam_call(config: OptimizerConfig, state: Mapping[str, Tensor], step: Tensor, corrections: Tensor) -> _AdamCall:
    return _AdamCall(
        mean=address(state["mean"]),
        square=address(state["square"]),
        step=address(step),
        corrections=address(corrections),
        num_corrections=len(corrections),
        beta1=config.beta1,
        rest1=1 - config.beta1,
        beta2=config.beta2,
        rest2=1 - config.beta2,
        eps=config.eps,
    )


@lru_cache(maxsize=16)  # an update uses what the lookups of its batch did
def _missed_call(missed: MissedSteps) -> _MissedCall:
    return _MissedCall(
        step=missed.step,
        settled=address(missed.settled),
        num_settled=missed.num_settled,
        recent=address(missed.recent),
        late=address(missed.late),
        decays=bool(missed.config.weight_decay),
        rates=address(missed.rates),
        keeps=address(missed.keeps),
        powers=address(missed.powers),
        horizon=missed.horizon,
        first_series=missed.first_series,
        short_square=missed.short_square,
    )


@cache
def row_kernels() -> RowKernels | None:
    """The native functions, or None where they cannot be built."""
    native = library()
    return RowKernels(native) if native else None
