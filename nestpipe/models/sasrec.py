"""SASRec: causal softmax attention and a feed-forward layer on jagged tokens, with one of three blocks."""

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
        self.blocks = nn.ModuleList(_BLOCKS[config.block](config) for _ in range(config.num_blocks))
        # Meta's blocks end in a normalised sum, and its scores are cosines.
        self.norm = nn.Identity() if config.block == "meta" else nn.LayerNorm(config.dim)

    def forward(self, vectors: Tensor, batch: Batch, rng: Rng | None) -> Tensor:
        layout = attention_layout(batch.items)
        drop = TokenDropout(self.config.dropout, batch, rng)
        x = drop(self.input(vectors, batch), "input")
        for number, block in enumerate(self.blocks):
            x = block(x, layout, drop, f"block{number}")
        normed: Tensor = self.norm(x)
        return normed


class _SASRecBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feed(norm(x))."""

    def __init__(self, config: SASRecConfig, *, bias: bool = True):
        """`bias` is that of the feed-forward layer."""
        super().__init__()
        dim, hidden = config.dim, config.hidden_dim or config.dim
        self.num_heads = config.num_heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        # No key bias: softmax cancels it, so its gradient would be rounding noise, which Adam amplifies.
        self.key = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, layout: Layout, drop: TokenDropout, site: str) -> Tensor:
        normed = self.norm_attention(x)
        x = x + drop(self.attend(normed, normed, layout), f"{site}/attention")
        return torch.add(x, self.feed(self.norm_feed(x), drop, site))

    def attend(self, asking: Tensor, asked: Tensor, layout: Layout) -> Tensor:
        """Attention of `asking` [T, D] over the keys and values of `asked` [T, D]."""
        q, k, v = (
            layer(tokens).unflatten(1, (self.num_heads, -1))
            for layer, tokens in ((self.query, asking), (self.key, asked), (self.value, asked))
        )
        attended = jagged_attention(q, k, v, layout, kind="softmax", scale=q.shape[2] ** -0.5)
        out: Tensor = self.out(attended.flatten(1))
        return out

    def feed(self, x: Tensor, drop: TokenDropout, site: str) -> Tensor:
        hidden = drop(F.relu(self.up(x)), f"{site}/hidden")
        return drop(self.down(hidden), f"{site}/feed")


class _LigrBlock(_SASRecBlock):
    """Pre-norm block whose two steps pass a gate of the residual, with a SwiGLU layer: LiGR (arXiv 2502.03417), as in eSASRec."""

    def __init__(self, config: SASRecConfig):
        super().__init__(config, bias=False)
        dim = config.dim
        self.gate_attention, self.gate_feed = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.linear = nn.Linear(dim, config.hidden_dim or dim, bias=False)

    def forward(self, x: Tensor, layout: Layout, drop: TokenDropout, site: str) -> Tensor:
        normed = self.norm_attention(x)
        attended = drop(self.attend(normed, normed, layout), f"{site}/attention")
        x = x + torch.sigmoid(self.gate_attention(x)) * attended
        return torch.add(x, torch.sigmoid(self.gate_feed(x)) * self.feed(self.norm_feed(x), drop, site))

    def feed(self, x: Tensor, drop: TokenDropout, site: str) -> Tensor:
        hidden = drop(F.silu(self.up(x)) * self.linear(x), f"{site}/hidden")
        return drop(self.down(hidden), f"{site}/feed")


class _MetaBlock(_SASRecBlock):
    """The block of Meta's SASRec: only queries are normalised, and both sums start from a normalised value.

    Meta drops attention weights, this block the attended vectors.
    """

    def __init__(self, config: SASRecConfig):
        super().__init__(config)
        self.norm_attention, self.norm_feed = (
            nn.LayerNorm(config.dim, eps=1e-8, elementwise_affine=False) for _ in range(2)
        )
        for layer in (self.query, self.key, self.value, self.out, self.up, self.down):
            nn.init.xavier_normal_(layer.weight)

    def forward(self, x: Tensor, layout: Layout, drop: TokenDropout, site: str) -> Tensor:
        queries = self.norm_attention(x)
        x = self.norm_feed(queries + drop(self.attend(queries, x, layout), f"{site}/attention"))
        return torch.add(x, self.feed(x, drop, site))


_BLOCKS = {"pre_norm": _SASRecBlock, "ligr": _LigrBlock, "meta": _MetaBlock}
