"""Residual K-means: each level quantises the residual of the level before."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from nestpipe.errors import ConfigError

CHUNK = 1 << 24  # distances in memory at a time
_BALANCE_ROUNDS = 5


def fit(vectors: Tensor, *, num_levels: int, num_codes: int, iterations: int, balanced: bool, seed: int) -> Tensor:
    """Codebooks [levels, codes, D] for vectors [n, D]."""
    if len(vectors) < num_codes:
        raise ConfigError(f"{num_codes} codes for {len(vectors):,} vectors; use at most one code per vector.")
    codebooks, rest = [], vectors
    for level in range(num_levels):
        book = _kmeans(rest, num_codes, iterations=iterations, seed=seed + level)
        for _ in range(_BALANCE_ROUNDS if balanced else 0):
            book = _means(rest, assign_balanced(rest, book), book)
        codebooks.append(book)
        codes = assign_balanced(rest, book) if balanced else nearest(rest, book)
        rest = rest - book.index_select(0, codes)
    return torch.stack(codebooks)


def encode(vectors: Tensor, codebooks: Tensor, *, balanced: bool = False) -> Tensor:
    """Codes [n, levels] of vectors [n, D]; balanced spreads these vectors evenly over the codes of each level."""
    codes, rest = [], vectors
    for book in codebooks:
        codes.append(assign_balanced(rest, book) if balanced else nearest(rest, book))
        rest = rest - book.index_select(0, codes[-1])
    return torch.stack(codes, 1)


def distances(vectors: Tensor, book: Tensor) -> Tensor:
    """Squared distances [n, codes] in double precision, so that a vector's code does not depend on its neighbours."""
    wide, centres = vectors.double(), book.double()
    return wide.square().sum(1, keepdim=True) - 2 * wide @ centres.T + centres.square().sum(1)


def nearest(vectors: Tensor, book: Tensor) -> Tensor:
    """The nearest code [n] of each vector."""
    size = max(1, CHUNK // len(book))
    return torch.cat([distances(part, book).argmin(1) for part in vectors.split(size)])


def assign_balanced(vectors: Tensor, book: Tensor) -> Tensor:
    """A near code of each vector such that no code has more than ceil(n / codes) vectors.

    Greedy rounds: every unassigned vector proposes to its nearest code with free capacity, and a code accepts the nearest
    proposals up to its capacity. Each round fills a code or assigns all vectors, so there are at most as many rounds as codes.
    Small distance matrices are kept; large ones are recomputed block by block for the unassigned vectors.
    """
    capacity = math.ceil(len(vectors) / len(book))
    all_distances = distances(vectors, book) if len(vectors) * len(book) <= CHUNK else None
    codes = torch.full((len(vectors),), -1, dtype=torch.int64)
    free = torch.full((len(book),), capacity, dtype=torch.int64)
    unassigned = torch.arange(len(vectors))
    while len(unassigned):
        far, near = _nearest_open(vectors, book, all_distances, unassigned, free > 0)
        order = far.argsort(stable=True)
        order = order[near[order].argsort(stable=True)]  # by code, then by distance
        proposed = near[order]
        rank = torch.arange(len(proposed)) - torch.searchsorted(proposed, proposed)
        accepted = rank < free[proposed]
        codes[unassigned[order[accepted]]] = proposed[accepted]
        free -= torch.bincount(proposed[accepted], minlength=len(book))
        unassigned = unassigned[order[~accepted]].sort().values
    return codes


def _nearest_open(
    vectors: Tensor, book: Tensor, all_distances: Tensor | None, unassigned: Tensor, is_open: Tensor
) -> tuple[Tensor, Tensor]:
    """The distance to the nearest code with free capacity, and that code, of each unassigned vector."""
    far, near = [], []
    for part in unassigned.split(max(1, CHUNK // len(book))):
        own = (
            distances(vectors.index_select(0, part), book)
            if all_distances is None
            else all_distances.index_select(0, part)
        )
        best = own.masked_fill_(~is_open, torch.inf).min(1)
        far.append(best.values)
        near.append(best.indices)
    return torch.cat(far), torch.cat(near)


def _means(vectors: Tensor, codes: Tensor, book: Tensor) -> Tensor:
    """The mean of each code's vectors; an unused code does not change."""
    count = torch.bincount(codes, minlength=len(book)).unsqueeze(1)
    total = torch.zeros(book.shape, dtype=torch.float64).index_add_(0, codes, vectors.double())
    return torch.where(count > 0, (total / count.clamp(min=1)).to(book.dtype), book)


def _kmeans(vectors: Tensor, num_codes: int, *, iterations: int, seed: int) -> Tensor:
    kmeans = _faiss().Kmeans(
        vectors.shape[1],
        num_codes,
        niter=iterations,
        seed=seed + 1,
        min_points_per_centroid=1,
        max_points_per_centroid=1024,
    )
    kmeans.train(vectors.float().numpy())
    return torch.from_numpy(kmeans.centroids.copy())


def _faiss() -> ModuleType:
    try:
        import faiss
    except ModuleNotFoundError:
        raise ConfigError("semantic ids need faiss for K-means: pip install 'nestpipe[instruct]'.") from None
    return faiss
