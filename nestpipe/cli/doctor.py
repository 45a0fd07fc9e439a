"""`nestpipe doctor`: what this machine can run, what is missing, and what to do about it.

Each check is a function that returns a `MachineCheck`: `warn` means slower or unavailable, `fail` that nestpipe cannot work
here, which makes the exit code 1.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.nn import functional as F

from nestpipe.cli import doctor_device
from nestpipe.cli.arguments import DoctorArguments
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.ops.attention import attention_layout, jagged_attention
from nestpipe.ops.backends import BackendRequest, decide
from nestpipe.training.environment import _GB, MachineCheck, check_accelerator, check_cpu, check_memory, check_native

_MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 13)
# Module -> what it is for, and how to get it.
_OPTIONAL = {
    "tensorboard": ("training curves", "pip install 'nestpipe[tensorboard]'"),
    "faiss": ("semantic ids", "pip install 'nestpipe[instruct]'"),
    "triton": ("kernels on accelerators", "comes with torch's builds for accelerators"),
}


def check_python() -> MachineCheck:
    detail = f"{platform.python_version()} ({sys.executable})"
    if tuple(sys.version_info[:2]) < _MIN_PYTHON:
        return MachineCheck(
            "python", "fail", detail, f"nestpipe needs Python {_MIN_PYTHON[0]}.{_MIN_PYTHON[1]} or newer"
        )
    return MachineCheck("python", "ok", detail)


def check_torch() -> MachineCheck:
    found = torch.__version__
    detail = f"{found}, {torch.get_num_threads()} threads"
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < _MIN_TORCH:
        return MachineCheck("torch", "fail", detail, f"nestpipe needs torch {_MIN_TORCH[0]}.{_MIN_TORCH[1]} or newer")
    return MachineCheck("torch", "ok", detail)


def check_vector_units() -> MachineCheck:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() in {"x86_64", "AMD64"} and not capability.startswith("AVX"):
        return MachineCheck(
            "vector units", "warn", capability, "without AVX2 the dense part and the kernels are several times slower"
        )
    return MachineCheck("vector units", "ok", capability)


def check_disk() -> MachineCheck:
    free = shutil.disk_usage(Path.cwd()).free / _GB
    if free < 1:
        return MachineCheck(
            "disk", "warn", f"{free:.1f} GB free in {Path.cwd()}", "sequences and checkpoints go here; make room"
        )
    return MachineCheck("disk", "ok", f"{free:.1f} GB free in {Path.cwd()}")


def check_compiler() -> MachineCheck:
    path = shutil.which("g++")
    if path is None:
        return MachineCheck(
            "g++", "warn", "not found", "install g++: without it the reference kernels run, which are slower"
        )
    done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        return MachineCheck("g++", "warn", f"{path} fails: {done.stderr.strip()[:200]}", "repair or reinstall g++")
    return MachineCheck("g++", "ok", f"{done.stdout.strip()} ({path})")


def check_attention() -> MachineCheck:
    """Which attention kernel training uses, and whether it agrees with the reference."""
    backend, reason = decide(BackendRequest("cpu", torch.float32, "silu", "add", decay=False))
    rows = Jagged(torch.arange(70), torch.tensor([0, 3, 3, 70]), 67)
    q, k, v = torch.sin(torch.arange(3 * 70 * 16, dtype=torch.float32)).reshape(3, 70, 2, 8)
    layout = attention_layout(rows)
    found, expected = (jagged_attention(q, k, v, layout, kind="silu", backend=one) for one in (backend, "reference"))
    error = float((found - expected).abs().max() / expected.abs().max())
    detail = f"{backend} ({reason}); {error:.0e} from the reference"
    if not error < 1e-5:  # 100 roundings of float32; nan fails too
        return MachineCheck("attention", "fail", detail, "its results are wrong; please report this machine")
    if backend != "native":
        return MachineCheck("attention", "warn", detail, "training is slower; repair the native library")
    return MachineCheck("attention", "ok", detail)


def check_packages() -> MachineCheck:
    """Optional packages; always ok, because none is required."""
    found = [name for name in _OPTIONAL if importlib.util.find_spec(name) is not None]
    absent = {name: about for name, about in _OPTIONAL.items() if name not in found}
    detail = f"installed: {', '.join(found) or 'none'}"
    if absent:
        detail += "; not installed: " + ", ".join(f"{name} ({purpose})" for name, (purpose, _) in absent.items())
    return MachineCheck(
        "optional packages", "ok", detail, "; ".join(f"{name}: {how}" for name, (_, how) in absent.items())
    )


def check_matmul() -> MachineCheck:
    """The rate of a float32 matrix product, which bounds dense compute; takes about 0.25 s."""
    size = 1024
    left, right = torch.ones(size, size), torch.ones(size, size)
    left @ right  # the first product also starts the threads
    times: list[float] = []
    deadline = time.perf_counter() + 0.2
    while not times or time.perf_counter() < deadline:
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    rate = 2 * size**3 / min(times) / 1e9
    if rate < 10:
        return MachineCheck(
            "matmul", "warn", f"{rate:.0f} GFLOP/s", "very slow; is the machine busy, or torch built without BLAS?"
        )
    return MachineCheck("matmul", "ok", f"{rate:.0f} GFLOP/s float32, {torch.get_num_threads()} threads")


def check_determinism() -> MachineCheck:
    """Two operations that training relies on are bitwise reproducible."""
    if _row_sums() == _row_sums():
        return MachineCheck("determinism", "ok", "index_add and embedding backward are bitwise reproducible")
    return MachineCheck(
        "determinism",
        "fail",
        "the same sums differed between two runs",
        "exact resume is impossible; please report this machine",
    )


def _row_sums() -> bytes:
    """The bits of an index_add and of an embedding's gradient, with many ids per row."""
    ids = torch.arange(20_000) * 7919 % 97
    values = torch.sin(torch.arange(20_000 * 16, dtype=torch.float32)).reshape(20_000, 16)
    table = torch.zeros(97, 16, requires_grad=True)
    sums = torch.zeros(97, 16).index_add(0, ids, values)
    (gradient,) = torch.autograd.grad(F.embedding(ids, table), table, values)
    return bytes(torch.cat([sums, gradient]).numpy().tobytes())


