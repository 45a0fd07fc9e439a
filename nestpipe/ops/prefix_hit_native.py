"""Scores of candidates against cached KV prefixes in one native call (csrc/prefix_hit.cpp), for fp32 on the CPU.

`HitWeights` packs the weights of a ranking model once; `score_hits` scores the candidates of some requests with them. A
candidate's score is bitwise independent of other candidates and of other requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.ops.device_memory import address
from nestpipe.ops.kernel_args import bucket_boundaries
from nestpipe.ops.native_library import library

_PADDING = 16  # `kPadding` of prefix_hit.cpp


class _Block(ctypes.Structure):
    """`struct HitBlock` of prefix_hit.cpp, field by field."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("uvqk", "position", "time", "out", "out_bias", "ffn_gate", "ffn_up", "ffn_down")
    )


class _Request(ctypes.Structure):
    """`struct HitRequest`."""

    _fields_ = (
        *((name, c_void_p) for name in ("event", "candidates", "keys", "values", "times")),
        *((name, c_int64) for name in ("num_events", "num_candidates", "num_cached", "event_time", "request_time")),
        ("scores", c_void_p),
    )


class _PrefixHit(ctypes.Structure):
    """`struct PrefixHit`."""

    _fields_ = (
        *((name, c_void_p) for name in ("blocks", "requests")),
        *((name, c_void_p) for name in ("head_up", "head_up_bias", "head_down", "head_down_bias", "boundaries")),
        *((name, c_int64) for name in ("num_blocks", "num_requests", "dim", "num_heads", "qk_width", "v_width")),
        *((name, c_int64) for name in ("ffn_width", "head_width", "num_labels", "num_position", "num_boundaries")),
        *((name, c_int64) for name in ("is_channel", "num_threads")),
        *((name, c_double) for name in ("norm", "epsilon")),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockWeights:
    """One block: `uvqk` [D, gate + v + q + k], `out` [gate, D], biases by distance and time bucket; SwiGLU if it has one."""

    uvqk: Tensor
    position: Tensor
    time: Tensor
    out: Tensor
    out_bias: Tensor
    ffn: tuple[Tensor, Tensor, Tensor] | None = None  # gate and up [D, F], down [F, D]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadWeights:
    """The heads: `up` [D, F], `down` [F, labels], and their biases."""

    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HitShape:
    """Widths and constants of a model; `is_channel`: biases are attention matrices of their own (FuXi)."""

    dim: int
    num_heads: int
    qk_width: int
    v_width: int
    num_buckets: int
    is_channel: bool
    norm: float
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HitRows:
    """One request: input vectors [n, D] of at most one event and of candidates, and the cached rows before them."""

    events: Tensor
    candidates: Tensor
    keys: Sequence[Tensor]  # of each block [P, H, Q]
    values: Sequence[Tensor]  # of each block [P, H, V]
    times: Tensor | None  # [P]; None for a log without times
    event_time: int = 0
    request_time: int = 0


class HitWeights:
    """The weights of a model as the kernel reads them: rows padded to whole vectors."""

    def __init__(self, shape: HitShape, blocks: Sequence[BlockWeights], heads: HeadWeights):
        self.shape, self.num_labels = shape, heads.down.shape[1]
        self._kept: list[Tensor] = []
        fields = ("uvqk", "position", "time", "out", "out_bias")
        self._blocks = (_Block * len(blocks))()
        for own, block in zip(self._blocks, blocks, strict=True):
            for name in fields:
                setattr(own, name, self._packed(getattr(block, name)))
            for name, weight in zip(("ffn_gate", "ffn_up", "ffn_down"), block.ffn or (), strict=block.ffn is not None):
                setattr(own, name, self._packed(weight))
        boundaries = bucket_boundaries(shape.num_buckets)
        self._kept.append(boundaries)
        self.arguments: dict[str, Any] = {
            **{f"head_{name}": self._packed(getattr(heads, name)) for name in ("up", "up_bias", "down", "down_bias")},
            "blocks": ctypes.addressof(self._blocks),
            "boundaries": address(boundaries),
            "num_blocks": len(blocks),
            "dim": shape.dim,
            "num_heads": shape.num_heads,
            "qk_width": shape.qk_width,
            "v_width": shape.v_width,
            "ffn_width": blocks[0].ffn[0].shape[1] if blocks[0].ffn else 0,
            "head_width": heads.up.shape[1],
            "num_labels": self.num_labels,
            "num_position": min(len(block.position) for block in blocks),
            "num_boundaries": shape.num_buckets,
            "is_channel": int(shape.is_channel),
            "norm": shape.norm,
            "epsilon": shape.epsilon,
        }

    def _packed(self, weight: Tensor) -> int:
        own = F.pad(weight.detach(), (0, -weight.shape[-1] % _PADDING)).contiguous()
        self._kept.append(own)
        return address(own)


def score_hits(weights: HitWeights, requests: Sequence[HitRows]) -> Tensor:
    """Scores [C, labels] of all requests' candidates, request by request; raises MemoryError."""
    counts = [len(one.candidates) for one in requests]
    scores = torch.empty(sum(counts), weights.num_labels)
    rows, kept, first = (_Request * len(requests))(), list[object](), 0
    for own, one, count in zip(rows, requests, counts, strict=True):
        tensors = [tensor.contiguous() for tensor in (one.events, one.candidates, *one.keys, *one.values)]
        own.event, own.candidates, *cached = map(address, tensors)
        pointers = (c_void_p * len(cached))(*cached)
        times = None if one.times is None else one.times.contiguous()
        kept += [tensors, pointers, times]
        own.times = None if times is None else address(times) or address(scores)  # no pointer if it is empty
        own.keys = ctypes.addressof(pointers)
        own.values = own.keys + len(one.keys) * ctypes.sizeof(c_void_p)
        own.num_events, own.num_candidates, own.num_cached = len(one.events), count, len(one.keys[0])
        own.event_time, own.request_time = one.event_time, one.request_time
        own.scores = address(scores) + first * weights.num_labels * scores.itemsize
        first += count
    call = _PrefixHit(
        **weights.arguments,
        requests=ctypes.addressof(rows),
        num_requests=len(requests),
        num_threads=torch.get_num_threads(),
    )
    if _function()(ctypes.byref(call)):
        raise MemoryError("nestpipe_prefix_hit: cannot allocate its tiles")
    return scores


@cache
def _function() -> Any:
    native = library()
    if native is None:
        raise RuntimeError("the native hit was requested but cannot be built; 'nestpipe doctor' explains")
    return native.function("nestpipe_prefix_hit", c_int64, c_void_p)
