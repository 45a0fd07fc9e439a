"""The attention op against one dense matrix per sequence, written out; its layout, its errors and its bits."""

import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops import attention_blocks
from nestpipe.ops.attention import Bias, attention_layout, jagged_attention, plan_of
from nestpipe.ops.kernel_args import bucket_boundaries
from tests.ops.attention_cases import NUM_BUCKETS, Shape, make

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
    monkeypatch.setattr(attention_blocks, "_MAX_SCORES", 1)
    monkeypatch.setattr(attention_blocks, "_QUERY_BLOCK", 4)
    layout = attention_layout(sequences)
    assert len(plan_of(layout, "blocks")) > 100
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


def one_sequence(case, queries, keys, num_targets, backend, kind):
    """Some rows of one sequence over some of its keys, in fp64."""
    rows = lambda places: Jagged(places, torch.tensor([0, len(places)]), 0)  # noqa: E731
    query_times, times = case.layout.times
    layout = attention_layout(
        rows(queries),
        keys=rows(keys),
        times=rows(times[keys]),
        query_times=rows(query_times[queries]),
        num_targets=torch.tensor([num_targets]),
        num_buckets=NUM_BUCKETS,
        decay=True,
    )
    q, k, v = case.q[queries].detach(), case.k[keys].detach(), case.v[keys].detach()
    return jagged_attention(q, k, v, layout, kind=kind, norm=5.0, bias=case.bias, backend=backend).detach()


@pytest.mark.parametrize("mode", ["add", "channel"])
@pytest.mark.parametrize("kind", ["silu", "softmax"])
@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_a_target_is_the_next_event_of_its_history(backend, kind, mode):
    """By plain causal attention: the history with this one target behind it, whoever else is a candidate."""
    case = make(Shape((30,)), "position+time+decay", mode)
    history, targets = torch.arange(22), torch.arange(22, 30)
    together = one_sequence(case, torch.arange(30), torch.arange(30), 8, backend, kind)
    plain = one_sequence(case, history, history, 0, backend, kind)
    assert torch.allclose(together[:22], plain, rtol=0, atol=1e-12)
    for target in targets:
        behind = torch.cat([history, target[None]])
        alone = one_sequence(case, behind, behind, 0, backend, kind)
        assert torch.allclose(together[target], alone[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["silu", "softmax"])
@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_a_prefix_leaves_the_other_rows_as_they_were(backend, kind):
    case = make(Shape((150,)), "position+time+decay")
    everything = torch.arange(150)
    whole = one_sequence(case, everything, everything, 6, backend, kind)
    for first in (1, 130, 147):
        part = one_sequence(case, everything[first:], everything, 6, backend, kind)
        assert torch.allclose(part, whole[first:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_targets": torch.tensor([4])}, "row 0 has 3 queries and 4 targets among 3 keys"),
        ({"keys": Jagged.from_rows([[1, 2]])}, "row 0 has 3 queries and 0 targets among 2 keys"),
        ({"keys": Jagged.from_rows([[1], [2]])}, "1 rows of queries, 2 of keys, 1 target counts"),
        ({"times": Jagged.from_rows([[1, 2, 3]])}, "3 and None times for 3 keys and 3 queries"),
        ({"num_buckets": 256}, "256 time buckets; supported are 0 to 255"),
    ],
)
def test_a_layout_that_does_not_fit_says_what_was_seen(changes, message):
    with pytest.raises(ValueError, match=message):
        attention_layout(Jagged.from_rows([[1, 2, 3]]), **changes)


def test_biases_must_fit_the_layout():
    rows = Jagged.from_rows([[1, 2, 3]])
    layout = attention_layout(rows, times=rows, query_times=rows)
    q = torch.ones(3, 1, 2)
    with pytest.raises(ValueError, match="the time bias has 5 values, but the layout has 128 buckets"):
        jagged_attention(q, q, q, layout, kind="silu", bias=Bias(time=torch.zeros(5)))
    with pytest.raises(ValueError, match="a decay bias needs a layout made with decay=True"):
        jagged_attention(q, q, q, layout, kind="silu", bias=Bias(decay=torch.zeros(3)))
    with pytest.raises(ValueError, match="unknown attention backend 'cudnn'"):
        jagged_attention(q, q, q, layout, kind="silu", backend="cudnn")


@pytest.mark.parametrize("backend", ["blocks", None])
def test_scores_are_not_kept_for_backward(backend):
    """What autograd holds between forward and backward grows with the tokens, not with the pairs."""
    rows = Jagged(torch.arange(1000), torch.tensor([0, 1000]), 1000)
    layout = attention_layout(rows)
    q, k, v = (torch.ones(1000, 1, 8, requires_grad=True) for _ in range(3))
    plan = {one.data_ptr() for one in plan_of(layout, "blocks")}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        jagged_attention(q, k, v, layout, kind="silu", backend=backend)
    assert kept
    assert sum(one.numel() for one in kept if one.data_ptr() not in plan) < 10 * q.numel()


def test_neither_attention_nor_training_imports_the_compiler_of_torch():
    """It takes 1.3 s and 145 MB in every process: ranks, instances, commands."""
    code = """
import sys, torch
from nestpipe.jagged import Jagged
from nestpipe.ops.attention import attention_layout, jagged_attention
from nestpipe.training.process import exact_arithmetic
with exact_arithmetic(1):
    q = torch.randn(4, 1, 8, requires_grad=True)
    rows = Jagged(torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 4]), 3)
    jagged_attention(q, q, q, attention_layout(rows), kind="silu").sum().backward()
assert q.grad is not None
found = {"torch._dynamo", "torch._inductor", "sympy", "triton"} & sys.modules.keys()
sys.exit(f"imported: {found}" if found else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
