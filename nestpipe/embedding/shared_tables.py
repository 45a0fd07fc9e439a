"""Device copies of tables that grow by rows: one for each table and device, whatever the number of batches that use it.

    host     row 0 .. n             of a batch; a later batch has the same rows, and more
    device   row 0 .. capacity      rows are uploaded once; the capacity doubles

Rows that were uploaded do not change. So a batch may still read them on one stream while another one appends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class _Copy:
    """The first `num` rows are those of the host, for streams that wait for `done`."""

    rows: Tensor
    num: int
    done: torch.Event


class SharedTables:
    """Any thread and any stream may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[tuple[str, torch.device], _Copy] = {}

    def on(self, tables: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """The tables on a device, complete in the order of the current stream; the host does not wait."""
        with self._lock:
            return {name: self._shared(name, host, device) for name, host in tables.items()}

    def _shared(self, name: str, host: Tensor, device: torch.device) -> Tensor:
        stream, copy, num = torch.accelerator.current_stream(), self._copies.get((name, device)), len(host)
        if copy is not None:
            stream.wait_event(copy.done)
        if copy is None or num > len(copy.rows):
            capacity = max(num, 2 * copy.num if copy else 0)
            rows = torch.empty(capacity, *host.shape[1:], dtype=host.dtype, device=device)
            copy = self._copies[name, device] = _Copy(rows, 0, stream.record_event())
        if num > copy.num:
            copy.rows[copy.num : num].copy_(host[copy.num :].contiguous().pin_memory(), non_blocking=True)
            copy.num, copy.done = num, stream.record_event()
        return copy.rows[:num]
