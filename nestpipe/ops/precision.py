"""Mixed precision: matrix products of the dense part in bf16, everything else in fp32.

    with mixed_precision(device, torch.bfloat16):       # torch's autocast: products take and give bf16
        hidden = backbone(vectors, batch)               # fp32 weights and rows stay as they are
        with full_precision(device):                    # losses
            loss = softmax(widened(hidden), ...)

Attention takes bf16 only where its backend accumulates in fp32 (backends.py); others get fp32 inputs. Backward follows the
forward: the gradient of a product is a product of the same type, and gradients of weights and rows arrive in fp32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nestpipe.errors import TrainError

_HALF = (torch.bfloat16, torch.float16)


def mixed_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """A context in which matrix products are computed in `dtype`; without effect for fp32.

    Without a cache of converted weights: two uses of a weight would then add their gradients in bf16.
    """
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """A context without mixed precision, for losses and for kernels that convert their inputs themselves."""
    if not is_mixed(device):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def is_mixed(device: torch.device) -> bool:
    """Whether this thread computes products in mixed precision."""
    return bool(torch.amp.is_autocast_available(device.type)) and bool(torch.is_autocast_enabled(device.type))


def widened(tensor: Tensor) -> Tensor:
    """A 16-bit tensor as fp32; others unchanged."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def check_sum(loss_sum: Tensor, model: str) -> None:
    """Raises TrainError for a loss that was summed in 16 bits."""
    if loss_sum.dtype in _HALF:
        raise TrainError(
            f"the loss of {model} is a sum in {str(loss_sum.dtype).removeprefix('torch.')}, which keeps two or three digits. "
            "With --train.precision bf16 a model converts its scores before the loss: scores.float()."
        )


def bf16_problem(device: torch.device) -> str | None:
    """Why a device cannot compute in bf16, or None."""
    if not torch.amp.is_autocast_available(device.type):
        return f"torch has no mixed precision for {device.type}"
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if (offered := getattr(module, "get_amp_supported_dtype", None)) and torch.bfloat16 not in offered():
        return f"{device.type} computes mixed precision in {', '.join(map(str, offered()))} only"
    if (asked := getattr(module, "is_bf16_supported", None)) and not asked(
        **({"including_emulation": False} if device.type == "cuda" else {})
    ):
        return f"this {device.type} device has no bf16"
    return None


def has_fast_bf16(device: torch.device) -> bool:
    """Whether products in bf16 are faster than in fp32: on CPUs only with instructions for it."""
    if device.type != "cpu":
        return True
    cpu: Any = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())
