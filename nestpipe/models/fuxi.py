"""FuXi-alpha: attention with a channel each for content, position and time, and a SwiGLU block.

    [U V Q K] = silu(RMSNorm(X) W)                     U has the width of three channels
    O = [ silu(Q K') / N · V,  b_pos[i-j] · V,  b_time(i, j) · V ]         causal; biases are attention matrices
    X1 = W_0 dropout(U · RMSNorm(O)) + b + X
    Y  = X1 + W_3 dropout(silu(RMSNorm(X1) W_1) · (RMSNorm(X1) W_2))

b_time is a table by time bucket, or FuXi-gamma's alpha · gamma^(T^beta) with T in seconds, which needs no table.
N is the configured maximum length. It is a constant, so a user's result does not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.jagged import Batch
from nestpipe.models.backbone import InputLayer, TokenDropout
from nestpipe.models.config import FuXiConfig, RankingConfig
from nestpipe.models.hstu import NORM_EPS, HSTUUnit, Projected
from nestpipe.ops.attention import Bias, Layout, attention_layout, jagged_attention
from nestpipe.rng import Rng

_NUM_CHANNELS = 3
# Raw values of alpha, rate and beta: the weight of an event halves after about a day and falls to 1/30 after a year.
_DECAY_START = (0.02, -3.9, -0.85)


class FuXi(nn.Module):
    """The FuXi backbone. Without times in the log the time channel is zero."""

    def __init__(self, config: FuXiConfig, *, max_len: int):
        super().__init__()
        self.config = config
        self.input = InputLayer(config.dim, max_len)
        self.blocks = nn.ModuleList(_FuXiUnit(config, max_len) for _ in range(config.num_blocks))

    def forward(self, vectors: Tensor, batch: Batch, rng: Rng | None) -> Tensor:
        decay = self.config.time == "decay"
        layout = attention_layout(
            batch.items,
            times=batch.times,
            query_times=batch.query_times,
            num_buckets=0 if decay else self.config.num_time_buckets,
            decay=decay,
        )
        drop = TokenDropout(self.config.dropout, batch, rng)
        x = drop(self.input(vectors, batch), "input")
        for number, block in enumerate(self.blocks):
            x = block(x, layout, drop, f"block{number}")
        return x


class _FuXiUnit(nn.Module):
    def __init__(self, config: FuXiConfig, max_len: int):
        super().__init__()
        self.num_heads, self.max_len = config.num_heads, max_len
        values, keys = config.v_dim * config.num_heads, config.qk_dim * config.num_heads
        self.widths = [_NUM_CHANNELS * values, values, keys, keys]
        hidden = config.hidden_dim or config.dim
        self.uvqk = nn.Parameter(torch.empty(config.dim, sum(self.widths)))
        self.position = nn.Parameter(torch.empty(max_len))
        for parameter in (self.uvqk, self.position):
            nn.init.normal_(parameter, std=0.02)
        self.time = _time_parameter(config)
        self.by_decay = config.time == "decay"
        self.drops_input = config.feed_dropout == "input"
        self.out = nn.Linear(self.widths[0], config.dim)
        self.gate, self.up = (nn.Linear(config.dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, config.dim, bias=False)
        for layer in (self.out, self.gate, self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, layout: Layout, drop: TokenDropout, site: str) -> Tensor:
        mixed = F.silu(_normed(x) @ self.uvqk)
        gate, v, q, k = mixed.split(self.widths, dim=1)
        v, q, k = (part.unflatten(1, (self.num_heads, -1)) for part in (v, q, k))
        attended = jagged_attention(q, k, v, layout, kind="silu", norm=self.max_len, bias=self._bias()).flatten(1)
        x = torch.add(x, self.out(drop(gate * _normed(attended), f"{site}/attention")))
        normed = drop(_normed(x), f"{site}/feed") if self.drops_input else _normed(x)
        hidden = F.silu(self.gate(normed)) * self.up(normed)
        return torch.add(x, self.down(hidden if self.drops_input else drop(hidden, f"{site}/feed")))

    def _bias(self) -> Bias:
        if not self.by_decay:
            return Bias(position=self.position, time=self.time, mode="channel")
        alpha, rate, beta = self.time.unbind()
        # gamma = exp(-softplus(rate)) and sigmoid(beta) stay in (0, 1).
        decay = torch.stack([alpha, F.softplus(rate), torch.sigmoid(beta)])
        return Bias(position=self.position, decay=decay, mode="channel")


def _time_parameter(config: FuXiConfig) -> nn.Parameter:
    if config.time == "decay":
        return nn.Parameter(torch.tensor(_DECAY_START))
    return nn.Parameter(nn.init.normal_(torch.empty(config.num_time_buckets + 1), std=0.02))


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[1:], eps=NORM_EPS)


class FuXiRankingUnit(HSTUUnit):
    """FuXi-alpha for ranking models: an attention matrix each for content, position and time; then SwiGLU."""

    num_channels = _NUM_CHANNELS

    def __init__(self, config: RankingConfig, max_len: int, *, num_positions: int):
        super().__init__(config, max_len, num_positions=num_positions)
        self.ffn_gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.ffn_up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.ffn_down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def finish(self, x: Tensor, gate: Tensor, attended: Tensor, drop: TokenDropout, site: str) -> Tensor:
        x = super().finish(x, gate, attended, drop, site)
        normed = self.normalise(x)
        hidden = F.silu(self.ffn_gate(normed)) * self.ffn_up(normed)
        return torch.add(x, self.ffn_down(drop(hidden, f"{site}/feed")))

    def normalise(self, x: Tensor) -> Tensor:
        return _normed(x)

    def _bias(self, position: Tensor) -> Bias:
        return Bias(position=position, time=self.time, mode="channel")

    def _attend_self(self, candidate: Projected, *, timed: bool) -> Tensor:
        """The contribution [n, channels, H, V] of a candidate's own key."""
        content = F.silu((candidate.q * candidate.k).sum(2)) / self.norm
        position = self.position[0].expand_as(content)
        time = (self.time[0] if timed else self.time.new_zeros(())).expand_as(content)
        return torch.stack([content, position, time], dim=1).unsqueeze(3) * candidate.v.unsqueeze(1)
