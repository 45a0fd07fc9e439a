"""Rows by slot: the native versions against torch, bit for bit."""

import pytest
import torch

from nestpipe.embedding.row_ops import (
    ArrivedGrads,
    add_from,
    add_rows,
    copy_from,
    gather_each,
    gather_rows,
    largest,
    scatter_rows,
)
from tests.embedding.test_unique_ids import both, needs_compiler

DIMS = [1, 7, 50, 64, 128]
SIZES = [0, 1, 5, 3000]


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def numbers(seed, *shape):
    """Numbers of very different size, with zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    values = (
        torch.randn(*shape, generator=generator) * torch.randint(-30, 30, shape, generator=generator).float().exp2()
    )
    return values.masked_fill(torch.rand(*shape, generator=generator) < 0.05, 0.0).copysign(values)


def places(seed, size, high):
    return torch.randint(0, high, (size,), generator=torch.Generator().manual_seed(seed))


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_copies_are_those_of_torch(dim, size):
    for dtype in (torch.float32, torch.float64, torch.int32):
        column, slots = numbers(dim, 4001, dim).to(dtype), places(size, size, 4001)
        expected = column.index_select(0, slots)
        assert same_bits(gather_rows(column, slots), expected)
        assert same_bits(gather_rows(column, slots, num_threads=3), expected)
        buffer = torch.full((size + 2, dim), 7).to(dtype)
        gather_rows(column, slots, buffer[1:-1])
        assert same_bits(buffer[1:-1], expected)
        assert buffer[0].eq(7).all()
        assert buffer[-1].eq(7).all()
        distinct = torch.randperm(4001, generator=torch.Generator().manual_seed(1))[:size]
        other = column.clone()
        scatter_rows(column, distinct, expected)
        scatter_rows(other, distinct, expected, native=False)
        assert same_bits(column, other)


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_sums_are_those_of_torch(dim, size):
    """Few targets, so that most sums have many terms and their order shows."""
    rows, where = numbers(dim, size, dim), places(size, size, 40)
    ours = numbers(1, 40, dim)
    other = ours.clone()
    add_rows(ours, where, rows)
    add_rows(other, where, rows, native=False)
    assert same_bits(ours, other)


@both
def test_sums_go_in_order_of_the_places(native):
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    target = torch.zeros(3, 1)
    add_rows(target, torch.tensor([2, 2, 2, 2]), rows, native=native)
    assert target.flatten().tolist() == [0, 0, 1]  # 2 if the large numbers met first


@both
def test_sums_of_64_bit_numbers_are_not_rounded_to_32(native):
    target = torch.ones(2, 3, dtype=torch.float64)
    add_rows(target, torch.tensor([1]), torch.full((1, 3), 1e-12, dtype=torch.float64), native=native)
    assert target[1].tolist() == [1 + 1e-12] * 3


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_the_gradient_of_a_gather_is_that_of_torch(dim, size):
    index = places(3, size, 50).reshape(-1, 5) if size % 5 == 0 else places(3, size, 50)
    found = []
    for native in (True, False):
        unique = numbers(0, 50, dim).requires_grad_()
        vectors = gather_each(unique, index, native=native)
        assert vectors.shape == (*index.shape, dim)
        vectors.backward(numbers(1, *index.shape, dim))
        found.append((vectors.detach(), unique.grad))
    assert same_bits(found[0][0], found[1][0])
    assert same_bits(found[0][1], found[1][1])


@needs_compiler
def test_a_gradient_that_is_not_dense_is_summed_too():
    unique = torch.ones(3, 2, requires_grad=True)
    gather_each(unique, torch.tensor([0, 2, 2])).sum().backward()
    assert unique.grad.tolist() == [[1, 1], [0, 0], [2, 2]]


@needs_compiler
def test_columns_that_are_not_dense_are_left_to_torch():
    column = numbers(0, 9, 8)
    slots = torch.tensor([3, 1])
    assert same_bits(gather_rows(column[:, ::2], slots), column[slots, ::2])
    before = column.clone()
    add_rows(column[:, 2:4], slots, torch.ones(2, 2))
    before[slots, 2:4] += 1
    assert same_bits(column, before)


@needs_compiler
@pytest.mark.parametrize("wrong", [-1, 4, 2**62, -(2**63)])
def test_a_slot_that_does_not_exist_is_named_and_nothing_changes(wrong):
    column, slots = torch.zeros(4, 3), torch.tensor([0, wrong, 2])
    for call in (
        lambda: gather_rows(column, slots),
        lambda: scatter_rows(column, slots, torch.ones(3, 3)),
        lambda: add_rows(column, slots, torch.ones(3, 3)),
    ):
        with pytest.raises(IndexError, match=rf"slot {wrong} \(place 1 of 3\) is not among 4 slots"):
            call()
    assert not column.any()


@both
def test_shapes_that_do_not_fit_are_refused(native):
    column, slots = torch.zeros(4, 3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="do not fit into a buffer"):
        gather_rows(column, slots, torch.zeros(3, 3), native=native)
    for call in (scatter_rows, add_rows):
        with pytest.raises(ValueError, match="do not fit a column"):
            call(column, slots, torch.zeros(2, 2), native=native)


@both
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_rows_come_from_several_columns(dim, native):
    columns = [numbers(number, size, dim) for number, size in enumerate((5, 0, 40))]
    sources = torch.tensor([2 << 32 | 39, 4, 0, 2 << 32, 2 << 32 | 7])
    places, rows = torch.tensor([9, 0, 3, 4, 11]), [columns[2][39], *columns[0][[4, 0]], *columns[2][[0, 7]]]
    for call, change in ((copy_from, lambda old, row: row), (add_from, lambda old, row: old + row)):
        target = numbers(9, 12, dim)
        expected = target.clone()
        for place, row in zip(places.tolist(), rows, strict=True):
            expected[place] = change(expected[place], row)
        call(target, places, sources, columns, native=native)
        assert same_bits(target, expected)


def test_what_arrived_is_added_in_order_and_the_first_is_copied():
    segments = [torch.tensor([[1e8, -0.0], [2.0, 3.0]]), torch.empty(0, 2), torch.tensor([[1.0, -0.0], [-1e8, 5.0]])]
    arrived = ArrivedGrads(segments, torch.tensor([0, 3, 4]), torch.tensor([0, 2, 3, 1]))
    assert arrived.total().tolist() == [[0.0, 5.0], [2.0, 3.0]]
    alone = ArrivedGrads(segments[2:], torch.tensor([0, 1]), torch.tensor([0]))
    assert same_bits(alone.total(), segments[2][:1])


@both
def test_the_largest_value_counts_without_its_sign(native):
    values = torch.tensor([[1.0, -3.0], [2.0, 0.5]])
    assert largest(values, native=native) == 3
    assert largest(values[:0], native=native) == 0
    assert largest(values.double(), native=native) == 3
    values[1, 0] = -torch.inf
    assert largest(values, native=native) == torch.inf
    values[0, 1] = torch.nan
    assert largest(values, native=native) != largest(values, native=native)
