"""What has changed in a table since it was last saved: for delta checkpoints.

A row changes only in batches that look it up, skipped ones included: those still count as a use. So `Table.advance`, which sees
the ids of every batch, marks their slots: one byte per row. Ids that left are found by comparison with those of the last save,
which only tables with limits need to remember (8 bytes per row).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.embedding.admission import PENDING
from nestpipe.embedding.row_store import RowStore

GONE = "gone"  # exported ids that have left since the last save; with the prefix of `pending.ids` those without a count
_MARK = "changed"
_STEP, _PENDING_IDS = f"{PENDING}last_step", f"{PENDING}ids"


class ChangedRows:
    """The slots and ids that changed since the last `reset`."""

    def __init__(self) -> None:
        self._marks = RowStore({_MARK: torch.empty(0, dtype=torch.bool)})
        self._ids: dict[str, Tensor] = {}  # ids at the last reset, ascending, per column that can lose some
        self._last_step = -1  # of the counts at the last reset

    @property
    def num_rows(self) -> int:
        """Number of marked slots."""
        return int(self._marks[_MARK].sum())

    def mark(self, slots: Tensor, num_slots: int) -> None:
        """Marks slots as changed; -1 is skipped."""
        self._marks.grow(num_slots)
        self._marks[_MARK].index_fill_(0, slots[slots >= 0], True)

    def only(self, ids: Tensor, slots: Tensor, usage: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of an exported index: the ids that changed with their slots and usage, and ids that left."""
        self._marks.grow(int(slots.max()) + 1 if len(slots) else 0)
        own = self._marks[_MARK].index_select(0, slots).nonzero().flatten()
        content = {"ids": ids, "slots": slots, **{name: one for name, one in usage.items() if PENDING not in name}}
        content = {name: values.index_select(0, own) for name, values in content.items()}
        if "ids" in self._ids:
            content[GONE] = _lacking(self._ids["ids"], ids)
        if _PENDING_IDS in usage:
            # A count changes only with its last step.
            own = (usage[_STEP] > self._last_step).nonzero().flatten()
            content |= {name: values.index_select(0, own) for name, values in usage.items() if PENDING in name}
            content[PENDING + GONE] = _lacking(self._ids[_PENDING_IDS], usage[_PENDING_IDS])
        return content

    def reset(self, ids: Tensor, usage: Mapping[str, Tensor]) -> None:
        """The exported index is saved: nothing has changed since."""
        self._marks[_MARK].zero_()
        self._ids = {"ids": ids} if usage else {}
        if _PENDING_IDS in usage:
            self._ids[_PENDING_IDS] = usage[_PENDING_IDS]
            self._last_step = int(usage[_STEP].max()) if len(usage[_STEP]) else -1


def _lacking(before: Tensor, now: Tensor) -> Tensor:
    """The ids of `before` that are not in `now`; both are distinct and ascending."""
    if not len(now):
        return before
    place = torch.searchsorted(now, before).clamp_(max=len(now) - 1)
    return before[now.index_select(0, place) != before]
