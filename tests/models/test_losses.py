import pytest
import torch

from nestpipe.models.losses import full_softmax, in_batch_softmax, plain_full_softmax, plain_in_batch_softmax


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
