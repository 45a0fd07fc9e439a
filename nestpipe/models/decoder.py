"""Decoder blocks, in two forms of one function: teacher forcing over all tokens, and decoding with a KV cache.

Training (`DecoderBlock.forward`). Every event of a history is a query for the next one. The encoder is causal, so all queries
of a history share its output, the memory. A target has P tokens [T, P, D]; each attends to the tokens before it and to the
memory up to its own event. Cross-attention is causal attention over the history with P times as many heads, without padding.

Decoding (`DecoderCache`). Keys and values of the memory exist once per request, those of the decoded tokens once per beam.

Letters: T targets, P tokens of a target, D width, H heads, E = D / H, R requests, W beams, L keys of the longest memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.jagged import Jagged
from nestpipe.ops.attention import Bias, Layout, jagged_attention
from nestpipe.ops.device_memory import upload
from nestpipe.rng import Rng, dropout


class TargetDropout:
    """Dropout whose mask is a function of (sample, event, token); the identity if `rng` is None."""

    def __init__(self, probability: float, samples: Tensor, positions: Tensor, *, num_tokens: int, rng: Rng | None):
        self._probability = probability
        self._rng = rng if probability > 0 else None
        self._sample = samples.repeat_interleave(num_tokens)
        numbers = torch.arange(num_tokens, device=positions.device)
        self._position = (positions.unsqueeze(1) * num_tokens + numbers).flatten()

    def __call__(self, values: Tensor, site: str) -> Tensor:
        if self._rng is None:
            return values
        flat = dropout(values.flatten(0, 1), self._probability, self._rng.keys(site, self._sample, self._position))
        return flat.view_as(values)


@dataclass(frozen=True, slots=True, eq=False)
class Layouts:
    """Attention layouts: self-attention of the tokens of a target, and cross-attention on the memory."""

    tokens: Layout
    memory: Layout


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention with a distance bias, feed-forward; pre-norm."""

    def __init__(self, dim: int, hidden_dim: int, num_heads: int, max_keys: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm_self, self.norm_cross, self.norm_feed = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        # No key biases: softmax cancels them, so their gradients would be rounding noise, which Adam amplifies.
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.ask = nn.Linear(dim, dim)  # the query of cross-attention
        self.memory_key, self.memory_value = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.take = nn.Linear(dim, dim)  # its output projection
        self.distance = nn.Parameter(torch.zeros(max_keys))
        self.up, self.down = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def heads(self, values: Tensor) -> Tensor:
        """[..., D] as [..., H, E]."""
        split: Tensor = values.unflatten(-1, (self.num_heads, -1))
        return split

    def forward(self, x: Tensor, memory: Tensor, layouts: Layouts, drop: TargetDropout, site: str) -> Tensor:
        """x [T, P, D], memory [M, D]."""
        normed = self.norm_self(x).flatten(0, 1)
        q, k, v = (self.heads(layer(normed)) for layer in (self.query, self.key, self.value))
        scale = q.shape[2] ** -0.5
        attended = jagged_attention(q, k, v, layouts.tokens, kind="softmax", scale=scale)
        x = x + drop(self.out(attended.view_as(x)), f"{site}/self")
        num_tokens = x.shape[1]
        q = self.heads(self.ask(self.norm_cross(x))).flatten(1, 2)
        k, v = (self.heads(layer(memory)).repeat(1, num_tokens, 1) for layer in (self.memory_key, self.memory_value))
        bias = Bias(position=self.distance)
        attended = jagged_attention(q, k, v, layouts.memory, kind="softmax", scale=scale, bias=bias)
        x = x + drop(self.take(attended.view_as(x)), f"{site}/memory")
        hidden = drop(F.relu(self.up(self.norm_feed(x))), f"{site}/hidden")
        return torch.add(x, drop(self.down(hidden), f"{site}/feed"))


@dataclass(frozen=True, slots=True, eq=False)
class CrossAttentionMemory:
    """Keys and values [R, H, L, E] of a block, and the bias [R, 1, L]: by distance, -inf for padding."""

    keys: Tensor
    values: Tensor
    bias: Tensor

    @staticmethod
    def of(block: DecoderBlock, memory: Tensor, rows: Jagged) -> CrossAttentionMemory:
        """From the encoder's output [M, D], one row of `rows` per request; padded once for all beams."""
        lengths = rows.lengths()
        position = torch.arange(rows.max_len, device=lengths.device)
        inside = position < lengths.unsqueeze(1)
        index = (rows.offsets[:-1].unsqueeze(1) + position).masked_fill(~inside, 0).flatten()

        def padded(layer: nn.Linear) -> Tensor:
            heads = block.heads(layer(memory)).index_select(0, index)
            return heads.view(len(lengths), rows.max_len, *heads.shape[1:]).transpose(1, 2).contiguous()

        distance = (lengths.unsqueeze(1) - 1 - position).clamp(min=0, max=len(block.distance) - 1)
        bias = block.distance.index_select(0, distance.flatten()).view_as(distance)
        return CrossAttentionMemory(
            padded(block.memory_key), padded(block.memory_value), bias.masked_fill(~inside, -torch.inf).unsqueeze(1)
        )


class DecoderCache:
    """KV cache of a decoder: the memory per block, and keys and values [R, W, tokens, H, E] of the beams."""

    def __init__(self, blocks: nn.ModuleList, memory: Tensor, rows: Jagged):
        self._blocks = blocks
        self._memory = [
            CrossAttentionMemory.of(block, memory, rows) for block in blocks if isinstance(block, DecoderBlock)
        ]
        self._tokens: list[tuple[Tensor, Tensor]] = []

    def reorder(self, parents: Tensor) -> None:
        """Beam w continues beam parents[r, w]; given on the host."""
        for number, cached in enumerate(self._tokens):
            width = cached[0].shape[1]
            index = (torch.arange(len(parents)).unsqueeze(1) * width + parents).flatten()
            keys, values = (one.flatten(0, 1).index_select(0, upload(index, one.device)) for one in cached)
            self._tokens[number] = (keys.unflatten(0, parents.shape), values.unflatten(0, parents.shape))

    def token(self, x: Tensor) -> Tensor:
        """Appends one token x [R, W, D] to every beam; returns its hidden state after all blocks."""
        for number, block in enumerate(self._blocks):
            assert isinstance(block, DecoderBlock)
            x = x + block.out(self._self_attention(number, block, block.norm_self(x)))
            x = x + block.take(self._cross_attention(self._memory[number], block, block.norm_cross(x)))
            x = x + block.down(F.relu(block.up(block.norm_feed(x))))
        return x

    def _self_attention(self, number: int, block: DecoderBlock, normed: Tensor) -> Tensor:
        q = block.heads(block.query(normed)).unsqueeze(2)
        k, v = (block.heads(layer(normed)).unsqueeze(2) for layer in (block.key, block.value))
        if number < len(self._tokens):
            keys, values = self._tokens[number]
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            self._tokens[number] = (k, v)
        else:
            self._tokens.append((k, v))
        weights = ((q * k).sum(4, keepdim=True) * q.shape[4] ** -0.5).softmax(2)
        attended: Tensor = (weights * v).sum(2).flatten(2)
        return attended

    def _cross_attention(self, memory: CrossAttentionMemory, block: DecoderBlock, normed: Tensor) -> Tensor:
        q = block.heads(block.ask(normed)).transpose(1, 2)  # [R, H, W, E]
        scores = q @ memory.keys.transpose(2, 3) * q.shape[3] ** -0.5 + memory.bias.unsqueeze(1)
        # The softmax over an empty memory is nan.
        weights = scores.softmax(3).nan_to_num(0.0)
        attended: Tensor = (weights @ memory.values).transpose(1, 2).flatten(2)
        return attended
