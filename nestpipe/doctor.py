"""`nestpipe doctor`: what this machine offers, what is missing, and what to do about it.

Each check is one small function that returns a `Check`. Only a `fail` makes the exit code 1: nestpipe cannot work then.
A `warn` says what will be slower or unavailable.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.nn import functional as F

from nestpipe import native
from nestpipe.jagged import Jagged
from nestpipe.ops.attention import attention_layout, jagged_attention
from nestpipe.ops.backends import Wish, decide

Status = Literal["ok", "warn", "fail"]

_GB = 1e9
_MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 13)
# Module -> what it is for, and how to get it.
_OPTIONAL = {
    "tensorboard": ("training curves", "pip install 'nestpipe[tensorboard]'"),
    "faiss": ("semantic ids", "pip install 'nestpipe[instruct]'"),
    "triton": ("kernels on accelerators", "comes with torch's builds for accelerators"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and what to do if it is not ok."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def check_python() -> Check:
    detail = f"{platform.python_version()} ({sys.executable})"
    if tuple(sys.version_info[:2]) < _MIN_PYTHON:
        return Check("python", "fail", detail, f"nestpipe needs Python {_MIN_PYTHON[0]}.{_MIN_PYTHON[1]} or newer")
    return Check("python", "ok", detail)


def check_torch() -> Check:
    found = torch.__version__
    detail = f"{found}, {torch.get_num_threads()} threads"
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < _MIN_TORCH:
        return Check("torch", "fail", detail, f"nestpipe needs torch {_MIN_TORCH[0]}.{_MIN_TORCH[1]} or newer")
    return Check("torch", "ok", detail)


def check_cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cpu", "ok", f"{cores} cores, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}")


def check_vector_units() -> Check:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() in {"x86_64", "AMD64"} and not capability.startswith("AVX"):
        return Check(
            "vector units", "warn", capability, "without AVX2 the dense part and the kernels are several times slower"
        )
    return Check("vector units", "ok", capability)


def check_memory() -> Check:
    """Memory that can still be used, where the system says so."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return Check("memory", "ok", "unknown on this system")
    lines = (line.split(":") for line in info.read_text().splitlines())
    sizes = {name: int(size.split()[0]) * 1024 / _GB for name, size in lines}
    detail = f"{sizes['MemAvailable']:.1f} of {sizes['MemTotal']:.1f} GB free"
    if sizes["MemAvailable"] < 1:
        return Check("memory", "warn", detail, "training the example recipes takes about 1 GB")
    return Check("memory", "ok", detail)


def check_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / _GB
    if free < 1:
        return Check(
            "disk", "warn", f"{free:.1f} GB free in {Path.cwd()}", "sequences and checkpoints go here; make room"
        )
    return Check("disk", "ok", f"{free:.1f} GB free in {Path.cwd()}")


def check_compiler() -> Check:
    path = shutil.which("g++")
    if path is None:
        return Check("g++", "warn", "not found", "install g++: without it the reference kernels run, which are slower")
    done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        return Check("g++", "warn", f"{path} fails: {done.stderr.strip()[:200]}", "repair or reinstall g++")
    return Check("g++", "ok", f"{done.stdout.strip()} ({path})")


def check_native() -> Check:
    """Compiles the extension if it is not in the cache, which takes some seconds once."""
    if isinstance(native.load(), native.Native):
        return Check("native extension", "ok", native.status())
    advice = "id lookups are tens of times slower in torch; the results are the same. Mend the compiler and try again"
    return Check("native extension", "warn", native.status(), advice)


def check_attention() -> Check:
    """Which attention kernel training uses, and whether it agrees with the definition."""
    backend, reason = decide(Wish("cpu", torch.float32, "silu", "add", decay=False))
    rows = Jagged(torch.arange(70), torch.tensor([0, 3, 3, 70]), 67)
    q, k, v = torch.sin(torch.arange(3 * 70 * 16, dtype=torch.float32)).reshape(3, 70, 2, 8)
    layout = attention_layout(rows)
    found, expected = (jagged_attention(q, k, v, layout, kind="silu", backend=one) for one in (backend, "reference"))
    error = float((found - expected).abs().max() / expected.abs().max())
    detail = f"{backend} ({reason}); {error:.0e} from the reference"
    if not error < 1e-5:  # 100 roundings of float32; nan fails too
        return Check("attention", "fail", detail, "its results are wrong; please report this machine")
    if backend != "native":
        return Check("attention", "warn", detail, "training is slower; mend the native extension")
    return Check("attention", "ok", detail)


