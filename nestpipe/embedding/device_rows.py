"""Rows on a device: the columns of a row buffer there, and the store below it, in the memory of the host.

    device    columns by position, as many as fit     gather, scatter, update
                 ▲ upload: gathered into pinned memory      │ download, when the position is taken for another row
    host      RowStore, or RowBuffer over a file

Slots, positions and what is dirty are decided on the host (row_buffer.py), so no launch waits for the device. Only a
download waits, in the thread that retrieves rows. Uploads are on the stream of that thread, downloads on one of their own:

    stream of `retrieve`    gather rows that leave ─ upload rows that arrive, into the same positions ─ ...
    stream of downloads                         └──▶ copy to the host           the host waits and stores them

A position is only taken from a row that no batch in flight holds, so its last update is complete: `write` of the last batch
that held it, which `retrieve` needs, needs its `update` (pipeline/dependencies.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.row_ops import gather_rows, row_bytes, scatter_rows
from nestpipe.errors import ConfigError
from nestpipe.ops.device_memory import Download, download_all, upload

log = logging.getLogger("nestpipe")
_SHARE = 0.5  # of the free memory that all tables together take; the rest is for activations and messages


class DeviceColumns:
    """Columns of equal length on a device, by name: the part of `RowStore` that a row buffer needs."""

    def __init__(self, columns: Mapping[str, Tensor], device: torch.device, capacity: int):
        """Room for `capacity` rows with the type and shape of the given tensors' rows."""
        self.pinned = True
        self._device = device
        self._columns = {name: one[:0] for name, one in columns.items()}
        self.resize(capacity)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, name: str) -> Tensor:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @property
    def columns(self) -> dict[str, Tensor]:
        """All columns, by name."""
        return dict(self._columns)

    def gather(self, name: str, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of the rows [n, ...] of a column on the host; in `out` if given. Waits for it."""
        (rows,) = download_all([_rows_at(self._columns[name], positions)])
        return rows if out is None else out.copy_(rows)

    def write(self, positions: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Overwrites rows of the given columns with rows on the host."""
        for name, values in rows.items():
            _put(self._columns[name], positions, values)

    def resize(self, capacity: int) -> None:
        """Makes room for another number of rows, without their values; when no stream uses any."""
        shapes = {name: (one.shape[1:], one.dtype) for name, one in self._columns.items()}
        self._columns.clear()  # freed first: old and new together may not fit
        for name, (shape, dtype) in shapes.items():
            self._columns[name] = torch.empty(capacity, *shape, dtype=dtype, device=self._device)
        self.capacity, self._num_rows = capacity, 0

    def grow(self, num_rows: int) -> None:
        """Uses so many of the rows that there is room for."""
        if num_rows > self.capacity:
            raise ValueError(f"{num_rows:,} rows in columns with room for {self.capacity:,}")
        self._num_rows = max(num_rows, self._num_rows)

    def shrink(self, num_rows: int) -> None:
        """Uses fewer rows; the room stays."""
        self._num_rows = num_rows


class HostBelow:
    """The store in host memory as the slower store of a row buffer on a device."""

    slot_bytes = 0
    memory_bytes = 0

    def __init__(self, rows: HostRows, device: torch.device):
        self._rows = rows
        self._downloads = torch.Stream(device)

    def grow(self, num_slots: int) -> None:
        self._rows.grow(num_slots)

    def read(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Copies the rows of slots to places of columns, which may be on the device or on the host."""
        for name, values in self._rows.read(slots).items():
            if name in columns:
                _put(columns[name], places, values)

    def write(self, slots: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """Copies rows from places of columns on the device; waits for the download."""
        if len(slots):
            rows = download_all([_rows_at(column, places) for column in columns.values()])
            self._rows.write(slots, dict(zip(columns, rows, strict=True)))

    def exchange(self, leaving: Tensor, arriving: Tensor, columns: Mapping[str, Tensor], places: Tensor) -> None:
        """`write` of the rows that leave, but for slots of -1, then `read` of those that arrive; waits for the download."""
        changed = (leaving >= 0).nonzero().flatten()
        if not len(changed):
            self.read(arriving, columns, places)
            return
        gone, left = leaving.index_select(0, changed), places.index_select(0, changed)
        download = Download([_rows_at(column, left) for column in columns.values()], self._downloads)
        self.read(arriving, columns, places)  # into positions whose rows have been gathered
        self._rows.write(gone, dict(zip(columns, download.wait(), strict=True)))

    def drop(self, slots: Tensor) -> None:
        self._rows.drop(slots)


class HostRows(Protocol):
    """What `HostBelow` needs of a RowStore or RowBuffer."""

    def grow(self, num_slots: int) -> None: ...
    def read(self, slots: Tensor) -> dict[str, Tensor]: ...
    def write(self, slots: Tensor, rows: Mapping[str, Tensor]) -> None: ...
    def drop(self, slots: Tensor) -> None: ...


def device_capacity(
    name: str, columns: Mapping[str, Tensor], device: torch.device, num_bytes: int, *, num_tables: int
) -> int:
    """Rows of a table that fit into `num_bytes` on the device [0: an equal share of half the free memory]; logged."""
    each = sum(map(row_bytes, columns.values()))
    why = "embedding.device_bytes"
    if not num_bytes:
        free, total = torch.get_device_module(device).mem_get_info(device)
        num_bytes, why = int(free * _SHARE) // num_tables, f"of {free:,} free bytes, {total:,} in all"
    if num_bytes < each:
        raise ConfigError(
            f"a row of table '{name}' takes {each:,} bytes, but its buffer on {device} has {num_bytes:,} ({why}). "
            "Set --embedding.device-bytes to the rows of several batches."
        )
    log.info(
        "table '%s': room for %s rows on %s, %s bytes (%s)", name, f"{num_bytes // each:,}", device, num_bytes, why
    )
    return num_bytes // each


def _rows_at(column: Tensor, places: Tensor) -> Tensor:
    return gather_rows(column, places)


def _put(column: Tensor, places: Tensor, rows: Tensor) -> None:
    scatter_rows(column, places, upload(rows, column.device))
