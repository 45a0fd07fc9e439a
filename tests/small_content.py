"""A small log whose items have content, and runs that read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nestpipe.config import Config
from nestpipe.data.config import ContentLogConfig
from nestpipe.data.sequences import Sequences
from nestpipe.data.synthetic_content import ingest_content
from tests.small_runs import small_config

FEATURES = ("brand", "category", "tags", "price", "look", "title")
SIZE = ContentLogConfig(num_users=40, num_series=5, series_items=8, new_items=2, new_share=0.6, max_len=9)


def content_log(out: Path, **sizes: object) -> Sequences:
    """40 users, 5 series of 8 items of which 2 are new."""
    return ingest_content(out, replace(SIZE, **sizes))


def content_config(path: Path, model: str = "sasrec", loss: str = "sampled", **settings: object) -> Config:
    """A run that reads all features of items."""
    config = small_config(path, model, loss, **settings)
    own = replace(config.model, item_features=FEATURES, id_dropout=0.3, text_encoder="words")
    return replace(config, model=own)
