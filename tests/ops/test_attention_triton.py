"""The Triton kernels of attention in Triton's interpreter, which must be chosen before Triton is imported: processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nestpipe.ops.attention import jagged_attention
from tests.ops.attention_cases import Shape, make

ROOT = Path(__file__).resolve().parents[2]


def interpreted(which: str) -> dict[str, object]:
    """What `tests.ops.interpreted_attention` prints: name of a check -> its error or None."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.interpreted_attention", which],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000 if which == "shapes" else 280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    """Every kind, mode and bias, forward and backward, float32 and bfloat16; twice the same bits."""
    found = interpreted("modes")
    kernels = ["bias_channels", "bias_grads", "forward", "key_grads", "query_grads", "sum_groups", "value_grads"]
    assert found.pop("launched") == kernels
    assert len(found) == 43
    assert not [f"{name}: {error}" for name, error in found.items() if error]


def test_all_shapes_equal_the_reference(scale: Callable[[int, int], int]) -> None:
    """With --soak only: with the launch options of the table, in minutes."""
    found = interpreted("shapes") if scale(0, 1) else {}
    assert len(found) == scale(0, 81)
    assert not [f"{name}: {error}" for name, error in found.items() if error and name != "launched"]


def test_kernels_with_an_error_do_not_equal_it() -> None:
    found = interpreted("mutants")
    found.pop("launched")
    assert len(found) == 15
    assert not [f"{name}: {error}" for name, error in found.items() if error]


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (Shape((3,), qk=257), torch.float32, "a head has 257 values; supported are 256"),
        (Shape((3,)), torch.float64, "q, k and v are torch.float64; supported are float32 and bfloat16"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(shape: Shape, dtype: torch.dtype, message: str) -> None:
    case = make(shape).to(dtype)
    with pytest.raises(ValueError, match=message):
        jagged_attention(case.q, case.k, case.v, case.layout, kind="silu", backend="triton")
