"""HSTU: gated pointwise attention with relative position and time biases.

    [U V Q K] = silu(LN(X) W)          A_h = causal · silu(Q_h K_h' + b_pos[i-j] + b_time[bucket(i, j)]) / N
    Y = W_o dropout(U · LN(concat_h A_h V_h)) + b_o + X

N is the configured maximum length, a constant, so that a user's result does not depend on the batch. Row i uses the
time it answers for (that of the next event or of the request) against the times of the events it sees.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.jagged import Batch
from nestpipe.models.backbone import InputLayer, TokenDropout
from nestpipe.models.config import HSTUConfig
from nestpipe.ops.attention import Bias, Layout, attention_layout, jagged_attention
from nestpipe.rng import Rng

_NORM_EPS = 1e-6


class HSTU(nn.Module):
    """The HSTU backbone. Without times in the log the time bias is never read and keeps its start value."""

    def __init__(self, config: HSTUConfig, *, max_len: int):
        super().__init__()
        self.config = config
        self.input = InputLayer(config.dim, max_len)
        self.blocks = nn.ModuleList(_HSTUUnit(config, max_len) for _ in range(config.num_blocks))

    def forward(self, vectors: Tensor, batch: Batch, rng: Rng | None) -> Tensor:
        layout = attention_layout(
            batch.items, times=batch.times, query_times=batch.query_times, num_buckets=self.config.num_time_buckets
        )
        drop = TokenDropout(self.config.dropout, batch, rng)
        x = drop(self.input(vectors, batch), "input")
        for number, block in enumerate(self.blocks):
            x = block(x, layout, drop, f"block{number}")
        return x


class _HSTUUnit(nn.Module):
    def __init__(self, config: HSTUConfig, max_len: int):
        super().__init__()
        self.num_heads, self.max_len = config.num_heads, max_len
        self.widths = [config.v_dim * config.num_heads] * 2 + [config.qk_dim * config.num_heads] * 2
        self.uvqk = nn.Parameter(torch.empty(config.dim, sum(self.widths)))
        self.position = nn.Parameter(torch.empty(max_len))
        self.time = nn.Parameter(torch.empty(config.num_time_buckets + 1))
        for parameter in (self.uvqk, self.position, self.time):
            nn.init.normal_(parameter, std=0.02)
        self.out = nn.Linear(self.widths[0], config.dim)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, x: Tensor, layout: Layout, drop: TokenDropout, site: str) -> Tensor:
        mixed = F.silu(F.layer_norm(x, x.shape[1:], eps=_NORM_EPS) @ self.uvqk)
        gate, v, q, k = mixed.split(self.widths, dim=1)
        v, q, k = (part.unflatten(1, (self.num_heads, -1)) for part in (v, q, k))
        bias = Bias(position=self.position, time=self.time)
        attended = jagged_attention(q, k, v, layout, kind="silu", norm=self.max_len, bias=bias).flatten(1)
        gated = gate * F.layer_norm(attended, attended.shape[1:], eps=_NORM_EPS)
        return torch.add(x, self.out(drop(gated, site)))
