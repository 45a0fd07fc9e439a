"""The fake accelerator in Python: `load()` registers device `fake` and its collectives `fakeccl` in this process.

    load(delay_us=300, seed=1)             before any tensor is on the device
    torch.zeros(3, device="fake")
    check()                                raises AssertionError with every unordered pair of accesses so far

What it proves: order, placement, lifetime, reachability. Its arithmetic is the CPU's, so neither speed nor numerics.
"""

from __future__ import annotations

import ctypes
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from tests.fake_accelerator.build import library

NAME = "fake"
_TEXTS = ("fake_take_reports", "fake_take_syncs")


@cache
def _native() -> ctypes.CDLL:
    path = str(library())
    torch.ops.load_library(path)
    native = ctypes.CDLL(path)
    for name in _TEXTS:
        getattr(native, name).restype = ctypes.c_char_p
    native.fake_take_syncs.argtypes = [ctypes.c_long]
    native.fake_set_delay.argtypes = [ctypes.c_int, ctypes.c_uint64]
    native.fake_set_label.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    native.fake_set_memory.argtypes = [ctypes.c_size_t]
    native.fake_host_view.argtypes, native.fake_host_view.restype = [ctypes.c_void_p], ctypes.c_void_p
    native.fake_use_on_stream.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    sized = [ctypes.c_void_p, ctypes.c_size_t]
    native.fake_host_function.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.CFUNCTYPE(None), *sized, *sized]
    return native


@cache
def _register() -> None:
    """Names the device, and gives torch the module that goes with it: `torch.fake`."""
    _native()
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    functions: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "mem_get_info": lambda device=None: memory(),
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: _native().fake_warn_of_syncs(mode != "default"),
        "manual_seed_all": lambda seed: None,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    from tests.fake_accelerator import collectives  # it needs the device

    collectives.register()


def load(*, delay_us: int = 0, seed: int = 0, memory_bytes: int = 64 << 20) -> None:
    """Registers the device in this process, and sets its delays and its memory."""
    _register()
    _native().fake_set_delay(delay_us, seed)
    _native().fake_set_memory(memory_bytes)


def take_reports() -> list[str]:
    """Every unordered pair so far, after all queued work is done; the next call starts anew."""
    torch.accelerator.synchronize()
    text: bytes = _native().fake_take_reports()
    return text.decode().splitlines()


def check() -> None:
    """Raises AssertionError if any two accesses to the same bytes were unordered."""
    if reports := take_reports():
        raise AssertionError("the fake accelerator saw races:\n  " + "\n  ".join(reports))


def take_syncs(thread: int | None = None) -> dict[str, int]:
    """How often a host thread [default: this one] has waited for the device since the last call, by reason."""
    text: bytes = _native().fake_take_syncs(threading.get_native_id() if thread is None else thread)
    return {name: int(count) for name, count in (one.split("=") for one in text.decode().split())}


def counts() -> dict[str, int]:
    """Kernels, uploads from pinned memory, other uploads, and downloads so far."""
    values = (ctypes.c_long * 4)()
    _native().fake_counts(values)
    return dict(zip(("kernels", "uploads", "unpinned uploads", "downloads"), values, strict=True))


def memory() -> tuple[int, int]:
    """Free and total bytes of the device."""
    values = (ctypes.c_size_t * 2)()
    _native().fake_memory(values)
    return values[0], values[1]


@contextmanager
def labelled(text: str) -> Iterator[None]:
    """Names what the current stream does, for reports."""
    label(text)
    yield
    label("")


def label(text: str) -> None:
    """Names what the current stream does from now on, for reports."""
    _native().fake_set_label(torch.accelerator.current_stream().stream_id, text.encode())
