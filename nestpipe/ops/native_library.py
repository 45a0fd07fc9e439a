"""Compiles the C++ files beside this one into one shared library, once per machine, and loads it.

    library()                      the loaded library; None, with one log line saying why, where it cannot be built
      load()                       the same without the line, decided once per process
        build(Sources, folders)    the file of the library: from the cache, or compiled

The sources are plain C++17 with `extern "C"` functions on raw pointers, called by ctypes: no torch headers, so it
compiles in seconds and fits every version of torch, and ctypes gives up the GIL during calls.

The name of the file is a digest of all it depends on (sources, flags, compiler, processor), so a stale one is never
loaded. Processes that start together compile it once: the first holds a lock, the others wait and find the file.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger("nestpipe")

HERE = Path(__file__).parent / "csrc"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",  # else a square root is a call; it changes no bits
    "-ffp-contract=off",  # else the compiler's choice of fused multiply-adds would change bits
)
_TIMEOUT_S = 600
_ONE_AT_A_TIME = threading.Lock()


class BuildError(Exception):
    """The extension cannot be compiled or loaded here; the message is one line."""


@dataclass(frozen=True, slots=True, eq=False)
class Native:
    """The loaded library."""

    path: Path
    origin: str
    """How the file came about: compiled now, or found in the cache."""
    _handle: ctypes.CDLL

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the library with its ctypes result and argument types; calls release the GIL."""
        function = self._handle[name]
        function.restype, function.argtypes = result, arguments
        return function


@dataclass(frozen=True, slots=True)
class Sources:
    """What is compiled, and by which compiler."""

    folder: Path
    compiler: str
    flags: tuple[str, ...] = FLAGS

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.cpp"))

    def digest(self) -> str:
        """Changes with everything that the compiled library depends on."""
        parts = [version_of(self.compiler), *self.flags, cpu_features()]
        for path in [*self.files(), *sorted(self.folder.glob("*.h"))]:
            parts += [path.name, path.read_text()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def compile(self, target: Path) -> None:
        """Writes the shared library; raises `BuildError` with the first line of the compiler's complaint."""
        command = [self.compiler, *self.flags, *map(str, self.files()), "-o", str(target)]
        errors = _run(command, timeout=_TIMEOUT_S).stderr
        if not target.exists():
            raise BuildError(f"{self.compiler} made no file: {_first_error(errors)}")


def library() -> Native | None:
    """The extension, compiled if need be; None if that is impossible, which is logged once per process."""
    outcome = load()
    if isinstance(outcome, Native):
        return outcome
    _complain(str(outcome))
    return None


def load() -> Native | BuildError:
    """The extension, or why there is none; the answer stays the same for the life of the process."""
    with _ONE_AT_A_TIME:
        return _load()


def status() -> str:
    """One line about the extension, for people."""
    outcome = load()
    if isinstance(outcome, Native):
        return f"{outcome.origin}: {outcome.path}"
    return f"nestpipe runs without it, slower: {outcome}"


def build(sources: Sources, folders: Sequence[Path]) -> tuple[Path, str]:
    """The library's file, from the first folder that has it or can be written, and how it came about."""
    name = f"nestpipe-{sources.digest()}.so"
    found = next((folder / name for folder in folders if (folder / name).exists()), None)
    if found is not None:
        return found, "cached"
    target = next((folder / name for folder in folders if _writable(folder)), None)
    if target is None:
        raise BuildError(f"no folder to keep it in: cannot write to {' or '.join(map(str, folders))}")
    with _locked(target.parent / "lock"):
        if target.exists():
            return target, "cached"
        started = time.perf_counter()
        half_done = target.with_suffix(f".{os.getpid()}.part")
        try:
            sources.compile(half_done)
            half_done.replace(target)
        finally:
            half_done.unlink(missing_ok=True)
        return target, f"built in {time.perf_counter() - started:.1f} s"


def find_compiler() -> str:
    path = shutil.which("g++") or shutil.which("c++")
    if path is None:
        raise BuildError("no C++ compiler (g++ or c++) found")
    return path


@cache
def version_of(compiler: str) -> str:
    return _run([compiler, "--version"], timeout=60).stdout


def cpu_features() -> str:
    """What -march=native sees of the processor, near enough."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.machine()} {features}"


def cache_folders() -> list[Path]:
    """Beside the sources; where the package is installed read-only, the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [HERE / "build", Path(home) / "nestpipe"]


@cache
def _load() -> Native | BuildError:
    try:
        path, origin = build(Sources(HERE, find_compiler()), cache_folders())
        return Native(path, origin, ctypes.CDLL(str(path)))
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(f"cannot be loaded: {error}")


@cache
def _complain(reason: str) -> None:
    log.warning("native extension: running without it, slower: %s ('nestpipe doctor' explains)", reason)


def _run(command: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs the compiler; raises `BuildError` if it fails."""
    english = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=english, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} fails: {_first_error(done.stderr)}")
    return done


def _first_error(text: str) -> str:
    """The first line that speaks of an error; a compiler begins with the place where it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it does not say why")


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that other processes wait for; it ends with the process, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
