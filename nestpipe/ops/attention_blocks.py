"""The attention op in plain PyTorch, for any device.

    batch -> groups of similar length (little padding) -> blocks of 128 queries (keys behind a block are skipped)

The plan holds what depends on lengths and times alone. Backward recomputes the scores, so forward saves only q, k and v,
and for softmax the logsumexp of each row and head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.ops.device_memory import upload
from nestpipe.ops.kernel_args import MASKED, Gradients, KernelInputs, Layout, buckets_of, gaps, log_of, pairs

_QUERY_BLOCK = 128
_MAX_SCORES = 1 << 21  # per group and head: 8 MiB of fp32 scores, about the size of a last-level cache


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Queries first … last - 1 of a group, and the keys that any of them sees."""

    first: int
    last: int
    num_keys: int
    distance: Tensor  # [1 or b, q, k], 0 where hidden
    hidden: Tensor  # [1 or b, q, k]
    buckets: Tensor  # [b, q, k] int32, or empty
    log_gap: Tensor  # [b, q, k] fp32, or empty


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences of similar length, padded: row numbers [b, q] of queries and [b, k] of keys; padding is the last + 1."""

    query_rows: Tensor
    key_rows: Tensor
    blocks: tuple[_Block, ...]

    def flat(self) -> list[Tensor]:
        spans = torch.tensor([[block.first, block.last, block.num_keys] for block in self.blocks]).reshape(-1, 3)
        tensors = [one for b in self.blocks for one in (b.distance, b.hidden, b.buckets, b.log_gap)]
        return [spans, self.query_rows, self.key_rows, *tensors]


def plan(layout: Layout) -> list[Tensor]:
    """The groups of a batch as a flat list of tensors; spans of blocks stay on the host."""
    device, layout = layout.key_offsets.device, layout.host or layout
    flat = [_group(members, layout).flat() for members in _members(layout)]
    return [one for spans, *tensors in flat for one in (spans, *(upload(tensor, device) for tensor in tensors))]


def forward(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """The output [Q, channels, H, V], and for softmax the logsumexp of each row [Q, H]."""
    num_queries, num_heads = inputs.q.shape[:2]
    out = inputs.q.new_zeros(num_queries + 1, inputs.num_channels, num_heads, inputs.v.shape[2])
    saved = inputs.q.new_zeros((num_queries + 1, num_heads) if inputs.kind == "softmax" else 0)
    for group in _groups(inputs.plan):
        q, k, v = _gather(inputs, group)
        for block in group.blocks:
            rows = group.query_rows[:, block.first : block.last].flatten()
            values = v[:, :, : block.num_keys]
            scores = _scores(inputs, block, q, k)
            if inputs.kind == "softmax":
                sums = torch.logsumexp(scores, dim=-1, keepdim=True)
                saved.index_copy_(0, rows, sums.squeeze(3).transpose(1, 2).flatten(0, 1))
                weights = scores.sub_(sums).exp_()
            else:
                weights = (
                    torch.nn.functional.silu(scores).div_(inputs.norm).masked_fill_(block.hidden.unsqueeze(1), 0.0)
                )
            matrices = [weights, *_bias_matrices(inputs, block)]
            results = torch.stack([(one @ values).transpose(1, 2) for one in matrices], dim=2)
            out.index_copy_(0, rows, results.flatten(0, 1))
    return out[:num_queries], saved[:num_queries]


def backward(inputs: KernelInputs, grad: Tensor, out: Tensor, saved: Tensor) -> Gradients:
    """All gradients; recomputes the scores."""
    sums = _BlockSums(inputs)
    softmax = inputs.kind == "softmax"
    row_dots = (grad[:, 0] * out[:, 0]).sum(2) if softmax else saved  # [Q, H]: the softmax Jacobian's term per row
    for group in _groups(inputs.plan):
        q, k, v = _gather(inputs, group)
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in group.blocks:
            rows, span = group.query_rows[:, block.first : block.last], slice(0, block.num_keys)
            d_out = [_pad(grad[:, channel], rows).transpose(1, 2) for channel in range(inputs.num_channels)]
            values, hidden = v[:, :, span], block.hidden.unsqueeze(1)
            scores = _scores(inputs, block, q, k)
            d_weights = d_out[0] @ values.transpose(2, 3)
            if softmax:
                weights = scores.sub_(_pad(saved, rows).transpose(1, 2).unsqueeze(3)).exp_()
                d_scores = d_weights.sub_(_pad(row_dots, rows).transpose(1, 2).unsqueeze(3)).mul_(weights)
            else:
                gate = torch.sigmoid(scores)
                weights = (scores * gate).div_(inputs.norm).masked_fill_(hidden, 0.0)
                # silu' = gate · (1 + x (1 - gate))
                slope = scores.mul_(1 - gate).add_(1).mul_(gate).div_(inputs.norm)
                d_scores = d_weights.mul_(slope).masked_fill_(hidden, 0.0)
            d_v[:, :, span] += weights.transpose(2, 3) @ d_out[0]
            d_q[:, :, block.first : block.last] += (d_scores @ k[:, :, span]).mul_(inputs.scale)
            d_k[:, :, span] += (d_scores.transpose(2, 3) @ q[:, :, block.first : block.last]).mul_(inputs.scale)
            matrices = _bias_matrices(inputs, block)
            for matrix, d_o in zip(matrices, d_out[1:], strict=True):
                d_v[:, :, span] += matrix.transpose(2, 3) @ d_o
            if inputs.mode == "add":
                sums.add(block, [d_scores] * 2)
            else:
                sums.add(block, [(d_o @ values.transpose(2, 3)).masked_fill_(hidden, 0.0) for d_o in d_out[1:]])
        sums.put(group, d_q, d_k, d_v)
    return sums.result()


class _BlockSums:
    """Accumulates the gradients of all blocks."""

    def __init__(self, inputs: KernelInputs):
        self._inputs = inputs
        self._q, self._k, self._v = (
            one.new_zeros(len(one) + 1, *one.shape[1:]) for one in (inputs.q, inputs.k, inputs.v)
        )
        self._position, self._time, self._decay = (
            None if one is None else torch.zeros_like(one) for one in (inputs.position, inputs.time, inputs.decay)
        )

    def put(self, group: _Group, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> None:
        for target, rows, values in (
            (self._q, group.query_rows, d_q),
            (self._k, group.key_rows, d_k),
            (self._v, group.key_rows, d_v),
        ):
            target.index_copy_(0, rows.flatten(), values.transpose(1, 2).flatten(0, 1))

    def add(self, block: _Block, grads: Sequence[Tensor]) -> None:
        """Adds a block's gradients [b, H, q, k] of the position bias and of the time bias."""
        inputs = self._inputs
        if self._position is not None:
            by_pair = grads[0].sum(1)
            if len(block.distance) < len(by_pair):
                by_pair = by_pair.sum(0, keepdim=True)
            index = block.distance.clamp(max=len(self._position) - 1).flatten()
            self._position.index_add_(0, index, by_pair.flatten())
        if not inputs.uses_time:
            return
        by_pair = grads[-1].sum(1)
        if self._time is not None:
            self._time.index_add_(0, block.buckets.flatten(), by_pair.flatten())
        if self._decay is not None and inputs.decay is not None:
            alpha, rate, beta = inputs.decay.unbind()
            log_gap = block.log_gap.to(by_pair.dtype)
            power = torch.exp(beta * log_gap)
            by_alpha = by_pair * torch.exp(-rate * power)
            by_power = by_alpha * power * -alpha
            self._decay += torch.stack([by_alpha.sum(), by_power.sum(), rate * (by_power * log_gap).sum()])

    def result(self) -> Gradients:
        return Gradients(self._q[:-1], self._k[:-1], self._v[:-1], self._position, self._time, self._decay)


