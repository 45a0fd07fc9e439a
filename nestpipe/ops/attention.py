"""Attention over jagged sequences: one op, several backends, biases as rules instead of matrices.

    layout = attention_layout(items, times=times, query_times=query_times)               # once per batch
    out    = jagged_attention(q, k, v, layout, kind="silu", norm=max_len, bias=Bias(position=p, time=t))

q [Q, H, D], k [K, H, D] and v [K, H, V] hold the rows of all sequences back to back. The result is [Q, H, V], in channel
mode [Q, channels, H, V]. Nothing is padded, and no score matrix is saved: backward recomputes the scores.

Mask. A sequence has places 0 … n-1, one per key; its queries are the *last* places. With as many queries as keys this is
plain causal attention. With fewer, the keys before the first query are a cached prefix, of which only k and v are given.
The last `num_targets` places are targets (candidates). A target sees the history and itself, never another target, and has
the place of the next event. So its result does not depend on the number or order of the targets.

Score of query i and visible key j at the distance d = place(i) - place(j):

    s = scale · q_i·k_j              b_pos = position[min(d, N - 1)]
    T = max(|query_time_i - key_time_j|, 1) seconds
    b_time = time[bucket(T)] + alpha · exp(-rate · T^beta)       bucket(T) = min(floor(ln T / 0.301), num_buckets)

    mode "add"      one matrix           A(s + b_pos + b_time)
    mode "channel"  up to three          A(s), b_pos, b_time, each times v; biases are not divided by norm
    kind "silu"     A(x) = silu(x) / norm, norm a constant of the model      kind "softmax"  A = softmax over visible keys

Biases are shared by heads. For a log without times b_time is not applied, and its channel is zero.

Serving: `attention_layout(suffix, keys=prefix_and_suffix, ..., num_targets=candidates)` with q for the suffix only. On the
native backend a row's result is bitwise independent of the cached prefix and of other rows of the batch.

`backends.py` chooses the backend; only tests and benchmarks name one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nestpipe.jagged import Jagged
from nestpipe.ops import attention_reference, backends
from nestpipe.ops.backends import BackendRequest
from nestpipe.ops.kernel_args import KernelInputs, Kind, Layout, Mode
from nestpipe.ops.limits import MAX_BUCKETS
from nestpipe.ops.precision import full_precision, is_mixed, widened

__all__ = ("Bias", "Layout", "attention_layout", "jagged_attention", "plan_of")

# Defined with a `Library`: the first call of a `custom_op` imports torch's compiler, 1.3 s and 145 MB in every process.
_OPS = torch.library.Library("nestpipe", "DEF")
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor query_offsets, Tensor key_offsets, Tensor num_targets, Tensor? query_times, "
    "Tensor? key_times, Tensor? position, Tensor? time, Tensor? decay, Tensor[] plan, str kind, str mode, float scale, "
    "float norm, str backend)"
)
_FIELDS = [
    "q",
    "k",
    "v",
    "query_offsets",
    "key_offsets",
    "num_targets",
    "query_times",
    "key_times",
    "position",
    "time",
    "decay",
    "plan",
    "kind",
    "mode",
    "scale",
    "norm",
]


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """Learned biases: `position` [N] by distance, `time` [buckets + 1] by bucket, `decay` [3] = alpha, rate, beta."""

    position: Tensor | None = None
    time: Tensor | None = None
    decay: Tensor | None = None
    mode: Mode = "add"


def attention_layout(
    queries: Jagged,
    *,
    keys: Jagged | None = None,
    times: Jagged | None = None,
    query_times: Jagged | None = None,
    num_targets: Tensor | None = None,
    num_buckets: int = 128,
    decay: bool = False,
) -> Layout:
    """The layout of a batch.

    `keys` has the rows of all keys, by default those of `queries`. `times` [K] are the seconds of the events,
    `query_times` [Q] those for which each query predicts. `num_targets` [B] is 0 by default. With `num_buckets` 0 and
    `decay` False the layout supports no time bias. Raises ValueError if shapes do not match.
    """
    keys = queries if keys is None else keys
    host = None
    if queries.host is not None and keys.host is not None and num_targets is None:
        host = attention_layout(
            queries.host,
            keys=keys.host,
            times=None if times is None else times.host,
            query_times=None if query_times is None else query_times.host,
            num_buckets=num_buckets,
            decay=decay,
        )
    if num_targets is None:
        num_targets = torch.zeros(queries.num_rows, dtype=torch.int64, device=queries.offsets.device)
    if host is None and (problem := _problem(queries, keys, times, query_times, num_targets, num_buckets)):
        raise ValueError(f"attention layout: {problem}.")
    both = None if times is None or query_times is None else (query_times.values, times.values)
    return Layout(
        query_offsets=queries.offsets,
        key_offsets=keys.offsets,
        num_targets=num_targets,
        times=both,
        num_buckets=num_buckets,
        decay=decay,
        host=host,
    )


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    kind: Kind,
    scale: float = 1.0,
    norm: float = 1.0,
    bias: Bias | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention as defined in the module docstring: [Q, H, V] in add mode, [Q, channels, H, V] in channel mode."""
    bias = bias or Bias()
    if bias.time is not None and layout.times is not None and len(bias.time) != layout.num_buckets + 1:
        raise ValueError(
            f"the time bias has {len(bias.time)} values, but the layout has {layout.num_buckets} buckets, which take {layout.num_buckets + 1}."
        )
    if bias.decay is not None and layout.times is not None and not layout.decay:
        raise ValueError("a decay bias needs a layout made with decay=True.")
    if backend is None:
        width = max(q.shape[2], v.shape[2])
        request = BackendRequest(q.device.type, q.dtype, kind, bias.mode, bias.decay is not None, width)
        if is_mixed(q.device) and not backends.accumulates_in_fp32(request):
            q, k, v = widened(q), widened(k), widened(v)
            request = replace(request, dtype=q.dtype)
        backend = backends.choose(request)
    tensors = (q, k, v, layout.query_offsets, layout.key_offsets, layout.num_targets, *(layout.times or (None, None)))
    tensors += (bias.position, bias.time, bias.decay)
    numbers = (kind, bias.mode, float(scale), float(norm))
    with full_precision(q.device):
        if backend == "reference":
            out = attention_reference.attend(_inputs((*tensors, [], *numbers)))
        else:
            out, _ = _attention(*tensors, plan_of(layout, backend), *numbers, backend)
    result: Tensor = out.squeeze(1) if bias.mode == "add" else out
    return result


