"""A small log whose items have content, and runs that read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nestpipe.config import Config
from nestpipe.data.config import ContentLogConfig
from nestpipe.data.item_content import ItemOverlay
from nestpipe.data.sequences import Sequences
from nestpipe.data.synthetic_content import ingest_content
from nestpipe.serve.event_parser import parse_feature
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


class SmallCatalogue:
    """A living catalogue in memory, as `nestpipe.data.item_content.ItemContent` says."""

    def __init__(self) -> None:
        self.records: dict[int, Mapping[str, Any]] = {}
        self.gone: set[int] = set()

    def put(self, number: int, **content: Any) -> None:
        self.records[number] = content
        self.gone.discard(number)

    def overlay(self, items, features):
        rows, own = (
            np.full(len(items), -1, np.int64),
            [one for one in dict.fromkeys(items.tolist()) if one in self.records],
        )
        for place, item in enumerate(items.tolist()):
            if item in self.records:
                rows[place] = own.index(item)
        content = [self.records[one] for one in own]
        return ItemOverlay(rows, {one.name: parse_feature(one, content) for one in features})

    def revisions(self, items, names):
        found = np.zeros(len(items), np.int64)
        for place, item in enumerate(items.tolist()):
            if item in self.records:
                values = json.dumps([self.records[item].get(name) for name in names]).encode()
                found[place] = int.from_bytes(hashlib.blake2b(values, digest_size=7).digest(), "little")
        return found

    def texts(self, items):
        return [self.records[one].get("text") if one in self.records else None for one in items.tolist()]

    def changed(self):
        return np.array(sorted(self.records), np.int64)

    def withdrawn(self):
        return np.array(sorted(self.gone), np.int64)
