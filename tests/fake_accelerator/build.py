"""Compiles the fake accelerator once per source and torch version: g++ against the torch wheel."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

_FOLDER = Path(__file__).parent
_SOURCES = sorted(_FOLDER.glob("*.cpp"))
NO_COMPILER = "no C++ compiler: the fake accelerator is not built"


def has_compiler() -> bool:
    return shutil.which("g++") is not None


def library() -> Path:
    """The compiled library; compiled now if need be, by one process at a time."""
    content = b"".join(one.read_bytes() for one in (*_SOURCES, _FOLDER / "device.h", Path(__file__)))
    key = hashlib.sha256(content + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nestpipe" / "fake-accelerator"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"libfake-{key}.so"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(built)
    return built


def _compile(target: Path) -> None:
    """Objects first, two at a time, because each takes torch's headers; then one library, published by rename."""
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-O1", "-std=c++20", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    includes = [f"-I{path}" for path in include_paths()]
    objects = [target.with_name(f"{target.stem}-{source.stem}.o") for source in _SOURCES]
    running = [
        subprocess.Popen(["g++", *flags, *includes, "-c", str(source), "-o", str(own)], stderr=subprocess.PIPE)
        for source, own in zip(_SOURCES, objects, strict=True)
    ]
    errors = [one.communicate()[1].decode() for one in running]
    if any(one.returncode for one in running):
        raise RuntimeError("the fake accelerator does not compile:\n" + "\n".join(errors))
    partial = target.with_suffix(".partial")
    linked = ["-shared", *map(str, objects), "-o", str(partial), f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", *linked], check=True)
    partial.rename(target)
    for one in objects:
        one.unlink()
