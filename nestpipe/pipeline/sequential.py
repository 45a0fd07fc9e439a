"""One training step, start to end. Read this first: every faster way to run a step must give exactly these bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from nestpipe.comm import Lane
from nestpipe.draw import Draw
from nestpipe.embedding.route import route
from nestpipe.embedding.sharded import Sharded, Window
from nestpipe.errors import TrainError
from nestpipe.jagged import Batch
from nestpipe.model import Model, Output
from nestpipe.pipeline.dense import Dense


@dataclass(slots=True, eq=False)
class TrainState:
    """All that a step reads and changes."""

    model: Model
    embedding: Sharded
    dense: Dense
    control: Lane  # for what all ranks must agree on
    seed: int
    num_parts: int = 1
    num_steps: int = 0  # steps done


@dataclass(frozen=True, slots=True)
class Clip:
    """Gradients are scaled down to this norm, 0 for never: of the dense part alone, or of dense part and rows."""

    norm: float = 0.0
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """The settings of one step, captured with its batch."""

    dense: float  # learning rates
    rows: float
    clip: Clip = Clip()


def step(state: TrainState, batch: Batch, rates: Rates) -> dict[str, float]:
    """Trains on one rank's share of a batch; returns the loss and the model's logs, averaged over all ranks' weight."""
    model, draw = cast(nn.Module, state.model), Draw(state.seed, state.num_steps)
    parts = batch.split(state.num_parts)
    lookups = [state.model.lookups(part, draw) for part in parts]
    plan = route(lookups, list(state.embedding.tables), state.embedding.owners)  # 1 which rows, who owns them
    window = state.embedding.open(plan, state.model.weight(batch))  # 2 ids out, global weight agreed, rows retrieved
    state.dense.zero_grads()
    sums: dict[str, float] = {}
    for number, part in enumerate(parts):
        leaves = window.fetch(number)  # 3 rows of first use; leaf tensors
        output = model(plan.rows(number, leaves), part, draw)  # 4 dense forward
        (output.loss_sum / (window.weight or 1.0)).backward()  # 5 dense backward, row gradients
        window.send_grads(number, leaves)  # 6 gradients of last use go home
        _add(sums, output)
    means = _agree(state, window, sums)  # 7 nothing is updated if any rank saw a non-finite value
    if window.weight > 0:
        state.dense.sync()  # 8 dense gradients agree on every rank
        _clip(state, window, rates.clip)
        state.dense.update(rates.dense)  # 9 one dense step, and one step per touched row
        window.update(rates.rows)
    state.num_steps += 1
    return means


def _add(sums: dict[str, float], output: Output) -> None:
    for name, value in {"loss": output.loss_sum, **output.logs}.items():
        sums[name] = sums.get(name, 0.0) + value.item()


def _agree(state: TrainState, window: Window, sums: dict[str, float]) -> dict[str, float]:
    """Means of the logged sums over all ranks; raises TrainError on every rank if any saw a non-finite value."""
    gathered = state.control.all_gather_floats(
        [*_not_finite(state, window, sums["loss"]), *sums.values()], name="flags"
    )
    for rank, (code, seen, *_) in enumerate(gathered):
        if code:
            kinds = ["loss", "dense gradient", *(f"gradient of table '{table}'" for table in state.embedding.tables)]
            where = f"at step {state.num_steps + 1} on rank {rank}"
            raise TrainError(f"{kinds[int(code) - 1]} is {seen} {where}; no parameter was updated.")
    totals = [sum(column) for column in zip(*(values[2:] for values in gathered), strict=True)]  # in rank order
    return {name: total / window.weight for name, total in zip(sums, totals, strict=True)} if window.weight else {}


def _not_finite(state: TrainState, window: Window, loss: float) -> tuple[float, float]:
    """Which of loss, dense gradients and row gradients as sent is too large to be summed over all ranks: a code, a value."""
    limit = torch.finfo(state.dense.grads.dtype).max / state.control.world.size
    for code, values in enumerate([torch.tensor([loss]), state.dense.grads, *window.sent_grads().values()], start=1):
        largest = values.abs().max().item() if values.numel() else 0.0  # nan if there is one
        if not largest <= limit:
            return code, largest
    return 0, 0.0


def _clip(state: TrainState, window: Window, clip: Clip) -> None:
    """Scales the gradients down to the norm: squares in fp64, rows by ascending id, owners in rank order."""
    if not clip.norm:
        return
    grads = {**window.owned_grads()} if clip.rows else {}
    own = 0.0
    for rows in grads.values():
        own += rows.double().square().sum(1).sum().item()
    square = state.dense.grads.double().square().sum().item()
    square += sum(value for (value,) in state.control.all_gather_floats([own], name="norm"))
    norm = square**0.5
    if norm > clip.norm:
        for values in (state.dense.grads, *grads.values()):
            values.mul_(clip.norm / norm)
