"""Dense parameters as one flat buffer with a fixed layout, and their optimizer.

Parameters are views of `weights` and their gradients views of `grads`, in the order of
`named_parameters`. So one update, one norm, one finite check and one all-reduce cover all of them.
Gradients are summed in rank order, so the sum is the same on every rank and in every run. (DDP
regroups its buckets after the first step, which changes the order of sums.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nestpipe.distributed.process_group import Channel
from nestpipe.embedding.config import DenseConfig
from nestpipe.embedding.row_optimizer import OPTIMIZERS, update_slots


class DenseParams:
    """Owns the memory of a module's parameters and gradients."""

    def __init__(self, module: nn.Module, config: DenseConfig, channel: Channel):
        self.channel = channel
        self._named = dict(module.named_parameters())
        saved = module.state_dict().keys()
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
        parameters = list(self._named.values())
        self.weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.grads = torch.zeros_like(self.weights)
        # One row that has a gradient in every step: it needs no catching up.
        kind = "lazy_adam" if config.optimizer == "adam" else config.optimizer
        self._optimizer = OPTIMIZERS[kind](config)
        self._state = {
            name: values.to(self.weights.dtype) if values.is_floating_point() else values
            for name, values in self._optimizer.new_state(1, len(self.weights)).items()
        }
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, weight, grad in zip(parameters, self.weights.split(sizes), self.grads.split(sizes), strict=True):
            parameter.data = weight.view_as(parameter)
            parameter.grad = grad.view_as(parameter)

    def sync(self) -> None:
        """Replaces the gradients by their sum over all ranks."""
        self.channel.sum_in_rank_order(self.grads)

    def update(self, lr: float) -> None:
        """One optimizer step with the gradients since `zero_grads`."""
        row = torch.zeros(1, dtype=torch.int64)
        update_slots(self._optimizer, self.weights.unsqueeze(0), self._state, row, self.grads.unsqueeze(0), lr)

    def zero_grads(self) -> None:
        self.grads.zero_()

    def export(self) -> dict[str, Tensor]:
        """Named weights and saved buffers, and the optimizer's state in the layout of the flat buffer."""
        named = {f"weights.{name}": one.detach().clone() for name, one in (self._named | self._buffers).items()}
        return {**named, **{f"state.{name}": values.clone() for name, values in self._state.items()}}

    def load(self, content: dict[str, Tensor]) -> None:
        """Replaces weights and state by exported ones."""
        with torch.no_grad():
            for name, one in (self._named | self._buffers).items():
                one.copy_(content[f"weights.{name}"])
        for name, values in self._state.items():
            values.copy_(content[f"state.{name}"])
