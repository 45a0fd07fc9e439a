"""The encoder of instruction texts: that of the item texts from which the semantic ids were made."""

from __future__ import annotations

from functools import lru_cache

from nestpipe.errors import ConfigError
from nestpipe.generative.prompt_builder import Encode
from nestpipe.generative.text_encoder import MiniLM, hashed_words, installed


def instruction_encoder(encoder: str) -> Encode:
    """The function of an encoder's name in a registry; raises ConfigError if nestpipe has none, or its wheel is missing."""
    made_by = encoder.partition("/")[0]
    if made_by.startswith("hashed-words"):
        return hashed_words
    if not made_by.startswith("minilm"):
        raise ConfigError(
            f"the semantic ids are made from vectors of '{made_by}', an encoder that nestpipe does not have; "
            "run nestpipe.generative.nearline_job.NearlineJob with that encoder, or build the ids from texts."
        )
    if not installed():
        raise ConfigError("the MiniLM text encoder is not installed: pip install 'nestpipe[text]'.")
    return _minilm().encode


@lru_cache(1)
def _minilm() -> MiniLM:
    return MiniLM()  # reads 90 MB of weights
