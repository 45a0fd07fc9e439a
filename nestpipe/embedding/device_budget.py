"""How many rows of each table a device has room for, if `embedding.device_bytes` is 0: decided anew at barriers.

    at the start    an equal share of half the free memory for each table (device_rows.py)
    at a barrier    of three quarters of what is free or in the buffers, each table gets
        at least    twice the rows that batches in flight have held at once
        at most     its rows on this rank, with room for those that will come
        between     as many bytes as every other table that can use them

A resized buffer starts empty, so small changes are not made. Which rows are on the device changes no results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nestpipe.embedding.table import Table

_SHARE = 0.75  # of the memory that is free or in the buffers; the rest is for batches larger than those seen
_FLOOR_BYTES = 64 << 20  # a buffer is not made smaller than this, so that no larger batch is refused to save so little
_GROWS, _SHRINKS = 1.25, 0.5  # smaller changes are not made
_FIRST_STEPS, _MOST_STEPS = 16, 4096  # from the start to the first barrier that resizes, and between later ones


@dataclass(frozen=True, slots=True)
class BufferUse:
    """What is known of a table at a barrier. Counts are rows."""

    row_bytes: int
    capacity: int
    most_held: int  # at once, by batches in flight
    num_rows: int  # of the table on this rank
    num_before: int  # the same when sizes were last chosen

    @property
    def least(self) -> int:
        return max(2 * self.most_held, min(_FLOOR_BYTES // self.row_bytes, self.capacity))

    @property
    def most(self) -> int:
        """A quarter more than there are, and twice those that have come."""
        growth = max(self.num_rows - self.num_before, 0)
        return max(self.num_rows + self.num_rows // 4 + 2 * growth, self.least)


def shared_out(uses: Mapping[str, BufferUse], num_bytes: int) -> dict[str, int]:
    """The rows of each table on the device, in `num_bytes` together; unchanged if the least of all does not fit."""
    found = {name: use.least for name, use in uses.items()}
    left = num_bytes - sum(use.least * use.row_bytes for use in uses.values())
    if left < 0:
        return {name: use.capacity for name, use in uses.items()}

    def wanted(name: str) -> int:
        return (uses[name].most - uses[name].least) * uses[name].row_bytes

    for number, name in enumerate(sorted(uses, key=wanted)):  # who wants less leaves the rest to the others
        share = min(wanted(name), left // (len(uses) - number)) // uses[name].row_bytes
        found[name] += share
        left -= share * uses[name].row_bytes
    return found


class DeviceBuffers:
    """The buffers of a run's tables whose size is chosen: first after a few steps, then at barriers, ever more rarely."""

    def __init__(self, tables: Mapping[str, Table], num_steps: int):
        """`num_steps`: steps that are done."""
        self._tables = {
            name: table
            for name, table in tables.items()
            if table.device.type != "cpu" and not table.config.device_bytes
        }
        self._num_before = dict.fromkeys(self._tables, 0)
        self._interval, self._next = _FIRST_STEPS, num_steps + _FIRST_STEPS

    def describe(self) -> str:
        """The rows that there is room for at first."""
        return "\n".join(
            f"table '{name}': room for {use.capacity:,} rows on {self._device}, {use.capacity * use.row_bytes:,} bytes "
            "(half of the free memory, over all tables; chosen anew from the batches seen)"
            for name, use in ((name, self._use(name)) for name in self._tables)
        )

    def steps_to_barrier(self, num_steps: int) -> int:
        """Steps until a barrier is wanted; 0: none is."""
        is_first = self._interval == _FIRST_STEPS
        return max(self._next - num_steps, 0) if self._tables and is_first else 0

    def at_barrier(self, num_steps: int) -> str:
        """Chooses the sizes anew if it is time to; says what has changed."""
        if num_steps < self._next:
            return ""
        self._interval = min(2 * self._interval, _MOST_STEPS)
        self._next = num_steps + self._interval
        return self.resize()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._tables.values())).device

    def resize(self) -> str:
        """Chooses the sizes anew, at a barrier; says what has changed, with the numbers."""
        if not self._tables:
            return ""
        uses = {name: self._use(name) for name in self._tables}
        own = sum(use.capacity * use.row_bytes for use in uses.values())
        device, module = self._device, torch.get_device_module(self._device)
        free, _ = module.mem_get_info(device)
        chosen, lines = shared_out(uses, int((free + own) * _SHARE)), []
        for name in sorted(uses, key=lambda one: (chosen[one] - uses[one].capacity) * uses[one].row_bytes):
            use, num_rows = uses[name], chosen[name]  # those that shrink come first: their memory is for the others
            self._num_before[name] = use.num_rows
            if _SHRINKS * use.capacity <= num_rows <= _GROWS * use.capacity:
                continue
            self._tables[name].resize_on_device(num_rows)
            lines.append(
                f"table '{name}': room for {num_rows:,} rows on {device} instead of {use.capacity:,}, {num_rows * use.row_bytes:,} "
                f"bytes ({use.num_rows:,} rows here, at most {use.most_held:,} in use at once, {free:,} bytes free)"
            )
        if lines:
            module.empty_cache()  # what smaller buffers leave is free for others, and counted as free
        return "\n".join(lines)

    def _use(self, name: str) -> BufferUse:
        table = self._tables[name]
        assert table.buffer is not None
        return BufferUse(
            table.row_bytes, table.buffer.capacity, table.buffer.most_held, len(table), self._num_before[name]
        )
