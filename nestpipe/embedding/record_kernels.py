"""The native functions of records in a file, as ctypes: structures and signatures of records.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

from torch import Tensor

from nestpipe.embedding.row_ops import row_bytes
from nestpipe.ops.native_library import Native, library


class _RecordColumn(Structure):
    """nestpipe_record_column of records.cpp."""

    _fields_ = (("rows", c_void_p), ("row_bytes", c_int64), ("offset", c_int64))


class RecordRows(Structure):
    """nestpipe_record_rows of records.cpp."""

    _fields_ = (
        ("columns", POINTER(_RecordColumn)),
        ("num_columns", c_int64),
        ("num_rows", c_int64),
        ("places", c_void_p),
        ("slots", c_void_p),
        ("n", c_int64),
        ("record_bytes", c_int64),
    )


def record_rows(
    slots: Tensor, columns: Mapping[str, Tensor], places: Tensor, offsets: Mapping[str, int], record_bytes: int
) -> tuple[RecordRows, Any]:
    """Rows at places of columns as an argument of native functions, and what must live as long as it does."""
    slots, places = slots.contiguous(), places.contiguous()
    each = (_RecordColumn * len(columns))(
        *(_RecordColumn(column.data_ptr(), row_bytes(column), offsets[name]) for name, column in columns.items())
    )
    num_rows = min((len(column) for column in columns.values()), default=0)
    sizes = (slots.data_ptr(), len(slots), record_bytes)
    return RecordRows(each, len(columns), num_rows, places.data_ptr(), *sizes), (each, slots, places)


class RecordKernels:
    """The functions of records.cpp."""

    def __init__(self, native: Native):
        rows, array, number, error = POINTER(RecordRows), c_void_p, c_int64, POINTER(c_int64)
        self.pack = native.function("nestpipe_records_pack", number, rows, array)
        self.assign = native.function("nestpipe_records_assign", number, *(array, number) * 2, *(number, array, number))
        self.create = native.function("nestpipe_reader_create", c_void_p, c_int32, number, number, number)
        self.destroy = native.function("nestpipe_reader_destroy", None, c_void_p)
        self.read = native.function("nestpipe_records_read", number, c_void_p, rows, array, number, error)
        self.exchange = native.function(
            "nestpipe_records_exchange", number, c_void_p, rows, array, array, array, number, error
        )
        self.live = native.function(
            "nestpipe_records_live", number, c_void_p, *(number, number, array, number, array, array, number), error
        )


@cache
def record_kernels() -> RecordKernels | None:
    """The native functions, where they can be built."""
    native = library()
    return RecordKernels(native) if native else None
