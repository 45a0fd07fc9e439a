"""Ids of a batch: both versions against plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.unique_ids import among, dedupe, group, owner_of
from nestpipe.ops import native_library
from nestpipe.rng import mix64

LOW, HIGH = -(2**63), 2**63 - 1
IDS = st.one_of(
    st.integers(-30, 30),
    st.integers(LOW, HIGH),
    st.sampled_from([LOW, LOW + 1, HIGH - 1, HIGH, 0, -1]),
    st.integers(-20, 20).map(lambda number: number << 32),
)
try:
    COMPILER = native_library.find_compiler()
except native_library.BuildError:
    COMPILER = ""
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
both = pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_compiler)], ids=["torch", "native"])


def tensor(ids):
    return torch.tensor(ids, dtype=torch.int64)


@both
@given(ids=st.one_of(st.lists(IDS), st.lists(st.integers(HIGH - 40, HIGH)), st.lists(st.integers(LOW, LOW + 300))))
def test_distinct_ids_ascend_and_every_id_finds_its_place(native, ids):
    unique, inverse = dedupe(tensor(ids), native=native)
    expected = sorted(set(ids))
    assert unique.tolist() == expected
    assert inverse.tolist() == [expected.index(one) for one in ids]


@both
def test_ids_among_others(native):
    ids, others = torch.tensor([-(2**63), -3, 0, 7, 2**63 - 1]), torch.tensor([-4, -3, 7, 8])
    assert among(ids, others, native=native).tolist() == [0, 1, 0, 1, 0]
    assert among(others, ids, native=native).tolist() == [0, 1, 1, 0]
    assert among(ids[:0], others, native=native).tolist() == among(others[:0], ids, native=native).tolist() == []


@needs_compiler
@pytest.mark.parametrize("num_ids", [1, 1000, 30_000])
@pytest.mark.parametrize("num_bits", [4, 12, 20, 24, 33, 44, 63])
def test_both_versions_agree_however_far_the_ids_are_spread(num_ids, num_bits):
    """Both sides of the choice between a bitmap and a hash table, with few and many repeats."""
    generator = torch.Generator().manual_seed(num_bits)
    ids = torch.randint(-(2**num_bits), 2**num_bits - 1, (num_ids,), generator=generator)
    for some in (ids, torch.cat([ids, ids.flip(0)]), ids[::2]):
        for ours, other in zip(dedupe(some), some.unique(return_inverse=True), strict=True):
            assert torch.equal(ours, other)


@needs_compiler
@pytest.mark.parametrize("span", [256 * 100 - 1, 256 * 100, 256 * 100 + 1])
def test_the_last_id_of_a_bitmap_is_found(span):
    ids = torch.arange(100) + 5
    ids[17] = 5 + span
    unique, inverse = dedupe(ids)
    assert torch.equal(unique, ids.sort().values)
    assert torch.equal(unique.index_select(0, inverse), ids)


@both
@given(groups=st.lists(st.integers(0, 6)), num_more=st.integers(0, 3))
def test_groups_stand_together_in_order(native, groups, num_more):
    num_groups = max(groups, default=0) + 1 + num_more
    order, counts = group(tensor(groups), num_groups, native=native)
    assert order.tolist() == sorted(range(len(groups)), key=lambda place: groups[place])
    assert counts.tolist() == [groups.count(number) for number in range(num_groups)]


@needs_compiler
@pytest.mark.parametrize("wrong", [-1, 3, LOW, HIGH])
def test_a_group_that_is_none_is_named(wrong):
    with pytest.raises(IndexError, match=rf"group {wrong} \(place 1 of 3\) is not among 3 groups"):
        group(tensor([0, wrong, 1]), 3)


@both
@given(ids=st.lists(IDS), num_buckets=st.integers(1, 65_536), share=st.integers(0, 99))
def test_owners_are_those_of_the_rule(native, ids, num_buckets, share):
    world_size = 1 + (num_buckets - 1) * share // 99
    buckets = [((mix64(one) >> 32) * num_buckets) >> 32 for one in ids]
    assert owner_of(tensor(ids), num_buckets, num_buckets, native=native).tolist() == buckets
    expected = [bucket * world_size // num_buckets for bucket in buckets]
    assert owner_of(tensor(ids), num_buckets, world_size, native=native).tolist() == expected
