"""Process-wide state of training: the run's lock, deterministic arithmetic, malloc settings, stop signals."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from nestpipe.errors import TrainError

# glibc's numbers: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX.
_MALLOC = {-1: (1 << 31) - 1, -2: 64 << 20, -3: 1 << 30, -8: 1}


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Holds the run's lock, which the system releases when the process ends; raises TrainError if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise TrainError(
                f"process {file.readline().strip()} is training in {folder} ({file.readline().strip()}); "
                "two processes would overwrite each other's files."
            ) from None
        file.truncate(0)
        now = time.time_ns()
        begun = f"{datetime.fromtimestamp(now // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC"
        # The nanoseconds make the content unique: other machines compare it.
        file.write(f"{os.getpid()}\n{socket.gethostname()}, since {begun}\n{now}\n")
        file.flush()
        os.fsync(file.fileno())  # for the other machines
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process on this machine is training in a folder."""
    lock = folder / "lock"
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step.

    The buffers of a step are megabytes and have the same sizes every time; by default glibc maps and clears them anew.
    """
    try:
        tune = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    for setting, value in _MALLOC.items():
        tune(setting, value)


@contextlib.contextmanager
def exact_arithmetic(num_threads: int) -> Iterator[None]:
    """Deterministic algorithms and a fixed number of threads; restores the previous settings."""
    before = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    debugging: Any = torch.utils.deterministic
    fill = debugging.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")  # the other call also imports torch's compiler, 1.3 s
    debugging.fill_uninitialized_memory = False  # costs a pass over every new tensor
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        debugging.fill_uninitialized_memory = fill
        torch.set_num_threads(before[1])


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that is set by the first Ctrl-C or SIGTERM; a second one raises KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals only reach the main thread
        return

    def request_stop(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
