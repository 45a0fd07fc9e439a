"""Residual K-means: a vector is a code, what the code leaves over is the next code, and so on."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from nestpipe.errors import ConfigError

CHUNK = 1 << 24  # distances held at a time
_BALANCE_ROUNDS = 5


def fit(vectors: Tensor, *, num_levels: int, num_codes: int, iterations: int, balanced: bool, seed: int) -> Tensor:
    """Codebooks [levels, codes, D] for vectors [n, D]."""
    if len(vectors) < num_codes:
        raise ConfigError(f"{num_codes} codes for {len(vectors):,} vectors; take at most one code per vector.")
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
    """A near code of each vector such that no code has more than its share, rounded up.

    In every round the vectors without a code ask for the nearest one with room; a code that more ask for than it has room takes
    the nearest of them and is full. Each round fills a code or places all, so there are at most as many rounds as codes. Distances
    are kept if they are few; of a large catalogue they are computed again, block by block, for those that still wait.
    """
    capacity = math.ceil(len(vectors) / len(book))
    kept = distances(vectors, book) if len(vectors) * len(book) <= CHUNK else None
    codes = torch.full((len(vectors),), -1, dtype=torch.int64)
    room = torch.full((len(book),), capacity, dtype=torch.int64)
    waiting = torch.arange(len(vectors))
    while len(waiting):
        far, near = _nearest_open(vectors, book, kept, waiting, room > 0)
        order = far.argsort(stable=True)
        order = order[near[order].argsort(stable=True)]  # by code, then by distance
        asked = near[order]
        place = torch.arange(len(asked)) - torch.searchsorted(asked, asked)
        taken = place < room[asked]
        codes[waiting[order[taken]]] = asked[taken]
        room -= torch.bincount(asked[taken], minlength=len(book))
        waiting = waiting[order[~taken]].sort().values
    return codes


def _nearest_open(
    vectors: Tensor, book: Tensor, kept: Tensor | None, waiting: Tensor, is_open: Tensor
) -> tuple[Tensor, Tensor]:
    """The distance to the nearest open code, and that code, of each vector that waits."""
    far, near = [], []
    for part in waiting.split(max(1, CHUNK // len(book))):
        found = distances(vectors.index_select(0, part), book) if kept is None else kept.index_select(0, part)
        best = found.masked_fill_(~is_open, torch.inf).min(1)
        far.append(best.values)
        near.append(best.indices)
    return torch.cat(far), torch.cat(near)


def _means(vectors: Tensor, codes: Tensor, book: Tensor) -> Tensor:
    """The mean of each code's vectors; an unused code stays where it was."""
    count = torch.bincount(codes, minlength=len(book)).unsqueeze(1)
    total = torch.zeros(book.shape, dtype=torch.float64).index_add_(0, codes, vectors.double())
    return torch.where(count > 0, (total / count.clamp(min=1)).to(book.dtype), book)


def _kmeans(vectors: Tensor, num_codes: int, *, iterations: int, seed: int) -> Tensor:
    found = _faiss().Kmeans(
        vectors.shape[1],
        num_codes,
        niter=iterations,
        seed=seed + 1,
        min_points_per_centroid=1,
        max_points_per_centroid=1024,
    )
    found.train(vectors.float().numpy())
    return torch.from_numpy(found.centroids.copy())


def _faiss() -> ModuleType:
    try:
        import faiss
    except ModuleNotFoundError:
        raise ConfigError("semantic ids need faiss for K-means: pip install 'nestpipe[instruct]'.") from None
    return faiss
