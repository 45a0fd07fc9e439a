"""Generation step by step: the `Decoder` of generative/beam.py, on a model and the KV cache of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nestpipe.models.decoder import DecoderCache

if TYPE_CHECKING:
    from nestpipe.models.encdec import EncDec


class Decoding:
    """Decoder state of requests. Beams, codes and nodes are given on the host, logits are where the weights are."""

    def __init__(self, model: EncDec, cache: DecoderCache, prefix: Tensor, token: Tensor | None):
        self._model, self._cache, self._prefix, self._token = model, cache, prefix, token
        self._level = 0

    @property
    def version(self) -> str:
        return self._model.ids.version

    def first(self) -> Tensor:
        for x in self._prefix.unbind(1):
            hidden = self._cache.token(x.unsqueeze(1))
        return self._logits(hidden)

    def next(self, parents: Tensor, codes: Tensor, nodes: Tensor) -> Tensor:
        model, level = self._model, self._level
        self._cache.reorder(parents)
        self._level += 1
        token = None if self._token is None else self._token.repeat_interleave(codes.shape[1], 0)
        vectors = model.code_token(level, model.put(codes.flatten()), token)
        place = model.place[self._prefix.shape[1] + level]
        return self._logits(self._cache.token((vectors + place).unflatten(0, codes.shape)), nodes)

    def _logits(self, hidden: Tensor, nodes: Tensor | None = None) -> Tensor:
        model, level = self._model, self._level
        hidden = model.norm(hidden)
        logits: Tensor = model.heads[level](hidden)
        if nodes is None:
            return logits
        flat = logits.flatten(0, 1)
        children, places = model.ids.children(level, nodes.clamp(min=0).flatten())
        return model.with_prefixes(flat, hidden.flatten(0, 1), level, children, model.put(places)).view_as(logits)
