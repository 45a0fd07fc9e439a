"""Attention kernels compiled for GPUs that are not here: no spills, shared memory within limits, no atomics."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
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
WIDTHS = (16, 25, 32, 50, 64, 128, 256)
SPILLED_AT_256 = {"key_grads": 32}
"""Kernel -> bytes that it may spill at width 256: in bfloat16 on sm_90."""
REPRESENTATIVES = (
    ("forward", "HSTU", "float32", 64, "sm_80"),
    ("forward", "everything", "bfloat16", 64, "gfx942"),
    ("bias_channels", "FuXi", "float32", 128, "sm_90"),
    ("bias_channels", "FuXi with decay", "float32", 64, "gfx942"),
    ("query_grads", "FuXi", "float32", 32, "sm_80"),
    ("query_grads", "everything", "float32", 50, "gfx942"),
    ("key_grads", "decoder", "float32", 50, "sm_90"),
    ("key_grads", "SASRec", "float32", 128, "gfx942"),
    ("value_grads", "SASRec", "bfloat16", 64, "sm_80"),
    ("value_grads", "HSTU", "bfloat16", 64, "gfx942"),
    ("bias_grads", "everything", "float32", 50, "sm_90"),
    ("bias_grads", "FuXi with decay", "bfloat16", 64, "gfx942"),
)
"""Those of query_grads, key_grads and bias_grads on sm_80 and sm_90 spilled with other launch options."""
KERNELS = tuple(dict.fromkeys(kernel for kernel, *_ in REPRESENTATIVES))


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


def problems(kernel: str, mode: str, dtype: str, width: int, target: str) -> list[str]:
    report = compiled(kernel, mode, dtype, width, target)
    allowed = SPILLED_AT_256.get(kernel, 0) if width > 128 else 0
    found = [
        f"{report.spill_bytes} bytes spilled, {report.registers} registers" if report.spill_bytes > allowed else "",
        f"{report.shared_bytes} bytes of shared memory" if report.shared_bytes > MAX_SHARED_BYTES else "",
        "atomics" if re.search(r"\b(atom|red)\.|(global|flat|buffer)_atomic", report.assembly) else "",
    ]
    return [f"{kernel}, {mode}, {dtype}, width {width}, {target}: {problem}" for problem in found if problem]


def cells(kernel: str) -> Iterator[tuple[str, str, str, int, str]]:
    """What is launched of a kernel: every mode, type, width and target."""
    for mode, of in MODES.items():
        has_bias = {"position", "query_times"} - of.absent
        if (kernel == "bias_channels" and of.mode == "add") or (kernel == "bias_grads" and not has_bias):
            continue
        yield from itertools.product((kernel,), (mode,), DTYPES, WIDTHS, TARGETS)


@pytest.mark.parametrize("case", REPRESENTATIVES, ids=lambda case: f"{case[0]} {case[-1]}")
def test_a_representative_of_each_kernel_is_within_its_budget(case: tuple[str, str, str, int, str]) -> None:
    assert not problems(*case)


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_kernels_modes_and_widths_are_within_their_budgets(kernel: str, scale: Callable[[int, int], int]) -> None:
    """With --soak only: up to three minutes of CPU for each kernel. All cells that fail are listed."""
    every = itertools.islice(cells(kernel), scale(0, 10**6))
    assert not list(itertools.chain.from_iterable(problems(*cell) for cell in every))


def test_the_cells_are_those_that_the_page_counts() -> None:
    from nestpipe.ops.attention_triton import LAUNCH

    assert {kernel for kernel, _ in LAUNCH} == set(KERNELS)
    count = sum(1 for kernel in KERNELS for _ in cells(kernel))
    page = Path(__file__).resolve().parents[2] / "docs/concepts/kernels.md"
    assert f"{count:,} combinations" in " ".join(page.read_text().split())
