"""Embedding rows of a service: an item that the model was not trained with has a zero row, not its random initial one."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.row_reader import TableRows


class KnownRows(TableRows):
    """Rows of a checkpoint; `items` are the ascending ids of the catalogue that it was trained on."""

    def __init__(self, rows: TableRows, items: NDArray[np.int64]):
        super().__init__(rows.tables)
        self._rows, self._items = rows, torch.from_numpy(np.array(items))

    def peek(self, name: str, ids: Tensor) -> Tensor:
        found = self._rows.peek(name, ids)
        if name != "item" or not len(self._items):
            return found
        places = torch.searchsorted(self._items, ids).clamp_(max=len(self._items) - 1)
        is_known = self._items[places] == ids
        return found if bool(is_known.all()) else found * is_known.unsqueeze(1)
