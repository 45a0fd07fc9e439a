"""Clustering: both versions against the rules in plain Python, and what it is worth on skewed keys."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.jagged import Jagged
from nestpipe.pipeline.micro_batch import micro_batch_sizes
from nestpipe.pipeline.sample_clustering import SampleGroups, cluster, rows_ratio
from tests.embedding.test_unique_ids import HIGH, LOW, both

KEYS = st.one_of(st.integers(0, 12), st.sampled_from([LOW, HIGH, -1]))
SAMPLES = st.lists(st.lists(KEYS, max_size=6), max_size=14)


def oracle(samples, sizes, previous, groups):
    """The micro-batches as lists of places: every choice recounts the new keys of every group."""
    numbers = list(range(len(samples))) if groups is None else groups
    left = [[place for place, other in enumerate(numbers) if other == number] for number in dict.fromkeys(numbers)]
    micro_batches = [[] for _ in sizes]
    last = len(sizes) - 1
    middle_target = middle_size = 0
    for micro_batch in list(dict.fromkeys([0, last, *range(1, last)]))[:-1]:
        target, seen = sizes[micro_batch], set()
        if 0 < micro_batch < last:
            middle_target += target
            target = middle_target - middle_size
        while left and target > 0:
            keys = [{key for place in unit for key in samples[place]} - seen for unit in left]
            costs = [sum(2 if key in previous else 1 for key in own) for own in keys]
            best = min(range(len(left)), key=lambda unit: (costs[unit], left[unit][0]))
            now, then = len(micro_batches[micro_batch]), len(micro_batches[micro_batch]) + len(left[best])
            if abs(then - target) >= abs(now - target):
                break
            micro_batches[micro_batch] += left.pop(best)
            seen |= keys[best]
        if 0 < micro_batch < last:
            middle_size += len(micro_batches[micro_batch])
    rest = 0 if last == 0 else 1 if last == 1 else last - 1
    micro_batches[rest] += [place for unit in left for place in unit]
    return [sorted(micro_batch) for micro_batch in micro_batches]


def places_of(micro_batches):
    return [micro_batch.tolist() for micro_batch in micro_batches.places()]


@both
@given(samples=SAMPLES, num_micro_batches=st.integers(1, 6), previous=st.sets(KEYS), ramp=st.sampled_from([1.0, 0.3]))
def test_micro_batches_are_those_of_the_rules(native, samples, num_micro_batches, previous, ramp):
    sizes = micro_batch_sizes(len(samples), num_micro_batches, ramp)
    found = cluster(
        Jagged.from_rows(samples),
        sizes,
        previous=torch.tensor(sorted(previous), dtype=torch.int64),
        native=native,
    )
    assert found.sizes == sizes
    assert places_of(found) == oracle(samples, sizes, previous, None)


@both
@given(
    samples=SAMPLES, num_micro_batches=st.integers(1, 6), numbers=st.lists(st.integers(-1, 4), min_size=14, max_size=14)
)
def test_groups_move_as_one(native, samples, num_micro_batches, numbers):
    groups, sizes = numbers[: len(samples)], micro_batch_sizes(len(samples), num_micro_batches)
    tensor = torch.tensor(groups, dtype=torch.int64)
    found = cluster(Jagged.from_rows(samples), sizes, groups=tensor, native=native)
    assert places_of(found) == oracle(samples, sizes, set(), groups)
    assert found.order.sort().values.tolist() == list(range(len(samples)))
    of_group = [set(tensor.index_select(0, micro_batch).tolist()) for micro_batch in found.places()]
    assert sum(map(len, of_group)) == len(set(groups))


@both
def test_the_first_and_the_last_micro_batch_have_few_keys(native):
    samples = [[1, 2, 3], [7], [4, 5, 6], [7, 8], [1, 2, 3], [4, 5, 6]]
    found = cluster(Jagged.from_rows(samples), [2, 2, 2], native=native)
    assert places_of(found) == [[1, 3], [2, 5], [0, 4]]


@both
def test_keys_of_the_previous_batch_count_double(native):
    samples = Jagged.from_rows([[1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]])
    assert places_of(cluster(samples, [1, 2, 1], native=native))[0] == [0]
    previous = torch.tensor([-4, 1, 2, 9])
    assert places_of(cluster(samples, [1, 2, 1], previous=previous, native=native)) == [[1], [0, 3], [2]]


@both
def test_a_key_counts_once_however_often_a_sample_has_it(native):
    samples = Jagged.from_rows([[1, 2], [5, 5, 5, 5], [3, 4]])
    assert places_of(cluster(samples, [1, 2], native=native)) == [[1], [0, 2]]


def zipf(num_samples, num_keys, seed=0):
    """Users with tastes of their own: half of a sample's keys are from a corner of the catalogue that few share."""
    generator = torch.Generator().manual_seed(seed)
    popular = (torch.rand(num_samples, num_keys, generator=generator) ** -1.1).long()
    corner = torch.randint(0, 12, (num_samples, 1), generator=generator)
    own = 10**9 + 10**6 * corner + (torch.rand(num_samples, num_keys, generator=generator) ** -1.1).long()
    mine = torch.rand(num_samples, num_keys, generator=generator) < 0.5
    return Jagged(torch.where(mine, own, popular).flatten(), torch.arange(num_samples + 1) * num_keys, num_keys)


def exposed(keys, micro_batches):
    """Distinct keys of the first and of the last micro-batch."""
    first, *_, last = micro_batches.places()
    return sum(len(keys.select(places).values.unique()) for places in (first, last))


def test_clustering_pays_on_skewed_keys(scale):
    for seed in range(scale(3, 100)):
        keys = zipf(128, 40, seed)
        for ramp in (1.0, 0.25):
            sizes = micro_batch_sizes(128, 8, ramp)
            shuffle = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
            plain, ours = SampleGroups(shuffle, sizes), cluster(keys, sizes)
            assert ours.sizes == sizes
            assert ours.order.sort().values.tolist() == list(range(128))
            assert exposed(keys, ours) < exposed(keys, plain)
            assert rows_ratio(keys, ours) < rows_ratio(keys, plain)


@pytest.mark.parametrize("budget", [0, 1, 4000, 20_000, 1 << 24])
def test_what_may_be_spent_is_the_same_in_both_versions(budget):
    keys = zipf(60, 20)
    ours, plain = (cluster(keys, [10, 20, 20, 10], budget=budget, native=native) for native in (None, False))
    assert torch.equal(ours.order, plain.order)
    assert torch.equal(ours.order, cluster(keys, [10, 20, 20, 10], budget=budget).order)
    if budget == 0:  # nothing is known about keys: by place
        assert places_of(ours) == [list(range(10)), list(range(20, 40)), list(range(40, 60)), list(range(10, 20))]


def test_the_ratio_counts_keys_once_per_micro_batch():
    keys = Jagged.from_rows([[1, 1, 2], [2, 3], [], [3]])
    assert rows_ratio(keys, SampleGroups(torch.arange(4), [2, 2])) == pytest.approx(4 / 3)
    assert rows_ratio(keys, SampleGroups(torch.arange(4), [4])) == 1
    assert rows_ratio(Jagged.from_rows([[], []]), SampleGroups(torch.arange(2), [1, 1])) == 1


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


def test_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=r"micro-batches of \[1, 2\] samples do not add up to the 4 samples"):
        cluster(Jagged.from_rows([[1]] * 4), [1, 2])
