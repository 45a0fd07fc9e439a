"""Division of a batch: sizes that add up and ramp, and groups that are never divided."""

from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.pipeline.micro_batch import micro_batch_sizes, places_of_groups


@given(numbers=st.lists(st.integers(-1, 4), max_size=14), num_micro_batches=st.integers(1, 6))
def test_groups_are_cut_at_their_nearest_borders(numbers, num_micro_batches):
    sizes = micro_batch_sizes(len(numbers), num_micro_batches)
    found = [places.tolist() for places in places_of_groups(torch.tensor(numbers, dtype=torch.int64), sizes)]
    assert sorted(place for places in found for place in places) == list(range(len(numbers)))
    assert all(places == sorted(places) for places in found)
    order = list(dict.fromkeys(numbers))
    taken = [number for places in found for number in dict.fromkeys(numbers[place] for place in places)]
    assert sorted(taken) == sorted(order), "a group is in one micro-batch"
    assert [order.index(number) for number in taken] == sorted(order.index(number) for number in taken)
    borders = [0, *accumulate(numbers.count(number) for number in order)]
    for edge, end in zip(accumulate(sizes), accumulate(map(len, found)), strict=True):
        assert end in borders
        assert abs(end - edge) == min(abs(border - edge) for border in borders)


@given(st.integers(0, 70), st.integers(1, 12), st.floats(0.01, 1.0))
def test_sizes_add_up_and_ramp(num_samples, num_micro_batches, ramp):
    sizes = micro_batch_sizes(num_samples, num_micro_batches, ramp)
    assert len(sizes) == num_micro_batches
    assert sum(sizes) == num_samples
    first, *middle, last = sizes if num_micro_batches > 1 else [*sizes, 0]
    assert min(sizes) >= 0
    if num_micro_batches > 1:
        assert (first > 0) == (num_samples > 0)
        assert (last > 0) == (num_samples > 1)
        assert first - last in (0, 1)
    if middle:
        assert middle == sorted(middle, reverse=True)
        assert middle[0] - middle[-1] <= 1
        ideal = num_samples * Fraction(ramp) / (2 * Fraction(ramp) + len(middle))
        assert abs(last - ideal) < 1 + (num_samples > 1 and ideal < 1)


def test_some_sizes():
    assert micro_batch_sizes(512, 8) == [64] * 8
    assert micro_batch_sizes(512, 8, 0.25) == [19, 79, 79, 79, 79, 79, 79, 19]
    assert micro_batch_sizes(2, 4) == [1, 0, 0, 1]
    assert micro_batch_sizes(3, 4) == [1, 1, 0, 1]
    assert micro_batch_sizes(1, 3) == [1, 0, 0]
    assert micro_batch_sizes(0, 2) == [0, 0]
    assert micro_batch_sizes(7, 4) == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="ramp is 0"):
        micro_batch_sizes(3, 2, 0)
