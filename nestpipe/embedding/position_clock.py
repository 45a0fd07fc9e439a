"""The positions of a row buffer: which slot has which, who holds it, and which is taken next.

    slot -> position, number of uses             5 bytes per slot
    position -> slot, number of holders          6 bytes per position

A clock hand goes round the positions and takes those that nobody holds and whose slot is used rarely. What is rare is
decided once per turn, so that a tenth of the positions is. Uses are counted for slots without a position too: a slot that
returns is known. Counts are halved from time to time, so that old uses count less.

Native where that can be built; torch takes the same positions.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from nestpipe.embedding.row_ops import gather_rows
from nestpipe.embedding.row_store import HUGE_BYTES, RowStore
from nestpipe.ops.device_memory import address
from nestpipe.ops.native_library import Native, library

_NONE = -1
_MOST_USES = 255
_RARE_SHARE = 10  # one position in so many is rare
_USES_PER_HALVING = 20  # per position
_SWEEP = 1 << 12  # positions that torch looks at, at least


class PositionClock:
    """Slots and positions. Slots and positions in a call are distinct."""

    slot_bytes = 5
    position_bytes = 6

    def __init__(self, *, huge_bytes: int = HUGE_BYTES, native: bool | None = None):
        by_slot = {"position": torch.empty(0, dtype=torch.int32), "uses": torch.empty(0).byte()}
        by_position = {"slot": torch.empty(0, dtype=torch.int32), "holders": torch.empty(0).short()}
        self._by_slot, self._by_position = (RowStore(one, huge_bytes=huge_bytes) for one in (by_slot, by_position))
        for one in (self._by_slot, self._by_position):
            one.pinned = True
        self._functions = _functions() if native is None or native else None
        self._hand = self._most_uses = self._num_uses = 0
        self.num_held = 0  # positions

    @property
    def num_slots(self) -> int:
        return len(self._by_slot)

    @property
    def num_positions(self) -> int:
        return len(self._by_position)

    @property
    def slots(self) -> Tensor:
        """All slots with a position."""
        slots = self._by_position["slot"]
        return slots[slots >= 0].long()

    def grow(self, num_slots: int) -> None:
        """Adds slots without a position."""
        before = self.num_slots
        self._by_slot.grow(num_slots)
        self._by_slot["position"][before:] = _NONE

    def add(self, number: int) -> Tensor:
        """Adds so many positions without a slot, and holds them."""
        before = self.num_positions
        self._by_position.grow(before + number)
        self._by_position["slot"][before:] = _NONE
        self._by_position["holders"][before:] = 1
        self.num_held += number
        return torch.arange(before, before + number)

    def shrink(self, num_positions: int) -> None:
        """Removes the last positions, which must have no slot."""
        self._by_position.shrink(num_positions)

    def find(self, slots: Tensor) -> Tensor:
        """The position [n] of each slot, -1 if it has none; slots may repeat."""
        return gather_rows(self._by_slot["position"], slots).long()

    def slots_at(self, positions: Tensor) -> Tensor:
        """The slot [n] at each position, -1 if there is none."""
        return self._by_position["slot"].index_select(0, positions).long()

    def is_held(self, positions: Tensor) -> Tensor:
        """Whether somebody holds each position [n]."""
        return self._by_position["holders"].index_select(0, positions) > 0

    def hold(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Counts a use of slots, and holds the positions of those that have one.

        Returns positions [n], -1 for a slot without one, and the places [k] of these.
        """
        self._num_uses += len(slots)
        if self._functions is not None:
            slots = slots.contiguous()
            positions, missing, counts = torch.empty_like(slots), torch.empty_like(slots), torch.empty(2).long()
            out = address(positions), address(missing), address(counts)
            if self._functions.hold(byref(self._call()), address(slots), len(slots), *out) < len(slots):
                raise IndexError(f"a slot is not among {self.num_slots:,} slots; nothing was changed")
            num_missing, num_new = counts.tolist()
            self.num_held += num_new
            return positions, missing[:num_missing]
        uses, holders = self._by_slot["uses"], self._by_position["holders"]
        uses.index_copy_(0, slots, uses.index_select(0, slots).clamp_(max=_MOST_USES - 1).add_(1))
        positions = self.find(slots)
        found = positions[positions >= 0]
        counts = holders.index_select(0, found)
        self.num_held += int((counts == 0).sum())
        holders.index_copy_(0, found, counts.add_(1))
        return positions, (positions < 0).nonzero().flatten()

    def release(self, positions: Tensor) -> None:
        """Ends a hold; positions of -1 are skipped."""
        if self._functions is not None:
            positions = positions.contiguous()
            num_free = self._functions.release(byref(self._call()), address(positions), len(positions))
            if num_free < 0:
                raise IndexError(f"a position is not among {self.num_positions:,}; nothing was changed")
            self.num_held -= num_free
            return
        positions, holders = positions[positions >= 0], self._by_position["holders"]
        counts = holders.index_select(0, positions).sub_(1)
        self.num_held -= int((counts == 0).sum())
        holders.index_copy_(0, positions, counts)

    def take(self, number: int, end: int) -> Tensor:
        """Holds so many positions below `end` that nobody holds, with a slot or without; there must be as many."""
        taken, num_turns = torch.empty(number, dtype=torch.int64), 0
        done = 0
        while done < number:
            if self._hand >= end:
                self._turn(end)
                num_turns += 1
            most_uses = _MOST_USES if num_turns > 1 else self._most_uses  # too few rare ones: any will do
            done += self._sweep(taken[done:], end, most_uses)
        self.num_held += number
        return taken

    def link(self, slots: Tensor, positions: Tensor) -> None:
        """Gives positions to slots."""
        self._by_position["slot"].index_copy_(0, positions, slots.int())
        self._by_slot["position"].index_copy_(0, slots, positions.int())

    def unlink(self, slots: Tensor, positions: Tensor) -> None:
        """Takes the positions from slots."""
        self._by_slot["position"].index_fill_(0, slots, _NONE)
        self._by_position["slot"].index_fill_(0, positions, _NONE)

    def forget(self, slots: Tensor) -> None:
        """Forgets the uses of slots."""
        self._by_slot["uses"].index_fill_(0, slots, 0)

    def _turn(self, end: int) -> None:
        """Starts a turn of the clock: decides which counts are rare."""
        self._hand = 0
        uses = self._by_slot["uses"]
        if self._num_uses > _USES_PER_HALVING * end:
            uses.bitwise_right_shift_(1)
            self._num_uses = 0
        counts = torch.bincount(uses.index_select(0, self.slots_at(torch.arange(end)).clamp_(min=0)), minlength=256)
        rare = torch.searchsorted(counts.cumsum(0), torch.tensor([end // _RARE_SHARE + 1]))
        self._most_uses = min(int(rare), _MOST_USES)

    def _sweep(self, taken: Tensor, end: int, most_uses: int) -> int:
        """Goes on with the clock until `taken` is full or the end is reached; returns the number of those taken."""
        begin, number = self._hand, len(taken)
        if self._functions is not None:
            following = c_int64()
            out = address(taken), byref(following)
            found = int(self._functions.take(byref(self._call()), begin, end, most_uses, number, *out))
            self._hand = following.value
            return found
        last = min(begin + max(2 * number, _SWEEP), end)
        slots, holders = self._by_position["slot"][begin:last].long(), self._by_position["holders"][begin:last]
        uses = self._by_slot["uses"].index_select(0, slots.clamp(min=0)).masked_fill_(slots < 0, 0)
        free = ((holders == 0) & (uses <= most_uses)).nonzero().flatten()[:number]
        holders.index_fill_(0, free, 1)
        taken[: len(free)] = free + begin
        self._hand = begin + int(free[-1]) + 1 if len(free) == number else last
        return len(free)

    def _call(self) -> _Clock:
        by_slot, by_position = self._by_slot, self._by_position
        slots = address(by_slot["position"]), address(by_slot["uses"]), len(by_slot)
        return _Clock(*slots, address(by_position["slot"]), address(by_position["holders"]), len(by_position))


class _Clock(Structure):
    """nestpipe_clock of clock.cpp."""

    _fields_ = (
        ("positions", c_void_p),
        ("uses", c_void_p),
        ("num_slots", c_int64),
        ("slots", c_void_p),
        ("holders", c_void_p),
        ("num_positions", c_int64),
    )


class _ClockFunctions:
    """The functions of clock.cpp."""

    def __init__(self, native: Native):
        clock, number, array = POINTER(_Clock), c_int64, c_void_p
        self.hold = native.function("nestpipe_clock_hold", number, clock, array, number, array, array, array)
        self.release = native.function("nestpipe_clock_release", number, clock, array, number)
        self.take = native.function(
            "nestpipe_clock_take", number, clock, number, number, number, number, array, POINTER(c_int64)
        )


@cache
def _functions() -> _ClockFunctions | None:
    native = library()
    return _ClockFunctions(native) if native else None
