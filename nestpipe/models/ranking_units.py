"""The blocks of ranking models: HSTU and FuXi units, taken apart so that keys and values can be kept.

    gate, q, k, v = project(x)      attended = attend(q, k, v, layout)      x = finish(x, gate, attended)

In training every event is a candidate for the history before it. Rather than a sequence for each, one causal pass has the
candidates as queries: candidate p + 1 stands in row p and sees the keys of events 0 .. p, one place further away than the
row itself, and its own key is added (`attend_next`). Both kinds of attention are sums over keys, so this is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.models.backbone import TokenDropout
from nestpipe.models.config import RankingConfig
from nestpipe.ops.attention import Bias, Layout, jagged_attention

_NORM_EPS = 1e-6


class Projected(NamedTuple):
    """Gate [n, channels · H · V], queries and keys [n, H, Q], values [n, H, V]."""

    gate: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class HSTUUnit(nn.Module):
    """One attention matrix, with the biases inside of silu."""

    num_channels = 1

    def __init__(self, config: RankingConfig, max_len: int):
        super().__init__()
        self.num_heads, self.norm = config.num_heads, float(max_len)
        values, keys = config.v_dim * config.num_heads, config.qk_dim * config.num_heads
        self.widths = [values * self.num_channels, values, keys, keys]
        self.uvqk = nn.Parameter(torch.empty(config.dim, sum(self.widths)))
        # A candidate stands behind max_len events, so there is one distance more.
        self.position = nn.Parameter(torch.empty(max_len + 1))
        self.time = nn.Parameter(torch.empty(config.num_time_buckets + 1))
        for parameter in (self.uvqk, self.position, self.time):
            nn.init.normal_(parameter, std=0.02)
        self.out = nn.Linear(self.widths[0], config.dim)
        nn.init.xavier_uniform_(self.out.weight)

    def project(self, x: Tensor) -> Projected:
        gate, v, q, k = F.silu(self.normalise(x) @ self.uvqk).split(self.widths, dim=1)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v))
        return Projected(gate, q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """What the queries see of their sequences, [Q, channels · H · V]."""
        return jagged_attention(q, k, v, layout, kind="silu", norm=self.norm, bias=self._bias(0)).flatten(1)

    def attend_next(self, candidate: Projected, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """What candidates see, each standing behind the event of its row."""
        seen = jagged_attention(candidate.q, k, v, layout, kind="silu", norm=self.norm, bias=self._bias(1)).flatten(1)
        timed = layout.times is not None
        return seen + self._see_itself(candidate, timed=timed).flatten(1)

    def finish(self, x: Tensor, gate: Tensor, attended: Tensor, drop: TokenDropout, site: str) -> Tensor:
        return torch.add(x, self.out(drop(gate * self.normalise(attended), site)))

    def normalise(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:], eps=_NORM_EPS)

    def _bias(self, nearest: int) -> Bias:
        return Bias(position=self.position[nearest:], time=self.time)

    def _see_itself(self, candidate: Projected, *, timed: bool) -> Tensor:
        """Distance 0, time 0: the share [n, H, V] of a candidate's own key."""
        score = (candidate.q * candidate.k).sum(2) + self.position[0]
        if timed:
            score = score + self.time[0]
        return (F.silu(score) / self.norm).unsqueeze(2) * candidate.v


class FuXiUnit(HSTUUnit):
    """Three attention matrices: of content, position and time, each with values of its own gate; then SwiGLU."""

    num_channels = 3

    def __init__(self, config: RankingConfig, max_len: int):
        super().__init__(config, max_len)
        self.ffn_gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.ffn_up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.ffn_down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def finish(self, x: Tensor, gate: Tensor, attended: Tensor, drop: TokenDropout, site: str) -> Tensor:
        x = super().finish(x, gate, attended, drop, site)
        normed = self.normalise(x)
        hidden = F.silu(self.ffn_gate(normed)) * self.ffn_up(normed)
        return torch.add(x, self.ffn_down(drop(hidden, f"{site}/feed")))

    def normalise(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[1:], eps=_NORM_EPS)

    def _bias(self, nearest: int) -> Bias:
        return Bias(position=self.position[nearest:], time=self.time, mode="channel")

    def _see_itself(self, candidate: Projected, *, timed: bool) -> Tensor:
        """The same, [n, channels, H, V]."""
        content = F.silu((candidate.q * candidate.k).sum(2)) / self.norm
        position = self.position[0].expand_as(content)
        time = (self.time[0] if timed else self.time.new_zeros(())).expand_as(content)
        return torch.stack([content, position, time], dim=1).unsqueeze(3) * candidate.v.unsqueeze(1)


UNITS: dict[str, type[HSTUUnit]] = {"hstu": HSTUUnit, "fuxi": FuXiUnit}
