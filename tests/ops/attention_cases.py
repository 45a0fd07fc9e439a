"""Inputs for tests of the attention op: shapes that break kernels, biases of every kind, and the op applied to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops.attention import Bias, Layout, attention_layout, jagged_attention

NUM_BUCKETS = 40
BIASES = ("none", "position", "time", "decay", "position+time", "position+time+decay")


@dataclass(frozen=True)
class Shape:
    """Numbers of keys per sequence; how many of them have no query (a cached prefix) and how many are targets."""

    keys: tuple[int, ...]
    prefix: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    heads: int = 2
    qk: int = 3
    v: int = 4


SHAPES = {
    "mixed": Shape((3, 0, 17, 1, 1, 40, 0, 9)),
    "empty": Shape((0, 0)),
    "none": Shape(()),
    "one long among short": Shape((1, 2, 260, 2), heads=1, qk=16, v=8),
    "around a block": Shape((128, 129, 127, 64, 65, 63), heads=3, qk=7, v=5),
    "wide heads": Shape((31, 5, 50), heads=2, qk=50, v=25),
    "targets": Shape((20, 7, 5, 1, 0, 90), targets=(4, 0, 5, 1, 0, 33)),
    "prefix": Shape((20, 7, 5, 1, 0, 150), prefix=(4, 0, 5, 0, 0, 101)),
    "prefix and targets": Shape((20, 9, 140, 6, 4), prefix=(12, 3, 130, 0, 2), targets=(8, 2, 10, 6, 4), qk=9, v=17),
    "targets in cache": Shape((12, 30), prefix=(8, 1), targets=(6, 20)),
}


@dataclass(frozen=True)
class Case:
    """Everything for one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    bias: Bias
    grad: Tensor

    def run(self, backend: str | None, kind: str) -> tuple[Tensor, list[Tensor]]:
        """The output and the gradients of q, k, v and all biases."""
        bias = self.bias
        leaves = [one for one in (self.q, self.k, self.v, bias.position, bias.time, bias.decay) if one is not None]
        out = jagged_attention(
            self.q, self.k, self.v, self.layout, kind=kind, scale=0.7, norm=11.0, bias=bias, backend=backend
        )
        grads = torch.autograd.grad(out, leaves, self.grad, allow_unused=True)
        return out.detach(), [torch.zeros_like(one) if g is None else g for one, g in zip(leaves, grads, strict=True)]

    def to(self, dtype: torch.dtype) -> Case:
        convert = lambda one: None if one is None else one.detach().to(dtype).requires_grad_()  # noqa: E731
        bias = Bias(convert(self.bias.position), convert(self.bias.time), convert(self.bias.decay), self.bias.mode)
        return Case(convert(self.q), convert(self.k), convert(self.v), self.layout, bias, self.grad.to(dtype))


def jagged(lengths: tuple[int, ...]) -> Jagged:
    offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64))
    return Jagged(torch.arange(int(offsets[-1])), offsets, max(lengths, default=0))


def make(
    shape: Shape,
    bias: str = "position+time",
    mode: str = "add",
    *,
    times: bool = True,
    seed: int = 0,
    num_positions: int = 100,
) -> Case:
    """A case in fp64; the position table is shorter than the longest sequence, so that its end is read too."""
    generator = torch.Generator().manual_seed(seed)
    keys = jagged(shape.keys)
    prefix = shape.prefix or (0,) * len(shape.keys)
    queries = jagged(tuple(n - p for n, p in zip(shape.keys, prefix, strict=True)))
    num_queries, num_keys = len(queries.values), len(keys.values)
    rand = lambda *size: torch.randn(*size, dtype=torch.float64, generator=generator)  # noqa: E731
    key_times = torch.randint(0, 10**6, (num_keys,), generator=generator)
    query_times = torch.randint(0, 10**9, (num_queries,), generator=generator)
    tables = {
        "position": (0.5 * rand(num_positions)).requires_grad_(),
        "time": (0.5 * rand(NUM_BUCKETS + 1)).requires_grad_(),
        "decay": torch.tensor([0.8, 0.02, 0.3], dtype=torch.float64).requires_grad_(),
    }
    chosen = {name: table for name, table in tables.items() if name in bias.split("+")}
    layout = attention_layout(
        queries,
        keys=keys,
        times=keys.with_values(key_times) if times else None,
        query_times=queries.with_values(query_times) if times else None,
        num_targets=torch.tensor(shape.targets or (0,) * len(shape.keys), dtype=torch.int64),
        num_buckets=NUM_BUCKETS,
        decay=True,
    )
    channels = [1 + ("position" in chosen) + bool({"time", "decay"} & set(chosen))] if mode == "channel" else []
    return Case(
        rand(num_queries, shape.heads, shape.qk).requires_grad_(),
        rand(num_keys, shape.heads, shape.qk).requires_grad_(),
        rand(num_keys, shape.heads, shape.v).requires_grad_(),
        layout,
        Bias(**chosen, mode=mode),
        rand(num_queries, *channels, shape.heads, shape.v),
    )
