"""Row optimizers: a row's new bits are a function of its old bits, its gradient and the step's learning rate.

Whatever other rows share the call makes no difference, so a row may be updated on any rank, in any order and in any
company. Therefore only elementwise operations that are exactly rounded (no pow, no exp) and per-row sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.config import OptimizerConfig

State = dict[str, Tensor]


class RowOptimizer(Protocol):
    """Updates gathered rows [n, D] and their state [n, ...] in place."""

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
        rows.sub_(grads, alpha=lr)


class AdaGrad:
    """Accumulates the square of the full gradient sum, per weight."""

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def new_state(self, num_rows: int, dim: int) -> State:
        return {"sum": torch.zeros(num_rows, dim)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        _decay(rows, self.config, lr)
        state["sum"].addcmul_(grads, grads)
        rows.addcdiv_(grads, state["sum"].sqrt().add_(self.config.eps), value=-lr)


class RowwiseAdaGrad:
    """AdaGrad with one accumulator per row: the mean square of its gradient."""

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def new_state(self, num_rows: int, dim: int) -> State:
        return {"sum": torch.zeros(num_rows, 1)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        _decay(rows, self.config, lr)
        state["sum"].add_(grads.square().mean(1, keepdim=True))
        rows.addcdiv_(grads, state["sum"].sqrt().add_(self.config.eps), value=-lr)


class Adam:
    """Lazy Adam: each row counts its own steps."""

    def __init__(self, config: OptimizerConfig):
        self.config = config
        self._corrections = torch.ones(1, 2, dtype=torch.float64)

    def new_state(self, num_rows: int, dim: int) -> State:
        zeros = torch.zeros(num_rows, dim)
        return {"mean": zeros, "square": zeros.clone(), "step": torch.zeros(num_rows, 1, dtype=torch.int32)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float) -> None:
        config = self.config
        _decay(rows, config, lr)
        state["step"].add_(1)
        state["mean"].mul_(config.beta1).add_(grads, alpha=1 - config.beta1)
        state["square"].mul_(config.beta2).addcmul_(grads, grads, value=1 - config.beta2)
        correction = self._correction(state["step"].flatten()).to(rows.dtype)
        denominator = (state["square"] / correction[:, 1:]).sqrt_().add_(config.eps)
        rows.addcdiv_(state["mean"] / correction[:, :1], denominator, value=-lr)

    def _correction(self, step: Tensor) -> Tensor:
        """1 - beta ** step [n, 2] from a table: the last lanes of a vectorised pow have other bits."""
        needed = int(step.max()) + 1 if len(step) else 0
        if needed > len(self._corrections):
            betas = (self.config.beta1, self.config.beta2)
            table = [[1 - beta**k for beta in betas] for k in range(2 * needed)]
            self._corrections = torch.tensor(table, dtype=torch.float64)
        return self._corrections.index_select(0, step)


def _decay(rows: Tensor, config: OptimizerConfig, lr: float) -> None:
    if config.weight_decay:
        rows.mul_(1 - lr * config.weight_decay)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], RowOptimizer]] = {
    "sgd": Sgd,
    "adagrad": AdaGrad,
    "rowwise_adagrad": RowwiseAdaGrad,
    "adam": Adam,
}
