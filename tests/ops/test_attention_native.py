"""The native attention's bits: the same whoever else is in the batch, in the cache, among the targets, or at work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nestpipe.jagged import Jagged
from nestpipe.ops import native_library
from nestpipe.ops.attention import Bias, attention_layout, jagged_attention
from tests.ops.attention_cases import Case, Shape, jagged, make

KINDS = ("silu", "softmax")


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    if not isinstance(native_library.load(), native_library.Native):
        pytest.skip("no C++ compiler")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def alone(case: Case, row: int) -> Case:
    """One sequence of a case without prefixes, by itself."""
    layout = case.layout
    first, last = int(layout.key_offsets[row]), int(layout.key_offsets[row + 1])
    rows = jagged((last - first,))
    query_times, times = (rows.with_values(one[first:last]) for one in layout.times)
    one = attention_layout(
        rows,
        times=times,
        query_times=query_times,
        num_targets=layout.num_targets[row : row + 1],
        num_buckets=layout.num_buckets,
        decay=True,
    )
    cut = [part[first:last].detach().requires_grad_() for part in (case.q, case.k, case.v)]
    return Case(*cut, one, case.bias, case.grad[first:last])


@pytest.mark.parametrize("mode", ["add", "channel"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(kind: str, mode: str) -> None:
    """Outputs and gradients of q, k and v; lengths on both sides of every block size."""
    lengths = (1, 5, 6, 7, 47, 48, 49, 63, 64, 65, 150, 0, 16)
    shape = Shape(lengths, targets=(0, 2, 0, 7, 0, 10, 1, 0, 30, 0, 5, 0, 0), heads=3, qk=9, v=20)
    case = make(shape, "position+time+decay", mode).to(torch.float32)
    out, grads = case.run("native", kind)
    for row, length in enumerate(lengths):
        first = int(case.layout.key_offsets[row])
        single, its_grads = alone(case, row).run("native", kind)
        assert torch.equal(single, out[first : first + length]), (row, length)
        for one, other in zip(its_grads[:3], grads[:3], strict=True):
            assert torch.equal(one, other[first : first + length]), (row, length)


@pytest.mark.parametrize("kind", KINDS)
def test_one_and_two_threads_give_the_same_bits(kind: str) -> None:
    """Bias gradients included: they are summed in an order that lengths decide."""
    case = make(Shape((150, 3, 90, 40, 41, 200, 7) * 6, heads=4, qk=20, v=20), "position+time+decay").to(torch.float32)
    found = []
    for num_threads in (1, 2, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(case.run("native", kind))
    for out, grads in found[1:]:
        assert torch.equal(out, found[0][0])
        assert all(torch.equal(one, other) for one, other in zip(grads, found[0][1], strict=True))


def attend(case: Case, queries: Tensor, keys: Tensor, num_targets: int, kind: str) -> Tensor:
    """Attention of some rows of one sequence over some of its keys."""
    query_rows, key_rows = (
        Jagged(queries, torch.tensor([0, len(queries)]), 0),
        Jagged(keys, torch.tensor([0, len(keys)]), 0),
    )
    query_times, times = case.layout.times
    layout = attention_layout(
        query_rows,
        keys=key_rows,
        times=key_rows.with_values(times[keys]),
        query_times=query_rows.with_values(query_times[queries]),
        num_targets=torch.tensor([num_targets]),
        num_buckets=case.layout.num_buckets,
        decay=True,
    )
    q, k, v = (part.detach() for part in (case.q[queries], case.k[keys], case.v[keys]))
    bias = Bias(*(part.detach() for part in (case.bias.position, case.bias.time, case.bias.decay)), case.bias.mode)
    return jagged_attention(q, k, v, layout, kind=kind, norm=7.0, bias=bias, backend="native")


@pytest.mark.parametrize("mode", ["add", "channel"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prefix_changes_no_bit(kind: str, mode: str) -> None:
    case = make(Shape((150,), heads=2, qk=12, v=12), "position+time+decay", mode).to(torch.float32)
    everything = torch.arange(150)
    whole = attend(case, everything, everything, 20, kind)
    for first in (1, 48, 100, 130, 149):
        assert torch.equal(attend(case, everything[first:], everything, 20, kind), whole[first:])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_other_targets_change_no_bit(kind: str, at_once: bool) -> None:
    """A candidate scored alone, in another order or among others: all the same, also if they are asked for at once."""
    case = make(Shape((90,), heads=2, qk=12, v=12), "position+time+decay").to(torch.float32)
    for one in case.layout.times if at_once else ():
        one[70:] = one[-1]
    history, targets = torch.arange(70), torch.arange(70, 90)
    together = attend(case, targets, torch.cat([history, targets]), 20, kind)
    backwards = attend(case, targets.flip(0), torch.cat([history, targets.flip(0)]), 20, kind)
    assert torch.equal(backwards.flip(0), together)
    for place in (0, 7, 19):
        one = targets[place : place + 1]
        assert torch.equal(attend(case, one, torch.cat([history, one]), 1, kind), together[place : place + 1])


def test_slices_of_one_product_are_read_in_place() -> None:
    """q, k and v as models make them: columns of one matrix."""
    case = make(Shape((30, 12), heads=2, qk=4, v=4)).to(torch.float32)
    mixed = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], dim=1).detach()
    q, k, v = (part.unflatten(1, (2, 4)) for part in mixed.split([8, 8, 8], dim=1))
    assert not q.is_contiguous()
    sliced = jagged_attention(q, k, v, case.layout, kind="silu", bias=case.bias, backend="native")
    plain = jagged_attention(case.q, case.k, case.v, case.layout, kind="silu", bias=case.bias, backend="native")
    assert torch.equal(sliced, plain)
