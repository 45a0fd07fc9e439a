import math

import pytest
import torch

from nestpipe.models.losses import (
    full_softmax,
    in_batch_softmax,
    plain_full_softmax,
    plain_in_batch_softmax,
    query_to_item,
)


def problem(num_tokens=23, num_rows=11, dim=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_tokens, dim, dtype=torch.float64, generator=generator).mul_(3).requires_grad_()
    rows = torch.randn(num_rows, dim, dtype=torch.float64, generator=generator).requires_grad_()
    positives = torch.randint(num_rows, (num_tokens,), generator=generator)
    return queries, rows, positives


def gradients(loss, *leaves):
    return [loss, *torch.autograd.grad(loss * 0.37, leaves)]  # a factor shows if backward ignores its input


# The same sums in another order: 1e-12 covers a few hundred roundings of fp64 values of order ten.
def close(left, right):
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("segment", [1, 2, 8, 23, 100])
def test_full_softmax_equals_its_definition_for_every_segment(segment):
    queries, rows, targets = problem()
    fast = full_softmax(queries, rows, targets, segment=segment)
    assert close(gradients(fast, queries, rows), gradients(plain_full_softmax(queries, rows, targets), queries, rows))


@pytest.mark.parametrize("segment", [1, 2, 8, 100])
def test_in_batch_softmax_equals_its_definition_for_every_segment(segment):
    queries, rows, positives = problem()
    offsets, log_q = torch.tensor([0, 9, 9, 10, 23]), torch.linspace(-4, -1, 11, dtype=torch.float64)[positives]
    assert len(positives[:9].unique()) < 9, "some tokens of a group must have the same positive"
    fast = in_batch_softmax(queries, rows, positives, log_q, offsets, segment=segment)
    plain = plain_in_batch_softmax(queries, rows, positives, log_q, offsets)
    assert close(gradients(fast, queries, rows), gradients(plain, queries, rows))


def test_no_tokens_is_a_loss_of_zero():
    queries, rows, positives = problem(num_tokens=0)
    assert full_softmax(queries, rows, positives, segment=8).item() == 0
    assert in_batch_softmax(queries, rows, positives, queries.new_zeros(0), torch.tensor([0]), segment=8).item() == 0


def q2i_by_hand(q, t, same, spread, apart):
    """The formula, term by term, in plain Python."""
    n = len(q)
    near = -sum(float(q[i] @ t[i]) for i in range(n)) / n
    log_variance = sum(math.log(float(sum(((one - x.mean(0)) ** 2).sum() for one in x) / n)) for x in (q, t))
    pairs = [float(q[i] @ q[j]) ** 2 for i in range(n) for j in range(n) if same[i] != same[j]]
    return near - spread * log_variance + apart * sum(pairs) / len(pairs)


def test_q2i_equals_its_formula_group_by_group():
    queries, rows, positives = problem()
    q, t = (torch.nn.functional.normalize(one, dim=1) for one in (queries, rows[positives]))
    weights, same = torch.linspace(1, 2, 23, dtype=torch.float64), torch.arange(23) % 5
    offsets = torch.tensor([0, 9, 9, 23])
    found = query_to_item(q, t, weights, same, offsets, variance_weight=0.3, orthogonality_weight=0.7)
    with torch.no_grad():
        by_hand = sum(
            float(weights[a:b].sum()) * q2i_by_hand(q[a:b], t[a:b], same[a:b].tolist(), 0.3, 0.7)
            for a, b in [(0, 9), (9, 23)]
        )
    assert found.item() == pytest.approx(by_hand, rel=1e-12)
    assert all(one.isfinite().all() for one in torch.autograd.grad(found, (queries, rows)))


def test_q2i_is_finite_where_there_is_nothing_to_spread():
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    same = torch.zeros(3, dtype=torch.int64)
    equal = one.expand(3, 2)
    found = query_to_item(
        equal, equal, torch.ones(3), same, torch.tensor([0, 3]), variance_weight=1.0, orthogonality_weight=1.0
    )
    # q·t = 1, both variances are at their least 1e-4, and no pair is of different instructions.
    assert found.item() == pytest.approx(3 * (-1 - 2 * math.log(1e-4)))
    assert torch.autograd.grad(found, one)[0].isfinite().all()
    assert (
        query_to_item(
            equal[:0],
            equal[:0],
            torch.ones(0),
            same[:0],
            torch.tensor([0]),
            variance_weight=1.0,
            orthogonality_weight=1.0,
        )
        == 0
    )
