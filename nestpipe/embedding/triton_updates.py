"""Launches of the Triton kernels that update rows on a device; row_optimizer.py calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from torch import Tensor

from nestpipe.embedding.row_adam import SEEN, Adam, LazyAdam
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.row_optimizer import AdaGrad, RowOptimizer, RowwiseAdaGrad, Sgd
from nestpipe.embedding.skipped_steps import MissedSteps
from nestpipe.embedding.triton_rows import Scattered, check, tile
from nestpipe.ops import adam_triton, rows_triton
from nestpipe.ops.device_memory import upload

_LAST = (1 << 31) - 1  # a larger number would change the type of a kernel's argument


def update(
    optimizer: RowOptimizer,
    rows: Tensor,
    state: Mapping[str, Tensor],
    slots: Tensor,
    grads: Tensor | ArrivedGrads,
    lr: float,
    batch: int,
) -> None:
    """`update_slots` on a device, in fp32."""
    check(slots, len(rows), lowest=-1)
    if isinstance(optimizer, Adam):
        optimizer.steps(rows.dtype).record(batch, lr)
    if not len(slots):
        return
    config = optimizer.config
    given, constants = _gradient(grads, rows)
    call = [upload(slots, rows.device), *given, len(slots), lr, 1 - lr * config.weight_decay]
    betas = [config.beta1, 1 - config.beta1, config.beta2, 1 - config.beta2, config.eps]
    match optimizer:
        case Sgd():
            kernel, arguments = rows_triton.sgd_kernel, [rows, *call]
        case AdaGrad():
            kernel, arguments = rows_triton.adagrad_kernel, [rows, state["sum"], *call, config.eps]
        case RowwiseAdaGrad():
            kernel, arguments = rows_triton.rowwise_adagrad_kernel, [rows, state["sum"], *call, config.eps]
        case LazyAdam():
            table = optimizer.shared_corrections(rows)
            kernel, own = adam_triton.lazy_adam_kernel, [state["mean"], state["square"], state["step"]]
            arguments = [rows, *own, table, len(table), *call, *betas]
        case Adam():
            kernel, own = adam_triton.adam_kernel, [state["mean"], state["square"], state[SEEN]]
            arguments = [rows, *own, *call, *betas, *_missed(optimizer.missed(batch, rows.dtype).on(rows.device))]
            constants["DECAYS"] = bool(config.weight_decay)
        case _:
            raise TypeError(f"no Triton update for {type(optimizer).__name__}")
    _launch(kernel, len(slots), arguments, {"D": rows.shape[1], **constants})


def adam_gather(missed: MissedSteps, rows: Tensor, state: Mapping[str, Tensor], slots: Tensor, out: Tensor) -> None:
    """Weights at slots as of `missed.step` into `out`."""
    check(slots, len(rows))
    if not len(slots):
        return
    config = missed.config
    own = [state["mean"], state["square"], state[SEEN], upload(slots, rows.device), len(slots)]
    arguments = [out, rows, *own, config.beta1, config.beta2, config.eps, *_missed(missed.on(rows.device))]
    constants = {"D": rows.shape[1], "DECAYS": bool(config.weight_decay)}
    _launch(adam_triton.adam_gather_kernel, len(slots), arguments, constants)


def _missed(missed: MissedSteps) -> list[Any]:
    """The arguments `step` to `short_square` of a kernel."""
    series = [missed.settled, missed.recent, missed.late, missed.rates, missed.keeps, missed.powers, missed.corrections]
    limits = [missed.num_settled, min(missed.horizon, _LAST), min(missed.first_series, _LAST), missed.short_square]
    return [missed.step, *(one.contiguous() for one in series), *limits]


def _gradient(grads: Tensor | ArrivedGrads, rows: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments `grads`, `starts`, `offsets` of a kernel, and its constants."""
    if isinstance(grads, Tensor):
        given = grads.contiguous()
        return [given, given, given], {"ARRIVED": False, "ALIGNED": False}
    scattered = Scattered.of(grads.sources(), grads.segments)
    arrived = [scattered.base, upload(grads.starts, rows.device), scattered.offsets]
    return arrived, {"ARRIVED": True, "ALIGNED": scattered.aligned}


def _launch(kernel: Any, num_rows: int, arguments: list[Any], constants: dict[str, Any]) -> None:
    """One program for each tile of rows."""
    own = tile(kernel.__name__, constants["D"])
    kernel[(triton.cdiv(num_rows, own.rows),)](*arguments, **constants, **own.launch())
