"""Rows of exact Adam as of the step of their checkpoint, which stores them as of their last update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.checkpoint.manifest import ADAM, RATES
from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_adam import SEEN, Adam
from nestpipe.embedding.row_optimizer import gather_slots

_STATE = "state."
_CONSTANTS = ("beta1", "beta2", "eps", "weight_decay")


def adam_constants(config: OptimizerConfig) -> Tensor:
    """The constants with which rows catch up, as a checkpoint stores them."""
    return torch.tensor([getattr(config, name) for name in _CONSTANTS], dtype=torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class CurrentRows:
    """Makes the steps that stored rows have missed."""

    optimizer: Adam
    rates: Tensor  # of all batches, with those of the run's origin
    num_batches: int

    @staticmethod
    def of(dense: Mapping[str, Tensor], table: str, num_batches: int) -> CurrentRows:
        """From the dense part of a checkpoint."""
        constants = dict(zip(_CONSTANTS, dense[ADAM + table].tolist(), strict=True))
        optimizer, rates = Adam(OptimizerConfig(optimizer="adam", **constants)), dense[RATES + table]
        for dtype in (torch.float32, torch.float64):
            optimizer.steps(dtype).load(rates, num_batches)
        return CurrentRows(optimizer, rates, num_batches)

    def weights(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The weights [n, D] of stored rows with their state."""
        weights = rows["rows"]
        state = {name.removeprefix(_STATE): one.contiguous() for name, one in rows.items() if name.startswith(_STATE)}
        places = torch.arange(len(weights))
        return gather_slots(self.optimizer, weights.contiguous(), state, places, batch=self.num_batches)

    def rows(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights and state as of the checkpoint's step."""
        weights = self.weights(rows)
        missed = self.optimizer.missed(self.num_batches, weights.dtype)
        powers = missed.powers.index_select(0, missed.step - rows[_STATE + SEEN].flatten().long())
        return {
            "rows": weights,
            f"{_STATE}mean": rows[f"{_STATE}mean"] * powers[:, :1],
            f"{_STATE}square": rows[f"{_STATE}square"] * powers[:, 1:],
            _STATE + SEEN: torch.full_like(rows[_STATE + SEEN], missed.step),
        }