def _scores(inputs: KernelInputs, block: _Block, q: Tensor, k: Tensor) -> Tensor:
    """Scores [b, H, q, k] with the biases of add mode; hidden pairs are masked for softmax."""
    scores = (q[:, :, block.first : block.last] * inputs.scale) @ k[:, :, : block.num_keys].transpose(2, 3)
    if inputs.mode == "add":
        for bias in _biases(inputs, block):
            scores += bias.unsqueeze(1)
    if inputs.kind == "softmax":
        scores.masked_fill_(block.hidden.unsqueeze(1), MASKED)
    return scores


def _bias_matrices(inputs: KernelInputs, block: _Block) -> list[Tensor]:
    """Channel mode: the biases as attention matrices [1 or b, 1, q, k]."""
    if inputs.mode == "add":
        return []
    found = [bias.masked_fill(block.hidden, 0.0).unsqueeze(1) for bias in _biases(inputs, block)]
    if inputs.time_channel is not None and not inputs.uses_time:
        found.append(inputs.q.new_zeros(1, 1, *block.hidden.shape[1:]))
    return found


def _biases(inputs: KernelInputs, block: _Block) -> Iterator[Tensor]:
    """The position bias [1 or b, q, k], then the time bias [b, q, k]."""
    if inputs.position is not None:
        yield _at(inputs.position, block.distance.clamp(max=len(inputs.position) - 1))
    if inputs.uses_time:
        by_time = None if inputs.time is None else _at(inputs.time, block.buckets)
        if inputs.decay is not None:
            alpha, rate, beta = inputs.decay.unbind()
            faded = (block.log_gap.to(inputs.q.dtype) * beta).exp_().mul_(-rate).exp_().mul_(alpha)
            by_time = faded if by_time is None else by_time + faded
        assert by_time is not None
        yield by_time


