"""The native function that adds a batch to the series of exact Adam, as ctypes: structure and signature of adam_series.cpp."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from nestpipe.ops.native_library import library

Floats = npt.NDArray[np.float64]


class _SeriesStep(Structure):
    """nestpipe_series_step of adam_series.cpp."""

    _fields_ = (
        ("from_", c_void_p),
        ("num_from", c_int64),
        ("begin", c_int64),
        ("to", c_void_p),
        ("centre", c_double),
        ("powers1", c_void_p),
        ("powers2", c_void_p),
        ("step", c_int64),
        ("lr", c_double),
        ("keep", c_double),
        ("decays", c_int64),
    )


@cache
def _advance() -> Callable[..., Any] | None:
    native = library()
    return native.function("nestpipe_adam_series_advance", None, POINTER(_SeriesStep)) if native else None


def advance_natively(
    state: Floats, begin: int, centre: float, powers: tuple[Floats, Floats], step: int, lr: float, weight_decay: float
) -> Floats | None:
    """The state [ENTRY, n] from entry `begin` on, with a new entry and the term of `step`; None without the library.

    The entries are those of consecutive numbers of batches seen, the last of them of `step` - 2.
    """
    if (advance := _advance()) is None:
        return None
    state = np.ascontiguousarray(state)  # that of a cut is not
    new = np.empty((len(state), state.shape[1] - begin + 1))
    call = _SeriesStep(
        from_=state.ctypes.data,
        num_from=state.shape[1],
        begin=begin,
        to=new.ctypes.data,
        centre=centre,
        powers1=powers[0].ctypes.data,
        powers2=powers[1].ctypes.data,
        step=step,
        lr=lr,
        keep=1 - lr * weight_decay,
        decays=bool(weight_decay),
    )
    advance(byref(call))
    return new
