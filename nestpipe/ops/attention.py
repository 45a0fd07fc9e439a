"""Causal attention over jagged sequences, with biases given as rules instead of matrices.

Sequences are grouped by length, so that little is padded, and queries are taken in blocks, so that a block sees only
the keys before its end. A `Layout` holds everything that depends on lengths and times alone; it is made once per batch
and shared by all blocks and heads of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.jagged import Jagged

Kind = Literal["silu", "softmax"]
_QUERY_BLOCK = 128
_MAX_SCORES = 1 << 21  # per group and head: 8 MiB of fp32 scores stay near the cache
_BUCKET_WIDTH = 0.301


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """Learned biases: `position` [N] by distance, `time` [buckets + 1] by the bucket of the time between."""

    position: Tensor | None = None
    time: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Queries first..last of a group of sequences, padded to [b, last - first] with keys [b, last]."""

    query_places: Tensor  # [b, q] into the jagged values, T for padding
    key_places: Tensor  # [b, k]
    distance: Tensor  # [q, k], 0 where the key is later
    hidden: Tensor  # [q, k], True where the key is later than the query
    buckets: Tensor | None  # [b, q, k]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How to cut a batch of jagged sequences into dense blocks."""

    blocks: tuple[_Block, ...]
    order: Tensor  # [T]: where each token stands in the results of all blocks, back to back


def attention_layout(
    sequences: Jagged, *, times: Jagged | None = None, query_times: Jagged | None = None, num_buckets: int = 128
) -> Layout:
    """The layout of a batch. Times are in seconds; `query_times` is the time that each row answers for."""
    blocks = []
    boundaries = _bucket_boundaries(num_buckets)
    for places in _groups(sequences):
        buckets_of = None
        if times is not None and query_times is not None:
            buckets_of = (_pad(times.values, places), _pad(query_times.values, places))
        length = places.shape[1]
        for first in range(0, length, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, length)
            distance = torch.arange(first, last).unsqueeze(1) - torch.arange(last)
            buckets = None
            if buckets_of is not None:
                key, query = buckets_of
                gap = (query[:, first:last, None] - key[:, None, :last]).abs_()
                buckets = torch.bucketize(gap, boundaries, right=True, out_int32=True)
            hidden = distance < 0
            blocks.append(_Block(places[:, first:last], places[:, :last], distance.clamp(min=0), hidden, buckets))
    return Layout(tuple(blocks), _order(blocks, len(sequences.values)))


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
) -> Tensor:
    """Attention [T, H, dv] of q, k [T, H, dqk] and v [T, H, dv]; a row sees its own sequence up to itself.

    silu:    silu(scale · q·k + bias) / norm, then zero for later keys; norm is a constant of the model.
    softmax: softmax(scale · q·k + bias) over the visible keys.
    """
    num_heads = q.shape[1]
    packed = torch.cat([q, k, v], dim=2)
    packed = torch.cat([packed, packed.new_zeros(1, *packed.shape[1:])])  # the row that padding reads
    results = [v.new_zeros(0, num_heads, v.shape[2])]
    for block in layout.blocks:
        rows = packed.index_select(0, block.key_places.flatten()).reshape(*block.key_places.shape, num_heads, -1)
        q_b, k_b, v_b = rows.transpose(1, 2).split([q.shape[2], k.shape[2], v.shape[2]], dim=3)
        scores = (q_b[:, :, -block.query_places.shape[1] :] * scale) @ k_b.transpose(2, 3)
        weights = _weights(_add_bias(scores, block, bias), block.hidden, kind, norm)
        results.append((weights @ v_b).transpose(1, 2).flatten(0, 1))
    return torch.cat(results).index_select(0, layout.order)


def _weights(scores: Tensor, hidden: Tensor, kind: Kind, norm: float) -> Tensor:
    if kind == "silu":
        return (F.silu(scores) / norm).masked_fill(hidden, 0.0)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)


def _add_bias(scores: Tensor, block: _Block, bias: Bias | None) -> Tensor:
    if bias is None:
        return scores
    if bias.position is not None:
        scores = scores + _at(bias.position, block.distance)
    if bias.time is not None and block.buckets is not None:
        scores = scores + _at(bias.time, block.buckets).unsqueeze(1)
    return scores


def _at(table: Tensor, index: Tensor) -> Tensor:
    values: Tensor = _SmallTable.apply(table, index)  # type: ignore[no-untyped-call]
    return values


class _SmallTable(torch.autograd.Function):
    """table[index] for a short vector; its gradient is one serial histogram, so its bits never vary."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(table)
        return table.index_select(0, index.flatten()).reshape(index.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size).index_add_(0, index.flatten(), grad.flatten()), None


def _groups(sequences: Jagged) -> Iterator[Tensor]:
    """Padded places [b, L] of sequences of similar length; padding points behind the last value."""
    lengths, order = sequences.lengths().sort(stable=True)
    num_tokens = len(sequences.values)
    sizes = lengths.tolist()
    first = next((i for i, size in enumerate(sizes) if size), len(sizes))
    while first < len(sizes):
        last = first + 1
        # A group ends where padding its first member would waste more than a quarter, or where scores get too large.
        while (
            last < len(sizes)
            and sizes[last] <= sizes[first] * 1.25 + 8
            and (last - first) * sizes[last] ** 2 < _MAX_SCORES
        ):
            last += 1
        length = sizes[last - 1]
        places = sequences.offsets.index_select(0, order[first:last]).unsqueeze(1) + torch.arange(length)
        yield places.masked_fill(torch.arange(length) >= lengths[first:last].unsqueeze(1), num_tokens)
        first = last


def _order(blocks: list[_Block], num_tokens: int) -> Tensor:
    places = torch.cat([torch.empty(0, dtype=torch.int64), *(block.query_places.flatten() for block in blocks)])
    return torch.empty(num_tokens + 1, dtype=torch.int64).index_copy_(0, places, torch.arange(len(places)))[:num_tokens]


def _pad(values: Tensor, places: Tensor) -> Tensor:
    padded = torch.cat([values, values.new_zeros(1)])
    return padded.index_select(0, places.flatten()).reshape(places.shape)


def _bucket_boundaries(num_buckets: int) -> Tensor:
    """Seconds at which buckets 1 … num_buckets begin: bucket = floor(ln(seconds) / 0.301), in integers.

    A boundary search has no rounding, unlike a vectorised logarithm whose last lanes may land in another bucket.
    """
    starts = torch.arange(1, num_buckets + 1, dtype=torch.float64).mul_(_BUCKET_WIDTH).exp_().ceil_()
    return starts.clamp_(max=2.0**62).to(torch.int64)
