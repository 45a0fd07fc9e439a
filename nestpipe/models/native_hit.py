"""A hit in one native call: blocks and heads of a ranking model for candidates whose KV prefix is cached.

`Ranker.score` uses it for fp32 on the CPU, and its own torch operations, which are the oracle, for everything else.
Input vectors come from the model itself, so a model may read any features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from nestpipe.jagged import Batch
from nestpipe.models.fuxi import FuXiRankingUnit
from nestpipe.models.hstu import NORM_EPS, HSTUUnit
from nestpipe.models.kv_prefix import KVPrefix
from nestpipe.models.ranking import Ranking
from nestpipe.ops.native_library import Native, load
from nestpipe.ops.prefix_hit_native import BlockWeights, HeadWeights, HitRows, HitShape, HitWeights, score_hits

log = logging.getLogger("nestpipe")


class NativeHit:
    """The packed weights of a model; packed again if a weight has changed."""

    def __init__(self, model: Ranking):
        self._model = model
        self._parameters = list(model.parameters())
        self._packed: tuple[list[int], HitWeights] | None = None

    def scores(
        self, events: Tensor, candidates: Tensor, counts: Sequence[int], batch: Batch, before: Sequence[KVPrefix]
    ) -> Tensor:
        """Scores [C, labels] from the input vectors of suffix events and of candidates, `counts` of them per user."""
        cuts, is_timed = batch.items.offsets.tolist(), batch.times is not None and batch.query_times is not None
        requests, first = [], 0
        for row, prefix in enumerate(before):
            start, end = cuts[row], cuts[row + 1]
            own, moment = candidates[first : first + counts[row]], (0, 0)  # of an empty history, which reads no times
            first += counts[row]
            if end > start and batch.times is not None and batch.query_times is not None:
                moment = int(batch.times.values[start]), int(batch.query_times.values[start])
            requests.append(
                HitRows(
                    events=events[start:end],
                    candidates=own,
                    keys=prefix.keys,
                    values=prefix.values,
                    times=prefix.times if is_timed else None,
                    event_time=moment[0],
                    request_time=moment[1],
                )
            )
        return score_hits(self._weights(), requests)

    def _weights(self) -> HitWeights:
        versions = [one._version for one in self._parameters]
        if self._packed is None or self._packed[0] != versions:
            self._packed = versions, _pack(self._model)
        return self._packed[1]


def native_hit(model: Ranking) -> NativeHit | None:
    """The native hit of a model, or None; the log says once which path runs, and why."""
    problem = _problem(model)
    _log_once("torch" if problem else "native", problem or "float32 on the CPU")
    return None if problem else NativeHit(model)


def _problem(model: Ranking) -> str | None:
    """Why the torch operations run instead, or None."""
    if not model.place.is_cpu or model.place.dtype != torch.float32:
        return f"the native hit computes in float32 on the CPU, not {model.place.dtype} on {model.place.device.type}"
    if type(model).score is not Ranking.score or any(
        type(unit) not in {HSTUUnit, FuXiRankingUnit} for unit in model.units
    ):
        return f"{type(model).__name__} computes in its own way"
    native = load()
    return None if isinstance(native, Native) else f"{native}; 'nestpipe doctor' explains. Expect about 2x slower"


def _pack(model: Ranking) -> HitWeights:
    config, units = model.config, model.blocks()
    shape = HitShape(
        dim=config.dim,
        num_heads=config.num_heads,
        qk_width=config.qk_dim,
        v_width=config.v_dim,
        num_buckets=config.num_time_buckets,
        is_channel=isinstance(units[0], FuXiRankingUnit),
        norm=units[0].norm,
        epsilon=NORM_EPS,
    )
    heads = model.tasks
    return HitWeights(
        shape,
        [_block(unit) for unit in units],
        HeadWeights(up=heads.up.weight.T, up_bias=heads.up.bias, down=heads.down.weight.T, down_bias=heads.down.bias),
    )


def _block(unit: HSTUUnit) -> BlockWeights:
    ffn = None
    if isinstance(unit, FuXiRankingUnit):
        ffn = (unit.ffn_gate.weight.T, unit.ffn_up.weight.T, unit.ffn_down.weight.T)
    return BlockWeights(
        uvqk=unit.uvqk,
        position=unit.position,
        time=unit.time,
        out=unit.out.weight.T,
        out_bias=unit.out.bias,
        ffn=ffn,
    )


@cache
def _log_once(path: str, reason: str) -> None:
    log.info("hits of KV prefixes: %s (%s)", path, reason)
