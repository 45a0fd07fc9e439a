"""Adam on rows: the readable version in torch; adam.cpp does the same operations.

    LazyAdam   a row counts its own steps, and rests between two lookups
    Adam       equals Adam on the dense table: a row that is read or updated first makes the steps of the batches between

A row is stored as of its last update, with the number of batches that it had seen then. So a batch changes only the rows that it
looks up, and a delta checkpoint stays small. Reading never changes a row: which reads there were has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.embedding.adam_series import NUM_SUMS, ORDER
from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_ops import exact_sqrt
from nestpipe.embedding.skipped_steps import MissedSteps, SkippedSteps
from nestpipe.ops.device_memory import upload

State = dict[str, Tensor]
_BITS = {torch.float32: 26, torch.float64: 55}  # 1 - 2 ** -bits is 1
SEEN = "num_batches"  # the state of exact Adam that says how many batches a row has seen


class LazyAdam:
    """A row's moments and its own step count advance only when it is looked up."""

    def __init__(self, config: OptimizerConfig):
        self.config = config
        self._corrections: dict[torch.dtype, Tensor] = {}
        self._on_device: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def new_state(self, num_rows: int, dim: int) -> State:
        zeros = torch.zeros(num_rows, dim)
        return {"mean": zeros, "square": zeros.clone(), "step": torch.zeros(num_rows, 1, dtype=torch.int32)}

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float, batch: int = 0) -> None:
        state["step"].add_(1)
        step = state["step"].flatten()
        if rows.device.type == "cpu":
            table = self.corrections(int(step.max()) + 1 if len(step) else 1, rows.dtype)
        else:
            table = self.shared_corrections(rows)
            step = step.clamp(max=len(table) - 1)
        _step(self.config, rows, state, grads, lr, table.index_select(0, step))

    def shared_corrections(self, rows: Tensor) -> Tensor:
        """The corrections on the rows' device, up to the step from which on they are exactly 1."""
        key = rows.dtype, rows.device
        if key not in self._on_device:
            beta, bits = max(self.config.beta1, self.config.beta2), _BITS[rows.dtype]
            num_steps = 2 + (math.ceil(-bits * math.log(2) / math.log(beta)) if beta else 0)
            self._on_device[key] = upload(self.corrections(num_steps, rows.dtype)[:num_steps], rows.device)
        return self._on_device[key]

    def corrections(self, num_steps: int, dtype: torch.dtype) -> Tensor:
        """1 - beta ** step [>= num_steps, 2] as a table: a vectorised pow rounds the tail of a tensor differently."""
        table = self._corrections.get(dtype)
        if table is None or len(table) < num_steps:
            betas = (self.config.beta1, self.config.beta2)
            table = torch.tensor([[1 - beta**k for beta in betas] for k in range(2 * num_steps)], dtype=torch.float64)
            table = self._corrections[dtype] = table.to(dtype)
        return table


class Adam:
    """Every row makes the step of every batch, with a zero gradient where it was not looked up; skipped batches count."""

    def __init__(self, config: OptimizerConfig):
        self.config = config
        self._steps: dict[torch.dtype, SkippedSteps] = {}

    def new_state(self, num_rows: int, dim: int) -> State:
        zeros = torch.zeros(num_rows, dim)
        return {"mean": zeros, "square": zeros.clone(), SEEN: torch.zeros(num_rows, 1, dtype=torch.int32)}

    def steps(self, dtype: torch.dtype) -> SkippedSteps:
        """The learning rates of the table's batches; rows of a table have one type."""
        if dtype not in self._steps:
            self._steps[dtype] = SkippedSteps(self.config, dtype)
        return self._steps[dtype]

    def missed(self, batch: int, dtype: torch.dtype) -> MissedSteps:
        """What rows have missed before a batch."""
        return self.steps(dtype).at(batch)

    def update(self, rows: Tensor, state: State, grads: Tensor, lr: float, batch: int = 0) -> None:
        self.steps(rows.dtype).record(batch, lr)
        missed = self.missed(batch, rows.dtype).on(rows.device)
        rows.copy_(caught_up(missed, rows, state))
        powers = missed.powers.index_select(0, (missed.step - state[SEEN].flatten().long()).clamp_(min=0))
        state["mean"].mul_(powers[:, :1])
        state["square"].mul_(powers[:, 1:])
        state[SEEN].fill_(missed.step + 1)
        _step(self.config, rows, state, grads, lr, missed.corrections[missed.step + 1].expand(len(rows), 2))


