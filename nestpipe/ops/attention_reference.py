"""The attention op by definition, the oracle of tests: padded, all score matrices in memory, gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.ops.kernel_args import MASKED, KernelInputs, buckets_of, decayed, gaps, log_of, pairs


def attend(inputs: KernelInputs) -> Tensor:
    """The output [Q, channels, H, V], differentiable."""
    query_rows, key_rows = _padded_rows(inputs.query_offsets), _padded_rows(inputs.key_offsets)
    query_lengths, key_lengths = inputs.query_offsets.diff(), inputs.key_offsets.diff()
    first_place = (key_lengths - query_lengths)[:, None, None]
    query_places = first_place + torch.arange(query_rows.shape[1], device=inputs.q.device)[:, None]
    key_places = torch.arange(key_rows.shape[1], device=inputs.q.device).expand(1, 1, -1)
    hidden, distance = pairs(query_places, key_places, (key_lengths - inputs.num_targets)[:, None, None])

    scores = inputs.scale * torch.einsum("bqhd,bkhd->bhqk", _pad(inputs.q, query_rows), _pad(inputs.k, key_rows))
    by_position, by_time = _position_bias(inputs, distance), _time_bias(inputs, query_rows, key_rows)
    if inputs.mode == "add":
        matrices = [_weights(inputs, scores + (by_position + by_time).unsqueeze(1), hidden.unsqueeze(1))]
    else:
        matrices = [_weights(inputs, scores, hidden.unsqueeze(1))]
        biases = [by_position] * (inputs.position is not None) + [by_time] * (inputs.time_channel is not None)
        matrices += [bias.masked_fill(hidden, 0.0).unsqueeze(1).expand_as(scores) for bias in biases]
    values = _pad(inputs.v, key_rows).transpose(1, 2)
    padded = torch.stack([(one @ values).transpose(1, 2) for one in matrices], dim=2)  # [B, q, channels, H, V]
    real = (query_rows < len(inputs.q)).flatten().nonzero().squeeze(1)
    return padded.flatten(0, 1).index_select(0, real)


def _weights(inputs: KernelInputs, scores: Tensor, hidden: Tensor) -> Tensor:
    if inputs.kind == "silu":
        return (F.silu(scores) / inputs.norm).masked_fill(hidden, 0.0)
    return torch.softmax(scores.masked_fill(hidden, MASKED), dim=-1)


def _position_bias(inputs: KernelInputs, distance: Tensor) -> Tensor:
    if inputs.position is None:
        return inputs.q.new_zeros(distance.shape)
    return _at(inputs.position, distance.clamp(max=len(inputs.position) - 1))


def _time_bias(inputs: KernelInputs, query_rows: Tensor, key_rows: Tensor) -> Tensor:
    total = inputs.q.new_zeros(*query_rows.shape, key_rows.shape[1])
    if inputs.query_times is None or inputs.key_times is None:
        return total
    gap = gaps(_pad(inputs.query_times, query_rows).unsqueeze(2), _pad(inputs.key_times, key_rows).unsqueeze(1))
    if inputs.time is not None:
        total = total + _at(inputs.time, buckets_of(gap, len(inputs.time) - 1))
    if inputs.decay is not None:
        total = total + decayed(inputs.decay, log_of(gap).to(inputs.decay.dtype))
    return total


def _at(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index.long(), table.unsqueeze(1)).squeeze(-1)


def _padded_rows(offsets: Tensor) -> Tensor:
    """Row numbers [B, longest] of jagged values; the last + 1 for padding."""
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    steps = torch.arange(longest, device=offsets.device)
    return (offsets[:-1, None] + steps).masked_fill(steps >= lengths[:, None], int(offsets[-1]))


def _pad(values: Tensor, rows: Tensor) -> Tensor:
    padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return padded.index_select(0, rows.flatten()).reshape(*rows.shape, *values.shape[1:])