def _at(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.flatten()).reshape(index.shape)


def _gather(inputs: KernelInputs, group: _Group) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a group, [b, H, places, width]."""
    chosen = (_pad(inputs.q, group.query_rows), _pad(inputs.k, group.key_rows), _pad(inputs.v, group.key_rows))
    q, k, v = (one.transpose(1, 2).contiguous() for one in chosen)
    return q, k, v


def _pad(values: Tensor, rows: Tensor) -> Tensor:
    padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return padded.index_select(0, rows.flatten()).reshape(*rows.shape, *values.shape[1:])


def _members(layout: Layout) -> Iterator[Tensor]:
    """Sequences [b] with similar numbers of keys; sequences without a query are left out."""
    lengths, order = layout.key_offsets.diff().cpu().sort(stable=True)
    has_query = layout.query_offsets.diff().cpu().index_select(0, order) > 0
    lengths, order = lengths[has_query], order[has_query]
    sizes = lengths.tolist()
    first = 0
    while first < len(sizes):
        last = first + 1
        # A group ends where its shortest member would be padded by over a quarter, or where scores get too large.
        while (
            last < len(sizes)
            and sizes[last] <= sizes[first] * 1.25 + 8
            and (last - first) * sizes[last] ** 2 < _MAX_SCORES
        ):
            last += 1
        yield order[first:last].to(layout.key_offsets.device)
        first = last


def _group(members: Tensor, layout: Layout) -> _Group:
    query_rows, num_queries = _rows(layout.query_offsets, members)
    key_rows, num_keys = _rows(layout.key_offsets, members)
    targets = layout.num_targets.index_select(0, members)
    first_place = num_keys - num_queries
    if not bool(first_place.any()) and not bool(targets.any()):
        # Plain causal attention: one mask for the whole group, because padding follows every key.
        first_place, num_history = first_place[:1], num_keys.max().reshape(1)
    else:
        num_history = num_keys - targets
    times = None if layout.times is None else (_pad(layout.times[0], query_rows), _pad(layout.times[1], key_rows))
    blocks = []
    steps = torch.arange(max(query_rows.shape[1], key_rows.shape[1]), device=members.device)
    for first in range(0, query_rows.shape[1], _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, query_rows.shape[1])
        end = min(int(first_place.max()) + last, key_rows.shape[1])
        query_places = first_place[:, None, None] + steps[first:last, None]
        hidden, distance = pairs(query_places, steps[:end].reshape(1, 1, -1), num_history[:, None, None])
        buckets = log_gap = torch.empty(0, device=members.device)
        if times is not None:
            gap = gaps(times[0][:, first:last, None], times[1][:, None, :end])
            buckets = buckets_of(gap, layout.num_buckets) if layout.num_buckets else buckets
            log_gap = log_of(gap) if layout.decay else log_gap
        blocks.append(_Block(first, last, end, distance, hidden, buckets, log_gap))
    return _Group(query_rows, key_rows, tuple(blocks))


def _rows(offsets: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers [b, longest] of the members' values, the last + 1 for padding, and their lengths [b]."""
    lengths = offsets.diff().index_select(0, members)
    steps = torch.arange(int(lengths.max()), device=offsets.device)
    rows = offsets.index_select(0, members).unsqueeze(1) + steps
    return rows.masked_fill(steps >= lengths.unsqueeze(1), int(offsets[-1])), lengths


def _groups(flat: Sequence[Tensor]) -> Iterator[_Group]:
    """The groups of a flat plan."""
    items = iter(flat)
    for spans in items:
        query_rows, key_rows = next(items), next(items)
        blocks = (
            _Block(first, last, num_keys, next(items), next(items), next(items), next(items))
            for first, last, num_keys in spans.tolist()
        )
        yield _Group(query_rows, key_rows, tuple(blocks))
