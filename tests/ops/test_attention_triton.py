"""The Triton kernels in Triton's interpreter, which must be chosen before Triton is imported: a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ("mixed", "empty", "targets", "prefix and targets")
CODE = """
import torch
from tests.ops.attention_cases import SHAPES, Shape, make
from tests.ops.test_attention_parity import assert_equal_to_reference

for name in {names}:
    for bias in ("none", "position+time", "time") if name == "mixed" else ("position+time",):
        assert_equal_to_reference(make(SHAPES[name], bias), "triton", "silu", dtype=torch.float32, tolerance=3e-6)
assert_equal_to_reference(make(SHAPES["mixed"], times=False), "triton", "silu", dtype=torch.float32, tolerance=3e-6)
"""


def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(names=SHAPES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
