"""Item vectors from id and content: the sum of the id's row, a shared vector and projections of the item's features.

    vector(item) = keep(step, item) * row(item) + base + sum of feature vectors

In training the id row of an item is dropped in some steps (id dropout), so the features learn to stand alone. The draw is a
function of (seed, step, item): the item is dropped in every history, as a positive and as a negative of that step alike. If it
were dropped for targets alone, the missing row would mark the positive. Rows start at zero, so an id without a trained row,
such as that of a new item, adds nothing, in training, evaluation and serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from nestpipe.data.item_feature_rows import ItemFeatureRows
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.embedding.unique_ids import dedupe
from nestpipe.models.feature_encoder import FeatureEncoder, feature_tables
from nestpipe.rng import Rng, lanes16

ITEM = "item"  # the table
_DISTINCT = "item/distinct"  # a lookup of each distinct item once, in the order of its features
_STD = 0.02  # of the shared vector: the initial deviation of rows in models without content


class ItemEncoder(nn.Module):
    """Adds content to the rows of the item table."""

    def __init__(self, content: ItemFeatureRows, *, dim: int, id_dropout: float):
        super().__init__()
        self.content, self._id_dropout = content, id_dropout
        self.features = FeatureEncoder(ITEM, content.features, dim=dim)
        # Without it an item without features and row would have no direction, and cosine no gradient.
        self.base = nn.Parameter(torch.empty(dim))
        nn.init.normal_(self.base, std=_STD)
        self.tables = (TableSpec(name=ITEM, dim=dim, init_std=0.0), *feature_tables(content.features, dim))

    def lookups(self, lookups: Mapping[str, Lookup]) -> dict[str, Lookup]:
        """The lookups of a micro-batch, and those of the features of all its items."""
        own = [lookup for lookup in lookups.values() if lookup.table == ITEM]
        items, _ = dedupe(torch.cat([lookup.ids.flatten() for lookup in own]))
        # A row is sent in 16 bits if all its uses allow it; this one, which only counts places, always does.
        wire = next((lookup.wire for lookup in own if lookup.wire is not None), None)
        return {
            **lookups,
            _DISTINCT: Lookup(table=ITEM, ids=items, wire=wire),
            **self._feature_lookups(items),
        }

    def _feature_lookups(self, items: Tensor) -> dict[str, Lookup]:
        return self.features.lookups(self.content.rows(items.numpy(), self.features.looked_up))

    def joined(self, rows: Mapping[str, Rows], rng: Rng | None) -> dict[str, Rows]:
        """The rows with item vectors in the place of item rows; `rng` draws id dropout, None for inference."""
        distinct = rows[_DISTINCT]
        items, places = distinct.lookup.ids, distinct.index
        if len(items) != len(distinct.unique):
            raise ValueError(f"{len(distinct.unique)} rows for {len(items)} distinct items; rows must be deduplicated")
        order = torch.empty_like(places).index_copy_(0, places, torch.arange(len(places)))
        content = self._content(rows, items).index_select(0, order)
        keep = None if rng is None else self._kept(items, rng).index_select(0, order).unsqueeze(1).to(content.dtype)
        found, plain = dict(rows), None
        for name, one in rows.items():
            if one.lookup.table != ITEM or name == _DISTINCT:
                continue
            if one.lookup.wire is None and plain is not None:
                vectors = plain
            else:
                own = one.rounded()
                vectors = torch.add(own if keep is None else own * keep, content)
            if one.lookup.wire is None:
                plain = vectors
            found[name] = Rows(vectors, one.index, replace(one.lookup, wire=None))
        return found

    def item_lookups(self, items: Tensor) -> dict[str, Lookup]:
        """The rows that `item_vectors` needs."""
        return {ITEM: Lookup(table=ITEM, ids=items), **self._feature_lookups(items)}

    def item_vectors(self, rows: Mapping[str, Rows]) -> Tensor:
        """Vectors [n, D] of the items of `item_lookups`."""
        return torch.add(rows[ITEM].gather(), self._content(rows, rows[ITEM].lookup.ids))

    def _content(self, rows: Mapping[str, Rows], items: Tensor) -> Tensor:
        """What the features of items [n] add to their rows, [n, D]."""
        total = self.base.expand(len(items), -1)
        for vectors in self.features.vectors(rows, self.content.rows(items.numpy(), self.features.floating)):
            total = total + vectors
        return total

    def _kept(self, items: Tensor, rng: Rng) -> Tensor:
        return kept_ids(items, rng, self._id_dropout)


def kept_ids(items: Tensor, rng: Rng, id_dropout: float) -> Tensor:
    """Whether the id row of each item is used in this step, [n]."""
    drawn = lanes16(rng.keys("item ids", items), 1).flatten()
    return drawn >= round(id_dropout * 65536) - 32768
