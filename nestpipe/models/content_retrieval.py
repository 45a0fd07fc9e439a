"""Next-item retrieval whose items are known by id and content, so that an item without training events can be recommended.

Negatives are drawn from items with training events. Others have no row that could be trained; as negatives they would only
teach the model that new content is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nestpipe.data.item_feature_rows import ItemFeatureRows
from nestpipe.embedding.lookup import Lookup, Rows
from nestpipe.jagged import Batch
from nestpipe.models.backbone import initial_weights
from nestpipe.models.config import LossConfig
from nestpipe.models.contract import Backbone, Output
from nestpipe.models.item_encoder import ItemEncoder
from nestpipe.models.retrieval import Retrieval
from nestpipe.registry import entry_of
from nestpipe.rng import Rng

_ID_DROPOUT = 0.2  # of a registered backbone whose config names item features and no share


class ContentRetrieval(Retrieval):
    """A `Retrieval` whose item vectors come from an `ItemEncoder`; `catalogue` has the items with training events."""

    def __init__(
        self, backbone: Backbone, items: ItemEncoder, loss: LossConfig, trained: Tensor, *, dim: int, counts: Tensor
    ):
        """Trained items, ascending, and their numbers of training events."""
        super().__init__(backbone, loss, trained, dim=dim, counts=counts)
        self.items = items
        self.tables = items.tables

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        return self.items.lookups(super().lookups(batch, rng))

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        return super().forward(self.items.joined(rows, rng), batch, rng)

    def encode_lookups(self, batch: Batch) -> dict[str, Lookup]:
        return self.items.lookups(self._history_lookups(batch))

    def encode(self, rows: Mapping[str, Rows], batch: Batch) -> Tensor:
        return super().encode(self.items.joined(rows, None), batch)

    def item_lookups(self, items: Tensor) -> dict[str, Lookup]:
        """The rows that `content_vectors` needs."""
        return self.items.item_lookups(items)

    def content_vectors(self, rows: Mapping[str, Rows]) -> Tensor:
        """Item vectors [n, D] from the rows of ids and features; score = query · item."""
        return self._unit(self.items.item_vectors(rows))


def build_content_retrieval(
    config: Any,
    loss: LossConfig,
    content: ItemFeatureRows,
    *,
    catalogue: Tensor,
    counts: Tensor,
    max_len: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> ContentRetrieval:
    """Like `build_retrieval`; `counts` [I] are the training events of each item of the catalogue."""
    with initial_weights(seed):
        backbone = entry_of(config).load()(config, max_len=max_len)
        items = ItemEncoder(content, dim=config.dim, id_dropout=getattr(config, "id_dropout", _ID_DROPOUT))
    trained = (counts > 0).nonzero().flatten()
    known, num_events = catalogue.index_select(0, trained), counts.index_select(0, trained)
    return ContentRetrieval(backbone, items, loss, known, dim=config.dim, counts=num_events).to(dtype)
