"""One training step, start to end. Read this first: every faster way to run a step must give exactly these bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nestpipe.draw import Draw
from nestpipe.embedding.route import route
from nestpipe.embedding.table import Table
from nestpipe.errors import TrainError
from nestpipe.jagged import Batch
from nestpipe.model import Model, Output
from nestpipe.pipeline.dense import Dense


@dataclass(slots=True, eq=False)
class TrainState:
    """All that a step reads and changes."""

    model: Model
    tables: dict[str, Table]
    dense: Dense
    seed: int
    num_steps: int = 0  # steps done


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rates of one step."""

    dense: float
    rows: float


def step(state: TrainState, batch: Batch, rates: Rates) -> dict[str, float]:
    """Trains on one batch; returns the loss and the model's logs, averaged over the batch's weight."""
    draw = Draw(state.seed, state.num_steps)
    plan = route(state.model.lookups(batch, draw))  # 1 which rows
    leaves = {name: state.tables[name].fetch(ids).requires_grad_() for name, ids in plan.unique.items()}  # 2 fetch them
    weight = state.model.weight(batch)
    if weight > 0:
        state.dense.zero_grads()
        output = cast(nn.Module, state.model)(plan.rows(leaves), batch, draw)  # 3 forward
        (output.loss_sum / weight).backward()  # 4 backward: dense gradients and row gradients
        grads = {name: _grad(leaf) for name, leaf in leaves.items()}
        _check_finite(state, output, grads)  # 5 nothing is updated if anything is not finite
        state.dense.update(rates.dense)  # 6 dense step
        for name, ids in plan.unique.items():  # 7 one step per row
            state.tables[name].update(ids, grads[name], rates.rows)
    state.num_steps += 1
    return _means(output, weight) if weight > 0 else {}


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _check_finite(state: TrainState, output: Output, grads: dict[str, Tensor]) -> None:
    """Raises TrainError if the loss or a gradient is not finite."""
    named = {"loss": output.loss_sum, "dense gradient": state.dense.grads}
    for name, values in {**named, **{f"gradient of table '{name}'": grad for name, grad in grads.items()}}.items():
        if not bool(torch.isfinite(values).all()):
            seen = values[~torch.isfinite(values)].flatten()[0].item()
            raise TrainError(f"{name} is {seen} at step {state.num_steps + 1}; no parameter was updated.")


def _means(output: Output, weight: float) -> dict[str, float]:
    return {
        "loss": output.loss_sum.item() / weight,
        **{name: value.item() / weight for name, value in output.logs.items()},
    }
