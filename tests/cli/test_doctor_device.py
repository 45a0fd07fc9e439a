"""`nestpipe doctor --device` on the CPU: progress, table, record, exit codes, and what a check makes of a wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nestpipe.cli import doctor_device, doctor_runs, main
from nestpipe.cli.doctor_device import probes
from nestpipe.errors import ConfigError
from nestpipe.training import device_checks, device_trainings
from nestpipe.training.device_checks import AbsentError, CheckFailedError, DeviceProbe

CPU = torch.device("cpu")


def test_a_table_progress_and_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "device.json"
    only = "streams,row update sgd,softmax add with no bias,each pool,nested with clipping,nested in bf16"
    assert main(["doctor", "--device", "cpu", "--only", only, "--write", str(record)]) == 0
    out, progress = capsys.readouterr()
    assert "[1/7] streams are ordered by events ... absent" in progress
    assert "6 pass, 1 absent" in out
    content = json.loads(record.read_text())
    assert (content["device"]["type"], content["complete"]) == ("cpu", False)
    assert content["versions"]["torch"] == torch.__version__
    assert [one["result"] for one in content["checks"]].count("pass") == 6
    assert all(one["seconds"] >= 0 for one in content["checks"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--device", "cuda"], "--device is 'cuda', but this machine has no such device"),
        (["--device", "cpu", "--only", "moon"], "no check has a name with 'moon'"),
        (["--only", "rows"], "give --device"),
    ],
)
def test_what_cannot_be_done_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert problem in capsys.readouterr().err


def test_names_can_be_chosen_and_components_are_rows_of_the_page() -> None:
    every = probes()
    assert len({one.name for one in every}) == len(every)
    assert not [one.name for one in every if "," in one.name], "--only separates texts by commas"


def _raising(error: Exception) -> DeviceProbe:
    def check(device: torch.device) -> str:
        raise error

    return DeviceProbe("a check", "streams", check)


def test_whatever_a_check_raises_is_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"absent": AbsentError("no device"), "fail": CheckFailedError("wrong"), "broken": OSError("no disk")}
    found = {name: _raising(error).on(CPU) for name, error in errors.items()}
    assert {name: one.result for name, one in found.items()} == {"absent": "absent", "fail": "fail", "broken": "fail"}
    assert found["broken"].detail == "OSError: no disk"
    monkeypatch.setattr(doctor_device, "probes", lambda only: [_raising(errors["fail"])])
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "1 fail" in capsys.readouterr().out


def test_a_wrong_kernel_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def slightly_wrong(*arguments: object, **settings: object) -> torch.Tensor:
        return attention(*arguments, **settings) * (1.001 if settings["backend"] is None else 1)  # type: ignore[arg-type]

    attention = device_checks.jagged_attention
    monkeypatch.setattr(device_checks, "jagged_attention", slightly_wrong)
    (found,) = [one.on(CPU) for one in probes("silu add with decay")]
    assert (found.result, "limit 1e-04" in found.detail) == ("fail", True)
    loss = device_checks.sampled_softmax
    monkeypatch.setattr(device_checks, "sampled_softmax", lambda *rest, **more: loss(*rest, **more) * 1.001)
    (found,) = [one.on(CPU) for one in probes("each token")]
    assert found.result == "fail"


def test_another_result_of_a_schedule_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = device_trainings.trained
    monkeypatch.setattr(
        device_trainings,
        "trained",
        lambda device, case, size=None: {
            **trained(device, case, size),
            **({"loss": torch.zeros(4)} if case.mode else {}),
        },
    )
    (found,) = [one.on(CPU) for one in probes("dual-buffer")]
    assert (found.result, found.detail) == ("fail", "1 of 15 tensors differ: loss")


def test_a_run_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_runs, "PROGRAM", ("sh", "-c", "echo out of fuel >&2; exit 3"))
    (found,) = [one.on(CPU) for one in probes("killed")]
    assert found.result == "fail"
    assert "ended with 3: out of fuel" in found.detail


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device is 'rocket', which this torch does not know"):
        doctor_device.resolve_device("rocket", flag="--device")
