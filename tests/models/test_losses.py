import pytest
import torch

from nestpipe.models.losses import full_softmax, plain_full_softmax, plain_sampled_softmax, sampled_softmax


def problem(num_tokens=23, num_rows=11, num_negatives=7, dim=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_tokens, dim, dtype=torch.float64, generator=generator).mul_(3).requires_grad_()
    rows = torch.randn(num_rows, dim, dtype=torch.float64, generator=generator).requires_grad_()
    positives = torch.randint(num_rows, (num_tokens,), generator=generator)
    negatives = torch.randint(num_rows, (num_tokens, num_negatives), generator=generator)
    return queries, rows, positives, negatives


def gradients(loss, *leaves):
    return [loss, *torch.autograd.grad(loss * 0.37, leaves)]  # a factor shows if backward ignores its input


# The same sums in another order: 1e-12 covers a few hundred roundings of fp64 values of order ten.
def close(left, right):
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("segment", [1, 2, 8, 23, 100])
@pytest.mark.parametrize("use_gemm", [True, False, None])
def test_sampled_softmax_equals_its_definition_for_every_segment(segment, use_gemm):
    queries, rows, positives, negatives = problem()
    assert bool((negatives == positives.unsqueeze(1)).any()), "the problem must contain accidental hits"
    fast = sampled_softmax(queries, rows, positives, negatives, segment=segment, use_gemm=use_gemm)
    plain = plain_sampled_softmax(queries, rows, positives, negatives)
    assert close(gradients(fast, queries, rows), gradients(plain, queries, rows))


@pytest.mark.parametrize("segment", [1, 2, 8, 23, 100])
def test_full_softmax_equals_its_definition_for_every_segment(segment):
    queries, rows, targets, _ = problem()
    fast = full_softmax(queries, rows, targets, segment=segment)
    assert close(gradients(fast, queries, rows), gradients(plain_full_softmax(queries, rows, targets), queries, rows))


def test_only_accidental_hits_leave_a_loss_of_zero():
    queries, rows, positives, _ = problem()
    negatives = positives.unsqueeze(1).expand(-1, 4).contiguous()
    for use_gemm in (True, False):
        loss = sampled_softmax(queries, rows, positives, negatives, segment=8, use_gemm=use_gemm)
        assert loss.item() == 0


def test_extreme_scores_stay_finite():
    queries, rows, positives, negatives = problem()
    loss, grad = gradients(sampled_softmax(queries * 1e4, rows, positives, negatives, segment=8), queries)
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(grad).all())


def test_no_tokens_is_a_loss_of_zero():
    queries, rows, positives, negatives = problem(num_tokens=0)
    assert sampled_softmax(queries, rows, positives, negatives, segment=8).item() == 0
    assert full_softmax(queries, rows, positives, segment=8).item() == 0
