"""Dense parameters as one flat buffer with a fixed layout, and their optimizer, sharded over ranks.

Parameters are views of `weights` and their gradients views of `grads`, in the order of
`named_parameters`. Consecutive layers form a bucket; the layout is a function of the model alone.

    backward of the last micro-batch    ...  layer 3 ── layer 2 ── layer 1
    bucket 0 (layer 3)                            └ reduce-scatter ─ own piece updated ─ all-gather
    bucket 1 (layer 2)                                       └ reduce-scatter ─ ...

- Each rank sums its piece of a bucket in rank order, so the sum is the same in every run. (DDP
  regroups its buckets after the first step, which changes the order of sums.)
- Each rank keeps the optimizer state of its pieces only. Updates are elementwise, so pieces change
  no bit. Row-wise AdaGrad averages over all weights: ranks then gather the sums and update all.
- Local gradients are only read: sums are in buffers of their own. So the finite flag, taken after
  the backward, cannot see a sum that holds another rank's value.
- During a backward the new weights and state are staged, and `commit` takes them over when all
  ranks' flags are known. Without a backward to hide behind they are written in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.distributed.process_group import Channel, Handle
from nestpipe.embedding.config import DenseConfig
from nestpipe.embedding.row_adam import State
from nestpipe.embedding.row_optimizer import OPTIMIZERS, update_slots
from nestpipe.errors import TrainError
from nestpipe.ops.device_memory import download, used_here

_MAX_BUCKETS = 16
_MIN_BUCKET_BYTES = 1 << 18  # 2 ms at 1 Gbit/s; smaller messages cost more to launch than they hide


@dataclass(slots=True, eq=False)
class DenseBucket:
    """Parameters that are sent at once."""

    names: list[str]
    span: slice  # of the flat buffers
    state: State  # of this rank's piece, as are the others
    staged: State = field(default_factory=dict)
    total: Tensor | None = None  # sum over ranks
    received: tuple[Handle, list[Tensor]] | None = None  # reduce-scatter in flight


class DenseParams:
    """Owns the memory of a module's parameters and gradients."""

    def __init__(self, module: nn.Module, config: DenseConfig, channel: Channel):
        self.channel = channel
        self._module = module
        _move(module, channel.device)
        self._named = dict(module.named_parameters())
        saved = module.state_dict().keys()
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
        parameters = list(self._named.values())
        self.weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.grads = torch.zeros_like(self.weights)
        self._staged: Tensor | None = None
        self._gathers: list[Handle] = []
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, weight, grad in zip(parameters, self.weights.split(sizes), self.grads.split(sizes), strict=True):
            parameter.data = weight.view_as(parameter)
            parameter.grad = grad.view_as(parameter)
        # One row that has a gradient in every step: it needs no catching up.
        self._optimizer = OPTIMIZERS["lazy_adam" if config.optimizer == "adam" else config.optimizer](config)
        self._is_sharded = config.optimizer != "rowwise_adagrad"
        self._state = {} if self._is_sharded else self._new_state(self.weights)  # of all weights
        self.buckets = [
            DenseBucket(names, span, self._new_state(self._own(self.weights, span)) if self._is_sharded else {})
            for names, span in _layout(self._named)
        ]
        self._pending: list[set[str]] = []  # parameters of each bucket whose gradient is not final
        self._on_ready: Callable[[int], None] | None = None
        for number, bucket in enumerate(self.buckets):
            for name in bucket.names:
                if self._named[name].requires_grad:  # others stay pending, so their bucket is ready at the end
                    self._named[name].register_post_accumulate_grad_hook(partial(self._mark, number, name))

    @contextmanager
    def last_backward(self, on_ready: Callable[[int], None]) -> Iterator[None]:
        """A context around the backward that completes the gradients: calls `on_ready` for each bucket, once."""
        self._pending, self._on_ready = [set(bucket.names) for bucket in self.buckets], on_ready
        try:
            yield
        finally:
            self._on_ready = None
        for number, pending in enumerate(self._pending):  # hooks of unused parameters do not fire
            if pending:
                on_ready(number)

    def _mark(self, number: int, name: str, parameter: Tensor) -> None:
        """Called in the autograd thread when the gradient of a parameter is complete. It only marks."""
        if self._on_ready is None:
            return
        if name not in self._pending[number]:
            raise TrainError(
                f"parameter '{name}' got two gradients in one backward; its bucket may have been sent after the first. "
                "Reentrant checkpointing does that: use torch.utils.checkpoint with use_reentrant=False."
            )
        self._pending[number].remove(name)
        if not self._pending[number]:
            self._on_ready(number)

    def reduce(self, ready: Callable[[int], None], on_sum: Callable[[DenseBucket], None], *, where: str = "") -> None:
        """Reduce-scatters all buckets in order: waits until each is `ready`, calls `on_sum` with each sum. Collective."""
        before = None
        for number, bucket in enumerate(self.buckets):
            ready(number)
            pieces = self.grads[bucket.span].tensor_split(self.channel.world.size)
            received = [torch.empty_like(pieces[self.channel.world.rank]) for _ in pieces]
            bucket.received = self.channel.exchange("sum/scatter", pieces, received, where=where), received
            if before:  # one bucket is added up while the next is in flight
                on_sum(self._sum(before))
            before = bucket
        on_sum(self._sum(self.buckets[-1]))

    def _sum(self, bucket: DenseBucket) -> DenseBucket:
        assert bucket.received is not None
        (handle, (bucket.total, *others)), bucket.received = bucket.received, None
        handle.wait()
        for other in others:  # in rank order, not in order of arrival
            bucket.total.add_(other)
        return bucket

    def own_square(self) -> float:
        """Squared norm of this rank's pieces of the sums, in fp64."""
        squares = [_summed(bucket).double().square().sum() for bucket in self.buckets]
        return sum(map(float, download(torch.stack(squares)).tolist()))

    def advance(self, bucket: DenseBucket, lr: float, factor: float = 1.0, *, staged: bool) -> None:
        """Updates this rank's piece with the sum times `factor`, and launches its all-gather. Collective."""
        total, target, state, size = _summed(bucket), self.weights, bucket.state, self.channel.world.size
        used_here(total, *state.values())
        bucket.total = None
        if factor < 1.0:
            total.mul_(factor)
        if staged or not self._is_sharded:
            target = self._staged = torch.empty_like(self.weights) if self._staged is None else self._staged
            self._own(target, bucket.span).copy_(self._own(self.weights, bucket.span) if self._is_sharded else total)
            state = bucket.staged = {name: values.clone() for name, values in bucket.state.items()}
        own = self._own(target, bucket.span)
        if self._is_sharded:
            self._update(own, state, total, lr)
        pieces = target[bucket.span].tensor_split(size)
        self._gathers.append(self.channel.post("sum/gather", pieces, own=False).launch([own] * size))

    def wait_gathers(self) -> None:
        """Blocks until all ranks' pieces have arrived."""
        while self._gathers:
            self._gathers.pop(0).wait()

    def commit(self, lr: float, *, staged: bool) -> None:
        """Takes over what `advance` staged, after `wait_gathers`."""
        if not self._is_sharded and self._staged is not None:  # the sums
            self._update(self.weights, self._state, self._staged, lr)
        elif staged and self._staged is not None:
            self.weights.copy_(self._staged)
            for bucket in self.buckets:
                bucket.state, bucket.staged = bucket.staged or bucket.state, {}

    def zero_grads(self) -> None:
        self.grads.zero_()

    def export(self, *, everywhere: bool = True) -> dict[str, Tensor]:
        """Named weights and saved buffers, and the optimizer's state in the layout of the flat buffer. Collective.

        Not `everywhere`: the state is complete on rank 0 only.
        """
        named = {f"weights.{name}": _copy(one) for name, one in (self._named | self._buffers).items()}
        state = {name: _copy(values) for name, values in self._state.items()}
        for name, first in self.buckets[0].state.items():
            state[name] = self._gather_state(name, everywhere) if self._is_per_weight(name) else _copy(first)
        return {**named, **{f"state.{name}": values for name, values in state.items()}}

    def model_on_host(self) -> Any:
        """The module with its current weights on the host: itself, or a copy if it is on a device."""
        return self._module if self.weights.device.type == "cpu" else copy.deepcopy(self._module).to("cpu")

    def load(self, content: dict[str, Tensor]) -> None:
        """Replaces weights and state by exported ones, of any number of ranks."""
        with torch.no_grad():
            for name, one in (self._named | self._buffers).items():
                one.copy_(content[f"weights.{name}"])
        for name, values in self._state.items():
            values.copy_(content[f"state.{name}"])
        for bucket in self.buckets:
            for name, values in bucket.state.items():
                saved = content[f"state.{name}"]
                values.copy_(self._own(saved[0], bucket.span) if self._is_per_weight(name) else saved)

    def _own(self, flat: Tensor, span: slice) -> Tensor:
        """This rank's piece of a bucket."""
        return flat[span].tensor_split(self.channel.world.size)[self.channel.world.rank]

    def _new_state(self, weights: Tensor) -> State:
        state = self._optimizer.new_state(1, len(weights)).items()
        typed = {name: one.to(weights.dtype) if one.is_floating_point() else one for name, one in state}
        return {name: one.to(weights.device) for name, one in typed.items()}

    def _update(self, weights: Tensor, state: State, grads: Tensor, lr: float) -> None:
        row = torch.zeros(1, dtype=torch.int64)
        if len(weights):
            update_slots(self._optimizer, weights.unsqueeze(0), state, row, grads.unsqueeze(0), lr)

    def _is_per_weight(self, name: str) -> bool:
        return self._optimizer.new_state(1, 2)[name].shape[1] == 2

    def _gather_state(self, name: str, everywhere: bool) -> Tensor:
        world, whole = self.channel.world, torch.empty_like(self.weights)
        takers = range(world.size if everywhere else 1)
        for bucket in self.buckets:
            own, pieces = bucket.state[name][0], whole[bucket.span].tensor_split(world.size)
            receive = [piece if world.rank in takers else piece[:0] for piece in pieces]
            self.channel.exchange(
                "state", [own if one in takers else own[:0] for one in range(world.size)], receive
            ).wait()
        return download(whole).unsqueeze(0)


