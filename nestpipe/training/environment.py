"""What a run is trained on: the machine and its native library, recorded in the run folder and shown by `nestpipe doctor`."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nestpipe.ops import native_library

Status = Literal["ok", "warn", "fail"]


_GB = 1e9


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """What was found, and what to do if it is not ok."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def check_cpu() -> MachineCheck:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return MachineCheck("cpu", "ok", f"{cores} cores, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}")


def check_memory() -> MachineCheck:
    """Memory that can still be used, where the system says so."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return MachineCheck("memory", "ok", "unknown on this system")
    lines = (line.split(":") for line in info.read_text().splitlines())
    sizes = {name: int(size.split()[0]) * 1024 / _GB for name, size in lines}
    detail = f"{sizes['MemAvailable']:.1f} of {sizes['MemTotal']:.1f} GB free"
    if sizes["MemAvailable"] < 1:
        return MachineCheck("memory", "warn", detail, "training the example recipes takes about 1 GB")
    return MachineCheck("memory", "ok", detail)


def check_native() -> MachineCheck:
    """Compiles the library if it is not cached: about 10 s, once."""
    if isinstance(native_library.load(), native_library.Native):
        return MachineCheck("native library", "ok", native_library.status())
    advice = "id lookups are tens of times slower in torch; the results are the same. Mend the compiler and try again"
    return MachineCheck("native library", "warn", native_library.status(), advice)


def check_accelerator() -> MachineCheck:
    if not torch.accelerator.is_available():
        return MachineCheck("accelerator", "ok", "none; everything runs on the CPU")
    device = torch.accelerator.current_accelerator()
    return MachineCheck("accelerator", "ok", f"{torch.accelerator.device_count()} x {device}")


def environment() -> dict[str, str]:
    """What a run is trained on, for its folder: those checks that take no time."""
    quick = (check_cpu, check_memory, check_accelerator, check_native)
    return {found.name: found.detail for found in (check() for check in quick)}
