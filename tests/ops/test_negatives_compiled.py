"""The kernels of negatives compiled for GPUs: no spills, no atomics, tiles as large as the registers allow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest.mock import patch

from tests.ops.aot import MAX_SHARED_BYTES, TARGETS, CompiledReport, compile_kernel

MAX_REGISTERS = 80  # as of row kernels
WIDTHS = (8, 64, 100, 128, 200, 512)
REPRESENTATIVES = (("score_kernel", 128, "sm_80", "*bf16"), ("spread_kernel", 64, "gfx942", "*fp32"))


def compiled(name: str, width: int, target: str, dtype: str) -> CompiledReport:
    from nestpipe.ops import negatives_triton

    places = dict.fromkeys(("positives", "numbers", "order", "starts"), "*i64")
    sums = ("scores", "largest", "totals", "coefficients", "losses", "weights", "d_rows", "d_queries")
    signature = {
        **dict.fromkeys(("queries", "rows", "positive_rows"), dtype),
        **dict.fromkeys(sums, "*fp32"),
        **places,
        **dict.fromkeys(("num", "width", "num_rows"), "i32"),
    }
    score, spread = negatives_triton.score_constants, negatives_triton.spread_constants
    constants = score(width) if name == "score_kernel" else {"ARE_SCORES": True, **spread(width)}
    return compile_kernel(getattr(negatives_triton, name), signature, constants, target, negatives_triton.OPTIONS)


def fits(report: CompiledReport, target: str) -> bool:
    return report.spill_bytes == 0 and (target == "gfx942" or report.registers <= MAX_REGISTERS)


def test_kernels_are_within_their_budgets(scale: Callable[[int, int], int]) -> None:
    """One of each; with --soak all widths, types and targets, and tiles of twice the size, which do not fit."""
    names = ("score_kernel", "spread_kernel")
    every = itertools.product(names, WIDTHS, TARGETS, ("*fp32", "*bf16"))
    for name, width, target, dtype in itertools.islice([*REPRESENTATIVES, *every], scale(len(REPRESENTATIVES), 1000)):
        report = compiled(name, width, target, dtype)
        assert fits(report, target), (
            f"{name} {width} {target}: {report.spill_bytes} bytes, {report.registers} registers"
        )
        assert report.shared_bytes <= MAX_SHARED_BYTES
        assert "atom" not in report.assembly
    for name, size in list(zip(names, ("TILE", "SPREAD_TILE"), strict=True))[: scale(0, 2)]:
        with patch(f"nestpipe.ops.negatives_triton.{size}", {"TILE": 4096, "SPREAD_TILE": 1024}[size]):
            assert not all(fits(compiled(name, one, "sm_80", "*fp32"), "sm_80") for one in WIDTHS)
