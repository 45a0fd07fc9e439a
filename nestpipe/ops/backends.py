"""Which code runs the attention op, and why.

Each backend says what it can run; `choose` takes the fastest that can. The table below is also what docs/how-to/devices.md shows.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from nestpipe.ops.kernel_args import Gradients, KernelInputs
from nestpipe.ops.native_library import Native, load

log = logging.getLogger("nestpipe")

Standing = Literal["tested here", "written, not run", "absent"]


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

    def forward(self, inputs: KernelInputs) -> tuple[Tensor, Tensor]:
        """The output [Q, channels, H, V], and what backward wants to have kept."""
        ...

    def backward(self, inputs: KernelInputs, grad: Tensor, out: Tensor, kept: Tensor) -> Gradients: ...


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend: what it is, where it runs, and how far that was tried."""

    about: str
    cpu: Standing
    cuda: Standing
    npu: Standing


TABLE: dict[str, BackendEntry] = {
    "reference": BackendEntry(
        "padded matrices and autograd: the oracle", "tested here", "written, not run", "written, not run"
    ),
    "blocks": BackendEntry(
        "plain PyTorch, groups of similar length", "tested here", "written, not run", "written, not run"
    ),
    "native": BackendEntry("C++, fp32; bits independent of batch and threads", "tested here", "absent", "absent"),
    "triton": BackendEntry("fused kernels: silu, add mode, tables", "tested here", "written, not run", "absent"),
}
"""Fastest last, per device. On the CPU, triton means its interpreter, which tests use and training never does."""


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a call needs of a backend."""

    device: str
    dtype: torch.dtype
    kind: str
    mode: str
    decay: bool


def module(name: str) -> Backend:
    if name not in TABLE:
        raise ValueError(f"unknown attention backend '{name}'; there are {', '.join(TABLE)}.")
    found: Any = importlib.import_module(f"nestpipe.ops.attention_{name}")
    backend: Backend = found
    return backend


def choose(wish: BackendRequest) -> str:
    """The fastest backend that can do it; the log says once which and why."""
    backend, reason = decide(wish)
    _say(backend, reason)
    return backend


@cache
def decide(wish: BackendRequest) -> tuple[str, str]:
    """The backend and the reason, for people."""
    if wish.device != "cpu":
        problem = _triton_problem(wish)
        return ("blocks", problem) if problem else ("triton", "a GPU")
    if wish.dtype != torch.float32:
        return "blocks", f"the native kernel computes in float32, not {str(wish.dtype).removeprefix('torch.')}"
    if isinstance(found := load(), Native):
        return "native", "float32 on the CPU"
    return "blocks", f"{found}; 'nestpipe doctor' explains. Expect about 4x slower"


def _triton_problem(wish: BackendRequest) -> str | None:
    if wish.device != "cuda":
        return f"there is no kernel of our own for {wish.device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if (wish.kind, wish.mode, wish.decay, wish.dtype) != ("silu", "add", False, torch.float32):
        return "the triton kernel knows silu with added tables in float32 only"
    return None


@cache
def _say(backend: str, reason: str) -> None:
    log.info("attention backend: %s (%s)", backend, reason)
