"""Vectors of the items' texts: what semantic ids are made from, and what IGR compares with instructions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.item_texts import ITEM_TEXTS, read_item_texts
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError
from nestpipe.generative.config import Encoder
from nestpipe.generative.semantic_ids import Registry
from nestpipe.generative.text_encoder import cache_folder, encode_texts


def text_vectors(
    sequences: Sequences, *, encoder: Encoder = "auto", column: str = "title"
) -> tuple[Tensor, Tensor, str]:
    """Ids [I] of the catalogue, vectors [I, D] of their texts (empty if missing), and the name of the encoder."""
    texts = _catalogue_texts(sequences, column)
    if texts is None:
        raise DataError(f"{sequences.path} has no {ITEM_TEXTS}; ingest the log again with --texts FILE.")
    vectors, name = encode_texts(texts, encoder=encoder, cache=cache_folder())
    return torch.from_numpy(np.array(sequences.catalogue)), vectors, name


def vectors_for(registry: Registry, sequences: Sequences) -> Tensor | None:
    """Vectors [I, D] of the catalogue's texts by the encoder of instructions.

    None if the log has no texts, or the semantic ids were made by an encoder of the user.
    """
    made_by, _, rest = registry.encoder.partition("/")
    column = rest.partition("+")[0]
    texts = _catalogue_texts(sequences, column) if made_by.startswith(("minilm", "hashed-words")) else None
    if texts is None:
        return None
    kind: Encoder = "minilm" if made_by.startswith("minilm") else "words"
    return encode_texts(texts, encoder=kind, cache=cache_folder())[0]


def _catalogue_texts(sequences: Sequences, column: str) -> list[str] | None:
    texts = read_item_texts(sequences, column)
    return None if texts is None else [texts.get(item, "") for item in np.asarray(sequences.catalogue).tolist()]
