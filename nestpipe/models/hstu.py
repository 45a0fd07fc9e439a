"""HSTU: gated pointwise attention with relative position and time biases.

    [U V Q K] = silu(LN(X) W)          A_h = causal · silu(Q_h K_h' + b_pos[i-j] + b_time[bucket(i, j)]) / N
    Y = W_o dropout(U · LN(concat_h A_h V_h)) + b_o + X

N is the configured divisor, by default the maximum length. It is a constant, so a user's result does not depend on the batch. The time bias of row i
is computed from its query time (the time of the next event, or of the request) and the times of the events before it.

A unit is split into three functions, because a ranking model keeps keys and values between requests:

    gate, q, k, v = project(x)      attended = attend(q, k, v, layout)      x = finish(x, gate, attended)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.jagged import Batch
from nestpipe.models.backbone import InputLayer, TokenDropout
from nestpipe.models.config import HSTUConfig, RankingConfig
from nestpipe.ops.attention import Bias, Layout, attention_layout, jagged_attention
from nestpipe.rng import Rng

NORM_EPS = 1e-6


class HSTU(nn.Module):
    """The HSTU backbone. Without times in the log the time bias is never read and keeps its initial value."""

    def __init__(self, config: HSTUConfig, *, max_len: int):
        super().__init__()
        self.config = config
        self.input = InputLayer(config.dim, max_len, position_std=config.position_std)
        self.blocks = nn.ModuleList(HSTUUnit(config, max_len, num_positions=max_len) for _ in range(config.num_blocks))

    def forward(self, vectors: Tensor, batch: Batch, rng: Rng | None) -> Tensor:
        layout = attention_layout(
            batch.items, times=batch.times, query_times=batch.query_times, num_buckets=self.config.num_time_buckets
        )
        drop = TokenDropout(self.config.dropout, batch, rng)
        x = drop(self.input(vectors, batch), "input")
        for number, block in enumerate(self.blocks):
            x = block(x, layout, drop, f"block{number}")
        return x


class Projected(NamedTuple):
    """Gate [n, channels · H · V], queries and keys [n, H, Q], values [n, H, V]."""

    gate: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class HSTUUnit(nn.Module):
    """One attention matrix, with the biases inside silu."""

    num_channels = 1

    def __init__(self, config: HSTUConfig | RankingConfig, max_len: int, *, num_positions: int):
        super().__init__()
        self.num_heads = config.num_heads
        self.norm = float((config.divisor if isinstance(config, HSTUConfig) else 0) or max_len)
        values, keys = config.v_dim * config.num_heads, config.qk_dim * config.num_heads
        self.widths = [values * self.num_channels, values, keys, keys]
        self.uvqk = nn.Parameter(torch.empty(config.dim, sum(self.widths)))
        self.position = nn.Parameter(torch.empty(num_positions))
        self.time = nn.Parameter(torch.empty(config.num_time_buckets + 1))
        for parameter in (self.uvqk, self.position, self.time):
            nn.init.normal_(parameter, std=0.02)
        self.out = nn.Linear(self.widths[0], config.dim)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, x: Tensor, layout: Layout, drop: TokenDropout, site: str) -> Tensor:
        gate, q, k, v = self.project(x)
        return self.finish(x, gate, self.attend(q, k, v, layout), drop, site)

    def project(self, x: Tensor) -> Projected:
        gate, v, q, k = F.silu(self.normalise(x) @ self.uvqk).split(self.widths, dim=1)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v))
        return Projected(gate, q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, min_distance: int = 0) -> Tensor:
        """Attention output [n, channels · H · V]; `min_distance` is that of a query to the key of its own row."""
        bias = self._bias(self.position[min_distance:] if min_distance else self.position)
        return jagged_attention(q, k, v, layout, kind="silu", norm=self.norm, bias=bias).flatten(1)

    def attend_as_next(self, candidate: Projected, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Attention output of candidates, one behind each event: candidate p + 1 in row p sees events 0 .. p and itself.

        In training every event is a candidate for the history before it. One causal pass computes all of them: a candidate
        is one position further away from each event than its row is, and its own key is added. Attention here is a sum
        over keys, so this is exact.
        """
        before = self.attend(candidate.q, k, v, layout, min_distance=1)
        return before + self._attend_self(candidate, timed=layout.times is not None).flatten(1)

    def finish(self, x: Tensor, gate: Tensor, attended: Tensor, drop: TokenDropout, site: str) -> Tensor:
        return torch.add(x, self.out(drop(gate * self.normalise(attended), site)))

    def normalise(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:], eps=NORM_EPS)

    def _bias(self, position: Tensor) -> Bias:
        return Bias(position=position, time=self.time)

    def _attend_self(self, candidate: Projected, *, timed: bool) -> Tensor:
        """The contribution [n, H, V] of a candidate's own key, at distance 0 and time 0."""
        score = (candidate.q * candidate.k).sum(2) + self.position[0]
        if timed:
            score = score + self.time[0]
        return (F.silu(score) / self.norm).unsqueeze(2) * candidate.v
