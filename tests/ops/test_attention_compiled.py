"""Attention kernels compiled for GPUs that are not here: no spills, shared memory within limits, no atomics."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.ops.aot import MAX_SHARED_BYTES, TARGETS, CompiledReport, compile_kernel

DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
TYPES = {
    **dict.fromkeys(("query_offsets", "key_offsets", "num_targets", "query_times", "key_times", "boundaries"), "*i64"),
    **dict.fromkeys(("saved", "row_dots", "position", "time", "decay", "d_position", "d_time", "d_decay"), "*fp32"),
    **dict.fromkeys(("blocks", "starts"), "*i32"),
    **dict.fromkeys(("heads", "channels", "num_position", "num_buckets"), "i32"),
    **dict.fromkeys(("scale", "inverse_norm"), "fp32"),
}
NO_TIMES = {"query_times", "key_times", "time", "decay"}


class CompiledMode(NamedTuple):
    """A combination of kind, mode and biases that a model reaches."""

    kind: str
    mode: str
    absent: frozenset[str] = frozenset()


MODES = {
    "HSTU": CompiledMode("silu", "add", frozenset({"decay"})),
    "HSTU without times": CompiledMode("silu", "add", frozenset(NO_TIMES)),
    "FuXi": CompiledMode("silu", "channel", frozenset({"decay"})),
    "FuXi with decay": CompiledMode("silu", "channel", frozenset({"time"})),
    "SASRec": CompiledMode("softmax", "add", frozenset(NO_TIMES | {"position"})),
    "decoder": CompiledMode("softmax", "add", frozenset(NO_TIMES)),
    "everything": CompiledMode("softmax", "add"),
}
SPILLED_AT_256 = {"key_grads": 32}
"""Kernel -> bytes that it may spill at width 256: in bfloat16 on sm_90."""
REPRESENTATIVES = (
    ("forward", "HSTU", "float32", 64, "sm_80"),
    ("bias_channels", "FuXi with decay", "float32", 64, "gfx942"),
    ("query_grads", "SASRec", "bfloat16", 64, "sm_90"),
    ("key_grads", "SASRec", "float32", 128, "gfx942"),
    ("value_grads", "SASRec", "bfloat16", 64, "sm_80"),
    ("bias_grads", "FuXi with decay", "float32", 64, "sm_90"),
)


def compiled(kernel_name: str, mode_name: str, dtype: str, width: int, target: str) -> CompiledReport:
    """A kernel as it is launched for heads of a width; rows are a sixth of a product's, as in FuXi."""
    import torch

    from nestpipe.ops import attention_bias_kernels, attention_kernels
    from nestpipe.ops.attention_triton import LAUNCH, padded_width

    kernel: Any = getattr(attention_bias_kernels if kernel_name == "bias_grads" else attention_kernels, kernel_name)
    mode, padded = MODES[mode_name], padded_width(width)
    options = LAUNCH[kernel_name, getattr(torch, dtype)][padded]
    constants: dict[str, Any] = {
        **{"SOFTMAX": mode.kind == "softmax", "CHANNEL": mode.mode == "channel", "D": padded, "V": padded, "T": 256},
        **{"B": options.block, "CHUNK": min(options.chunk, padded), "qk_width": width, "v_width": width},
        **dict.fromkeys(("q_stride", "k_stride", "v_stride"), 6 * width),
        **dict.fromkeys(mode.absent),
        **({} if mode.kind == "softmax" else dict.fromkeys(("saved", "row_dots"))),
        **{f"d_{name}": None for name in mode.absent & {"position", "time", "decay"}},
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {**dict.fromkeys(kernel.arg_names, f"*{DTYPES[dtype]}"), **TYPES}
    return compile_kernel(kernel, signature, constants, target, options.for_target(is_nvidia=target != "gfx942"))


def check(kernel: str, mode: str, dtype: str, width: int, target: str) -> None:
    report = compiled(kernel, mode, dtype, width, target)
    where = f"{kernel}, {mode}, {dtype}, width {width}, {target}"
    allowed = SPILLED_AT_256.get(kernel, 0) if width > 128 else 0
    assert report.spill_bytes <= allowed, f"{where}: {report.spill_bytes} bytes spilled, {report.registers} registers"
    assert report.shared_bytes <= MAX_SHARED_BYTES, f"{where}: {report.shared_bytes} bytes of shared memory"
    assert not re.search(r"\b(atom|red)\.|(global|flat|buffer)_atomic", report.assembly), f"{where}: atomics"


@pytest.mark.parametrize("case", REPRESENTATIVES, ids=lambda case: f"{case[0]} {case[-1]}")
def test_a_representative_of_each_kernel_is_within_its_budget(case: tuple[str, str, str, int, str]) -> None:
    check(*case)


def test_all_kernels_modes_and_widths_are_within_their_budgets(scale: Callable[[int, int], int]) -> None:
    """With --soak only: hours."""
    from nestpipe.ops.attention_triton import LAUNCH

    kernels = sorted({kernel for kernel, _ in LAUNCH})
    every = itertools.product(kernels, MODES, DTYPES, (16, 25, 32, 50, 64, 128, 256), TARGETS)
    for kernel, mode, *rest in itertools.islice(every, scale(0, 10**6)):
        of = MODES[mode]
        has_bias = {"position", "query_times"} - of.absent
        if (kernel == "bias_channels" and of.mode == "add") or (kernel == "bias_grads" and not has_bias):
            continue  # not launched
        check(kernel, mode, *rest)
