"""Decoder blocks in two forms of the same function: all tokens of many targets at once, and one token of every beam.

Training. Every event of a history is a query for the next one, and the encoder is causal, so all queries of a history share one
memory. A target has P tokens [T, P, D]; each of them sees the tokens before it and the memory up to its own event:
attention over the memory is causal attention of the history with P times as many heads, so nothing is padded.

Decoding. `Decoding` keeps keys and values of the memory once per request, and of the few tokens so far once per beam.

Letters: T targets, P tokens of a target, D width, H heads, E = D / H, R requests, W beams, L keys of the longest memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.jagged import Jagged
from nestpipe.ops.attention import Bias, Layout, jagged_attention
from nestpipe.rng import Rng, dropout


class TargetDropout:
    """Dropout whose mask belongs to (sample, event, token); without a `draw` it does nothing."""

    def __init__(self, probability: float, samples: Tensor, positions: Tensor, num_tokens: int, rng: Rng | None):
        self._probability = probability
        self._draw = rng if probability > 0 else None
        self._sample = samples.repeat_interleave(num_tokens)
        self._place = (positions.unsqueeze(1) * num_tokens + torch.arange(num_tokens)).flatten()

    def __call__(self, values: Tensor, site: str) -> Tensor:
        if self._draw is None:
            return values
        flat = dropout(values.flatten(0, 1), self._probability, self._draw.keys(site, self._sample, self._place))
        return flat.view_as(values)


@dataclass(frozen=True, slots=True, eq=False)
class Layouts:
    """Of the tokens of each target among themselves, and of targets on the memory."""

    tokens: Layout
    memory: Layout


class DecoderBlock(nn.Module):
    """Attention among tokens, attention on the memory with a bias by distance, feed-forward; pre-norm."""

    def __init__(self, dim: int, hidden_dim: int, num_heads: int, max_keys: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm_self, self.norm_cross, self.norm_feed = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        # No key biases: softmax cancels them, so their gradients would be rounding noise that Adam blows up.
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.ask = nn.Linear(dim, dim)
        self.memory_key, self.memory_value = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.take = nn.Linear(dim, dim)
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
        among = jagged_attention(q, k, v, layouts.tokens, kind="softmax", scale=scale)
        x = x + drop(self.out(among.view_as(x)), f"{site}/self")
        num_tokens = x.shape[1]
        asked = self.heads(self.ask(self.norm_cross(x))).flatten(1, 2)
        k, v = (self.heads(layer(memory)).repeat(1, num_tokens, 1) for layer in (self.memory_key, self.memory_value))
        bias = Bias(position=self.distance)
        taken = jagged_attention(asked, k, v, layouts.memory, kind="softmax", scale=scale, bias=bias)
        x = x + drop(self.take(taken.view_as(x)), f"{site}/memory")
        hidden = drop(F.relu(self.up(self.norm_feed(x))), f"{site}/hidden")
        return torch.add(x, drop(self.down(hidden), f"{site}/feed"))


@dataclass(frozen=True, slots=True, eq=False)
class CrossAttentionMemory:
    """Keys and values [R, H, L, E] of a block, and what is added to scores [R, 1, L]: a bias by distance, -inf for padding."""

    keys: Tensor
    values: Tensor
    bias: Tensor

    @staticmethod
    def of(block: DecoderBlock, memory: Tensor, rows: Jagged) -> CrossAttentionMemory:
        """From the encoder's output [M, D], rows as in `rows`; padded once, whatever the number of beams."""
        lengths = rows.lengths()
        place = torch.arange(rows.max_len)
        inside = place < lengths.unsqueeze(1)
        index = (rows.offsets[:-1].unsqueeze(1) + place).masked_fill(~inside, 0).flatten()

        def padded(layer: nn.Linear) -> Tensor:
            found = block.heads(layer(memory)).index_select(0, index)
            return found.view(len(lengths), rows.max_len, *found.shape[1:]).transpose(1, 2).contiguous()

        distance = (lengths.unsqueeze(1) - 1 - place).clamp(min=0, max=len(block.distance) - 1)
        bias = block.distance.index_select(0, distance.flatten()).view_as(distance)
        return CrossAttentionMemory(
            padded(block.memory_key), padded(block.memory_value), bias.masked_fill(~inside, -torch.inf).unsqueeze(1)
        )


class DecoderCache:
    """What a decoder remembers between tokens: the memory by block, and keys and values [R, W, tokens, H, E] of the beams."""

    def __init__(self, blocks: nn.ModuleList, memory: Tensor, rows: Jagged):
        self._blocks = blocks
        self._memory = [
            CrossAttentionMemory.of(block, memory, rows) for block in blocks if isinstance(block, DecoderBlock)
        ]
        self._tokens: list[tuple[Tensor, Tensor]] = []

    def reorder(self, parents: Tensor) -> None:
        """Beam w goes on from beam parents[r, w]."""
        for number, kept in enumerate(self._tokens):
            width = kept[0].shape[1]
            index = (torch.arange(len(parents)).unsqueeze(1) * width + parents).flatten()
            keys, values = (one.flatten(0, 1).index_select(0, index) for one in kept)
            self._tokens[number] = (keys.unflatten(0, parents.shape), values.unflatten(0, parents.shape))

    def token(self, x: Tensor) -> Tensor:
        """One more token x [R, W, D] of every beam, through all blocks."""
        for number, block in enumerate(self._blocks):
            assert isinstance(block, DecoderBlock)
            x = x + block.out(self._among(number, block, block.norm_self(x)))
            x = x + block.take(self._on_memory(self._memory[number], block, block.norm_cross(x)))
            x = x + block.down(F.relu(block.up(block.norm_feed(x))))
        return x

    def _among(self, number: int, block: DecoderBlock, normed: Tensor) -> Tensor:
        q = block.heads(block.query(normed)).unsqueeze(2)
        k, v = (block.heads(layer(normed)).unsqueeze(2) for layer in (block.key, block.value))
        if number < len(self._tokens):
            keys, values = self._tokens[number]
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            self._tokens[number] = (k, v)
        else:
            self._tokens.append((k, v))
        weights = ((q * k).sum(4, keepdim=True) * q.shape[4] ** -0.5).softmax(2)
        seen: Tensor = (weights * v).sum(2).flatten(2)
        return seen

    def _on_memory(self, memory: CrossAttentionMemory, block: DecoderBlock, normed: Tensor) -> Tensor:
        q = block.heads(block.ask(normed)).transpose(1, 2)  # [R, H, W, E]
        scores = q @ memory.keys.transpose(2, 3) * q.shape[3] ** -0.5 + memory.bias.unsqueeze(1)
        # A request without a memory has the softmax of nothing, which is nan.
        weights = scores.softmax(3).nan_to_num(0.0)
        taken: Tensor = (weights @ memory.values).transpose(1, 2).flatten(2)
        return taken
