"""The attention op against one dense matrix per sequence, written out; its layout, its errors and its bits."""

import math

import pytest
import torch
from torch.nn import functional as F

from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops import blocks
from nestpipe.ops.attention import Bias, attention_layout, jagged_attention
from nestpipe.ops.inputs import bucket_boundaries

LENGTHS = {
    "mixed": [3, 0, 17, 1, 1, 40, 0, 9],
    "empty": [0, 0],
    "none": [],
    "one long among short": [1, 2, 260, 2],
    "at the block": [128, 129, 127],
}


def inputs(lengths, heads=2, qk=3, v=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    rand = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()  # noqa: E731
    layout = Jagged(torch.arange(total), offsets_of(torch.tensor(lengths, dtype=torch.int64)), max(lengths, default=0))
    times = torch.randint(0, 10**6, (total,), generator=generator)
    bias = Bias(position=rand(512), time=rand(41))
    return rand(total, heads, qk), rand(total, heads, qk), rand(total, heads, v), layout, times, bias


def bucket(query_time, key_time, num_buckets=40):
    return min(max(math.floor(math.log(max(abs(query_time - key_time), 1)) / 0.301), 0), num_buckets)


def plain(q, k, v, sequences, times, query_times, bias, *, kind, scale, norm):
    out = [v[:0]]
    for first, last in zip(sequences.offsets.tolist(), sequences.offsets.tolist()[1:], strict=False):
        places = range(first, last)
        buckets = torch.tensor(
            [[bucket(int(query_times[i]), int(times[j])) for j in places] for i in places], dtype=torch.int64
        )
        distance = torch.tensor([[max(i - j, 0) for j in places] for i in places], dtype=torch.int64)
        later = torch.tensor([[j > i for j in places] for i in places])
        if first == last:
            continue
        scores = torch.einsum("ihd,jhd->hij", q[first:last], k[first:last]) * scale
        scores = (
            scores
            + F.embedding(distance, bias.position[:, None])[..., 0]
            + F.embedding(buckets, bias.time[:, None])[..., 0]
        )
        if kind == "silu":
            weights = torch.where(later, 0.0, F.silu(scores) / norm)
        else:
            weights = torch.softmax(torch.where(later, -torch.inf, scores), 2)
        out.append(torch.einsum("hij,jhd->ihd", weights, v[first:last]))
    return torch.cat(out)


@pytest.mark.parametrize("kind", ["silu", "softmax"])
@pytest.mark.parametrize("case", LENGTHS)
def test_equals_the_definition(case, kind):
    q, k, v, sequences, times, bias = inputs(LENGTHS[case])
    query_times = times + 1000
    layout = attention_layout(
        sequences, times=sequences.with_values(times), query_times=sequences.with_values(query_times), num_buckets=40
    )
    fast = jagged_attention(q, k, v, layout, kind=kind, scale=0.7, norm=11.0, bias=bias)
    slow = plain(q, k, v, sequences, times, query_times, bias, kind=kind, scale=0.7, norm=11.0)
    assert torch.allclose(fast, slow, rtol=1e-12, atol=1e-12)  # fp64, sums of at most 300 terms of order one
    if not len(slow):
        return
    direction = torch.randn(fast.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = (q, k, v, bias.position, bias.time)
    for a, b in zip(
        torch.autograd.grad((fast * direction).sum(), leaves),
        torch.autograd.grad((slow * direction).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)


def test_small_score_limit_changes_nothing(monkeypatch):
    q, k, v, sequences, _, bias = inputs(LENGTHS["mixed"])
    bias = Bias(position=bias.position)
    whole = jagged_attention(q, k, v, attention_layout(sequences), kind="silu", bias=bias)
    monkeypatch.setattr(blocks, "_MAX_SCORES", 1)
    monkeypatch.setattr(blocks, "_QUERY_BLOCK", 4)
    layout = attention_layout(sequences)
    assert len(layout.plan("blocks")) > 100
    assert torch.allclose(whole, jagged_attention(q, k, v, layout, kind="silu", bias=bias), rtol=1e-12, atol=1e-12)


def test_bucket_boundaries_follow_the_logarithm():
    boundaries = bucket_boundaries(128)
    for seconds in [0, 1, 2, 3, 59, 60, 3600, 86_400, 10**7, 10**9]:
        assert int(torch.bucketize(torch.tensor(seconds), boundaries, right=True)) == bucket(seconds, 0, 128)


def test_gradient_bits_repeat_at_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        q, k, v, sequences, times, bias = inputs([200] * 20)
        layout = attention_layout(
            sequences, times=sequences.with_values(times), query_times=sequences.with_values(times), num_buckets=40
        )
        grads = [
            torch.autograd.grad(
                jagged_attention(q, k, v, layout, kind="silu", bias=bias).square().sum(),
                (q, k, v, bias.position, bias.time),
            )
            for _ in range(3)
        ]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))
