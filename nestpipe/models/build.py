"""From a run's configuration to its model, and to what the loader must put into its batches."""

from __future__ import annotations

import numpy as np
import torch

from nestpipe.config import Config
from nestpipe.data.batches import Inputs
from nestpipe.data.sequences import Sequences
from nestpipe.models.retrieval import Retrieval, build_retrieval


def build_model(config: Config, sequences: Sequences, *, dtype: torch.dtype = torch.float32) -> Retrieval:
    """The model of a run; its initial dense weights are a function of the seed."""
    return build_retrieval(
        config.model,
        config.loss,
        catalogue=torch.from_numpy(np.array(sequences.catalogue)),
        max_len=config.data.max_len,
        seed=config.seed,
        dtype=dtype,
    )


def inputs_of(config: Config, sequences: Sequences) -> Inputs:
    """What the model reads beside items and times."""
    return Inputs()