def check_network() -> MachineCheck:
    """Whether network benchmarks can create namespaces; creates none."""
    if shutil.which("ip") is None or not hasattr(os, "geteuid"):
        return MachineCheck("network namespaces", "ok", "no 'ip' command; benchmarks use the loopback only")
    if os.geteuid() != 0:
        return MachineCheck("network namespaces", "ok", "not root; benchmarks use the loopback only")
    return MachineCheck("network namespaces", "ok", "root and 'ip' found; benchmarks can shape a link")


def checks() -> list[Callable[[], MachineCheck]]:
    """All checks, in the order in which they are shown."""
    hardware = [check_cpu, check_vector_units, check_memory, check_disk, check_accelerator]
    software = [check_python, check_torch, check_compiler, check_native, check_attention, check_packages]
    return [*software, *hardware, check_matmul, check_determinism, check_network]


def examine() -> list[MachineCheck]:
    """Runs every check; one that raises is reported as failed, and the others still run."""
    results = []
    for check in checks():
        try:
            results.append(check())
        except Exception as error:
            name = getattr(check, "__name__", "check").removeprefix("check_")
            results.append(MachineCheck(name, "fail", f"the check itself failed: {error!r}", "please report this"))
    return results


def show(results: Sequence[MachineCheck], console: Console) -> None:
    """A table for people."""
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(title="nestpipe doctor", title_justify="left")
    for column in ("check", "status", "found", "advice"):
        table.add_column(column, overflow="fold")
    for check in results:
        status = f"[{colours[check.status]}]{check.status}[/]"
        table.add_row(escape(check.name), status, escape(check.detail), escape(check.advice))
    console.print(table)


def main(arguments: DoctorArguments) -> int:
    """Returns 1 if any check failed."""
    if arguments.device:
        return doctor_device.main(arguments)
    if arguments.only or arguments.write:
        raise ConfigError("--only and --write are for the checks of a device; give --device auto, cpu, cuda or npu.")
    results = examine()
    if arguments.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(check) for check in results], indent=2) + "\n")
    else:
        show(results, Console())
    return int(any(check.status == "fail" for check in results))
