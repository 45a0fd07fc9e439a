"""Builds the C++ kernels of `csrc/` into one shared library, once per machine and user, and loads it.

    library()                      the loaded library; None, with one log line that says why, if it cannot be built
      load()                       the same without the log line; decided once per process
        build(Sources, folders)    path of the library: from the cache, or compiled

The kernels are plain C++17: `extern "C"` functions on raw pointers, called through ctypes, which releases the GIL. They
use no torch headers, so they compile in seconds and work with every version of torch.

    ~/.cache/nestpipe/kernels/nestpipe-DIGEST.so     or $XDG_CACHE_HOME/nestpipe/kernels
    $TMPDIR/nestpipe-UID/nestpipe-DIGEST.so          if that folder cannot be used

DIGEST covers sources, flags, compiler and processor, so a stale library is never loaded. Ranks that start together
compile once: the first holds a file lock, the others wait for it. A library is code, so it is loaded only from a folder
that no other user can write. Each build removes libraries that have not been loaded for 30 days.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger("nestpipe")

CSRC = Path(__file__).parent / "csrc"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",  # inlines square roots; results stay bitwise identical
    "-ffp-contract=off",  # fused multiply-adds, chosen by the compiler, would change results
)
_TIMEOUT_S = 600
_KEEP_DAYS = 30
_load_lock = threading.Lock()


class BuildError(Exception):
    """The library cannot be compiled or loaded here; the message is one line."""


@dataclass(frozen=True, slots=True, eq=False)
class Native:
    """The loaded library."""

    path: Path
    origin: str
    """'cached' or 'built in N s', and why the user's cache folder is not used, if it is not."""
    _handle: ctypes.CDLL

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the library with its ctypes result and argument types; calls release the GIL."""
        function = self._handle[name]
        function.restype, function.argtypes = result, arguments
        return function


@dataclass(frozen=True, slots=True)
class Sources:
    """The source folder, the compiler and its flags."""

    folder: Path
    compiler: str
    flags: tuple[str, ...] = FLAGS

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.cpp"))

    def digest(self) -> str:
        """Of everything that the compiled library depends on."""
        parts = [version_of(self.compiler), *self.flags, cpu_features()]
        for path in [*self.files(), *sorted(self.folder.glob("*.h"))]:
            parts += [path.name, path.read_text()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def compile(self, target: Path) -> None:
        """Writes the shared library; raises `BuildError` with the compiler's first error."""
        command = [self.compiler, *self.flags, *map(str, self.files()), "-o", str(target)]
        errors = _run(command, timeout=_TIMEOUT_S).stderr
        if not target.exists():
            raise BuildError(f"{self.compiler} wrote no file: {_first_error(errors)}")


def library() -> Native | None:
    """The library, compiled if it is not cached; None if that fails, which is logged once per process."""
    outcome = load()
    if isinstance(outcome, Native):
        return outcome
    _warn_once(str(outcome))
    return None


def load() -> Native | BuildError:
    """The library, or why there is none; decided once per process."""
    with _load_lock:
        return _load()


def status() -> str:
    """One line for `nestpipe doctor`: where the library is, or why there is none."""
    outcome = load()
    if isinstance(outcome, Native):
        return f"{outcome.origin}: {outcome.path}"
    return f"nestpipe runs without it, slower: {outcome}"


def build(sources: Sources, folders: Sequence[Path]) -> tuple[Path, str]:
    """Path and origin of the library: the first folder that has it, otherwise compiled into the first usable one."""
    name = f"nestpipe-{sources.digest()}.so"
    for folder in folders:
        if _only_we_write(folder) and _only_we_write(folder / name):
            with suppress(OSError):  # a read-only cache is fine
                os.utime(folder / name)
            return folder / name, "cached" + _reason(folders, folder)
    target = next((folder for folder in folders if _refusal(folder) is None), None)
    if target is None:
        raise BuildError(f"no folder to keep it in{_reason(folders, None)}")
    return _build_in(target, name, sources, _reason(folders, target))


def _build_in(folder: Path, name: str, sources: Sources, reason: str) -> tuple[Path, str]:
    target = folder / name
    with _locked(folder / "lock"):
        if _only_we_write(target):
            return target, "cached" + reason
        sys.stderr.write(f"compiling kernels, once (about 10 s){reason and f' into {folder}{reason}'}\n")
        sys.stderr.flush()
        start = time.perf_counter()
        draft = target.with_suffix(f".{os.getpid()}.part")
        try:
            sources.compile(draft)
            draft.chmod(0o755)  # whatever the umask: see _only_we_write
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
        _remove_old(folder)
        return target, f"built in {time.perf_counter() - start:.1f} s{reason}"


def _remove_old(folder: Path) -> None:
    oldest = time.time() - _KEEP_DAYS * 86_400
    for path in folder.glob("nestpipe-*.so"):
        if path.stat().st_mtime < oldest:
            path.unlink()


def find_compiler() -> str:
    path = shutil.which("g++") or shutil.which("c++")
    if path is None:
        raise BuildError("no C++ compiler (g++ or c++) found")
    return path


@cache
def version_of(compiler: str) -> str:
    return _run([compiler, "--version"], timeout=60).stdout


def cpu_features() -> str:
    """The processor's features, on which -march=native depends."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.machine()} {features}"


def cache_folders() -> list[Path]:
    """The user's cache folder, and a temporary folder of the user for machines on which it cannot be used."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(RuntimeError):  # neither HOME nor an entry in the password file: it stays relative and is refused
        cache_home = cache_home.expanduser()
    return [cache_home / "nestpipe" / "kernels", Path(tempfile.gettempdir()) / f"nestpipe-{os.geteuid()}"]


@cache
def _load() -> Native | BuildError:
    try:
        path, origin = build(Sources(CSRC, find_compiler()), cache_folders())
        return Native(path, origin, ctypes.CDLL(str(path)))
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(f"cannot be loaded: {error}")


@cache
def _warn_once(reason: str) -> None:
    log.warning("native library: running without it, slower: %s ('nestpipe doctor' explains)", reason)


def _run(command: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs the compiler; raises `BuildError` if it fails."""
    environment = {**os.environ, "LC_ALL": "C"}  # error messages in English
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} fails: {_first_error(done.stderr)}")
    return done


def _first_error(text: str) -> str:
    """The first line with an error; compilers print the function it is in before it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no error message")


def _refusal(folder: Path) -> str | None:
    """Why no library can be compiled into the folder, which is created if it is missing; None if one can."""
    if not folder.is_absolute():
        return f"{folder} is not an absolute path"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be created ({error.strerror})"
    if not _only_we_write(folder):
        return f"{folder} belongs to another user or can be written by others"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is read-only"


def _only_we_write(path: Path) -> bool:
    """Whether this user or root owns the file or folder and no other user may write to it; False for a link."""
    try:
        info = path.lstat()
    except OSError:
        return False
    is_private = info.st_uid in {0, os.geteuid()} and not info.st_mode & 0o022
    return is_private and path.is_absolute() and not stat.S_ISLNK(info.st_mode)


def _reason(folders: Sequence[Path], chosen: Path | None) -> str:
    """Why the folders before the chosen one are not used; empty if it is the first."""
    passed_over = folders[: None if chosen is None else folders.index(chosen)]
    reasons = [reason for folder in passed_over if (reason := _refusal(folder))]
    return f": {'; '.join(reasons)}" if reasons else ""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; the kernel releases it when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
