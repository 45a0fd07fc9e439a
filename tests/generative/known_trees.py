"""Trees of semantic ids and a decoder whose probabilities are known, for the tests of the search."""

from __future__ import annotations

import numpy as np
import torch

from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.embedding.prefetch_buffer import InPlaceRows
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.table import Table
from nestpipe.generative.trie import Trie
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.stages import TrainState
from nestpipe.rng import mix64


def random_trie(num_items: int, sizes: tuple[int, ...], *, seed: int = 0, unique: bool = True) -> Trie:
    """Items with random codes, all different unless told otherwise."""
    rng = np.random.default_rng(seed)
    total = int(np.prod(sizes))
    numbers = rng.choice(total, num_items, replace=not unique)
    codes = np.stack(np.unravel_index(numbers, sizes), 1)
    items = np.sort(rng.choice(10 * num_items, num_items, replace=False))
    return Trie(torch.from_numpy(items), torch.from_numpy(codes), sizes, version="v1")


class TableDecoder:
    """Logits are a pure function of (request, code sequence); it counts how often it was asked."""

    def __init__(self, num_requests: int, sizes: tuple[int, ...], *, flat: bool = False, version: str = "v1"):
        self.version, self._sizes, self._num, self._flat = version, sizes, num_requests, flat
        self._known: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in range(num_requests)]

    def logits(self, request: int, path: tuple[int, ...]) -> torch.Tensor:
        if (request, path) in self._known:
            return self._known[request, path]
        if self._flat:
            return torch.zeros(self._sizes[len(path)], dtype=torch.float64)
        rng = np.random.default_rng(mix64(hash((request, *path))))
        self._known[request, path] = torch.from_numpy(rng.normal(size=self._sizes[len(path)]) * 2)
        return self._known[request, path]

    def first(self) -> torch.Tensor:
        return self._all()

    def next(self, parents: torch.Tensor, codes: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        self._paths = [
            [(*self._paths[row][parent], code) for parent, code in zip(*pair, strict=True)]
            for row, pair in enumerate(zip(parents.tolist(), codes.tolist(), strict=True))
        ]
        return self._all()

    def _all(self) -> torch.Tensor:
        return torch.stack(
            [torch.stack([self.logits(row, path) for path in paths]) for row, paths in enumerate(self._paths)]
        )


def exhaustive(
    trie: Trie, decoder: TableDecoder, request: int, live: torch.Tensor, softmax: str
) -> list[tuple[int, float]]:
    """All live leaves with the log-probabilities of draws among them, by definition: best first, ties by lower code sequence."""
    paths = {tuple(trie.leaf_codes(torch.tensor([leaf]))[0].tolist()): leaf for leaf in range(trie.num_leaves)}
    alive = {path for path, leaf in paths.items() if live[leaf]}
    found = []
    for path in alive:
        total = 0.0
        for level, code in enumerate(path):
            scores = decoder.logits(request, path[:level])
            if softmax == "legal":
                legal = sorted({other[level] for other in alive if other[:level] == path[:level]})
                total += float(scores[code] - scores[legal].logsumexp(0))
            else:
                total += float(scores[code] - scores.logsumexp(0))
        found.append((path, total))
    found.sort(key=lambda one: (-one[1], one[0]))
    return [(paths[path], total) for path, total in found]


def plain_search(
    trie: Trie, decoder: TableDecoder, request: int, live: torch.Tensor, width: int, softmax: str = "legal"
) -> list[tuple[int, float]]:
    """Leaves and log-probabilities of a beam search that grows live paths only; probabilities are those of the whole trie."""
    leaf_of = {tuple(trie.leaf_codes(torch.tensor([leaf]))[0].tolist()): leaf for leaf in range(trie.num_leaves)}
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for level in range(trie.num_levels):
        grown = []
        for path, score in beams:
            below = [one for one in leaf_of if one[:level] == path]
            scores = decoder.logits(request, path)
            codes = sorted({one[level] for one in below}) if softmax == "legal" else list(range(len(scores)))
            total = scores[codes].logsumexp(0)
            grown += [
                ((*path, code), score + float(scores[code] - total))
                for code in {one[level] for one in below if live[leaf_of[one]]}
            ]
        beams = sorted(grown, key=lambda one: (-one[1], one[0]))[:width]
    return [(leaf_of[path], score) for path, score in beams]


def state_of(model, *, cut: MicroBatchConfig | None = None, seed: int = 0) -> TrainState:
    """A model ready to be trained, on one rank."""
    world = World.single()
    settings = EmbeddingConfig(num_buckets=4)
    tables = {
        spec.name: Table(spec, OPTIMIZERS[settings.optimizer](settings), seed=seed, config=settings)
        for spec in model.tables
    }
    embedding = ShardedTables(tables, world.channel("keys"), world.channel("rows"), Owners(4, 1))
    embedding.row_access = {name: InPlaceRows(table) for name, table in tables.items()}
    return TrainState(
        model=model,
        embedding=embedding,
        dense=DenseParams(model, DenseConfig(), world.channel("dense")),
        control=world.channel("control"),
        seed=seed,
        micro_batching=cut or MicroBatchConfig(),
    )
