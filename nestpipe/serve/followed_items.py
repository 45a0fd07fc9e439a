"""Keeps the items of a served model up to date with the living catalogue: new ones join, changed ones get new vectors, withdrawn ones leave.

    changed items, revisions  ->  vectors of those whose revision is another  ->  a new `KnownItems`, taken by the next request

Only a model with item features has a vector for an item that it was not trained with; of other models, items can only leave.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.item_content import ItemContent
from nestpipe.embedding.row_reader import RowReader
from nestpipe.eval.catalogue_predictor import content_vectors
from nestpipe.models.content_retrieval import ContentRetrieval
from nestpipe.serve.known_items import Ints, KnownItems

_BLOCK = 256  # items whose vectors are computed at a time


class FollowedItems:
    """The items of one served model; `known` is replaced as a whole, so a request sees one state of the catalogue."""

    def __init__(self, model: object, rows: RowReader, known: KnownItems):
        self._model, self._rows = model if isinstance(model, ContentRetrieval) else None, rows
        self._trained = self.known = known
        self._revisions: dict[int, int] = {}
        self.later: dict[int, Tensor] = {}  # vectors of items by number that are not those of training
        self.withdrawn: Ints = np.empty(0, np.int64)

    @property
    def reads_new_items(self) -> bool:
        """Whether a history may hold items that the model was not trained with."""
        return self._model is not None

    def follow(self, live: ItemContent | None) -> bool:
        """Takes what has changed since the last call; True if there is a new `known`. From one thread."""
        if live is None:
            return False
        withdrawn = live.withdrawn()
        is_same = np.array_equal(withdrawn, self.withdrawn)
        if not self._take_vectors(live) and is_same:
            return False
        self.withdrawn = withdrawn
        self.known = self._merged()
        return True

    def _take_vectors(self, live: ItemContent) -> bool:
        """Computes the vectors of items whose content is another one; False if there are none."""
        if self._model is None:
            return False
        content, changed = self._model.items.content, live.changed()
        content.live = live
        revisions = dict(zip(changed.tolist(), live.revisions(changed, content.revised_names).tolist(), strict=True))
        new = [item for item, revision in revisions.items() if self._revisions.get(item) != revision]
        gone = self._revisions.keys() - revisions.keys()
        if new:
            items = torch.tensor(new)
            self.later |= dict(zip(new, content_vectors(self._model, self._rows, items, size=_BLOCK), strict=True))
        for item in gone:
            del self.later[item]
        self._revisions = revisions
        return bool(new or gone)

    def _merged(self) -> KnownItems:
        """The trained items with later ones in their order, without withdrawn ones."""
        own, vectors = self._trained, self._trained.vectors
        items, popularity = own.items, own.popularity
        if self.later:
            assert vectors is not None
            later = np.array(sorted(self.later), np.int64)
            kept = ~np.isin(items, later)
            items = np.concatenate([items[kept], later])
            counts = np.zeros(len(later), popularity.dtype)
            is_old = np.isin(later, own.items)
            counts[is_old] = popularity[np.searchsorted(own.items, later[is_old])]
            popularity = np.concatenate([popularity[kept], counts])
            rows = torch.stack([self.later[item] for item in later.tolist()])
            vectors = torch.cat([vectors[torch.from_numpy(kept)], rows.to(vectors.dtype)])
        shown = np.flatnonzero(~np.isin(items, self.withdrawn))
        order = shown[np.argsort(items[shown], kind="stable")]
        return own.replaced(
            items[order],
            popularity[order],
            None if vectors is None else vectors.index_select(0, torch.from_numpy(order)),
        )
