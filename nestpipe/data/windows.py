"""Which stretch of a history a target is predicted from, as windows that hold many targets at once.

Row r of a window is event r of a user with event r + 1 as its target. A window is what serving would keep of the history:
at most `max_len` events from a multiple of `block` on. So every target is counted in the one window that serving would use.

    rows     0 1 2 3 4 5 6 7 8 9        max_len 6, block 3
    window   [0 1 2 3 4 5]              counts rows 0 .. 5
             . . . [3 4 5 6 7 8]        counts rows 6 .. 8
             . . . . . . [6 7 8 9]      counts row 9
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nestpipe.data.sequences import truncate
from nestpipe.data.splits import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Rows start .. end - 1 of a user (its place in the folder); those from `counted` on count."""

    user: Ints
    start: Ints
    counted: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.user)

    def pick(self, places: Ints) -> Windows:
        return Windows(self.user[places], self.start[places], self.counted[places], self.end[places])


def cover(first: Ints, end: Ints, *, max_len: int, block: int) -> Windows:
    """The windows in which rows first[u] .. end[u] - 1 of each user count exactly once; none where there are no rows."""
    users = np.flatnonzero(end > first)
    start = truncate(first[users] + 1, max_len, block)
    beyond = np.maximum(end[users] - (start + max_len), 0)
    num = 1 + -(-beyond // block)
    number = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    user = np.repeat(users, num)
    starts = np.repeat(start, num) + number * block
    counted = np.where(number == 0, first[user], starts + max_len - block)
    return Windows(user, starts, counted, np.minimum(starts + max_len, end[user]))


def alone(first: Ints, end: Ints, *, max_len: int) -> Windows:
    """Windows for events that need none before them: rows first[u] .. end[u] - 1 of each user, without overlap."""
    found = cover(np.zeros_like(first), end - first, max_len=max_len, block=max_len)
    shift = first[found.user]
    return Windows(found.user, found.start + shift, found.counted + shift, found.end + shift)
