"""Neighbours of items by content: which items have features like an item's.

    similarity(i, j) = mean over features of the cosine of i and j      the n best of each item; ties to the lower position

Ids are weighted by rarity (idf), numbers and vectors standardised over the catalogue. It needs no events, so it ranks new items
as it ranks old ones: what a model with item features must not be worse than.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.data.item_feature_rows import ItemFeatureRows
from nestpipe.eval.item_neighbours import ItemNeighbours
from nestpipe.eval.topk_metrics import Counts
from nestpipe.jagged import Jagged
from nestpipe.models.feature_encoder import is_looked_up

MAX_ITEMS = 50_000  # of a catalogue in which every pair is compared
_MAX_WIDTH = 4096  # values of an id feature that have a column of their own; more share columns by hash
_BLOCK = 1024


def content_neighbours(content: ItemFeatureRows, catalogue: Counts, *, num_neighbours: int) -> ItemNeighbours:
    """The items of a catalogue whose content is most like an item's, with the mean cosine as weight."""
    parts = list(feature_columns(content, catalogue))
    kept_items, kept_weights, counts = [], [], []
    for first in range(0, len(catalogue), _BLOCK):
        likeness = _likeness(parts, slice(first, first + _BLOCK))
        own = torch.arange(len(likeness))
        likeness[own, own + first] = -1.0  # not itself
        weights, items = likeness.sort(dim=1, descending=True, stable=True)
        weights, items = weights[:, :num_neighbours], items[:, :num_neighbours]
        is_like = weights > 0
        counts.append(is_like.sum(1))
        kept_items.append(items[is_like])
        kept_weights.append(weights[is_like])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(counts).cumsum(0)])
    return ItemNeighbours(
        offsets.numpy(), torch.cat(kept_items).numpy(), torch.cat(kept_weights).to(torch.float64).numpy()
    )


def feature_columns(content: ItemFeatureRows, catalogue: Counts) -> Iterator[Tensor]:
    """One matrix [I, width] of unit rows for each feature; the row of an item without the feature is zero."""
    for feature in content.features:
        values = content.rows(catalogue, [feature])[feature.name]
        if is_looked_up(feature):
            yield _rare_ids(values)
        else:
            floats = values.values.reshape(len(catalogue), -1)
            spread = floats.std(0, correction=0)
            scaled = (floats - floats.mean(0)) / torch.where(spread > 0, spread, 1.0)
            # One number alone has only two directions; a bell around each value compares how near they are.
            yield F.normalize(_bells(scaled) if floats.shape[1] == 1 else scaled, dim=1)


def _rare_ids(values: Jagged) -> Tensor:
    """Rows of idf weights over the distinct ids of a feature."""
    distinct, places = values.values.unique(return_inverse=True)
    width = min(len(distinct), _MAX_WIDTH)
    found = torch.zeros(values.num_rows, max(width, 1))
    idf = (values.num_rows / torch.bincount(places, minlength=len(distinct)).clamp(min=1)).log() + 1
    found.index_put_((values.row_of_value(), places % max(width, 1)), idf[places].to(found.dtype), accumulate=True)
    return F.normalize(found, dim=1)


def _bells(numbers: Tensor) -> Tensor:
    """How near each number [n, 1] is to nine points from -2 to 2 deviations."""
    return torch.exp(-((numbers - torch.linspace(-2, 2, 9)) ** 2) * 2)


def _likeness(parts: Sequence[Tensor], rows: slice) -> Tensor:
    """The mean cosine of some items and all."""
    return torch.stack([part[rows] @ part.T for part in parts]).mean(0)