def check_packages() -> Check:
    """Optional packages; a missing one is no fault, so this is always ok."""
    found = [name for name in _OPTIONAL if importlib.util.find_spec(name) is not None]
    absent = {name: about for name, about in _OPTIONAL.items() if name not in found}
    detail = f"installed: {', '.join(found) or 'none'}"
    if absent:
        detail += "; not installed: " + ", ".join(f"{name} ({purpose})" for name, (purpose, _) in absent.items())
    return Check("optional packages", "ok", detail, "; ".join(f"{name}: {how}" for name, (_, how) in absent.items()))


def check_accelerator() -> Check:
    if not torch.accelerator.is_available():
        return Check("accelerator", "ok", "none; everything runs on the CPU")
    device = torch.accelerator.current_accelerator()
    return Check("accelerator", "ok", f"{torch.accelerator.device_count()} x {device}")


def check_matmul() -> Check:
    """The rate of a float32 matrix product, the bound of the dense part; takes about a quarter of a second."""
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
        return Check(
            "matmul", "warn", f"{rate:.0f} GFLOP/s", "very slow; is the machine busy, or torch built without BLAS?"
        )
    return Check("matmul", "ok", f"{rate:.0f} GFLOP/s float32, {torch.get_num_threads()} threads")


def check_determinism() -> Check:
    """Two operations that training relies on give the same bits twice."""
    if _row_sums() == _row_sums():
        return Check("determinism", "ok", "index_add and embedding backward repeat bit for bit")
    return Check(
        "determinism",
        "fail",
        "the same sums differed in two tries",
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


def check_network() -> Check:
    """Whether network benchmarks may make namespaces; nothing is created."""
    if shutil.which("ip") is None or not hasattr(os, "geteuid"):
        return Check("network namespaces", "ok", "no 'ip' command; benchmarks use the loopback only")
    if os.geteuid() != 0:
        return Check("network namespaces", "ok", "not root; benchmarks use the loopback only")
    return Check("network namespaces", "ok", "root and 'ip' found; benchmarks can shape a link")


def checks() -> list[Callable[[], Check]]:
    """All checks, in the order in which they are shown."""
    hardware = [check_cpu, check_vector_units, check_memory, check_disk, check_accelerator]
    software = [check_python, check_torch, check_compiler, check_native, check_attention, check_packages]
    return [*software, *hardware, check_matmul, check_determinism, check_network]


def environment() -> dict[str, str]:
    """What a run is trained on, for its folder: those checks that take no time."""
    quick = (check_cpu, check_memory, check_accelerator, check_native)
    return {found.name: found.detail for found in (check() for check in quick)}


def examine() -> list[Check]:
    """Runs every check; one that breaks is itself a finding, and the others still run."""
    results = []
    for check in checks():
        try:
            results.append(check())
        except Exception as error:
            name = getattr(check, "__name__", "check").removeprefix("check_")
            results.append(Check(name, "fail", f"the check itself failed: {error!r}", "please report this"))
    return results


def show(results: Sequence[Check], console: Console) -> None:
    """A table for people."""
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(title="nestpipe doctor", title_justify="left")
    for column in ("check", "status", "found", "advice"):
        table.add_column(column, overflow="fold")
    for check in results:
        status = f"[{colours[check.status]}]{check.status}[/]"
        table.add_row(escape(check.name), status, escape(check.detail), escape(check.advice))
    console.print(table)


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    json: bool = False
    """Print JSON instead of a table."""


def main(argv: Sequence[str]) -> int:
    """`nestpipe doctor [--json]`; returns 1 if any check failed."""
    description = "What this machine can run, and what is missing.\n\nExample: nestpipe doctor --json"
    arguments = tyro.cli(_Arguments, prog="nestpipe doctor", description=description, args=argv)
    results = examine()
    if arguments.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(check) for check in results], indent=2) + "\n")
    else:
        show(results, Console())
    return int(any(check.status == "fail" for check in results))
