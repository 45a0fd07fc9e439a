"""Rows of tables on a device: what is shared out fits, suffices for the windows seen, and wastes nothing."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from nestpipe.embedding import device_budget
from nestpipe.embedding.device_budget import BufferUse, shared_out

_USES = st.builds(
    BufferUse,
    row_bytes=st.integers(1, 400),
    capacity=st.integers(1, 10**6),
    most_held=st.integers(0, 10**4),
    num_rows=st.integers(0, 10**6),
    num_before=st.integers(0, 10**6),
)


def num_bytes(uses: dict[str, BufferUse], rows: dict[str, int]) -> int:
    return sum(uses[name].row_bytes * one for name, one in rows.items())


@hypothesis.given(st.dictionaries(st.sampled_from("abcde"), _USES, min_size=1), st.integers(0, 10**9))
def test_every_table_gets_its_least_and_no_more_than_it_can_use(uses: dict[str, BufferUse], budget: int) -> None:
    found = shared_out(uses, budget)
    if num_bytes(uses, {name: use.least for name, use in uses.items()}) > budget:
        assert found == {name: use.capacity for name, use in uses.items()}
        return
    assert num_bytes(uses, found) <= budget
    assert all(use.least <= found[name] <= use.most for name, use in uses.items())
    starved = [name for name, use in uses.items() if found[name] < use.most]
    widest = max(use.row_bytes for use in uses.values())
    left = budget - num_bytes(uses, found)
    assert not starved or left <= widest * len(uses)  # what is left is less than a row of each
    for name in starved:  # nobody has more bytes beyond its least than one who wants more
        own = (found[name] - uses[name].least) * uses[name].row_bytes
        for other, use in uses.items():
            assert (found[other] - use.least) * use.row_bytes <= own + widest * len(uses)


def test_a_table_that_has_stopped_growing_gets_a_quarter_more_than_its_rows() -> None:
    grown = BufferUse(row_bytes=8, capacity=10**6, most_held=10, num_rows=10**6, num_before=10**6)
    growing = BufferUse(row_bytes=8, capacity=10**6, most_held=10, num_rows=10**6, num_before=0)
    assert (grown.most, growing.most) == (1_250_000, 3_250_000)


def test_small_buffers_are_not_made_smaller() -> None:
    use = BufferUse(row_bytes=64, capacity=1000, most_held=1, num_rows=1, num_before=1)
    assert use.least == 1000
    large = BufferUse(row_bytes=64, capacity=10**9, most_held=1, num_rows=1, num_before=1)
    assert large.least == device_budget._FLOOR_BYTES // 64
