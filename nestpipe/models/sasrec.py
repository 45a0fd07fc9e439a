"""SASRec: causal softmax attention and a pointwise feed-forward layer, pre-norm, on jagged tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.jagged import Batch
from nestpipe.models.backbone import InputLayer, TokenDropout
from nestpipe.models.config import SASRecConfig
from nestpipe.ops.attention import Layout, attention_layout, jagged_attention
from nestpipe.rng import Rng


class SASRec(nn.Module):
    """The SASRec backbone. It does not use times."""

    def __init__(self, config: SASRecConfig, *, max_len: int):
        super().__init__()
        self.config = config
        self.input = InputLayer(config.dim, max_len)
        self.blocks = nn.ModuleList(_SASRecBlock(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, vectors: Tensor, batch: Batch, rng: Rng | None) -> Tensor:
        layout = attention_layout(batch.items)
        drop = TokenDropout(self.config.dropout, batch, rng)
        x = drop(self.input(vectors, batch), "input")
        for number, block in enumerate(self.blocks):
            x = block(x, layout, drop, f"block{number}")
        normed: Tensor = self.norm(x)
        return normed


class _SASRecBlock(nn.Module):
    def __init__(self, config: SASRecConfig):
        super().__init__()
        dim, hidden = config.dim, config.hidden_dim or config.dim
        self.num_heads = config.num_heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        # No key bias: softmax cancels it, so its gradient would be rounding noise, which Adam amplifies.
        self.key = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor, layout: Layout, drop: TokenDropout, site: str) -> Tensor:
        normed = self.norm_attention(x)
        q, k, v = (layer(normed).unflatten(1, (self.num_heads, -1)) for layer in (self.query, self.key, self.value))
        attended = jagged_attention(q, k, v, layout, kind="softmax", scale=q.shape[2] ** -0.5)
        x = x + drop(self.out(attended.flatten(1)), f"{site}/attention")
        hidden = drop(F.relu(self.up(self.norm_feed(x))), f"{site}/hidden")
        return torch.add(x, drop(self.down(hidden), f"{site}/feed"))
