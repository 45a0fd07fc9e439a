"""Backends of the attention op: what exists on which device, and which one a call gets.

`choose` takes the fastest backend that supports the call, and logs it with the reason once. docs/how-to/devices.md
shows `TABLE`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from nestpipe.ops.kernel_args import Gradients, KernelInputs, Layout
from nestpipe.ops.limits import MAX_KERNEL_WIDTH
from nestpipe.ops.native_library import Native, load

log = logging.getLogger("nestpipe")

Standing = Literal["tested here", "written, not run", "absent"]


class Backend(Protocol):
    """The functions of a backend's module."""

    def plan(self, layout: Layout) -> list[Tensor]:
        """Tensors that depend on lengths and times alone; computed once per batch."""
        ...

    def forward(self, inputs: KernelInputs) -> tuple[Tensor, Tensor]:
        """The output [Q, channels, H, V], and what is saved for backward."""
        ...

    def backward(self, inputs: KernelInputs, grad: Tensor, out: Tensor, saved: Tensor) -> Gradients: ...


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend, and how far it was tested on each device."""

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
    "native": BackendEntry("C++, fp32; bitwise independent of batch and threads", "tested here", "absent", "absent"),
    "triton": BackendEntry(
        "fused kernels, fp32 and bf16; no atomics, so equal calls give equal bits",
        "tested here",
        "written, not run",
        "absent",
    ),
}
"""Fastest last, per device. On the CPU, triton is its interpreter, which only tests use."""


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """The properties of a call that decide which backends support it."""

    device: str
    dtype: torch.dtype
    kind: str
    mode: str
    decay: bool
    width: int = 1  # of a head's queries or values, the larger


def module(name: str) -> Backend:
    if name not in TABLE:
        raise ValueError(f"unknown attention backend '{name}'; there are {', '.join(TABLE)}.")
    backend: Any = importlib.import_module(f"nestpipe.ops.attention_{name}")
    return cast(Backend, backend)


def choose(request: BackendRequest) -> str:
    """The fastest backend that supports the call; logged once with the reason."""
    backend, reason = decide(request)
    _log_once(backend, reason)
    return backend


@cache
def decide(request: BackendRequest) -> tuple[str, str]:
    """The backend and the reason."""
    if request.device != "cpu":
        problem = _triton_problem(request)
        return ("blocks", problem) if problem else ("triton", "a GPU")
    if request.dtype != torch.float32:
        return "blocks", f"the native kernel computes in float32, not {str(request.dtype).removeprefix('torch.')}"
    if isinstance(native := load(), Native):
        return "native", "float32 on the CPU"
    return "blocks", f"{native}; 'nestpipe doctor' explains. Expect about 4x slower"


def accumulates_in_fp32(request: BackendRequest) -> bool:
    """Whether the backend of a call with 16-bit inputs sums in fp32; others get fp32 inputs in mixed precision."""
    return decide(request)[0] == "triton"


def _triton_problem(request: BackendRequest) -> str | None:
    if request.device != "cuda":
        return f"nestpipe has no kernel for {request.device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if request.dtype not in (torch.float32, torch.bfloat16):
        return f"the triton kernels take float32 and bfloat16, not {str(request.dtype).removeprefix('torch.')}"
    if request.width > MAX_KERNEL_WIDTH:
        return f"the triton kernels take heads of at most {MAX_KERNEL_WIDTH} values, not {request.width}"
    return None


@cache
def triton_runs(device_type: str) -> bool:
    """Whether row kernels in Triton run on a kind of device: a GPU of NVIDIA or AMD; logged once."""
    if device_type != "cuda":
        return False
    is_installed = importlib.util.find_spec("triton") is not None
    reason = "triton (a GPU)" if is_installed else "torch (triton is not installed). Expect a slower row path"
    log.info("row kernels: %s", reason)
    return is_installed


@cache
def _log_once(backend: str, reason: str) -> None:
    log.info("attention backend: %s (%s)", backend, reason)
