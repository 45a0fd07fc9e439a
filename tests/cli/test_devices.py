"""docs/how-to/devices.md shows what the table of proofs, the records and the dispatch say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nestpipe.cli.doctor_device import probes
from nestpipe.ops import backends, native_library
from nestpipe.ops.backends import TABLE, BackendRequest, decide

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "_generate" / "devices.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("devices_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["devices_page"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_generated(script: ModuleType) -> None:
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run 'python docs/_generate/devices.py --write'"


def test_a_stale_page_fails_the_check(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "devices.md"
    stale.write_text(script.PAGE.read_text().replace("none yet", "all of them", 1))
    monkeypatch.setattr(script, "PAGE", stale)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["devices.py", "--check"])
    assert script.main() == 1
    monkeypatch.setattr(sys, "argv", ["devices.py", "--write"])
    assert script.main() == 0
    monkeypatch.setattr(sys, "argv", ["devices.py", "--check"])
    assert script.main() == 0


def test_every_named_test_exists(script: ModuleType) -> None:
    named = list(script.tests())
    assert len(named) > 10
    for one in named:
        path, _, name = one.partition("::")
        source = (ROOT / path).read_text()
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{one} does not exist"


def test_every_component_has_a_proof_or_a_reason_and_every_check_a_component(script: ModuleType) -> None:
    for name, proof in script.COMPONENTS.items():
        assert bool(proof.fake or proof.interpreter or proof.compiled) != bool(proof.missing), name
    assert {one.component for one in probes()} <= script.COMPONENTS.keys()


def test_a_record_of_hardware_appears_and_others_do_not(script: ModuleType, tmp_path: Path) -> None:
    checks = [
        {"name": "a", "component": "streams", "result": "pass", "detail": "", "seconds": 0.1},
        {"name": "b", "component": "streams", "result": "fail", "detail": "", "seconds": 0.1},
        {"name": "c", "component": "streams", "result": "absent", "detail": "", "seconds": 0.1},
    ]
    for name, kind, complete in (("a", "cuda", True), ("b", "fake", True), ("c", "npu", False)):
        record = {"date": "2026-12-01 10:00 UTC", "device": {"type": kind, "name": f"GPU {name}"}, "checks": checks}
        (tmp_path / f"{name}.json").write_text(json.dumps({**record, "complete": complete}))
    known = script.records(tmp_path)
    assert script.ran_on("streams", known) == "GPU a: 1 of 2 (2026-12-01)"
    assert script.ran_on("collectives", known) == "none yet"


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
