"""The baselines of the beam search find what the search finds."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import beam
import plain_beam

from nestpipe.generative.beam import search
from nestpipe.models.config import EncDecConfig
from nestpipe.models.encdec import build_encdec


def test_the_plain_search_and_the_loop_find_the_same_leaves():
    trie = beam.make_trie(500, seed=0)
    config = EncDecConfig(dim=16, num_encoder=1, num_decoder=2, num_heads=2, dropout=0.0, prefix_vectors=64)
    model = build_encdec(config, trie, max_len=20, seed=0)
    decoding = beam.start(model, trie, 3, 12, seed=1)
    found = search(beam.fork(decoding), trie, width=8)
    leaves, scores = plain_beam.plain_search(model, decoding, plain_beam.PlainTrie(trie.item_codes), 8)
    torch.testing.assert_close(leaves, found.leaves)
    torch.testing.assert_close(scores, found.scores)
    one = beam.start(model, trie, 1, 12, seed=1)
    alone = search(beam.fork(one), trie, width=8)
    nodes, logs = beam.loop(beam.fork(one), trie, 8)
    assert nodes == alone.leaves[0].tolist()
    torch.testing.assert_close(torch.tensor(logs), alone.scores[0])
