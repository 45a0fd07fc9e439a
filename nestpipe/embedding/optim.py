"""Row optimizers: a row's new bits are a function of its old bits, its gradient and the step's learning rate.

Whatever other rows share the call makes no difference, so a row may be updated on any rank, in any order and in any
company. Therefore only elementwise operations that are exactly rounded, one after the other, and per-row sums in one
order: other code that does the same operations (slots.py) has the same bits. That rules out pow and exp, the fused
operations (addcmul, addcdiv, add with alpha: torch contracts a product and a sum where the processor can) and torch's
own square root of 32-bit numbers, which is one unit off in one of six cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.config import OptimizerConfig

State = dict[str, Tensor]
_PIECE = 1 << 15


class RowOptimizer(Protocol):
    """Updates gathered rows [n, D] and their state [n, ...] in place."""

    config: OptimizerConfig

    def new_state(self, num_rows: int, dim: int) -> State:
        """The state of rows that were never updated."""
        ...

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        """One update of each row; every row is touched, also with a zero gradient."""
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
        """1 - beta ** step [>= num_steps, 2] as a table: the last lanes of a vectorised pow have other bits."""
        found = self._corrections.get(dtype)
        if found is None or len(found) < num_steps:
            betas = (self.config.beta1, self.config.beta2)
            found = torch.tensor([[1 - beta**k for beta in betas] for k in range(2 * num_steps)], dtype=torch.float64)
            found = self._corrections[dtype] = found.to(dtype)
        return found


def exact_sqrt(values: Tensor) -> Tensor:
    """The square root, exactly rounded for 32-bit numbers: that of a 64-bit number is near enough to round correctly."""
    roots = torch.empty_like(values, memory_format=torch.contiguous_format)
    # In pieces that stay in the cache, and with little memory beside the rows.
    for into, piece in zip(roots.view(-1).split(_PIECE), values.reshape(-1).split(_PIECE), strict=True):
        into.copy_(piece.double().sqrt_())
    return roots


def fold(values: Tensor) -> Tensor:
    """Sums [n, 1] of rows [n, D], which are overwritten: the upper half is added to the lower one until one is left."""
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
