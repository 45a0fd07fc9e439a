from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import DataError
from nestpipe.jagged import Batch, Cursor, Jagged, offsets_of, ranges

ROWS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=6)


def lists(jagged: Jagged) -> list[list[int]]:
    values, offsets = jagged.values.tolist(), jagged.offsets.tolist()
    return [values[first:last] for first, last in pairwise(offsets)]


@given(ROWS)
def test_rows_come_back(rows):
    jagged = Jagged.from_rows(rows)
    jagged.check("rows")
    assert lists(jagged) == rows
    assert jagged.row_of_value().tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert jagged.positions().tolist() == [i for row in rows for i in range(len(row))]


@given(ROWS, st.randoms())
def test_select_takes_rows_in_any_order_and_repeatedly(rows, random):
    chosen = [random.randrange(len(rows)) for _ in range(4)] if rows else []
    picked = Jagged.from_rows(rows).select(torch.tensor(chosen, dtype=torch.int64))
    picked.check("picked")
    assert lists(picked) == [rows[i] for i in chosen]


@pytest.mark.parametrize(
    ("offsets", "max_len", "message"),
    [
        ([0, 2], 9, "offsets run from 0 to 2, but there are 3 values"),
        ([1, 3], 9, "offsets run from 1 to 3"),
        ([0, 3, 2, 3], 9, "offsets decrease at row 1"),
        ([0, 3], 2, "row 0 has 3 values, but max_len is 2"),
    ],
)
def test_check_names_the_broken_invariant(offsets, max_len, message):
    with pytest.raises(DataError, match=message):
        Jagged(torch.arange(3), torch.tensor(offsets), max_len).check("x")


def test_ranges():
    assert ranges(torch.tensor([5, 0, 9]), torch.tensor([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert offsets_of(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]


def test_batch_select_moves_every_feature_with_its_sample():
    items = Jagged.from_rows([[1, 2], [], [3, 4, 5]])
    batch = Batch(
        cursor=Cursor(0, 0),
        sample_ids=torch.tensor([10, 11, 12]),
        items=items,
        times=items.with_values(items.values * 100),
        event_features={"tags": Jagged.from_rows([[1], [2, 2], [3, 3, 3], [], [5]])},
        sample_features={"age": Jagged.from_rows([[10], [], [12]])},
    )
    middle = batch.slice(1, 3)
    assert middle.sample_ids.tolist() == [11, 12]
    assert lists(middle.items) == [[], [3, 4, 5]]
    assert lists(middle.times) == [[], [300, 400, 500]]
    assert lists(middle.event_features["tags"]) == [[3, 3, 3], [], [5]]
    assert lists(middle.sample_features["age"]) == [[], [12]]
    assert middle.items.values.data_ptr() == items.values[2:].data_ptr()
    picked = batch.select(torch.tensor([2, 0]))
    assert picked.sample_ids.tolist() == [12, 10]
    assert lists(picked.items) == [[3, 4, 5], [1, 2]]
    assert lists(picked.times) == [[300, 400, 500], [100, 200]]
    assert lists(picked.event_features["tags"]) == [[3, 3, 3], [], [5], [1], [2, 2]]
    assert lists(picked.sample_features["age"]) == [[12], [10]]
    assert picked.sample_of_token().tolist() == [12, 12, 12, 10, 10]


@pytest.mark.parametrize("rows", [[[4], [5], [6], [7]], [[], [5, 6], [], [7, 8]], [[4], [], [6], []], [[], [], [], []]])
def test_a_slice_is_the_selection_of_its_rows(rows):
    whole = Jagged.from_rows(rows)
    for begin in range(5):
        for end in range(begin, 5):
            found, wanted = whole.slice(begin, end), whole.select(torch.arange(begin, end))
            assert found.offsets.tolist() == wanted.offsets.tolist()
            assert found.values.tolist() == wanted.values.tolist()
            found.check("slice")
