"""Constrained beam search over a large catalogue vs. a loop over beams, and vs. a plain search with torch (plain_beam.py).

256 beams, three levels of 256 codes, 100,000 items, one encoder-decoder. All arms cache keys and values of earlier tokens. The
loop decodes one beam at a time and extends it by its legal codes; it shares the encoder's memory. The plain search decodes all
beams as one batch, over a trie in CSR arrays with a dense mask of codes, and copies the memory to each beam. All must find the
same items. Figures are CPU time of one thread, so other load matters little.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable

import measure
import numpy as np
import torch
from plain_beam import PlainTrie, plain_search
from torch import Tensor

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.routing import route
from nestpipe.generative.beam import search
from nestpipe.generative.trie import Trie
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import EncDecConfig
from nestpipe.models.encdec import Decoding, EncDec, build_encdec

NAME = "beam"
AT_LEAST = 10.0
SIZES = (256, 256, 256)


def make_trie(num_items: int, seed: int) -> Trie:
    """Items with distinct random ids."""
    numbers = np.random.default_rng(seed).choice(256**3, num_items, replace=False)
    codes = np.stack(np.unravel_index(numbers, SIZES), 1)
    return Trie(torch.arange(num_items), torch.from_numpy(codes), SIZES, version="benchmark")


def start(model: EncDec, trie: Trie, num_requests: int, length: int, seed: int) -> Decoding:
    """Requests with random histories, encoded."""
    items = np.random.default_rng(seed).integers(len(trie.items), size=(num_requests, length)).tolist()
    batch = Batch(cursor=Cursor(0, 0), sample_ids=torch.arange(num_requests), items=Jagged.from_rows(items))
    plan = route([model.encode_lookups(batch)], ["item"], Owners(1, 1))
    rows = {name: torch.zeros(len(table.ids), model.config.dim) for name, table in plan.tables.items()}
    with torch.no_grad():
        return model.decoding(plan.rows(0, rows), batch)


def fork(decoding: Decoding) -> Decoding:
    """The same beam once more, with the memory shared."""
    twin = copy.copy(decoding)
    twin._cache = copy.copy(decoding._cache)
    twin._cache._tokens = list(decoding._cache._tokens)
    return twin


@torch.no_grad()
def loop(decoding: Decoding, trie: Trie, width: int) -> tuple[list[int], list[float]]:
    """The best leaves of one request, beam by beam."""
    here = torch.zeros(1, 1, dtype=torch.int64)
    beams = [(0.0, 0, decoding, decoding.first()[0, 0])]
    for level in range(trie.num_levels):
        grown: list[tuple[float, int, Decoding, int]] = []
        for score, node, decoder, logits in beams:
            first, last = int(trie.first[level][node]), int(trie.first[level][node + 1])
            codes = trie.codes[level][first:last]
            logs = logits[codes].log_softmax(0).tolist()
            grown += [
                (score + log, first + place, decoder, code)
                for place, (log, code) in enumerate(zip(logs, codes.tolist(), strict=True))
            ]
        grown.sort(key=lambda one: (-one[0], one[1]))
        beams = []
        for score, node, decoder, code in grown[:width]:
            if level + 1 == trie.num_levels:
                beams.append((score, node, decoder, torch.empty(0)))
            else:
                own = fork(decoder)
                beams.append((score, node, own, own.next(here, torch.tensor([[code]]), torch.tensor([[node]]))[0, 0]))
    return [node for _, node, _, _ in beams], [score for score, *_ in beams]


def timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def same(found: Tensor, scores: Tensor, other: tuple[list[int], list[float]]) -> bool:
    """Rounding may swap neighbours and trade the last places; scores are those of fp32."""
    theirs = torch.tensor(other[1])
    close = bool(torch.allclose(scores, theirs, atol=1e-3))
    return close and len(set(found.tolist()) & set(other[0])) >= 0.98 * len(other[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10,000 items and 64 beams, result not recorded")
    parser.add_argument("--requests", type=int, default=4, help="requests that the search decodes at once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_items, width = (10_000, 64) if options.quick else (100_000, 256)
    trie = make_trie(num_items, seed=0)
    config = EncDecConfig(dim=64, num_encoder=1, num_decoder=2, num_heads=4, dropout=0.0)
    model = build_encdec(config, trie, max_len=50, seed=0)
    one = start(model, trie, 1, 30, seed=1)
    together = start(model, trie, options.requests, 30, seed=1)
    beams = search(fork(one), trie, width=width)
    assert same(beams.leaves[0], beams.scores[0], loop(fork(one), trie, width)), "the arms disagree"
    plain = PlainTrie(trie.item_codes)
    beams = search(fork(together), trie, width=width)
    for row, (leaves, scores) in enumerate(zip(*plain_search(model, together, plain, width), strict=True)):
        assert same(beams.leaves[row], beams.scores[row], (leaves.tolist(), scores.tolist())), "the arms disagree"
    times = measure.alternate(
        {
            "loop": lambda: timed(lambda: loop(fork(one), trie, width)),
            "search": lambda: timed(lambda: search(fork(one), trie, width=width)),
            "search, requests together": lambda: timed(lambda: search(fork(together), trie, width=width)),
            "plain": lambda: timed(lambda: plain_search(model, one, plain, width)),
            "plain, requests together": lambda: timed(lambda: plain_search(model, together, plain, width)),
        }
    )
    alone = measure.ratio(times["loop"], times["search"])
    many = measure.ratio([value * options.requests for value in times["loop"]], times["search, requests together"])
    vs_plain = measure.ratio(times["plain"], times["search"])
    vs_plain_many = measure.ratio(times["plain, requests together"], times["search, requests together"])
    rows = [[name, f"{1000 * measure.Spread.of(values).median:.1f}"] for name, values in times.items()]
    print(measure.table(["arm", "CPU ms"], rows))
    figures = {
        "vs_loop": round(alone.median, 2),
        "vs_loop_range": alone.range,
        "vs_loop_verdict": measure.verdict(alone, at_least=AT_LEAST),
        "vs_loop_together": round(many.median, 2),
        "vs_loop_together_range": many.range,
        "vs_plain": round(vs_plain.median, 2),
        "vs_plain_range": vs_plain.range,
        "vs_plain_together": round(vs_plain_many.median, 2),
        "vs_plain_together_range": vs_plain_many.range,
        "ms": {name: round(1000 * measure.Spread.of(values).median, 2) for name, values in times.items()},
    }
    if not options.quick:
        settings = {"items": num_items, "beams": width, "levels": len(SIZES), "requests": options.requests}
        measure.append(NAME, measure.record(seed=0, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