def plan_of(layout: Layout, backend: str) -> list[Tensor]:
    """What a backend derives from a layout, computed once."""
    if backend not in layout.plans:
        layout.plans[backend] = backends.module(backend).plan(layout)
    return layout.plans[backend]


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *rest, backend = arguments
    return backends.module(backend).forward(_inputs(rest))


def _backward(*arguments: Any) -> list[Tensor]:
    grad, out, saved, *rest, backend = arguments
    grads = backends.module(backend).backward(_inputs(rest), grad.contiguous(), out, saved)
    return [one for one in grads if one is not None]


def _inputs(arguments: Sequence[Any]) -> KernelInputs:
    return KernelInputs(**dict(zip(_FIELDS, arguments, strict=True)))


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *rest, backend = arguments
    inputs = _inputs(rest)
    dtype = torch.float32 if backend == "triton" else inputs.q.dtype
    saved = inputs.q.new_empty(inputs.q.shape[:2] if inputs.kind == "softmax" else 0, dtype=dtype)
    return torch.empty_like(inputs.new_output()), saved


def _fake_backward(*arguments: Any) -> list[Tensor]:
    inputs = _inputs(arguments[3:-1])
    differentiable = (inputs.q, inputs.k, inputs.v, inputs.position, inputs.time, inputs.decay)
    return [torch.empty_like(one) for one in differentiable if one is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, plan, kind, mode, scale, norm, backend = inputs
    out, saved = output
    # The backward of silu needs no output.
    ctx.save_for_backward(*(output if kind == "softmax" else (out.new_empty(0), saved)), *tensors, *plan)
    ctx.numbers = (kind, mode, scale, norm, backend)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, saved, *rest = ctx.saved_tensors
    tensors, plan = rest[:11], rest[11:]
    computed = iter(_attention_backward(grad, out, saved, *tensors, plan, *ctx.numbers))
    differentiable = {0, 1, 2, 8, 9, 10}  # q, k, v and the three biases
    grads = [next(computed) if at in differentiable and one is not None else None for at, one in enumerate(tensors)]
    return *grads, [None] * len(plan), *[None] * len(ctx.numbers)


def _defined(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator `name`, which `run` computes on every device."""
    _OPS.define(name + schema)
    _OPS.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nestpipe::{name}", fake, lib=_OPS)
    operator: Callable[..., Any] = getattr(torch.ops.nestpipe, name).default
    return operator


_attention = _defined("jagged_attention", f"{_SCHEMA} -> (Tensor, Tensor)", _forward, _fake_forward)
_attention_backward = _defined(
    "jagged_attention_backward",
    f"(Tensor grad, Tensor out, Tensor saved, {_SCHEMA[1:]} -> Tensor[]",
    _backward,
    _fake_backward,
)
torch.library.register_autograd("nestpipe::jagged_attention", _differentiate, setup_context=_save, lib=_OPS)


def _problem(
    queries: Jagged,
    keys: Jagged,
    times: Jagged | None,
    query_times: Jagged | None,
    num_targets: Tensor,
    num_buckets: int,
) -> str | None:
    """What does not match, or None."""
    if keys.num_rows != queries.num_rows or len(num_targets) != queries.num_rows:
        return f"{queries.num_rows} rows of queries, {keys.num_rows} of keys, {len(num_targets)} target counts"
    if not 0 <= num_buckets <= MAX_BUCKETS:
        return f"{num_buckets} time buckets; supported are 0 to {MAX_BUCKETS}"
    num_times = [None if one is None else len(one.values) for one in (times, query_times)]
    if num_times not in ([None, None], [len(keys.values), len(queries.values)]):
        return f"{num_times[0]} and {num_times[1]} times for {len(keys.values)} keys and {len(queries.values)} queries"
    num_keys, num_queries = keys.lengths(), queries.lengths()
    bad = (num_keys < num_queries) | (num_targets > num_keys) | (num_targets < 0)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        counts = f"{int(num_queries[row])} queries and {int(num_targets[row])} targets among {int(num_keys[row])} keys"
        return f"row {row} has {counts}"
    return None