def _step(config: OptimizerConfig, rows: Tensor, state: State, grads: Tensor, lr: float, corrections: Tensor) -> None:
    if config.weight_decay:
        rows.mul_(1 - lr * config.weight_decay)
    state["mean"].mul_(config.beta1).add_(grads * (1 - config.beta1))
    state["square"].mul_(config.beta2).add_((grads * grads).mul_(1 - config.beta2))
    denominator = exact_sqrt(state["square"] / corrections[:, 1:]).add_(config.eps)
    rows.sub_((state["mean"] / corrections[:, :1]).mul_(lr).div_(denominator))


def caught_up(missed: MissedSteps, rows: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The weights [n, D] of rows with their state as of `missed.step`; the rows are not changed."""
    missed, seen = missed.on(rows.device), state[SEEN].flatten().long()
    rows = rows.clone()
    is_behind, decays = seen < missed.step, bool(missed.config.weight_decay)
    if decays:
        _walk(missed, rows, state, (is_behind & (seen == 0)).nonzero().flatten(), moves=False)
    _walk(missed, rows, state, (is_behind & (seen > 0) & (seen < missed.first_series)).nonzero().flatten())
    _jump(missed, rows, state, (is_behind & (seen >= missed.first_series)).nonzero().flatten())
    if decays:
        late = (seen < missed.num_settled).nonzero().flatten()
        factors = missed.late.index_select(0, seen.index_select(0, late)).unsqueeze(1)
        rows.index_copy_(0, late, rows.index_select(0, late).mul_(factors))
    return rows


def _walk(missed: MissedSteps, rows: Tensor, state: Mapping[str, Tensor], own: Tensor, *, moves: bool = True) -> None:
    """The steps one by one, each like an update with a zero gradient; rows that never had one only decay."""
    seen = state[SEEN].flatten().long().index_select(0, own)
    weights, mean, square = (one.index_select(0, own) for one in (rows, state["mean"], state["square"]))
    last = (seen + missed.horizon).clamp_(max=missed.step)
    for k in range(int((last - seen).max()) if len(own) else 0):
        some = (seen + k < last).nonzero().flatten()
        step = seen.index_select(0, some) + k
        lr, keep = (column.index_select(0, step).unsqueeze(1) for column in (missed.rates, missed.keeps))
        moved = weights.index_select(0, some).mul_(keep)
        if moves:
            own_mean = mean.index_select(0, some).mul_(missed.config.beta1)
            own_square = square.index_select(0, some).mul_(missed.config.beta2)
            corrections = missed.corrections.index_select(0, step + 1)
            denominator = exact_sqrt(own_square / corrections[:, 1:]).add_(missed.config.eps)
            moved.sub_((own_mean / corrections[:, :1]).mul_(lr).div_(denominator))
            mean.index_copy_(0, some, own_mean)
            square.index_copy_(0, some, own_square)
        weights.index_copy_(0, some, moved)
    rows.index_copy_(0, own, weights)


def _jump(missed: MissedSteps, rows: Tensor, state: Mapping[str, Tensor], own: Tensor) -> None:
    """All steps at once, by the series of adam_series.py."""
    if not len(own):
        return
    seen = state[SEEN].flatten().long().index_select(0, own)
    entries = torch.cat([missed.settled, missed.recent]).index_select(0, seen)
    centre, keep, coefficients = entries[:, :1], entries[:, 1:2], entries[:, 2:]
    eps, square = missed.config.eps, state["square"].index_select(0, own)
    root = exact_sqrt(square)
    scaled = root * centre
    inverse = 1.0 / (scaled + eps)
    whole = _polynomial(coefficients[:, : ORDER + 1], (eps - scaled).mul_(inverse)).mul_(inverse)
    inverse = 1.0 / root
    short = _polynomial(coefficients[:, ORDER + 1 : NUM_SUMS], inverse * -eps).mul_(inverse)
    total = torch.where(square < missed.short_square, whole, short)
    moved = state["mean"].index_select(0, own).mul_(total)
    rows.index_copy_(0, own, rows.index_select(0, own).mul_(keep).sub_(moved))


def _polynomial(coefficients: Tensor, at: Tensor) -> Tensor:
    """The polynomial of each row's coefficients [n, K] at [n, D]."""
    total = coefficients[:, -1:].expand_as(at)
    for j in range(coefficients.shape[1] - 2, -1, -1):
        total = total * at + coefficients[:, j : j + 1]
    return total
