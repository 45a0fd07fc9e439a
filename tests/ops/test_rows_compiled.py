"""Row kernels compiled for GPUs: no spills, few registers, and no operation that rounds differently from C++."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.ops.aot import MAX_SHARED_BYTES, TARGETS, CompiledReport, compile_kernel

Scale = Callable[[int, int], int]
WIDTHS = (1, 3, 8, 64, 100, 128, 200, 512)
FLOATS = (
    *("source", "target", "base", "weights", "sums", "grads", "mean", "square", "corrections", "settled", "recent"),
    *("late", "rates", "keeps", "powers", "out"),
)
SIGNATURE = {
    **dict.fromkeys(FLOATS, "*fp32"),
    **dict.fromkeys(("source_rows", "target_rows", "slots", "starts", "offsets"), "*i64"),
    **dict.fromkeys(("steps", "num_batches"), "*i32"),
    **dict.fromkeys(("n", "step", "num_settled", "horizon", "first_series", "num_corrections"), "i32"),
    **dict.fromkeys(("lr", "keep", "eps", "beta1", "rest1", "beta2", "rest2", "short_square"), "fp32"),
}
WIDE_SPILL_BYTES = 16  # of rows wider than a block of columns: ptxas spills an address to keep 1,152 threads resident
MOST = {"FROM": "offsets", "TO": "slots", "ADDS": True, "ARRIVED": True, "DECAYS": True}  # what needs most registers
REPRESENTATIVES = (
    ("sum_kernel", 64, "sm_80"),
    ("rowwise_adagrad_kernel", 100, "sm_90"),
    ("lazy_adam_kernel", 128, "gfx942"),
    ("adam_kernel", 64, "sm_90"),
)


def compiled(name: str, width: int, target: str, num_elements: int = 0, **more: Any) -> CompiledReport:
    """A kernel as it is launched for a width, or with a tile of another size."""
    from nestpipe.embedding.triton_rows import tile
    from nestpipe.ops import adam_triton, rows_triton

    kernel = getattr(adam_triton if "adam" in name else rows_triton, name)
    options = tile(name, width, num_elements).launch()
    constants = {**MOST, "D": width, "ALIGNED": width % 4 == 0, **options}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    options = {key: value for key, value in options.items() if key not in constants}
    return compile_kernel(kernel, SIGNATURE, constants, target, {**options, **more})


def fits(report: CompiledReport, width: int, target: str) -> bool:
    from nestpipe.embedding.triton_rows import MAX_COLUMNS, MAX_REGISTERS

    spills = report.spill_bytes > (WIDE_SPILL_BYTES if width > MAX_COLUMNS else 0)
    return not spills and (target == "gfx942" or report.registers <= MAX_REGISTERS)


def test_kernels_are_within_their_budgets(scale: Scale) -> None:
    """One of each kind; with --soak all kernels, widths and targets."""
    from nestpipe.embedding.triton_rows import ELEMENTS

    every = itertools.product(ELEMENTS, WIDTHS, TARGETS)
    for name, width, target in itertools.islice([*REPRESENTATIVES, *every], scale(len(REPRESENTATIVES), 1000)):
        report = compiled(name, width, target)
        said = f"{name} {width} {target}: {report.spill_bytes} bytes spilled, {report.registers} registers"
        assert fits(report, width, target), said
        assert report.shared_bytes <= MAX_SHARED_BYTES
        if target != "gfx942":
            assert not report.inexact_operations()


def test_tiles_are_the_largest_within_the_budgets(scale: Scale) -> None:
    """Compiles larger tiles with --soak only."""
    from nestpipe.embedding.triton_rows import ELEMENTS, MAX_COLUMNS, MAX_ELEMENTS, NARROW, NARROW_ELEMENTS, tile

    for number, (name, sizes) in enumerate(ELEMENTS.items()):
        for is_wide, size in enumerate(sizes):
            widths = [width for width in WIDTHS if (width > MAX_COLUMNS) == is_wide]
            tiles = {one: tile(name, one) for one in widths}
            for width, own in tiles.items():
                assert own.rows * own.columns == (NARROW_ELEMENTS if width <= NARROW else size)
            if size < MAX_ELEMENTS and number < scale(0, 100):
                larger = itertools.product(widths, ("sm_80", "sm_90"))
                fit = all(fits(compiled(name, one, target, 2 * size), one, target) for one, target in larger)
                assert not fit, f"{name} fits {2 * size} numbers too"


def test_inexact_operations_are_found_in_assembly() -> None:
    text = "mul.f32 %f1;\n fma.rn.f32 %f2;\n div.rn.f32 %f3;\n div.full.f32 %f4; sqrt.approx.f32 %f5; add.ftz.f32 %f6;"
    found = CompiledReport(0, 0, 0, text).inexact_operations()
    assert found == ["add.ftz.f32", "div.full.f32", "fma.rn.f32", "sqrt.approx.f32"]
