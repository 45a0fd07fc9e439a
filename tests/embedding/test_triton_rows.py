"""Row kernels in Triton's interpreter: bitwise identical to C++, and called wherever rows are on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nestpipe.embedding import row_ops
from nestpipe.ops import backends
from tests.embedding.test_unique_ids import needs_compiler

ROOT = Path(__file__).resolve().parents[2]


@needs_compiler
def test_kernels_have_the_bits_of_native_code_in_the_interpreter() -> None:
    """TRITON_INTERPRET counts when Triton is imported, so the checks are a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.embedding.interpreted_kernels"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == 10
    assert not [f"{name}: {error}" for name, error in found.items() if error]


def test_a_gpu_takes_the_kernels_and_other_devices_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.triton_runs.cache_clear()
    assert [backends.triton_runs(one) for one in ("cuda", "cpu", "npu", "fake")] == [True, False, False, False]
    assert row_ops.triton_for(None, torch.zeros(2, 2)) is None
    monkeypatch.setattr(row_ops, "triton_runs", lambda device_type: device_type == "cpu")
    on_device = row_ops.triton_for(None, torch.zeros(2, 2))
    assert on_device is not None
    assert on_device.__name__ == "nestpipe.embedding.triton_rows"
    assert row_ops.triton_for(None, torch.zeros(2, 4)[:, ::2]) is None  # kernels take dense rows
    assert row_ops.triton_for(False, torch.zeros(2, 2)) is None


def test_without_triton_a_gpu_takes_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backends.triton_runs.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level("INFO", logger="nestpipe"):
        assert not backends.triton_runs("cuda")
    assert "row kernels: torch (triton is not installed)" in caplog.text
    backends.triton_runs.cache_clear()
