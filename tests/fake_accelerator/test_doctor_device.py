"""`nestpipe doctor --device` on the fake accelerator: its checks pass, and see what is wrong with a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from nestpipe.cli.doctor_device import probes
from nestpipe.distributed.process_group import World
from nestpipe.embedding import row_optimizer
from nestpipe.ops import device_memory
from nestpipe.training.device_checks import DeviceCheck
from tests.fake_accelerator.fake_ranks import run_on_fake
from tests.rank_pool import exit_code_of

PROGRAM = "import runpy, sys\nrunpy.run_module('tests.fake_accelerator.fake_program', run_name='__main__')\n"


def _checked(world: World, only: str) -> list[DeviceCheck]:
    return [one.on(world.device) for one in probes(only)]


def test_the_checks_pass_without_an_unordered_access() -> None:
    only = "streams,memory in use,gather,update adagrad,silu channel with decay,each shared,device buffer,waits of the host"
    (found,) = run_on_fake(1, _checked, only, delay_us=20)
    assert {one.result for one in found} == {"pass"}, found
    assert len(found) == 8
    assert next(one for one in found if "waits" in one.name).detail == "1.0 per step"


def _checked_with_wrong_kernels(world: World) -> list[DeviceCheck]:
    """An update that rounds differently, a host that waits for every download twice, and streams that do not wait."""
    update = row_optimizer.AdaGrad.update

    def wrong(self: object, rows: torch.Tensor, *rest: object) -> None:
        update(self, rows, *rest)  # type: ignore[arg-type]
        rows.mul_(1 + 2**-23)

    used = device_memory.upload

    def waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = used(tensor, device)
        if copy.device.type != "cpu" and copy.numel():
            copy.flatten()[0].item()
        return copy

    with patch.object(row_optimizer.AdaGrad, "update", wrong), patch("nestpipe.embedding.lookup.upload", waiting):
        return _checked(world, "update adagrad,waits of the host")


def test_what_is_wrong_is_seen() -> None:
    (found,) = run_on_fake(1, _checked_with_wrong_kernels)
    assert [one.result for one in found] == ["fail", "fail"], found
    assert "values differ from the CPU" in found[0].detail
    assert "waits per step" in found[1].detail


def test_the_whole_examination(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    record = tmp_path / "device.json"
    only = [] if scale(0, 1) else ["--only", "killed"]
    assert exit_code_of(PROGRAM, "doctor", "--device", "fake", "--write", str(record), *only, deadline_s=1500) == 0
    content = json.loads(record.read_text())
    assert content["device"]["type"] == "fake"
    assert content["complete"] == bool(scale(0, 1))
    assert {one["result"] for one in content["checks"]} <= {"pass", "absent"}
    assert content["checks"][-1]["result"] == "pass"
    assert content["checks"][-1]["component"] == "kill and resume"
