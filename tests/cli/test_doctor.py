"""`nestpipe doctor`: the table, the JSON, the exit code, and what it says about a poor machine."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch

from nestpipe.cli import doctor
from nestpipe.ops import native_library
from nestpipe.training.environment import MachineCheck


def test_json_has_every_check_and_none_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in found]
    assert len(set(names)) == len(names) == len(doctor.checks())
    assert {"python", "torch", "g++", "native library", "memory", "disk", "matmul", "determinism"} <= set(names)
    assert all(check["status"] in {"ok", "warn"} for check in found)


def test_the_table_shows_findings_and_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "checks", lambda: [lambda: MachineCheck("fuel", "warn", "low", "fill up")])
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("fuel", "warn", "low", "fill up"))


def test_one_failed_check_makes_the_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [MachineCheck("a", "ok", ""), MachineCheck("b", "fail", "")]
    monkeypatch.setattr(doctor, "checks", lambda: [lambda check=check: check for check in found])
    assert doctor.main(["--json"]) == 1


def test_a_check_that_breaks_is_a_finding_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_broken() -> MachineCheck:
        raise OSError("no such file")

    monkeypatch.setattr(doctor, "checks", lambda: [check_broken, doctor.check_python])
    broken, python = doctor.examine()
    assert (broken.name, broken.status) == ("broken", "fail")
    assert "no such file" in broken.detail
    assert python.status == "ok"


def test_a_machine_without_a_compiler_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check = doctor.check_compiler()
    assert check.status == "warn"
    assert "install g++" in check.advice


def test_a_machine_without_the_extension_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "load", lambda: native_library.BuildError("no C++ compiler"))
    monkeypatch.setattr(native_library, "status", lambda: "nestpipe runs without it: no C++ compiler")
    check = doctor.check_native()
    assert (check.status, check.detail) == ("warn", "nestpipe runs without it: no C++ compiler")
    assert "compiler" in check.advice


def test_attention_is_compared_with_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "decide", lambda wish: ("blocks", "no C++ compiler"))
    slow = doctor.check_attention()
    assert slow.status == "warn"
    assert slow.detail.startswith("blocks (no C++ compiler)")
    answers = iter([torch.ones(1), torch.full((1,), 1.1)])
    monkeypatch.setattr(doctor, "jagged_attention", lambda *args, **kwargs: next(answers))
    assert doctor.check_attention().status == "fail"


def test_an_old_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    check = doctor.check_torch()
    assert check.status == "fail"
    assert "2.13" in check.advice


def test_different_bits_fail_the_determinism_check(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([b"one", b"two"])
    monkeypatch.setattr(doctor, "_row_sums", lambda: next(tries))
    assert doctor.check_determinism().status == "fail"


def test_absent_packages_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check = doctor.check_packages()
    assert check.status == "ok"
    assert "not installed: tensorboard" in check.detail
    assert "nestpipe[tensorboard]" in check.advice


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--jsn"])
