"""Constrained beam search as one would write it plainly with torch: the baseline of beam.py that is no loop over beams.

The trie is in CSR arrays, made here from the codes alone. All beams of all requests are one batch, as in usual generation
libraries: the encoder's keys and values are copied to each beam, the cache of decoded tokens is reordered by parent, illegal codes
get -inf in a dense mask over all codes, and the top W are those of beams x codes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.jagged import ranges
from nestpipe.models.decoder import DecoderBlock
from nestpipe.models.encdec import Decoding, EncDec


class PlainTrie:
    """Per level: the start of each node's children, and the code of each child."""

    def __init__(self, codes: Tensor):
        self.start, self.code = [], []
        above = torch.zeros(len(codes), dtype=torch.int64)
        for level in range(codes.shape[1]):
            prefixes, node = torch.unique(codes[:, : level + 1], dim=0, return_inverse=True)
            parent = torch.empty(len(prefixes), dtype=torch.int64).index_copy_(0, node, above)
            counts = torch.bincount(parent, minlength=int(above.max()) + 1)
            self.start.append(F.pad(counts.cumsum(0), (1, 0)))
            self.code.append(prefixes[:, level].contiguous())
            above = node

    def children(self, level: int, nodes: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
        """Child nodes [n, codes] of nodes [n], -1 for a code that there is not; and those that there are, as flat indices."""
        count = self.start[level][nodes + 1] - self.start[level][nodes]
        found = ranges(self.start[level][nodes], count)
        places = torch.arange(len(nodes)).repeat_interleave(count) * num_codes + self.code[level][found]
        table = torch.full((len(nodes) * num_codes,), -1, dtype=torch.int64).index_copy_(0, places, found)
        return table.view(len(nodes), num_codes), places


class PlainDecoder:
    """Beams as a batch [B]; B is requests x beams once there are beams."""

    def __init__(self, model: EncDec, decoding: Decoding):
        self._model = model
        self._blocks = [block for block in model.blocks if isinstance(block, DecoderBlock)]
        self._prefix = decoding._prefix
        kept = decoding._cache._memory
        self._keys, self._values = [one.keys for one in kept], [one.values for one in kept]  # [B, H, L, E]
        self._bias = [one.bias.unsqueeze(1) for one in kept]  # [B, 1, 1, L]
        self._tokens: list[tuple[Tensor, Tensor]] = []

    def copy_memory(self, num_beams: int) -> None:
        for kept in (self._keys, self._values, self._bias):
            kept[:] = [one.repeat_interleave(num_beams, 0) for one in kept]

    def reorder(self, parents: Tensor) -> None:
        self._tokens = [(keys[parents], values[parents]) for keys, values in self._tokens]

    def first(self) -> Tensor:
        for place in range(self._prefix.shape[1]):
            hidden = self._token(self._prefix[:, place])
        return self._model.norm(hidden)

    def next(self, level: int, codes: Tensor) -> Tensor:
        place = self._model.place[self._prefix.shape[1] + level]
        return self._model.norm(self._token(self._model.code_token(level, codes, None) + place))

    def _token(self, x: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        for number, block in enumerate(self._blocks):
            normed = block.norm_self(x)
            q, k, v = (block.heads(layer(normed)).unsqueeze(2) for layer in (block.query, block.key, block.value))
            if number < len(self._tokens):
                k, v = (torch.cat([old, new], 2) for old, new in zip(self._tokens[number], (k, v), strict=True))
                self._tokens[number] = (k, v)
            else:
                self._tokens.append((k, v))
            x = x + block.out(F.scaled_dot_product_attention(q, k, v).flatten(1))
            q = block.heads(block.ask(block.norm_cross(x))).unsqueeze(2)
            keys, values, bias = self._keys[number], self._values[number], self._bias[number]
            x = x + block.take(F.scaled_dot_product_attention(q, keys, values, attn_mask=bias).flatten(1))
            x = x + block.down(F.relu(block.up(block.norm_feed(x))))
        return x


@torch.no_grad()
def plain_search(model: EncDec, decoding: Decoding, trie: PlainTrie, width: int) -> tuple[Tensor, Tensor]:
    """Leaves [R, W], best first, and their log-probabilities."""
    decoder = PlainDecoder(model, decoding)
    hidden = decoder.first()
    num_requests = len(hidden)
    nodes, scores = torch.zeros(num_requests, dtype=torch.int64), hidden.new_zeros(num_requests)
    for level in range(len(trie.code)):
        logits = model.heads[level](hidden)
        children, places = trie.children(level, nodes, logits.shape[1])
        logits = model.with_prefixes(logits, hidden, level, children.flatten()[places], places)
        logs = logits.masked_fill(children < 0, -torch.inf).log_softmax(1) + scores.unsqueeze(1)
        best = logs.view(num_requests, -1).topk(width, dim=1)
        beams = len(nodes) // num_requests
        flat = (torch.arange(num_requests).unsqueeze(1) * beams * logits.shape[1] + best.indices).flatten()
        nodes, scores, parents = children.flatten()[flat], best.values.flatten(), flat // logits.shape[1]
        if level + 1 < len(trie.code):
            decoder.reorder(parents)
            if level == 0:
                decoder.copy_memory(width)
            hidden = decoder.next(level, flat % logits.shape[1])
    return nodes.view(num_requests, width), scores.view(num_requests, width)
