"""Every backend against the padded reference: outputs and all gradients, over shapes, kinds, biases and modes."""

from __future__ import annotations

import pytest
import torch

from nestpipe.ops import native_library
from nestpipe.ops.attention import Bias, jagged_attention, plan_of
from tests.ops.attention_cases import BIASES, SHAPES, Case, Shape, make

KINDS = ("silu", "softmax")


def need_compiler() -> None:
    if not isinstance(native_library.load(), native_library.Native):
        pytest.skip("no C++ compiler")


def assert_equal_to_reference(case: Case, backend: str, kind: str, *, dtype: torch.dtype, tolerance: float) -> None:
    """Within tolerance of the fp64 reference, relative to the largest value of each tensor.

    A bias gradient is a sum over all pairs, whose terms may cancel: its rounding grows with the root of their number.
    """
    expected_out, expected = case.run("reference", kind)
    out, found = case.to(dtype).run(backend, kind)
    num_pairs = len(case.q) * max((int(n) for n in case.layout.key_offsets.diff()), default=0) * case.q.shape[1]
    for place, (one, other) in enumerate(zip([out, *found], [expected_out, *expected], strict=True)):
        assert one.dtype == dtype
        assert one.shape == other.shape
        limit = tolerance * max(1.0, float(other.abs().max()) if other.numel() else 0.0)
        if place > 3:
            limit = max(limit, tolerance * num_pairs**0.5 / 4)
        assert torch.allclose(one.double(), other, rtol=0, atol=limit), (place, (one - other).abs().max(), limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_over_shapes(name: str, kind: str) -> None:
    for mode in ("add", "channel"):
        case = make(SHAPES[name], mode=mode)
        # fp64, sums of at most a few thousand terms of order one.
        assert_equal_to_reference(case, "blocks", kind, dtype=torch.float64, tolerance=1e-12)


@pytest.mark.parametrize("mode", ["add", "channel"])
@pytest.mark.parametrize("bias", BIASES)
def test_blocks_over_biases(bias: str, mode: str) -> None:
    for kind in KINDS:
        for times in (True, False):
            case = make(SHAPES["prefix and targets"], bias, mode, times=times)
            assert_equal_to_reference(case, "blocks", kind, dtype=torch.float64, tolerance=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_native_over_shapes(name: str, kind: str) -> None:
    need_compiler()
    for mode in ("add", "channel"):
        case = make(SHAPES[name], mode=mode)
        # fp32: 3e-6 is 50 roundings of the largest value; sums here have up to 260 terms of order one.
        assert_equal_to_reference(case, "native", kind, dtype=torch.float32, tolerance=3e-6)


@pytest.mark.parametrize("mode", ["add", "channel"])
@pytest.mark.parametrize("bias", BIASES)
def test_native_over_biases(bias: str, mode: str) -> None:
    need_compiler()
    for kind in KINDS:
        for times in (True, False):
            case = make(SHAPES["prefix and targets"], bias, mode, times=times)
            assert_equal_to_reference(case, "native", kind, dtype=torch.float32, tolerance=3e-6)


@pytest.mark.parametrize("backend", ["reference", "blocks"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["add", "channel"])
def test_gradcheck(backend: str, kind: str, mode: str) -> None:
    case = make(Shape((4, 0, 3), targets=(2, 0, 0), prefix=(1, 0, 0)), "position+time+decay", mode)

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        q, k, v, position, time, decay = leaves
        return jagged_attention(
            q,
            k,
            v,
            case.layout,
            kind=kind,
            scale=0.7,
            norm=3.0,
            bias=Bias(position, time, decay, mode),
            backend=backend,
        )

    bias = case.bias
    leaves = (case.q, case.k, case.v, bias.position, bias.time, bias.decay)
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def test_the_op_keeps_its_contract_with_torch() -> None:
    """Schema, fake tensors and autograd registration, by torch's own checks."""
    case = make(SHAPES["targets"], "position+time", "channel").to(torch.float32)
    layout, bias = case.layout, case.bias
    arguments = (case.q, case.k, case.v, layout.query_offsets, layout.key_offsets, layout.num_targets, *layout.times)
    arguments += (bias.position, bias.time, None, plan_of(layout, "blocks"), "silu", "channel", 1.0, 1.0, "blocks")
    torch.library.opcheck(torch.ops.nestpipe.jagged_attention.default, arguments)
