"""Item vectors from co-occurrence: items that are close to each other in training histories get similar vectors.

The positive pointwise mutual information (PPMI) of items within a few events of each other, weighted by 1 / distance, then a
truncated SVD. Fused with text vectors they give semantic ids whose first codes a history can predict. Only training events
are read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split
from nestpipe.rng import seeded_generator

DIM = 128
_WINDOW = 5  # events
_SMOOTHING = 0.75  # exponent of the neighbour counts, as in word2vec: reduces the weight of rare neighbours
_ITERATIONS = 6  # of the power method


def behaviour_vectors(sequences: Sequences, split: Split, *, dim: int = DIM, seed: int = 0) -> Tensor:
    """Unit vectors [I, dim] in the order of the catalogue; zero for items without a neighbour in training."""
    pairs = _neighbours(sequences, split)
    num = len(sequences.catalogue)
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        counts = torch.sparse_coo_tensor(*pairs, (num, num)).coalesce()
        by_item = torch.zeros(num, dtype=torch.float64).index_add_(0, counts.indices()[0], counts.values())
        neighbours = by_item**_SMOOTHING
        expected = by_item[counts.indices()[0]] * (neighbours / neighbours.sum())[counts.indices()[1]]
        weights = (counts.values() / expected).log().clamp_(min=0)
        ppmi = torch.sparse_coo_tensor(counts.indices(), weights, (num, num), is_coalesced=True)
    rank = min(dim, num)
    with seeded_generator(seed):
        left, strength, _ = torch.svd_lowrank(ppmi, q=rank, niter=_ITERATIONS)
    vectors = F.normalize(left * strength.sqrt(), dim=1).masked_fill((by_item == 0).unsqueeze(1), 0.0)
    return F.pad(vectors, (0, dim - rank)).to(torch.float32)


def fuse(text: Tensor, behaviour: Tensor, share: float) -> Tensor:
    """Text and behaviour vectors concatenated, weighted by 1 - share and share."""
    return torch.cat([F.normalize(text, dim=1) * (1 - share), behaviour * share], 1)


def _neighbours(sequences: Sequences, split: Split) -> tuple[Tensor, Tensor]:
    """Pairs of catalogue positions [2, n] within the window, in both directions, training events only; and weights [n]."""
    items = torch.searchsorted(torch.tensor(sequences.catalogue), torch.tensor(sequences.items))
    offsets = torch.tensor(sequences.offsets)
    user = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    is_train = torch.arange(len(items)) < (offsets[:-1] + torch.tensor(split.train_end)).index_select(0, user)
    pairs, weights = [], []
    for distance in range(1, _WINDOW + 1):
        near = (user[:-distance] == user[distance:]) & is_train[distance:]
        pair = torch.stack([items[:-distance][near], items[distance:][near]])
        pairs += [pair, pair.flip(0)]
        weights.append(torch.full((2 * pair.shape[1],), 1 / distance, dtype=torch.float64))
    return torch.cat(pairs, 1), torch.cat(weights)
