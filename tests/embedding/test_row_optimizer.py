"""Row optimizers in place: native and torch bit for bit, and each row in company as alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.row_optimizer import OPTIMIZERS, exact_sqrt, fold, update_slots
from tests.embedding.test_row_ops import DIMS, numbers, same_bits
from tests.embedding.test_unique_ids import both, needs_compiler

KINDS = list(OPTIMIZERS)
NUM_SLOTS = 60


def columns(optimizer, dim, dtype=torch.float32):
    state = {
        name: values.to(dtype) if values.is_floating_point() else values
        for name, values in optimizer.new_state(NUM_SLOTS, dim).items()
    }
    return {"rows": numbers(dim, NUM_SLOTS, dim).to(dtype), **state}


def run(optimizer, content, slots, grads, lr=0.0123, **settings):
    state = {name: column for name, column in content.items() if name != "rows"}
    update_slots(optimizer, content["rows"], state, slots, grads, lr, **settings)


def steps(kind, dim, *, num_steps=6, weight_decay=0.0, **settings):
    """The columns after some updates of random rows, of which a third has no slot."""
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind, weight_decay=weight_decay, eps=1e-7))
    content = columns(optimizer, dim)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[: 7 * step]
        if step % 2:
            slots[torch.rand(len(slots), generator=generator) < 0.3] = -1
        run(optimizer, content, slots, numbers(step, len(slots), dim), **settings)
    return content


def same(one, other):
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


@needs_compiler
@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_native_updates_have_the_bits_of_torch(kind, dim, weight_decay):
    assert same(
        steps(kind, dim, weight_decay=weight_decay, native=True),
        steps(kind, dim, weight_decay=weight_decay, native=False),
    )


@needs_compiler
@given(
    kind=st.sampled_from(KINDS),
    dim=st.integers(1, 40),
    picked=st.lists(st.integers(0, NUM_SLOTS - 1), unique=True),
    lr=st.floats(1e-8, 10),
    seed=st.integers(0, 99),
)
def test_any_shape_has_the_bits_of_torch(kind, dim, picked, lr, seed):
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind))
    contents = [columns(optimizer, dim) for _ in range(2)]
    slots, grads = torch.tensor(picked, dtype=torch.int64), numbers(seed, len(picked), dim)
    for content, native in zip(contents, (True, False), strict=True):
        run(optimizer, content, slots, grads, lr, native=native)
    assert same(*contents)


@both
@pytest.mark.parametrize("dim", [1, 7, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_the_bits_of_a_row_in_company(kind, dim, native):
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind))
    together, alone = columns(optimizer, dim), columns(optimizer, dim)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(0))[:41]
    for step in range(3):
        grads = numbers(step, len(slots), dim)
        run(optimizer, together, slots, grads, native=native)
        for place in range(len(slots)):
            run(optimizer, alone, slots[place : place + 1], grads[place : place + 1], native=native)
    assert same(together, alone)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bits(kind):
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind))
    found = []
    for num_threads in (1, 3):
        rows = numbers(0, 5000, 7)
        state = optimizer.new_state(5000, 7)
        slots = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:4100]
        update_slots(optimizer, rows, state, slots, numbers(1, 4100, 7), 0.1, num_threads=num_threads)
        found.append({"rows": rows, **state})
    assert same(*found)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_places_without_a_slot_are_left_out(kind, native):
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind, weight_decay=0.1))
    content, expected = columns(optimizer, 5), columns(optimizer, 5)
    grads = numbers(1, 4, 5)
    run(optimizer, content, torch.tensor([3, -1, -1, 5]), grads, native=native)
    run(optimizer, expected, torch.tensor([3, 5]), grads[[0, 3]], native=False)
    assert same(content, expected)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_that_does_not_exist_is_named_and_nothing_changes(kind):
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind))
    content = columns(optimizer, 5)
    before = {name: column.clone() for name, column in content.items()}
    for wrong in (NUM_SLOTS, -2):
        with pytest.raises(IndexError, match=rf"slot {wrong} \(place 2 of 4\)"):
            run(optimizer, content, torch.tensor([0, -1, wrong, 1]), torch.ones(4, 5))
    assert same(content, before)


@pytest.mark.parametrize("kind", KINDS)
def test_64_bit_rows_are_updated_in_64_bits(kind):
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind))
    ours, plain = (columns(optimizer, 5, torch.float64) for _ in range(2))
    for step in range(3):
        grads = numbers(step, NUM_SLOTS, 5).double()
        run(optimizer, ours, torch.arange(NUM_SLOTS), grads)
        state = {name: column for name, column in plain.items() if name != "rows"}
        optimizer.update(plain["rows"], state, grads, 0.0123)
    assert same(ours, plain)
    assert not torch.equal(ours["rows"].float().double(), ours["rows"])


def test_the_square_root_is_exactly_rounded():
    """Next to integers: r is the root if and only if its square lies within half a unit on both sides of it."""
    values = numbers(0, 500).abs().clamp_(min=1e-30)
    for value, root in zip(values.tolist(), exact_sqrt(values).tolist(), strict=True):
        low, high = (torch.tensor(root).nextafter(torch.tensor(end)).item() for end in (0.0, float("inf")))
        # Exact: sums and squares of such numbers have at most 50 bits.
        assert ((root + low) / 2) ** 2 <= value <= ((root + high) / 2) ** 2


def test_sums_of_rows_fold():
    # [1e8, 1, 3 | -1e8, 1] -> [0, 2 | 3] -> [3 | 2] -> 5; from left to right it would be 1.
    assert fold(torch.tensor([[1e8, 1.0, 3.0, -1e8, 1.0]])).tolist() == [[5.0]]


@needs_compiler
@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_on_the_way_have_the_bits_of_sums_made_before(kind, dim):
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind))
    segments = [numbers(seed, size, dim) for seed, size in ((1, 20), (2, 0), (3, 15))]
    arrived = ArrivedGrads(segments, torch.tensor([0, 1, 4, 5, 30, 35]), torch.randperm(35))
    slots = torch.tensor([7, 3, -1, 50, -1])
    contents = [columns(optimizer, dim) for _ in range(4)]
    run(optimizer, contents[0], slots, arrived)
    run(optimizer, contents[1], slots, arrived.total())
    run(optimizer, contents[2], slots, arrived, native=False)
    for some in (torch.tensor([3, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 2, 4])):
        run(optimizer, contents[3], slots[some], arrived.at(some))
    for other in contents[1:]:
        assert same(contents[0], other)
