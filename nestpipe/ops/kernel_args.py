"""Arguments of the attention op, and the mask and bias rules that every backend follows.

Shapes: B sequences, Q queries and K keys in total, H heads, D width of queries and keys, V width of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nestpipe.ops.device_memory import upload

Kind = Literal["silu", "softmax"]
Mode = Literal["add", "channel"]
BUCKET_WIDTH = 0.301
MASKED = -1e30  # a masked score before softmax; -inf would give nan in padding rows, where everything is masked


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """Lengths and times of a batch, shared by all layers and heads."""

    query_offsets: Tensor  # [B + 1]
    key_offsets: Tensor  # [B + 1]
    num_targets: Tensor  # [B]
    times: tuple[Tensor, Tensor] | None  # of queries [Q] and keys [K]
    num_buckets: int
    decay: bool
    host: Layout | None = None  # of a layout on a device: the same on the host, where plans are made
    plans: dict[str, list[Tensor]] = field(default_factory=dict)
    """Backend -> what it derives from the fields above; filled on first use."""

    def moved(self, device: torch.device) -> Layout:
        """The layout on a device, which remembers the one on the host."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            query_offsets=upload(self.query_offsets, device),
            key_offsets=upload(self.key_offsets, device),
            num_targets=upload(self.num_targets, device),
            times=None if self.times is None else (upload(self.times[0], device), upload(self.times[1], device)),
            host=self,
            plans={},
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KernelInputs:
    """The arguments of the op, as plain tensors and numbers."""

    q: Tensor  # [Q, H, D]
    k: Tensor  # [K, H, D]
    v: Tensor  # [K, H, V]
    query_offsets: Tensor  # [B + 1]
    key_offsets: Tensor  # [B + 1]
    num_targets: Tensor  # [B]
    query_times: Tensor | None  # [Q]
    key_times: Tensor | None  # [K]
    position: Tensor | None  # [N]
    time: Tensor | None  # [buckets + 1]
    decay: Tensor | None  # [3]
    plan: list[Tensor]
    kind: Kind
    mode: Mode
    scale: float
    norm: float

    @property
    def has_times(self) -> bool:
        return self.query_times is not None and self.key_times is not None

    @property
    def uses_time(self) -> bool:
        """Whether a time bias applies; never for a log without times."""
        return self.has_times and (self.time is not None or self.decay is not None)

    @property
    def time_channel(self) -> int | None:
        """Index of the time channel in channel mode; all zeros for logs without times."""
        if self.time is None and self.decay is None:
            return None
        return 1 if self.position is None else 2

    @property
    def num_channels(self) -> int:
        if self.mode == "add":
            return 1
        return 1 + (self.position is not None) + (self.time_channel is not None)

    def new_output(self) -> Tensor:
        """Zeros [Q, channels, H, V] for the result."""
        return self.q.new_zeros(self.q.shape[0], self.num_channels, self.q.shape[1], self.v.shape[2])


class Gradients(NamedTuple):
    """Gradients of the differentiable inputs; those of absent biases are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    position: Tensor | None = None
    time: Tensor | None = None
    decay: Tensor | None = None


class Pairs(NamedTuple):
    """Mask and distance of the padded queries and keys of some sequences."""

    hidden: Tensor  # [..., q, k], True where the query must not see the key
    distance: Tensor  # [..., q, k], 0 where hidden


def pairs(query_places: Tensor, key_places: Tensor, num_history: Tensor) -> Pairs:
    """Query places [..., q, 1], key places [..., 1, k] and history lengths [..., 1, 1], each within its sequence.

    An event sees itself and earlier events. A target sees the history and itself; its place is that of the next event.
    """
    hidden = (key_places > query_places) | ((key_places >= num_history) & (key_places != query_places))
    distance = torch.minimum(query_places, num_history) - torch.minimum(key_places, num_history)
    return Pairs(hidden, distance.masked_fill(hidden, 0))


def gaps(query_times: Tensor, key_times: Tensor) -> Tensor:
    """Seconds between queries [..., q, 1] and keys [..., 1, k], at least 1."""
    return (query_times - key_times).abs_().clamp_(min=1)


def log_of(gap: Tensor) -> Tensor:
    """ln of the gap, rounded to fp32 because it is stored for every pair."""
    return gap.to(torch.float64).log_().to(torch.float32)


def bucket_boundaries(num_buckets: int) -> Tensor:
    """Seconds at which buckets 1 … num_buckets begin: bucket = floor(ln(seconds) / 0.301), in integers.

    Searching integer boundaries is exact. A vectorised logarithm rounds differently in the remainder of a vector.
    """
    starts = torch.arange(1, num_buckets + 1, dtype=torch.float64).mul_(BUCKET_WIDTH).exp_().ceil_()
    return starts.clamp_(max=2.0**62).to(torch.int64)


def buckets_of(gap: Tensor, num_buckets: int) -> Tensor:
    """The bucket of each gap, int32."""
    return torch.bucketize(gap, bucket_boundaries(num_buckets).to(gap.device), right=True, out_int32=True)


def decayed(decay: Tensor, log_gap: Tensor) -> Tensor:
    """alpha · exp(-rate · T^beta) for decay = (alpha, rate, beta) and ln T: FuXi-gamma's alpha · gamma^(T^beta)."""
    alpha, rate, beta = decay.unbind()
    return alpha * torch.exp(-rate * torch.exp(beta * log_gap))
