"""A model with small batches of its data, and forward passes that record every submodule call (model_contracts.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.config import Config
from nestpipe.data.loader import Loader
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.row_reader import TableRows, read_rows
from nestpipe.embedding.table import Table
from nestpipe.jagged import Batch, Cursor
from nestpipe.models.build_model import build_model, inputs_of
from nestpipe.models.contract import Model, Output
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.stages import TrainState
from nestpipe.rng import Rng

_FLOAT64 = torch.float64


@dataclass(slots=True, eq=False)
class Calls:
    """The submodule calls of one forward pass, in order."""

    outputs: list[tuple[str, list[Tensor], list[Tensor]]] = field(default_factory=list)  # name, inputs, outputs
    global_draws: list[str] = field(
        default_factory=list
    )  # submodules that advanced a global generator, innermost first
    active: list[str] = field(default_factory=list)  # submodules that have begun and not ended, innermost last


class ModelUnderTest:
    """A model with small batches of its data, and forward passes that record every submodule call."""

    def __init__(self, config: Config, sequences: Sequences):
        self.config, self.sequences = config, sequences
        self.loader = Loader(
            sequences,
            make_split(sequences, config.data),
            config.data,
            seed=config.seed,
            inputs=inputs_of(config, sequences),
        )
        self.name = type(self.new_model()).__name__

    def new_model(self, dtype: torch.dtype = _FLOAT64) -> Any:
        return build_model(self.config, self.sequences, dtype=dtype)

    @cached_property
    def batch(self) -> Batch:
        return self.loader.batch(Cursor(0, 0))

    def batches(self, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Whole batches, or a rank's share of each."""
        for number in range(self.loader.num_batches(0)):
            batch = self.loader.batch(Cursor(0, number))
            edges = [batch.num_samples * edge // world_size for edge in (rank, rank + 1)]
            yield batch.slice(*edges) if world_size > 1 else batch

    def state(
        self, *, micro_batches: int = 1, dtype: torch.dtype = _FLOAT64, channels: Channels | None = None
    ) -> TrainState:
        return build_state(
            self.new_model(dtype),
            pipeline=PipelineConfig(micro_batches=micro_batches),
            seed=self.config.seed,
            channels=channels,
            dtype=dtype,
        )

    def rows_of(self, model: Model, batch: Batch, rng: Rng) -> Mapping[str, Any]:
        """The rows of a batch at their initial values."""
        settings = self.config.embedding
        tables = {
            spec.name: Table(spec, OPTIMIZERS[settings.optimizer](settings), seed=self.config.seed, dtype=_FLOAT64)
            for spec in model.tables
        }
        rows = read_rows(TableRows(tables), model.lookups(batch, rng))
        for unique in {one.lookup.table: one.unique for one in rows.values()}.values():
            unique.requires_grad_()
        return rows

    def forward(self, model: Any, batch: Batch, calls: Calls | None = None) -> Output:
        """One forward pass of step 0; `calls` is filled with its submodule calls."""
        rng = Rng(self.config.seed, 0)
        rows = self.rows_of(model, batch, rng)
        with _recorded(model, calls) if calls is not None else nullcontext():
            output: Output = model(rows, batch, rng)
        return output

    def samples(self) -> list[Batch]:
        """The samples of the batch, or its groups if the loss may mix them, one by one."""
        if self.batch.groups is None:
            return [self.batch.slice(place, place + 1) for place in range(self.batch.num_samples)]
        return [
            self.batch.select((self.batch.groups == group).nonzero().flatten()) for group in self.batch.groups.unique()
        ]


@contextmanager
def _recorded(model: nn.Module, calls: Calls) -> Iterator[None]:
    """Records the calls of all submodules, and which of them advanced a global generator."""
    states: list[Any] = []

    def before(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            states.append(_generators())
            calls.active.append(name)

        return record

    def after(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            calls.active.pop()
            if states.pop() != _generators():
                calls.global_draws.append(name)
            calls.outputs.append((name, _tensors_in(inputs), _tensors_in(output)))

        return record

    handles = [module.register_forward_pre_hook(before(name)) for name, module in model.named_modules()]
    handles += [module.register_forward_hook(after(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generators() -> tuple[bytes, object, bytes]:
    """The states of torch's, Python's and numpy's global generators."""
    state = np.random.get_state(legacy=False)
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), repr(state).encode()


def _tensors_in(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [one.detach().clone() for one in values if isinstance(one, Tensor) and one.is_floating_point()]
