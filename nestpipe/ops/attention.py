"""Attention over jagged sequences: one op, several backends, biases given as rules instead of matrices.

    layout = attention_layout(items, times=times, query_times=query_times)               # once per batch
    out    = jagged_attention(q, k, v, layout, kind="silu", norm=max_len, bias=Bias(position=p, time=t))

q [Q, H, D], k [K, H, D], v [K, H, V] are jagged rows back to back; the result is [Q, H, V], in channel mode
[Q, channels, H, V]. Nothing is padded and no matrix of scores is kept: backward computes them again.

Who sees whom. A sequence has places 0 … n-1, one per key. Its queries stand at the *last* places: with as many queries as
keys this is plain causal attention; with fewer, the keys before the first query are a prefix (a cache), of which only k
and v are given. The last `num_targets` places are targets (candidates): a target sees history and itself, never another
target, and stands where the next event would, so its result does not depend on how many targets there are or on their order.

What a score is, for query i and visible key j at the distance d = place(i) - place(j):

    s = scale · q_i·k_j              b_pos = position[min(d, N - 1)]
    T = max(|query_time_i - key_time_j|, 1) seconds
    b_time = time[bucket(T)] + alpha · exp(-rate · T^beta)       bucket(T) = min(floor(ln T / 0.301), num_buckets)

    mode "add"      one matrix           A(s + b_pos + b_time)
    mode "channel"  up to three          A(s), b_pos, b_time, each times v; biases are not divided by norm
    kind "silu"     A(x) = silu(x) / norm, norm a constant of the model      kind "softmax"  A = softmax over visible keys

Biases are shared by heads. In a log without times b_time is not read: nothing is added, and its channel is zero.

Serving: `attention_layout(suffix, keys=prefix_and_suffix, ..., num_targets=candidates)` with q for the suffix only. The
native backend gives the same bits for a row whatever is before it in the cache, beside it in the batch, or behind it.

Backends: see `backends.py`. A user of the op never names one; tests and benchmarks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nestpipe.jagged import Jagged
from nestpipe.ops import attention_reference, backends
from nestpipe.ops.backends import BackendRequest
from nestpipe.ops.kernel_args import KernelInputs, Kind, Mode
from nestpipe.ops.limits import MAX_BUCKETS

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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """Lengths and times of a batch, and what backends derive from them, made once and shared by blocks and heads."""

    query_offsets: Tensor
    key_offsets: Tensor
    num_targets: Tensor
    times: tuple[Tensor, Tensor] | None
    num_buckets: int
    decay: bool
    _plans: dict[str, list[Tensor]] = field(default_factory=dict)

    def plan(self, backend: str) -> list[Tensor]:
        if backend not in self._plans:
            self._plans[backend] = backends.module(backend).plan(
                self.query_offsets,
                self.key_offsets,
                self.num_targets,
                self.times,
                num_buckets=self.num_buckets,
                decay=self.decay,
            )
        return self._plans[backend]


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

    `keys` has the rows of all keys, `queries` those of the queries (default: the same). `times` [K] and `query_times` [Q]
    are seconds: of the events, and that which each row answers for. `num_targets` [B] is 0 by default. `num_buckets` 0 and
    `decay` False say that no bias of that kind will be asked for. Raises ValueError if the parts do not fit.
    """
    keys = queries if keys is None else keys
    if num_targets is None:
        num_targets = torch.zeros(queries.num_rows, dtype=torch.int64, device=queries.offsets.device)
    if problem := _problem(queries, keys, times, query_times, num_targets, num_buckets):
        raise ValueError(f"attention layout: {problem}.")
    both = None if times is None or query_times is None else (query_times.values, times.values)
    return Layout(
        query_offsets=queries.offsets,
        key_offsets=keys.offsets,
        num_targets=num_targets,
        times=both,
        num_buckets=num_buckets,
        decay=decay,
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
    """Attention as in the module's docstring: [Q, H, V] in add mode, [Q, channels, H, V] in channel mode."""
    bias = bias or Bias()
    if bias.time is not None and layout.times is not None and len(bias.time) != layout.num_buckets + 1:
        raise ValueError(f"the time bias has {len(bias.time)} values, but the layout has {layout.num_buckets} buckets.")
    if bias.decay is not None and layout.times is not None and not layout.decay:
        raise ValueError("a decay bias needs a layout made with decay=True.")
    if backend is None:
        backend = backends.choose(BackendRequest(q.device.type, q.dtype, kind, bias.mode, bias.decay is not None))
    tensors = (q, k, v, layout.query_offsets, layout.key_offsets, layout.num_targets, *(layout.times or (None, None)))
    tensors += (bias.position, bias.time, bias.decay)
    numbers = (kind, bias.mode, float(scale), float(norm))
    if backend == "reference":
        out = attention_reference.attend(_inputs((*tensors, [], *numbers)))
    else:
        out, _ = _forward(*tensors, layout.plan(backend), *numbers, backend)
    result: Tensor = out.squeeze(1) if bias.mode == "add" else out
    return result


@torch.library.custom_op("nestpipe::jagged_attention", mutates_args=(), schema=f"{_SCHEMA} -> (Tensor, Tensor)")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *rest, backend = arguments
    return backends.module(backend).forward(_inputs(rest))


@torch.library.custom_op(
    "nestpipe::jagged_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor kept, {_SCHEMA[1:]} -> Tensor[]",
)
def _backward(*arguments: Any) -> list[Tensor]:
    grad, out, kept, *rest, backend = arguments
    found = backends.module(backend).backward(_inputs(rest), grad.contiguous(), out, kept)
    return [one for one in found if one is not None]


def _inputs(arguments: Sequence[Any]) -> KernelInputs:
    return KernelInputs(**dict(zip(_FIELDS, arguments, strict=True)))


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = _inputs(arguments[:-1])
    kept = inputs.q.new_empty(inputs.q.shape[:2] if inputs.kind == "softmax" else 0)
    return torch.empty_like(inputs.new_output()), kept


@_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs = _inputs(arguments[3:-1])
    given = (inputs.q, inputs.k, inputs.v, inputs.position, inputs.time, inputs.decay)
    return [torch.empty_like(one) for one in given if one is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, plan, kind, mode, scale, norm, backend = inputs
    out, kept = output
    # silu needs neither; the output is there anyway, because the next layer keeps it.
    ctx.save_for_backward(*(output if kind == "softmax" else (out.new_empty(0), kept)), *tensors, *plan)
    ctx.numbers = (kind, mode, scale, norm, backend)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, kept, *saved = ctx.saved_tensors
    tensors, plan = saved[:11], saved[11:]
    found = iter(_backward(grad, out, kept, *tensors, plan, *ctx.numbers))
    wanted = {0, 1, 2, 8, 9, 10}  # q, k, v and the three biases
    grads = [next(found) if place in wanted and one is not None else None for place, one in enumerate(tensors)]
    return *grads, [None] * len(plan), *[None] * len(ctx.numbers)


_forward.register_autograd(_differentiate, setup_context=_keep)


def _problem(
    queries: Jagged,
    keys: Jagged,
    times: Jagged | None,
    query_times: Jagged | None,
    num_targets: Tensor,
    num_buckets: int,
) -> str | None:
    """What does not fit, or None."""
    if keys.num_rows != queries.num_rows or len(num_targets) != queries.num_rows:
        return f"{queries.num_rows} rows of queries, {keys.num_rows} of keys, {len(num_targets)} numbers of targets"
    if not 0 <= num_buckets <= MAX_BUCKETS:
        return f"{num_buckets} time buckets; there may be 0 to {MAX_BUCKETS}"
    seen = [None if one is None else len(one.values) for one in (times, query_times)]
    if seen not in ([None, None], [len(keys.values), len(queries.values)]):
        return f"{seen[0]} and {seen[1]} times for {len(keys.values)} keys and {len(queries.values)} queries"
    num_keys, num_queries = keys.lengths(), queries.lengths()
    bad = (num_keys < num_queries) | (num_targets > num_keys) | (num_targets < 0)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        counts = f"{int(num_queries[row])} queries and {int(num_targets[row])} targets among {int(num_keys[row])} keys"
        return f"row {row} has {counts}"
    return None