def _layout(named: Mapping[str, nn.Parameter]) -> list[tuple[list[str], slice]]:
    """Buckets from the last layer to the first: the names of their parameters, of whole modules, and their places."""
    modules = [list(names) for _, names in groupby(named, key=lambda name: name.rpartition(".")[0])]
    least = max(sum(parameter.nbytes for parameter in named.values()) / _MAX_BUCKETS, _MIN_BUCKET_BYTES)
    layout, names, end = list[tuple[list[str], slice]](), list[str](), sum(one.numel() for one in named.values())
    for module in reversed(modules):
        names = module + names
        if sum(named[name].nbytes for name in names) >= least or module is modules[0]:
            start = end - sum(named[name].numel() for name in names)
            layout.append((names, slice(start, end)))
            names, end = [], start
    return layout


def _move(module: nn.Module, device: torch.device) -> None:
    """Moves parameters and saved buffers to a device; they stay the same objects, shared ones too.

    Other buffers, and those of a module with `buffers_on_host`, belong to what a model decides on the host: lookups, selection.
    """
    if device.type == "cpu":
        return
    parts = [part for part in module.modules() if getattr(part, "buffers_on_host", False)]
    kept = {id(one) for part in parts for one in part.buffers(recurse=False)}
    used = (*module.parameters(), *module.state_dict(keep_vars=True).values())
    for one in {id(one): one for one in used if id(one) not in kept}.values():
        moved = one.detach().to(device)
        torch.utils.swap_tensors(
            one, nn.Parameter(moved, one.requires_grad) if isinstance(one, nn.Parameter) else moved
        )


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the host."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else download(tensor)


def _summed(bucket: DenseBucket) -> Tensor:
    if bucket.total is None:
        raise TrainError("a dense update without its sum: the schedule lacks a dependency.")
    return bucket.total
