"""docs/how-to/devices.md shows what the dispatch tables say."""

from __future__ import annotations

from pathlib import Path

import torch

from nestpipe.cli.doctor import components, markdown
from nestpipe.ops import backends, native_library
from nestpipe.ops.backends import TABLE, BackendRequest, decide

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "devices.md"


def test_the_page_shows_the_tables() -> None:
    assert markdown() in PAGE.read_text(), "docs/how-to/devices.md is stale; paste nestpipe.cli.doctor.markdown() there"
    assert {standing for row in components().values() for standing in row.values()} == {
        "tested here",
        "fake accelerator",
        "written, not run",
        "absent",
    }


def test_every_backend_of_the_table_can_be_named() -> None:
    for name in TABLE:
        if name not in ("triton", "reference"):  # the first may be absent, the second is called directly
            assert callable(backends.module(name).forward)


def test_decisions_and_their_reasons(monkeypatch) -> None:
    float32 = BackendRequest("cpu", torch.float32, "silu", "add", decay=False)
    double = BackendRequest("cpu", torch.float64, "silu", "add", decay=False)
    npu = BackendRequest("npu", torch.float32, "silu", "add", decay=False)
    decide.cache_clear()
    monkeypatch.setattr(backends, "load", lambda: native_library.BuildError("no C++ compiler found"))
    try:
        assert decide(float32)[0] == "blocks"
        assert "no C++ compiler found" in decide(float32)[1]
        assert decide(double) == ("blocks", "the native kernel computes in float32, not float64")
        assert decide(npu) == ("blocks", "nestpipe has no kernel for npu")
        monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object())
        assert decide(BackendRequest("cuda", torch.float32, "silu", "add", decay=False)) == ("triton", "a GPU")
        assert (
            decide(BackendRequest("cuda", torch.bfloat16, "softmax", "channel", decay=True, width=256))[0] == "triton"
        )
        half = BackendRequest("cuda", torch.float16, "softmax", "add", decay=False)
        assert decide(half) == ("blocks", "the triton kernels take float32 and bfloat16, not float16")
        wide = BackendRequest("cuda", torch.float32, "silu", "add", decay=False, width=257)
        assert decide(wide) == ("blocks", "the triton kernels take heads of at most 256 values, not 257")
    finally:
        decide.cache_clear()
