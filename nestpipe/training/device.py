"""The device of a run: `--train.device` as torch knows it, and arithmetic on it that repeats bitwise."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nestpipe.distributed.process_group import backend_of
from nestpipe.errors import ConfigError
from nestpipe.generative.config import AlignedConfig
from nestpipe.ops.named_device import named_device
from nestpipe.ops.precision import bf16_problem, has_fast_bf16

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""`--train.precision`: the type of matrix products."""
log = logging.getLogger("nestpipe")


def check_precision(name: str, device: torch.device, model: object = None) -> None:
    """Raises ConfigError for a precision that a device, or the model of a config, cannot train in; logs what runs in it."""
    if name == "fp32":
        return
    if isinstance(model, AlignedConfig):
        raise ConfigError(
            "train.precision is 'bf16', but an aligned run compares probabilities with those that its reference computed in "
            "fp32: the difference of the two precisions would count as a change of the policy. Use --train.precision fp32."
        )
    if problem := bf16_problem(device):
        raise ConfigError(f"train.precision is 'bf16', but {problem}; use --train.precision fp32.")
    log.info(
        "matrix products of the dense part: bf16; weights, rows, losses, sums and optimizers: fp32%s",
        "" if has_fast_bf16(device) else ". This CPU has no instructions for bf16: it is slower than fp32",
    )


def resolve_device(name: str, *, flag: str = "--train.device") -> torch.device:
    """The device of this rank: `auto` is the accelerator if there is one, else the CPU. Raises ConfigError.

    An accelerator without an index is that of the rank on its machine (LOCAL_RANK). `flag` is where the name
    was given.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if found is None or backend_of(found) is None else found.type
    device = named_device(name, flag=flag)
    if device.type == "cpu":
        return device
    if backend_of(device) is None:
        raise ConfigError(f"{flag} is {name!r}, for which torch has no communication library; use cuda, npu or cpu.")
    index, count = _index(device), torch.accelerator.device_count()
    if index >= count:
        raise ConfigError(
            f"this rank would use {device.type}:{index} (LOCAL_RANK {os.environ.get('LOCAL_RANK', '0')}), but the machine has "
            f"{count}; start at most {count} ranks here (torchrun --nproc-per-node {count})."
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


@contextmanager
def exact_device(device: torch.device) -> Iterator[None]:
    """Settings of a device with which results repeat bitwise; restores the previous ones."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the library starts
    backends: Any = torch.backends
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = backends.cudnn.benchmark = False
    try:
        yield
    finally:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark = before


def _index(device: torch.device) -> int:
    return int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
