"""Checks of a device by `nestpipe train` in processes of their own: two ranks, and a run that is killed and resumed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.cli.demo import differing_tensors
from nestpipe.data.config import SyntheticConfig
from nestpipe.data.synthetic_sequences import ingest_synthetic
from nestpipe.distributed.process_group import backend_of
from nestpipe.training.device_checks import AbsentError, DeviceProbe, require

PROGRAM = (sys.executable, "-m", "nestpipe.cli")
_DEADLINE_S = 300.0
_STEPS, _SAVE_STEPS, _RANKS = 40, 4, 2


def run_probes() -> Iterator[DeviceProbe]:
    """Checks of whole runs."""
    yield DeviceProbe("two ranks: nested is bitwise sequential", "collectives", _in_folder(check_ranks))
    yield DeviceProbe("killed and resumed is bitwise undisturbed", "kill and resume", _in_folder(check_resume))


def _in_folder(check: Callable[[Path, torch.device], str]) -> Callable[[torch.device], str]:
    """The check in a folder with a small log, which is deleted afterwards."""

    def run(device: torch.device) -> str:
        with tempfile.TemporaryDirectory(prefix="nestpipe-doctor-") as place:
            ingest_synthetic(Path(place) / "log", SyntheticConfig(num_users=120, num_items=40, max_len=20))
            return check(Path(place), device)

    return run


def check_ranks(folder: Path, device: torch.device) -> str:
    """Ranks exchange rows and gradients through the collective library of the device."""
    count = _RANKS if device.type == "cpu" else torch.accelerator.device_count()
    if count < _RANKS:
        raise AbsentError(f"{_RANKS} ranks need {_RANKS} devices; there is {count}")
    launch = ("launch", "-n", str(_RANKS))
    for mode in ("sequential", "nested"):
        with _TrainProcess(folder, mode, device, mode=mode, launch=launch, steps=8) as run:
            run.finish()
    _require_equal(folder / "sequential", folder / "nested")
    return f"{_RANKS} ranks over {backend_of(device)}, 8 steps"


def check_resume(folder: Path, device: torch.device) -> str:
    """A run that the system kills after its first checkpoint ends as one that nothing disturbs."""
    with _TrainProcess(folder, "calm", device) as calm:
        with _TrainProcess(folder, "killed", device) as killed:
            killed.await_checkpoint()
        (*_, last) = checkpoint_folders.complete_steps(folder / "killed" / "checkpoints")
        require(last < _STEPS, "the run ended before it could be killed")
        with _TrainProcess(folder, "killed", device) as resumed:
            resumed.finish()
        calm.finish()
    _require_equal(folder / "calm", folder / "killed")
    return f"killed after step {last} of {_STEPS}"


def _require_equal(one: Path, other: Path) -> None:
    differing = differing_tensors(one, other)
    require(not differing, f"{len(differing)} tensors differ: {', '.join(differing[:4])}")


class _TrainProcess:
    """A run that is started, or resumed, in a process of its own, and killed at the end of its context if it still runs."""

    def __init__(
        self,
        folder: Path,
        name: str,
        device: torch.device,
        *,
        mode: str = "nested",
        launch: tuple[str, ...] = (),
        steps: int = _STEPS,
    ):
        flags = {
            **{"run": folder / name, "data.path": folder / "log", "data.batch-size": 16, "data.max-len": 16},
            **{"model.dim": 16, "model.hidden-dim": 16, "embedding.num-buckets": 4},
            **{"train.device": device.type, "train.epochs": 0, "train.steps": steps, "train.save-steps": _SAVE_STEPS},
            **{"train.num-threads": 1, "pipeline.mode": mode, "pipeline.micro-batches": 2},
        }
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        self._command = [*PROGRAM, *launch, "train", "tiny", "--resume", *words]
        self._checkpoints, self._said = folder / name / "checkpoints", folder / f"{name}.log"
        with self._said.open("a") as said:
            self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=said)

    def __enter__(self) -> _TrainProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def finish(self) -> None:
        """Waits for the run; raises CheckFailedError with the end of what it said unless it succeeded."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEADLINE_S)
        code = self._process.poll()
        ended = f"not finished after {_DEADLINE_S:.0f} s" if code is None else f"ended with {code}"
        require(code == 0, f"'{' '.join(self._command)}' {ended}: {self._said.read_text().strip()[-500:]}")

    def await_checkpoint(self) -> None:
        """Waits until the run has a complete checkpoint."""
        deadline = time.monotonic() + _DEADLINE_S
        while self._process.poll() is None and not checkpoint_folders.complete_steps(self._checkpoints):
            require(time.monotonic() < deadline, f"no checkpoint after {_DEADLINE_S:.0f} s")
            time.sleep(0.005)
        if self._process.poll() is not None:
            self.finish()
