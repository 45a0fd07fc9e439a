"""Values of given items for users at a point in their history, by any trained run that can score items."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nestpipe.config import Config
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.data.splits import Ints, Split
from nestpipe.embedding.row_reader import RowReader
from nestpipe.errors import ConfigError
from nestpipe.eval.predictor import GenerativePredictor, RetrievalPredictor, make_predictor
from nestpipe.models.contract import Model


class CandidateValues:
    """Scores items with a next-item or ranking run; of a ranking run the first label counts."""

    def __init__(self, model: Model, rows: RowReader, sequences: Sequences, split: Split, config: Config):
        """Raises ConfigError for a generative run, whose probabilities are what alignment changes."""
        predictor = make_predictor(model, rows, sequences, split, config)
        if isinstance(predictor, GenerativePredictor):
            raise ConfigError("a generative run cannot be the ranker; name a run that ranks, or a next-item run.")
        self._predictor, self._sequences, self._data = predictor, sequences, config.data

    @torch.no_grad()
    def of(self, users: Ints, ends: Ints, positions: Tensor) -> Tensor:
        """Values [N, K] of items (catalogue positions) for the first `ends` events of users (rows). Collective."""
        sequences, predictor = self._sequences, self._predictor
        start = truncate(ends, self._data.max_len, self._data.truncate_block)
        asked = None if sequences.times is None else sequences.times[sequences.offsets[users] + ends - 1]
        history = predictor.builder.history(torch.from_numpy(users), start, ends, request_ms=asked)
        if isinstance(predictor, RetrievalPredictor):
            queries = predictor.encode(history)
            vectors = predictor.item_vectors.index_select(0, positions.flatten()).view(*positions.shape, -1)
            return (vectors * queries.unsqueeze(1)).sum(2)
        items = np.asarray(sequences.catalogue)[positions.numpy()]
        return predictor.score_each(history, items)
